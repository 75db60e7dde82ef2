"""What was typed, as it was typed."""

import json
from pathlib import Path

from support.commands import check, run
from support.runs import SMALL, runs

from lathe.runs.rundir import RunDir


def test_a_value_may_follow_another_key(tmp_path: Path) -> None:
    """In a run, in what continues it, and in a sweep's jobs."""
    words = [word for word in SMALL if not word.startswith(("model.net.width", "data.batch_size"))]
    check(run(*words, "model.net.width=${data.batch_size}", "data.batch_size=24", cwd=tmp_path))
    (made,) = runs(tmp_path / "logs")
    assert "width: 24" in (made / "config.yaml").read_text()
    assert "model.net.width=24" in RunDir(made).overrides
    check(run(f"resume={made}", "trainer.max_epochs=3", cwd=tmp_path))
    assert json.loads((made / "result.json").read_text())["epochs"] == 3
    check(run("-m", *words, "model.net.width=${data.batch_size}", "data.batch_size=16,24", cwd=tmp_path))
    wide = [path for path in runs(tmp_path / "logs") if "width: 24" in (path / "config.yaml").read_text()]
    assert len(wide) == 2
