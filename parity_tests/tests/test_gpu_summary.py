"""The summary of what `benchmarks/gpu.sh` measured."""

import json

from benchmarks import gpu_summary

JUNIT = """<testsuites><testsuite>
<testcase name="test_fine[flash]" time="1.25"><properties><property name="planned_gib" value="7.1"/></properties>
</testcase>
<testcase name="test_broken" time="0.5"><failure message="BREAKS a | b&#10;and more">trace</failure></testcase>
<testcase name="test_absent" time="0"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_every_test_and_figure_is_in_the_summary(tmp_path, capsys):
    (tmp_path / "runs.xml").write_text(JUNIT)
    row = {"variant": "anchor", "dtype": "bfloat16", "tokens": 8192, "row": "mean", "documents": [4096, 4096]}
    spread = {"median": 0.3, "least": 0.25, "most": 0.35}
    measured = row | {"name": "flash, anchor", "engine": "flash", "error_ratio": 0.3, "live_ratio": 0.25}
    measured |= {
        "forward": spread,
        "backward": spread,
        "of_full": spread,
        "over_the_law": spread,
        "flops_per_second": 2e14,
    }
    skipped = row | {"name": "flash3, anchor", "engine": "flash3", "not_run": "needs a Hopper"}
    environment = {"date": "2026-11-22", "device": "a GPU", "threads": None, "seconds": "the clock's", "commit": None}
    environment |= {"changed": None, "versions": {"torch": "2"}, "command": "torchtrain bench"}
    result = {"what": "attention", "environment": environment, "settings": {"repeats": 3}, "rows": [measured, skipped]}
    (tmp_path / "attention.json").write_text(json.dumps(result))
    gpu_summary.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "| test_fine[flash] | passed | 1.2 | planned_gib 7.1 |" in lines
    assert "| test_broken | failure | 0.5 | BREAKS a \\| b |" in lines
    assert "| test_absent | skipped | 0.0 | needs two GPUs |" in lines
    ratio = "0.3 (0.25 to 0.35)"
    assert f"| torchtrain flash, anchor | 300.0 | 300.0 | {ratio} | 0.250 | {ratio} | 200000.0 | 0.30 |" in lines
    assert "Not run: torchtrain flash3, anchor (bfloat16, 8,192): needs a Hopper." in lines
