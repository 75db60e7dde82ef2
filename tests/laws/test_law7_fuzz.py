"""Law 7 for random values: an invalid one is refused before the run, in one sentence with its key.

`LATHE_FUZZ_SEED=clock` draws other values each time, `LATHE_FUZZ_SEED=<the printed number>` the same ones again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fuzz_draws import MLP, QUICK, draws, seed
from support.runs import SMALL, new_run

import lathe.training.train

Cli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the other commands."""
    cfg = new_run(tmp_path_factory.mktemp("trained") / "logs", *SMALL)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_wrong_value_of_any_key_is_refused_by_its_name(cli: Cli, trained: Path, tmp_path: Path, count: int) -> None:
    number, found = seed(), []
    for draw in draws(number, count):
        base = [word.replace("RUN", str(trained)) for word in draw.base]
        code, errors = cli(*base, draw.word, script=draw.script)
        lines = errors.splitlines()
        named = any(draw.key.rpartition(".")[2] in line for line in lines)
        if code != 1 or not named or not all(line.startswith("Error: ") for line in lines):
            found.append(f"{draw.script} {' '.join(draw.base)} {draw.word}: exit code {code}, {errors}")
    assert found == [], f"LATHE_FUZZ_SEED={number}\n" + "\n".join(found)
    assert list(tmp_path.rglob("config.yaml")) == []


def test_a_directory_goes_with_whatever_ends_a_run_before_its_first_step(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cfg: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lathe.training.train, "make_loggers", lambda *_: 1 / 0)
    code, errors = cli(*QUICK, *MLP)
    assert code == 1
    assert "ZeroDivisionError" in errors
    monkeypatch.setattr(lathe.training.train, "train", interrupted)
    assert cli(*QUICK, *MLP)[0] == 130
    assert list(tmp_path.rglob("config.yaml")) == []
