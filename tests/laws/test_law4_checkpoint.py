"""Law 4 and law 7 together: a last.ckpt that somebody has edited, part by part, is refused in one sentence, or the run
ends as if nobody had.
"""

import copy
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import QUICK, SEED, Interrupted, Interruption, equal, interruption, train_through
from support.runs import new_run

import lathe.verbs.train
from lathe.callbacks.outline import KEY
from lathe.errors import UserError

__all__ = ["interruption"]  # a fixture

pytestmark = pytest.mark.law7

OPTIONS = (
    *QUICK,
    "model.net.dropout=0.2",
    "trainer.max_epochs=2",
    "callbacks=[default,early_stopping]",
    "callbacks.checkpoint.every_n_train_steps=1",
)
COMPRESSED = (*OPTIONS[:-2], "compression.receipt=none", "callbacks.checkpoint.every_n_train_steps=1")
OWN = (
    *OPTIONS[-1:],
    *(word for word in QUICK if not word.startswith("model")),
    "model=lightning",
    "trainer.max_epochs=2",
    "callbacks.checkpoint.monitor=val_loss",
    "callbacks.checkpoint.mode=min",
)
# runs whose checkpoints hold other parts
KINDS = {
    "averaged": (*OPTIONS, "callbacks=[default,ema]", "scheduler=plateau"),
    "muon": (*OPTIONS, "optimizer=muon", "model.net.depth=2"),
    "pruned": (*COMPRESSED, "compression=prune", "compression.prune.every_n_steps=2"),
    "exchanged": (*COMPRESSED, "compression=rigl", "compression.rigl.every_n_steps=5"),
    "quantized": (*COMPRESSED, "compression=[distill,prune,qat]", "compression.distill.teacher=ema"),
    "module": (*OWN, "model.net={_target_: support.own_lightning.LitNet, width: 16}"),
    "steps of its own": (*OWN, "model.net={_target_: support.own_lightning.Manual, width: 16}"),
}
ABSENT = object()
WRONG = (ABSENT, 5, "word", [], [5], {}, {"a": 1}, -3)
OPEN = (("state",), ("best_metrics",))
Part = tuple[Any, ...]
MUST: dict[Part, Any] = {
    ("loops",): ABSENT,
    ("global_step",): -5,
    ("epoch",): -3,
    ("optimizer_states",): [{"state": 5}],
    ("callbacks",): {"EarlyStopping": "word"},
    ("lr_schedulers",): [{"last_epoch": "x"}],
    ("random_state",): ABSENT,
    ("random_state", 0): ABSENT,
    ("task",): ABSENT,
    ("task", "sums"): ABSENT,
    ("task", "sums", "epoch"): ABSENT,
    ("callbacks", "Checkpoint"): ABSENT,
    ("loops", "fit_loop"): ABSENT,
    ("loops", "fit_loop", "state_dict", "combined_loader"): ABSENT,
    ("optimizer_states", 0, "param_groups", 0, "name"): "other",
}


def changed(state: dict[str, Any], part: Part, value: Any) -> dict[str, Any]:
    tree = node = copy.deepcopy(state)
    for name in part[:-1]:
        node = node[name]
    if value is ABSENT:
        del node[part[-1]]
    else:
        node[part[-1]] = value
    return tree


def parts(tree: Any, above: Part = ()) -> Iterator[tuple[Part, Any]]:
    """What lies in the parts from which a run goes on, and where."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, name), value
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from parts(value, (*above, name))


@pytest.fixture
def attempt(tmp_path: Path, interruption: Interruption, request: pytest.FixtureRequest) -> Callable[[Part, Any], str]:
    """Continues a run that died in the middle of an epoch from its last.ckpt with a part changed: what was refused, or
    "" if it ended as the run that was left alone. Without a kind the checkpoint is as earlier versions wrote it,
    without an outline."""
    kind = getattr(request, "param", None)
    options = KINDS[kind] if kind else OPTIONS
    alone = train_through(new_run(tmp_path / "alone", *options), [], interruption)
    cfg = new_run(tmp_path / "died", *options)
    interruption.hook, interruption.step = "on_train_batch_start", 8
    with pytest.raises(Interrupted):
        lathe.verbs.train.train(dict(cfg))
    died = Path(cfg["paths"]["run_dir"])
    shutil.copytree(died, tmp_path / "kept")
    state = torch.load(died / "checkpoints" / "last.ckpt", weights_only=True)
    if not kind:
        del state[KEY]

    def through(part: Part, value: Any) -> str:
        shutil.rmtree(died)
        shutil.copytree(tmp_path / "kept", died)
        torch.save(changed(state, part, value), died / "checkpoints" / "last.ckpt")
        before = (died / "metrics.csv").read_text()
        print(f"LATHE_KILL_SEED={SEED}: {part} {value}")  # shown if the test fails
        try:
            train_through(cfg, [], interruption)
        except UserError as error:
            assert (died / "metrics.csv").read_text() == before
            return str(error)
        equal(alone, died)
        return ""

    through.parts = {part: found for part, found in parts(state) if part[0] != "state_dict"}  # type: ignore[attr-defined]
    return through


def test_what_is_not_there_or_can_not_be(attempt: Callable[[Part, Any], str]) -> None:
    for part, value in MUST.items():
        sentence = attempt(part, value)
        assert part[0] in sentence, sentence
        assert "last.ckpt" in sentence
        assert "\n" not in sentence
    assert not attempt(("optimizer_states", 0, "param_groups", 0, "name"), ABSENT)  # torch's own optimizers have none


def wrong_for(part: Part, found: Any) -> list[Any]:
    """Values of another kind. What may be absent: of a parameter without a gradient, of a metric."""
    kinds: tuple[Any, ...] = ((int, float), str, list, dict)
    values = [value for value in WRONG if not any(isinstance(value, k) and isinstance(found, k) for k in kinds)]
    return [value for value in values if value is not ABSENT or part[2:3] not in OPEN]


def refused_or_the_same(attempt: Any, values_of: Callable[[Part, Any], list[Any]]) -> None:
    wrong = []
    for part, found in attempt.parts.items():
        for value in values_of(part, found):
            try:
                assert "\n" not in attempt(part, value)
            except Exception as error:
                shown = "absent" if value is ABSENT else value
                wrong.append((part, shown, type(error).__name__, str(error)[:100]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
def test_edited_parts(attempt: Any) -> None:
    chance = random.Random(f"{SEED} parts")
    refused_or_the_same(attempt, lambda part, found: [chance.choice(wrong_for(part, found))])


@pytest.mark.slow
@pytest.mark.parametrize("attempt", KINDS, indirect=True)
def test_edited_parts_of_every_kind_of_run(attempt: Any) -> None:
    """A part that is taken out and one of another kind, whoever it belongs to."""
    chance = random.Random(f"{SEED} kinds")
    values = [value for value in WRONG if value is not ABSENT]
    assert len(attempt.parts) > 50
    refused_or_the_same(
        attempt,
        lambda part, found: [
            chance.choice([ABSENT, chance.choice([value for value in values if type(value) is not type(found)])])
        ],
    )
