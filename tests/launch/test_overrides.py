"""Overrides: interpolations are saved as values, and a log directory without effect is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from support.commands import check, run
from support.runs import ROOT, SMALL, runs

from lathe.config.schema import commands
from lathe.launch.command_checks import IGNORE_LOG_DIR
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


def test_a_log_directory_without_effect_is_refused(cli: Callable[..., tuple[int, str]]) -> None:
    texts = {verb: (ROOT / "configs" / f"{verb}.yaml").read_text() for verb in commands()}
    assert {verb for verb, text in texts.items() if re.search(r"log_dir: .* # for Hydra alone", text)} == set(
        IGNORE_LOG_DIR
    )
    for verb in IGNORE_LOG_DIR:
        keys = re.findall(r"^(\w+): \?\?\?", texts[verb], re.MULTILINE)
        code, said = cli(*(f"{key}=x" for key in keys), "paths.log_dir=other", script=f"scripts/{verb}.py")
        assert code == 1
        assert said.startswith(f"Error: paths.log_dir=other has no effect on {verb}.py")
        assert len(said.splitlines()) == 1
    assert not list(Path().iterdir())
