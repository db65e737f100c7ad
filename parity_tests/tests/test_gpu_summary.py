"""The summary of what `benchmarks/gpu.sh` measured."""

from benchmarks import gpu_summary

JUNIT = """<testsuites><testsuite>
<testcase name="test_fine[flash]" time="1.25"><properties><property name="planned_gib" value="7.1"/></properties>
</testcase>
<testcase name="test_broken" time="0.5"><failure message="BREAKS a | b&#10;and more">trace</failure></testcase>
<testcase name="test_absent" time="0"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_every_test_and_figure_is_in_the_summary(tmp_path, capsys):
    (tmp_path / "runs.xml").write_text(JUNIT)
    (tmp_path / "attention.md").write_text("| torchtrain flash, anchor | 300.0 |\n")
    (tmp_path / "flex.txt").write_text("Killed")
    gpu_summary.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "| test_fine[flash] | passed | 1.2 | planned_gib 7.1 |" in lines
    assert "| test_broken | failure | 0.5 | BREAKS a \\| b |" in lines
    assert "| test_absent | skipped | 0.0 | needs two GPUs |" in lines
    assert "| torchtrain flash, anchor | 300.0 |" in lines
    assert "No results: cut off or broken; see the end of flex.txt." in lines
