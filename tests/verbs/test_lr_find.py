"""lr_find.py and batch_find.py: the rates and sizes tried and suggested, for every kind of data and model."""

import csv
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.commands import check, run
from support.runs import SMALL, config

from lathe.errors import UserError
from lathe.verbs import batch_find, lr_find

Cli = Callable[..., tuple[int, str]]


def found(folder: Path, *words: str) -> dict[str, Any]:
    cfg = config(*SMALL, *words, f"find.output={folder}", name="lr_find")
    told = lr_find.lr_find(cfg)
    assert told is not None
    return told


def test_the_rates_rise_by_equal_ratios_and_the_losses_say_which_train(tmp_path: Path) -> None:
    told = found(tmp_path / "out", "find.steps=120")
    with open(tmp_path / "out" / "lr_find.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows[0]["lr"] == 1e-6
    ratios = {round(b["lr"] / a["lr"], 9) for a, b in pairwise(rows)}
    assert ratios == {round(1e7 ** (1 / 119), 9)}
    assert rows[0]["loss"] == pytest.approx(math.log(10), rel=0.1)  # ten classes, untrained
    assert rows[0]["smoothed"] == pytest.approx(rows[0]["loss"])
    assert 0.01 < told["steepest"] < told["lowest"] < told["diverged"] <= 10
    kept = json.loads((tmp_path / "out" / "lr_find.json").read_text())
    assert kept == {key: told[key] for key in ("suggestion", "steepest", "lowest", "diverged")}
    assert kept["suggestion"] == float(f"{told['steepest']:.1e}")
    drawn = (tmp_path / "out" / "lr_find.svg").read_text()
    assert drawn.count("<polyline") == 2
    assert f"suggested: {kept['suggestion']:g}</text>" in drawn


def test_groups_keep_their_proportions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = lr_find.Rising.on_before_optimizer_step

    def spy(self: Any, trainer: Any, module: Any, optimizer: Any) -> None:
        real(self, trainer, module, optimizer)
        seen.append((self.rates[-1], sorted({group["lr"] for group in optimizer.param_groups})))

    monkeypatch.setattr(lr_find.Rising, "on_before_optimizer_step", spy)
    found(tmp_path, "find.steps=60", "optimizer.layer_decay=0.5", "model.net.depth=2")
    for rate, groups in seen[:3]:
        assert len(groups) > 1
        assert groups[-1] == pytest.approx(rate)
        assert all(b / a == pytest.approx(2) for a, b in pairwise(groups))


def test_a_range_that_does_not_rise_is_refused(cli: Cli) -> None:
    code, error = cli(*SMALL, "find.min_lr=1", "find.max_lr=0.1", script="scripts/lr_find.py")
    assert (code, error.startswith("Error: find.min_lr=1 is not below find.max_lr=0.1")) == (1, True), error
    assert not list(Path("logs").glob("lr_find"))


@pytest.mark.slow
def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    for devices in (1, 2):
        words = [f"trainer.devices={devices}", f"find.output=on{devices}", "find.steps=100", "precision=64-true"]
        check(run(*SMALL, *words, cwd=tmp_path, script="scripts/lr_find.py"))
    one, two = (json.loads((tmp_path / f"on{devices}" / "lr_find.json").read_text()) for devices in (1, 2))
    assert two == pytest.approx(one)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    whole = found(tmp_path / "a", "find.steps=100", "find.max_lr=1")
    parts = found(
        tmp_path / "b", "find.steps=100", "find.max_lr=1", "data.batch_size=32", "trainer.accumulate_grad_batches=2"
    )
    assert parts["losses"][:20] == pytest.approx(whole["losses"][:20], rel=1e-5)
    assert len(parts["rates"]) == len(whole["rates"])


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*stays as it is", "ignore:.*has no state_dict", "ignore:.*returned `None`"
)
LIT = ["model=lightning", "model.net={_target_: support.own_lightning.LitNet, features: 16, classes: 2}"]
RUN = [word for word in SMALL if not word.startswith(("model", "data"))]
FLOW = ["data=dataset", "data.train={_target_: support.own_datasets.Flow, n: 200}", "data.num_classes=2"]
FLOW += ["data.channels=1", "data.image_size=4", "model=mlp"]
FLOW += [f"data.{name}={{_target_: support.own_datasets.Pictures, n: 20}}" for name in ("val", "test")]


def own(name: str) -> list[str]:
    return [*LIT, "~data", f"+data={{_target_: support.own_loaders.{name}}}"]


