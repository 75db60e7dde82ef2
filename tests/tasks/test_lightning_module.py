"""A user's unmodified LightningModule: on one process and two, interrupted, and in other commands."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from support.interruptions import Interruption, interruption, same, train_through
from support.own_lightning import QUICK, LitNet
from support.ranks import on_ranks
from support.runs import column, new_run, rows, weights

from lathe import trust
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.evaluate import evaluate
from lathe.verbs.load import load

__all__ = ["interruption"]  # a fixture

BEST = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min")


def net(name: str = "LitNet", words: str = "width: 16") -> str:
    return f"model.net={{_target_: support.own_lightning.{name}, {words}}}"


def run(folder: Path, *words: str, module: str = "LitNet") -> dict[str, Any]:
    """Return a run on digits."""
    return new_run(folder, *QUICK, *BEST, net(module), "data.batch_size=100", *words)


def table(folder: Path, *words: str, kind: str) -> dict[str, Any]:
    """Return a run with a user's LightningDataModule."""
    cfg = new_run(folder, *QUICK, *BEST, net(words="features: 16, classes: 2, width: 4"), *words)
    cfg["data"] = {"_target_": "support.own_parts.Table", "kind": kind}
    return cfg


def directory(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


def result_of(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    return train(cfg)


def test_the_modules_own_loaders_train_as_those_of_a_data_module(tmp_path: Path) -> None:
    words = "features: 16, classes: 2, width: 4"
    own = new_run(tmp_path / "own", *QUICK, *BEST, net("WithData", words), "data=module", "test=false")
    apart = table(tmp_path / "apart", "test=false", kind="table")
    train(own)
    train(apart)
    losses = [column(directory(cfg), "train_loss_step") for cfg in (own, apart)]
    assert losses[0] == losses[1] != []
    assert [row["val_loss"] for row in rows(directory(own))] == [row["val_loss"] for row in rows(directory(apart))]


@pytest.mark.filterwarnings("ignore:data. train_dataloader stays as it is")
def test_a_module_makes_its_samples_with_its_own_net(tmp_path: Path) -> None:
    words = ("data=module", "test=false", "callbacks.checkpoint.monitor=null", "trainer.limit_val_batches=0")
    cfg = new_run(tmp_path, *QUICK, net("Playing", "features: 16, classes: 2, width: 4"), *words)
    assert train(cfg)["steps"] == 8  # two epochs of 32 samples in batches of 8


@pytest.mark.parametrize("data", ["digits", "own"])
def test_two_processes_have_the_losses_of_one(tmp_path: Path, data: str) -> None:
    """Without dropout, which differs. Every sample of an evaluation counts once; filling rows do not count. The
    monitored value is of all processes, also where the module logs it without sync_dist.
    """
    made = partial(run, module="Unsynchronised") if data == "digits" else partial(table, kind="noisy")
    one, two = made(tmp_path / "one"), made(tmp_path / "two", "trainer.devices=2")
    for cfg in (one, two):
        cfg["model"]["net"]["dropout"] = 0.0
    result, results = train(one), on_ranks(result_of, two)
    losses = [column(directory(cfg), "train_loss_step") for cfg in (one, two)]
    assert len(losses[0]) == (5 if data == "digits" else 2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert result["test_seen"] == (297 if data == "digits" else 7)
    for name in ("val_loss", "val_accuracy", "val_seen", "test_loss", "test_seen", "train_loss_epoch"):
        assert results[0][name] == pytest.approx(result[name], rel=1e-5), name


def test_what_it_logs_is_monitored_and_reported(tmp_path: Path) -> None:
    words = ("callbacks=[default,early_stopping,ema]", "callbacks.early_stopping.monitor=val_loss")
    cfg = run(tmp_path, *words, "callbacks.early_stopping.mode=min")
    result = train(cfg)
    found = rows(directory(cfg))
    losses = [float(row["val_loss"]) for row in found if row["val_loss"]]
    assert (result["monitor"], result["objective"]) == ("val_loss", min(losses))
    assert [float(row["lr-SGD"]) for row in found if row["lr-SGD"]] == [0.1, 0.1, 0.05, 0.05, 0.05]
    assert [row["step"] for row in found if row["train_loss_step"]] == ["5", "10", "15", "20", "25"]
    assert result["test_loss"] == pytest.approx(column(directory(cfg), "test_loss")[0])
    best = torch.load(directory(cfg) / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["hyper_parameters"] == {"features": 64, "classes": 10, "width": 16, "dropout": 0.1, "lr": 0.1}
    assert best["ema"]["updates"] == 26
    plain = LitNet.load_from_checkpoint(directory(cfg) / "checkpoints" / "best.ckpt")
    assert all(torch.equal(value, best["state_dict"][name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("data", "hook", "step"), [("digits", "on_train_batch_start", 7), ("own", "on_validation_end", 8)]
)
def test_an_interruption_changes_nothing(
    tmp_path: Path, interruption: Interruption, data: str, hook: str, step: int
) -> None:
    words = ("callbacks.checkpoint.every_n_train_steps=3", "callbacks=[default,ema]")
    made = run if data == "digits" else partial(table, kind="noisy")
    whole, cut = (made(tmp_path / name, *words) for name in ("whole", "cut"))
    same(train_through(cut, [(hook, step)], interruption), train_through(whole, [], interruption))
    assert interruption.hook == ""


# options of a waiting schedule, and its steps before the last checkpoint, which precedes that of the last epoch, in
# three epochs of five steps
WAITS: dict[str, tuple[dict[str, Any], int]] = {
    "second epoch": ({"frequency": 2}, 1),
    "metric of training": ({"waits_for": "train_loss_epoch"}, 2),
    "third step": ({"interval": "step", "frequency": 3, "waits_for": "train_loss_step"}, 3),
}


@pytest.mark.parametrize("waits", WAITS)
def test_a_scheduler_that_waits_lacks_no_step_after_a_death(
    tmp_path: Path, interruption: Interruption, waits: str
) -> None:
    """Lightning omits one in the first epoch of a resumed run."""

    def run_of(name: str, steps: str = "null") -> dict[str, Any]:
        words = ("data.batch_size=260", "trainer.max_epochs=3", f"callbacks.checkpoint.every_n_train_steps={steps}")
        cfg = run(tmp_path / name, *words, module="Waits")
        cfg["model"]["net"].update(options)
        return cfg

    (options, steps), rng = WAITS[waits], random.Random(waits)
    whole, longer = run_of("whole"), run_of("longer")
    train(whole)
    (expected,) = schedules(whole)
    assert expected["last_epoch"] == steps
    hook = rng.choice(("on_train_batch_start", "on_validation_start", "on_validation_end", "on_train_epoch_end"))
    saves = rng.choice(("null", "1", "3"))
    death = (hook, rng.randint(6 if saves == "null" else 4, 14))
    cut = run_of("cut", saves)
    train_through(cut, [death], interruption)
    assert interruption.hook == ""
    assert schedules(cut) == [expected], (death, saves)
    same(directory(cut), directory(whole))
    for epochs in (2, 3):
        longer["trainer"]["max_epochs"] = epochs
        train(longer)
    assert schedules(longer) == [expected]


def schedules(cfg: dict[str, Any]) -> list[dict[str, Any]]:
    found = torch.load(directory(cfg) / "checkpoints" / "last.ckpt", weights_only=True)["lr_schedulers"]
    assert isinstance(found, list)
    return found


def test_ours_optimize_a_module_without_configure_optimizers(tmp_path: Path) -> None:
    words = ("optimizer=adamw", "optimizer.lr=0.01", "scheduler=cosine", "scheduler.warmup=0")
    cfg = run(tmp_path, *words, module="Plain")
    train(cfg)
    rates = column(directory(cfg), "lr-AdamW/decay")
    assert 0.009 < rates[0] < 0.01
    assert rates[-1] < 0.001
    state = torch.load(directory(cfg) / "checkpoints" / "last.ckpt", weights_only=True)
    decays = {group["weight_decay"]: len(group["params"]) for group in state["optimizer_states"][0]["param_groups"]}
    assert decays == {0.05: 3, 0.0: 3}


def test_layers_and_words_of_its_own_hooks_come_back(tmp_path: Path) -> None:
    cfg = run(tmp_path, "trainer.max_epochs=1", module="Late")
    result = train(cfg)
    assert "late.weight" in weights(directory(cfg))
    assert result["parameters"] == 16 * 65 + 17 * 10 + 2 * 110
    trust.allow({"trusted": ["support"]})
    found = load(directory(cfg), trusted=["support.own_lightning", "support.own_parts"])
    assert (found.net.word, found.net.training) == ("kept", False)
    state = weights(directory(cfg), "best")
    assert all(torch.equal(value, state[name]) for name, value in found.net.state_dict().items())


def evaluated(rank: int, cfg: dict[str, Any], split: str) -> dict[str, float]:
    request = {"checkpoint": "best", "batch_size": None, "output": None, "run": "x", "split": split}
    return evaluate({**cfg, "request": request})


def test_a_run_is_loaded_and_evaluated_on_two_processes_as_on_one(tmp_path: Path) -> None:
    """An odd number of samples: Lightning's mean of their count over ranks loses a half."""
    cfg = table(tmp_path, kind="noisy")
    RunDir(directory(cfg)).save_config(cfg)
    result = train(cfg)
    expected = {name: result[name] for name in ("test_loss", "test_seen")}
    found = load(directory(cfg), trusted=["support.own_lightning", "support.own_parts"])
    assert type(found.task) is LitNet
    assert found.net is found.task
    (metrics,) = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(
        found.task, datamodule=found.datamodule, verbose=False
    )
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert "train_dataloader" in vars(found.datamodule)
    cfg["trainer"]["devices"] = 2
    for metrics in on_ranks(evaluated, cfg, "test"):
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_evaluate_has_the_metrics_of_each_split(tmp_path: Path) -> None:
    cfg = run(tmp_path)
    result = train(cfg)
    found = {split: evaluated(0, cfg, split) for split in ("val", "test", "train")}
    assert found["val"] == pytest.approx({name: result[name] for name in ("val_loss", "val_accuracy", "val_seen")})
    assert found["test"] == pytest.approx({name: result[name] for name in ("test_loss", "test_seen")})
    assert found["train"].keys() == {"train_loss", "train_seen"}
    assert found["train"]["train_seen"] == 1300


def test_gradients_in_validation(tmp_path: Path) -> None:
    cfg = run(tmp_path, "test=false", module="Slope")
    result = train(cfg)
    assert evaluated(0, cfg, "val")["val_loss"] == pytest.approx(result["val_loss"], rel=1e-5)


def test_a_checkpoint_callback_of_ones_own_writes_into_the_run_directory(tmp_path: Path) -> None:
    kind = "lightning.pytorch.callbacks.ModelCheckpoint"
    asked = f"{{_target_: {kind}, dirpath: {tmp_path / 'given'}, monitor: val_accuracy, mode: max}}"
    for words, module in (((), "Checkpointing"), ((f"+callbacks.mine={asked}",), "LitNet")):
        cfg = run(tmp_path / module, *words, module=module)
        train(cfg)
        home = Path(cfg["paths"]["run_dir"])
        assert sorted(path.name for path in (home / "checkpoints").glob("*.ckpt")) == ["best.ckpt", "last.ckpt"]
        assert not (home / "csv").exists()
        if words:
            assert len(list((tmp_path / "given").iterdir())) == 1
            continue
        own = sorted((home / "checkpoints" / "own").iterdir())
        assert [path.name for path in own] == ["epoch=1-step=26.ckpt", "last.ckpt"]
        kept = torch.load(own[0], weights_only=True)["state_dict"]
        assert all(torch.equal(kept[name], value) for name, value in weights(home, "best").items())
    with pytest.warns(UserWarning, match=r"a ModelCheckpoint of Checkpointing\.configure_callbacks takes the place"):
        train(run(tmp_path / "both", f"+callbacks.mine={asked}", "trainer.max_epochs=1", module="Checkpointing"))


TABLE = "features: 16, classes: 2, width: 4"


def habit(folder: Path, module: str, *words: str, data: str = "support.own_parts.Table") -> dict[str, Any]:
    cfg = new_run(folder, *QUICK, f"model.net={{_target_: support.own_habits.{module}, {TABLE}}}", "test=false", *words)
    cfg["data"] = {"_target_": data}
    return cfg


def on_two(rank: int, waiting: dict[str, Any], *refused: dict[str, Any]) -> list[str]:
    train(waiting)
    messages = []
    for cfg in refused:
        with pytest.raises(UserError) as error:
            train(cfg)
        messages.append(str(error.value))
    return messages


def test_two_ranks_agree_or_say_why_not(tmp_path: Path) -> None:
    two = "trainer.devices=2"
    waiting = habit(tmp_path / "waiting", "Waiting", two)
    gathering = habit(tmp_path / "gathering", "Gathers", two, data="support.own_habits.Odd")
    divided = habit(tmp_path / "divided", "LitNet", two, data="support.own_habits.Divided")
    divided["model"]["net"]["_target_"] = "support.own_lightning.LitNet"
    for gathered, halved in on_ranks(on_two, waiting, gathering, divided):
        assert gathered.startswith("Gathers.all_gather: ")
        assert halved == (
            "data: Divided has batch_size=16 and a train_dataloader of 8: the DataLoader's batch_size is "
            "the global batch, which Lathe divides among the 2 replicas itself, so give it all of batch_size."
        )
    home = Path(waiting["paths"]["run_dir"])
    rates = [float((home / f"rate{rank}").read_text()) for rank in range(2)]
    assert rates == [0.1, 0.1]  # the first rank's metric decreases, the other's does not


OWN_KIND = "lightning.pytorch.callbacks.ModelCheckpoint"
# the worst epoch, which is the first: decisions before an interruption count after it
WORST = f'+callbacks.mine={{_target_: {OWN_KIND}, monitor: val_loss, mode: max, save_top_k: 1, filename: "x{{epoch}}"}}'


def kept(cfg: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the callback's files and its state in last.ckpt, without the run's folder."""
    home = Path(cfg["paths"]["run_dir"])
    state = torch.load(home / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    own = next(value for key, value in state.items() if key.startswith("ModelCheckpoint"))
    # current_score belongs to the newest file that it wrote, and Lightning does not restore it
    plain = {name: str(value).replace(str(home), "") for name, value in own.items() if name != "current_score"}
    return sorted(path.name for path in (home / "checkpoints" / "own").iterdir()), plain


@pytest.mark.parametrize(("words", "module"), [((WORST,), "LitNet"), ((), "Checkpointing")])
def test_it_goes_on_where_it_was(tmp_path: Path, words: tuple[str, ...], module: str) -> None:
    whole = run(tmp_path / "whole", *words, "test=false", "trainer.max_epochs=3", module=module)
    train(whole)
    begun = run(tmp_path / "begun", *words, "test=false", "trainer.max_epochs=1", module=module)
    train(begun)
    train({**begun, "trainer": {**begun["trainer"], "max_epochs": 3}})
    assert kept(begun) == kept(whole)
    if words:
        assert kept(whole)[0] == ["xepoch=0.ckpt"]
    last = [weights(Path(cfg["paths"]["run_dir"])) for cfg in (begun, whole)]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())


def test_one_that_it_wrote_is_evaluated(tmp_path: Path, cli: Callable[..., tuple[int, str]]) -> None:
    cfg = run(tmp_path, WORST, "test=false")
    train(cfg)
    home = Path(cfg["paths"]["run_dir"])
    trusted, script = f"trusted=[{OWN_KIND},support.own_lightning.LitNet]", "scripts/evaluate.py"
    for words in ((f"run={home}/checkpoints/own/xepoch=0.ckpt",), (f"run={home}", "checkpoint=own/xepoch=0")):
        assert cli(*words, trusted, "split=val", "output=found.json", script=script) == (0, "")
        found = json.loads(Path("found.json").read_text())
        assert found["val_loss"] == pytest.approx(column(home, "val_loss")[0])
    code, error = cli(f"run={home}", "checkpoint=own/none", trusted, script=script)
    assert (code, error.count("\n")) == (1, 1)
    assert "no checkpoint 'own/none': it has best, last, own/xepoch=0; checkpoint=own/xepoch=0 takes that." in error


def test_a_tuple_needs_no_trust(tmp_path: Path) -> None:
    shape = "width: 16, shape: {_target_: builtins.tuple, _args_: [[1, 8, 8]]}"
    words = ("trainer.max_epochs=1", "test=false", "data.batch_size=100")
    cfg = new_run(tmp_path, *QUICK, *BEST, net("Shaped", shape), *words)
    RunDir(directory(cfg)).save_config(cfg)
    train(cfg)
    assert load(directory(cfg), trusted=["support.own_lightning"]).task.example_input_array.shape == (1, 1, 8, 8)
