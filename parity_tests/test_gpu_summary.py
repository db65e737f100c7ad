"""What `benchmarks/gpu.sh` measured is told to who was not there."""

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
    measured = {
        "engine": "flash",
        "tokens": 8192,
        "full_over_anchor": {"median": 3.5, "min": 3.0, "max": 4.0},
        "live_pairs_full_over_anchor": 3.9,
        "tflops": {"anchor": 200.0, "full": 250.0},
    }
    skipped = {"engine": "flash3", "tokens": 8192, "skipped": "needs a Hopper"}
    (tmp_path / "attention.json").write_text(json.dumps({"results": [measured, skipped]}))
    gpu_summary.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "| test_fine[flash] | passed | 1.2 | planned_gib 7.1 |" in lines
    assert "| test_broken | failure | 0.5 | BREAKS a \\| b |" in lines
    assert "| test_absent | skipped | 0.0 | needs two GPUs |" in lines
    assert "| flash | 8192 | 3.50 (3.00 to 4.00) | 3.9 | 200 | 250 |" in lines
    assert "| flash3 | 8192 | needs a Hopper | | | |" in lines