def lit(name: str) -> list[str]:
    return [word.replace("LitNet", name) for word in own("Sized")]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in this process; each reports the memory of the whole suite."""

    def tried(cfg: dict[str, Any], size: int, device: str) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []
        batch_find._attempt(cfg, size, device, type("Sink", (), {"send": staticmethod(sent.append)})())  # type: ignore[arg-type]
        if "refused" in sent[0]:
            raise UserError(sent[0]["refused"])
        return sent[0]

    monkeypatch.setattr(batch_find, "tried", tried)


def batch(folder: Path, *words: str) -> dict[str, Any]:
    typed = [*RUN, *words, "find.memory=64", f"find.output={folder / 'out'}", "find.steps=2"]
    return batch_find.batch_find(config(*typed, name="batch_find"))


def rate(folder: Path, *words: str) -> dict[str, Any]:
    told = lr_find.lr_find(config(*RUN, *words, "find.steps=60", f"find.output={folder / 'out'}", name="lr_find"))
    assert told is not None
    return told


BOUND = {  # 200 training samples
    "images in memory": ["data=synthetic", "data.source.train_size=200", "data.source.val_size=20", "model=mlp"],
    "an iterable dataset": [*FLOW, "data.samples=200"],
    "own, a stream": own("Streaming"),
}


@pytest.mark.parametrize("kind", ["an iterable dataset", "own, a stream"])
def test_every_kind_of_data_has_a_rate(kind: str, tmp_path: Path) -> None:
    result = rate(tmp_path, *BOUND[kind], "find.min_lr=1e-3", "find.max_lr=1")
    assert result["losses"][0] == pytest.approx(math.log(2), rel=0.25)
    assert result["rates"][:2] == pytest.approx([1e-3, 10 ** (-3 + 3 / 59)])
    assert 1e-3 < result["suggestion"] < 1


@pytest.mark.parametrize("kind", BOUND)
def test_data_bound_the_batch(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = batch(tmp_path, *BOUND[kind], "find.start=64")
    tries = json.loads((tmp_path / "out" / "batch_find.json").read_text())["tries"]
    assert result["bound"] == "the 200 training samples"
    assert 180 <= result["batch_size"] <= 200
    assert [item["size"] for item in tries if item["size"] > 200]
    assert all(item["fits"] == (item["size"] <= 200) for item in tries)
    plus = "+" if kind == "own, a stream" else ""
    assert f"The largest that fits is {plus}data.batch_size={result['batch_size']};" in capsys.readouterr().out


def test_find_most_bounds_the_batch_of_a_language_model(tmp_path: Path) -> None:
    tokens = ("model=gpt_nano", "data=synthetic_tokens", "data.source.train_size=2000", "data.length=16")
    result = batch(tmp_path, *tokens, "optimizer=adamw", "find.start=4", "find.most=8")
    assert (result["batch_size"], result["bound"]) == (8, "find.most")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Manual", "the module's own rate=0.1 at data.batch_size=32 is 0.2 at 64 (SGD: in proportion"),
        ("Turns", "No rule is known for the rate of several optimizers"),
    ],
)
def test_own_modules_have_a_batch(name: str, said: str, tmp_path: Path) -> None:
    told = batch(tmp_path, *lit(name), "find.start=32", "find.most=64")
    assert (told["batch_size"], told["bound"]) == (64, "find.most")
    assert told["said"].startswith(said)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["batch_find.json"]


def test_a_rate_is_set_on_the_modules_own_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same net with the same optimizer of the group optimizer is the reference."""
    plain = [*lit("Plain"), "optimizer=sgd", "optimizer.weight_decay=0", "optimizer.nesterov=false"]
    expected = rate(tmp_path, *plain)
    assert f"Suggestion: optimizer.lr={expected['suggestion']:g} (now 0.1).\n" in capsys.readouterr().out
    way = f"{expected['suggestion']:g} (now 0.1).\n"
    hidden = (
        f"a rate of {expected['suggestion']:g} (now 0.2) where Plainest.configure_optimizers sets it; as an argument "
        f"lr of its __init__ it would be a key, model.net.lr={expected['suggestion']:g}.\n"
    )
    ways = {"LitNet": f"+model.net.lr={way}", "Plainest": hidden}
    for name, typed in ways.items():
        told = rate(tmp_path, *lit(name))
        assert told["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert told["rates"] == expected["rates"]
        assert f"Suggestion: {typed}" in capsys.readouterr().out
