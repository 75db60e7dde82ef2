"""What a LightningModule as it is can't have, told in one sentence before any data is touched."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.own_lightning import Plain
from support.runs import runs
from tasks.test_lightning_module import QUICK, net, run, table
from torch import nn

from lathe import trust
from lathe.errors import UserError
from lathe.runs.inference import open_net
from lathe.tasks import LightningTask
from lathe.training.train import train
from lathe.verbs.load import load

Cli = Callable[..., tuple[int, str]]
NO_DATA = ("data=cifar10", "data.source.download=false")
IT = net(words="features: 3072")

TYPED = {
    "a name in the place of a node": (
        ["model.net=support.own_lightning.LitNet"],
        "model.net=support.own_lightning.LitNet: expected a group of keys; write model.net={_target_: ",
    ),
    "no net": ([], "model.net: a value has to be given"),
    "task alone": (["task=lightning", "model=mlp"], "task=lightning runs a LightningModule, and model.net._target_="),
    "a net of the user's own": (
        ["model.net={_target_: support.own_parts.Table}"],
        "model.net._target_=support.own_parts.Table: expected a torch Module, got the class Table.",
    ),
    "another task": (
        [IT, "task=classification", "optimizer=sgd"],
        "model.net: LitNet is a LightningModule, whose steps task._target_=lathe.tasks.ClassificationTask would not "
        "call: model=lightning model.net={_target_: support.own_lightning.LitNet} runs it as it is.",
    ),
    "as the task": (
        ["model=mlp", "optimizer=sgd", "task={_target_: support.own_lightning.LitNet}"],
        "task._target_=support.own_lightning.LitNet is a plain LightningModule, which brings its net: model=lightning",
    ),
    "no training_step": (
        ["model.net={_target_: support.own_lightning.Stepless}"],
        "model.net: support.own_lightning.Stepless has no training_step: write one.",
    ),
    "no test_step": (
        ["model.net={_target_: support.own_lightning.Untested}"],
        "test=true: support.own_lightning.Untested has no test_step: write one, or add test=false.",
    ),
    "loaders": (
        [net("Loading")],
        "data: support.own_lightning.Loading.train_dataloader would not be read, as a run's data are a group",
    ),
    "hyper-parameters": (
        ["model.net={_target_: support.own_lightning.Keeping, make: {_target_: torch.nn.ReLU, _partial_: true}}"],
        "model.net: support.own_lightning.Keeping keeps make, a ",
    ),
    "lazy layers": ([net("Lazy")], "model.net: extra.weight of support.own_lightning.Lazy has no shape before the"),
    "no optimizer": (
        [net("Plain")],
        "optimizer=none: support.own_lightning.Plain has no configure_optimizers: write one, or choose optimizer=adamw",
    ),
    "an optimizer too many": (
        [IT, "optimizer=adamw"],
        "optimizer: support.own_lightning.LitNet has a configure_optimizers of its own, beside which the optimizer",
    ),
    "a scheduler alone": ([IT, "scheduler=cosine"], "scheduler is made for the optimizer of the group optimizer"),
    "a key of no optimizer": (
        [IT, "optimizer.lr=0.1"],
        "optimizer.lr: optimizer=none has no keys; with model=lightning it is the module's own: model.net.lr",
    ),
    "a new key of no optimizer": (
        [IT, "+optimizer.lr=0.1"],
        "optimizer has no _target_: leave ~optimizer._target_ out, or choose one of the files in configs/optimizer; "
        "with model=lightning it is the module's own: model.net.lr.",
    ),
    "an optimizer for a net": (["model=mlp", "optimizer=none"], "optimizer=none is for model=lightning"),
    "a plateau without a monitor": (
        [net("Plain"), "optimizer=adamw", "scheduler=plateau"],
        "scheduler.monitor=auto: nobody knows what this LightningModule logs: name a metric, and its mode.",
    ),
    "a stop without a monitor": (
        [IT, "callbacks=[default,early_stopping]"],
        "callbacks.early_stopping.monitor=auto: LitNet declares no metrics. Name one, such as callbacks.early_",
    ),
    "a monitor without a mode": (
        [IT, "callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=auto"],
        "callbacks.checkpoint.mode=auto knows the task's own metrics, and not val_loss",
    ),
    "a monitor of the test": (
        [IT, "callbacks.checkpoint.monitor=test/loss", "callbacks.checkpoint.mode=min"],
        "callbacks.checkpoint.monitor=test/loss: the test split is evaluated once, after training",
    ),
    "compile": ([IT, "compile=default"], "compile: torch.compile can't take a LightningModule that calls self.log"),
    "compression": ([IT, "compression=[prune,qat]"], "compression=prune,qat makes the net of a task small"),
    "recomputing": ([IT, "trainer.activation_checkpointing=blocks"], "trainer.activation_checkpointing=blocks is for"),
    "a class of pytorch_lightning": (
        ["model.net={_target_: mine_of_old.Net}"],
        "model.net: mine_of_old.Net derives from the LightningModule of pytorch_lightning, which is another class",
    ),
}
SPREAD = ("fsdp", "tensor", "pipeline", "3d", "deepspeed_2")


@pytest.fixture
def of_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is called as Lightning was, and a module that imports it."""
    theirs, mine = types.ModuleType("pytorch_lightning.core.module"), types.ModuleType("mine_of_old")
    base: Any = type("LightningModule", (nn.Module,), {"__module__": theirs.__name__})
    mine.Net = type("Net", (base,), {"__module__": "mine_of_old"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine_of_old", mine)


@pytest.mark.usefixtures("of_old")
@pytest.mark.parametrize("mistake", TYPED)
def test_a_mistake_costs_one_line(cli: Cli, mistake: str, tmp_path: Path) -> None:
    words, sentence = TYPED[mistake]
    code, errors = cli(*QUICK, *NO_DATA, *words)
    lines = [line for line in errors.splitlines() if line.strip()]
    assert (code, len(lines)) == (1, 1), errors
    assert sentence in lines[0]
    assert runs(tmp_path / "logs") == []


@pytest.mark.parametrize("strategy", SPREAD)
def test_strategies_that_spread_a_net_are_refused(cli: Cli, strategy: str) -> None:
    code, errors = cli(*QUICK, *NO_DATA, IT, f"strategy={strategy}", "trainer.devices=2")
    assert code == 1
    assert "spreads the net of a task, and task=lightning has a LightningModule as it is: use strategy=ddp" in errors


def test_a_monitor_that_nothing_logs_is_told_after_the_first_validation(tmp_path: Path) -> None:
    cfg = run(tmp_path, "callbacks.checkpoint.monitor=val_los")
    with pytest.raises(
        UserError, match=r"callbacks.checkpoint.monitor=val_los: .* not reported it; did you mean val_lo"
    ):
        train(cfg)


# Lightning's own warnings, which tell nothing of the checkpoint
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_a_monitor_without_a_validation_is_told_before_the_first_step(tmp_path: Path) -> None:
    sentence = "^callbacks.checkpoint.monitor=val_loss: {}, so that best.ckpt is the last weights unless training repo"
    short = ("trainer.max_epochs=1", "test=false")
    with pytest.warns(UserWarning, match=sentence.format("Unvalidated has no validation_step")):
        train(run(tmp_path / "module", *short, module="Unvalidated"))
    with pytest.warns(UserWarning, match=sentence.format("the data have no validation batches")):
        train(table(tmp_path / "data", "unvalidated", *short))


def test_samples_need_classes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shows predictions of classes, and LitNet predicts something else"):
        train(run(tmp_path, "callbacks=[default,samples]"))


def test_layers_of_setup_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.net: .*SetUp makes later\.weight in setup\(\), which evaluating"):
        train(run(tmp_path, module="SetUp"))


def test_a_loss_that_is_no_number_names_its_step(tmp_path: Path) -> None:
    made = "in optimizer step 4 the loss is inf, made in the training_step of Broken"
    with pytest.raises(UserError, match=rf"{made} .*; lower the module's learning rate, set"):
        train(run(tmp_path, module="Broken"))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("Vector", r"^model\.net: .*Vector\.training_step gives a tensor \[5\], expected a scalar: take its mean\.$"),
        ("Detached", r"^model\.net: .*Detached\.training_step gives a loss without a gradient: compute it from the"),
    ],
)
def test_a_loss_that_nothing_can_be_trained_on(tmp_path: Path, module: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(run(tmp_path, module=module))


def test_what_lightning_refuses_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Lightning refuses this run: .*gradient clipping is not supported for manual"):
        train(run(tmp_path, "trainer.gradient_clip_val=1.0", module="Manual"))


def test_what_asks_for_a_nets_outputs_is_refused(tmp_path: Path, cli: Cli) -> None:
    cfg = run(tmp_path / "logs", "trainer.max_epochs=1", "test=false")
    train(cfg)
    directory = cfg["paths"]["run_dir"]
    trust.allow({"trusted": ["support"]})
    sentence = "it has trained a LightningModule as it is, and nobody knows what that takes and answers"
    with pytest.raises(UserError, match=sentence):
        open_net(directory)
    with pytest.raises(UserError, match=sentence):
        load(directory).predict(str(tmp_path))
    path = Path(directory, "config.yaml")
    config = yaml.safe_load(path.read_text())  # whose data need not declare anything either: that is no way out
    config["data"] = {"_target_": "support.own_parts.Table"}
    path.write_text(yaml.safe_dump(config))
    for script, *words in (
        ("export", "target=tensorrt"),
        ("serve", "target=module"),
        ("serve", "target=onnx"),
        ("compress", "compression=ptq_static"),
        ("receipt",),
        ("sensitivity",),
        ("predict", f"input={tmp_path}", f"output={tmp_path / 'a.csv'}"),
    ):
        code, errors = cli(f"run={directory}", "trusted=[support]", *words, script=f"scripts/{script}.py")
        assert (code, errors.count(sentence), errors.count("\n")) == (1, 1, 1), (script, errors)


def test_from_python_the_task_needs_neither_optimizer_nor_run() -> None:
    task = LightningTask(Plain())
    assert task.driven is task.net
    assert (task.monitor, task.metric_names, task.reported) == ("", [], ())
    assert [task.count_units(batch) for batch in ((*(2 * [nn.Parameter().new_zeros(3, 2)]),), {"a": 5}, [])] == [
        3,
        1,
        1,
    ]
