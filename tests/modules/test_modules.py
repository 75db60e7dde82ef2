"""LightningModules in the styles that are public, unchanged: trained, resumed and compressed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from support import modules
from support.exports import request
from support.interruptions import NEVER, Interrupted, Interruption, interruption
from support.module_runs import MODULES, cfg_of, directory
from support.ranks import on_ranks
from support.runs import column, weights

from lathe import trust
from lathe.callbacks.run_callbacks import ExactResume
from lathe.compression.quantization import describe
from lathe.errors import UserError
from lathe.measure.calls import Call, run
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir
from lathe.tasks.core import core_of
from lathe.training.train import train
from lathe.verbs.compress import compress
from lathe.verbs.evaluate import evaluate
from lathe.verbs.load import load

__all__ = ["interruption"]  # a fixture
pytestmark = [
    pytest.mark.filterwarnings("ignore:compression.*of the weights"),
    pytest.mark.filterwarnings("ignore:data. train_dataloader stays as it is"),
    pytest.mark.filterwarnings("ignore:You have overridden .transfer_batch_to_device"),  # of Lightning
]

PRUNE = (
    "compression=prune",
    "compression.prune.head=true",
    "compression.prune.sparsity=0.7",
    "compression.prune.start=0",
    "compression.prune.end=0.5",
)


def first(*names: Any, rest: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: those of the default run, and the rest, which are slow."""
    return [*names, *(pytest.param(*_tuple(one), marks=pytest.mark.slow) for one in rest if one not in names)]


def _tuple(one: Any) -> tuple[Any, ...]:
    return one if isinstance(one, tuple) else (one,)


def core_weights(state: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """Return the weights below the module's core in a checkpoint, by full names."""
    core = MODULES[name][0]
    return {key: value for key, value in state.items() if core is None or key.startswith(f"{core}.")}


@pytest.mark.parametrize("name", MODULES)
def test_trains_as_with_a_bare_trainer(tmp_path: Path, name: str) -> None:
    cfg = cfg_of(tmp_path, name, "trainer.max_epochs=1")
    train(cfg)
    seed_everything(cfg["seed"], verbose=False)
    bare = getattr(modules, name)()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    seeds = ExactResume(cfg["seed"])  # a run draws by seed and rank from its first step on
    trainer = Trainer(max_epochs=1, accelerator="cpu", log_every_n_steps=5, callbacks=[seeds], **off)
    trainer.fit(bare, modules.Data(MODULES[name][1]))
    found = weights(directory(cfg))
    assert found.keys() == bare.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in bare.state_dict().items())
    task = load(directory(cfg), trusted=["support"]).task
    call = Call.load(directory(cfg) / "example.pt")  # the core takes it as it is
    assert call.samples() == modules.BATCH
    run(core_of(task), call)


@pytest.mark.parametrize("name", first("GAN", rest=["Alternating", "QuasiNewton"]))
def test_pruned_weights_stay_zero_over_an_interruption(tmp_path: Path, name: str, interruption: Interruption) -> None:
    """At the share that was asked for, in the core alone, whichever optimizer steps."""
    whole, cut = (cfg_of(tmp_path / part, name, *PRUNE) for part in ("whole", "cut"))
    result = train(whole)
    assert result["prune/sparsity"] == pytest.approx(0.7, abs=0.02)
    found = weights(directory(whole))
    zeros = sum(int((value == 0).sum()) for value in core_weights(found, name).values() if value.dim() > 1)
    state = read_checkpoint(directory(whole) / "checkpoints" / "last.ckpt")
    masks = next(value["masks"] for key, value in state["callbacks"].items() if key.startswith("Prune"))
    masked = sum(int((~mask).sum()) for mask in masks.values())
    assert 0 < masked <= zeros
    core = MODULES[name][0]
    for key, mask in masks.items():
        assert not bool(found[f"{core}.{key}" if core else _full(found, key)][~mask].any()), key
    interruption.hook, interruption.step = "on_train_epoch_end", 1
    with pytest.raises(Interrupted):
        train(cut)
    interruption.step = NEVER
    train(cut)
    again = weights(directory(cut))
    assert all(torch.equal(again[key], value) for key, value in found.items())


def _full(state: dict[str, Any], key: str) -> str:
    return next(name for name in state if name == key or name.endswith(f".{key}"))


MASKS = {
    "prune_nm": ("compression.prune_nm.start=0",),
    "prune_structured": ("compression.prune_structured.start=0",),
    "rigl": ("compression.rigl.every_n_steps=3", "compression.rigl.sparsity=0.5"),
}


@pytest.mark.parametrize(
    ("method", "name"),
    first(("rigl", "GAN"), rest=[("prune_nm", "GAN"), ("prune_structured", "Classifier")]),
)
def test_other_masks_hold(tmp_path: Path, name: str, method: str) -> None:
    """Half of the weights are zero; RigL grows by gradients, which manual optimization has cleared after its steps."""
    cfg = cfg_of(tmp_path, name, f"compression={method}", f"compression.{method}.head=true", *MASKS[method])
    assert train(cfg)[f"{method}/sparsity"] == pytest.approx(0.5, abs=0.02)
    found = core_weights(weights(directory(cfg)), name)
    matrices = [value for value in found.values() if value.dim() > 1]
    zeros = sum(int((value == 0).sum()) for value in matrices)
    assert zeros / sum(value.numel() for value in matrices) == pytest.approx(0.5, abs=0.02)


def test_quantized_in_training(tmp_path: Path) -> None:
    """The best checkpoint has the layers' structure and opens."""
    cfg = cfg_of(tmp_path, "LanguageModel", "compression=qat", "compression.qat.start=0.3")
    result = train(cfg)
    assert result["qat/layers"] > 0
    opened = load(directory(cfg), trusted=["support"])
    assert len(describe(core_of(opened.task))) >= result["qat/layers"]


AFTER = [
    *first(("ptq_static", "TextClassifier"), rest=[("ptq_static", name) for name in ("UNet", "Recurrent", "GAN")]),
    *(("ptq_dynamic", "TextClassifier"), ("weight_only", "LanguageModel")),
]


@pytest.mark.parametrize(("method", "name"), AFTER)
def test_quantized_after_training(tmp_path: Path, method: str, name: str) -> None:
    cfg = cfg_of(tmp_path, name, f"compression={method}", "trainer.max_epochs=1")
    result = train(cfg)
    assert result[f"{method}/layers"] > 0
    opened = load(directory(cfg), trusted=["support"])
    assert describe(core_of(opened.task))


@pytest.mark.parametrize(
    ("name", "mode"),
    first(
        *(("Classifier", "gradual"), ("TextClassifier", "one_shot")),
        rest=[("Convolutional", "one_shot"), ("UNet", "gradual"), ("GAN", "one_shot")],
    ),
)
def test_channels_are_removed(tmp_path: Path, name: str, mode: str) -> None:
    words = (f"compression.prune_channels.mode={mode}", "compression.prune_channels.min_channels=1")
    share = ("compression.prune_channels.budget=parameters", "compression.prune_channels.share=0.7")
    cfg = cfg_of(tmp_path, name, "compression=prune_channels", *words, *share)
    result = train(cfg)
    assert result["prune_channels/parameters_share"] <= 0.7
    task = load(directory(cfg), trusted=["support"]).task
    assert sum(p.numel() for p in core_of(task).parameters()) < sum(p.numel() for p in core_of_new(name).parameters())


def core_of_new(name: str) -> Any:
    from lathe.tasks import LightningTask

    return LightningTask(getattr(modules, name)(), core=MODULES[name][0]).core


@pytest.mark.parametrize("name", first("TextClassifier", rest=["Convolutional"]))
def test_distilled_from_a_run_of_its_own_kind(tmp_path: Path, name: str) -> None:
    """The teachers' term joins the loss that training_step returns; the run's own loss is reported beside it."""
    teacher = cfg_of(tmp_path / "teacher", name)
    train(teacher)
    words = (f"compression.distill.teacher={directory(teacher)}", "compression.distill.alpha=1", "trusted=[support]")
    cfg = cfg_of(tmp_path / "student", name, "compression=distill", *words, "trainer.max_epochs=8")
    cfg["seed"] = 3
    trust.allow({"trusted": ["support"]})
    train(cfg)
    soft = column(directory(cfg), "train/soft_loss")
    assert len(soft) == 8
    assert soft[-1] < 0.5 * soft[0]
    assert column(directory(cfg), "train/hard_loss") == [0.0] * 8


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        (
            "GAN",
            ("compression=distill", "compression.distill.teacher=ema"),
            "GAN has manual optimization: use prune",
        ),
        (
            "VAE",
            ("compression=distill", "compression.distill.teacher=ema"),
            "VAE returns several tensors, none of",
        ),
        ("GAN", ("compression=qat", "model.core=null"), r"GAN.validation_step \(.*:\d+\) does not call GAN"),
        ("GAN", ("compression=qat", "model.core=generatr"), "did you mean generator?"),
    ],
)
def test_a_method_or_a_core_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train(cfg_of(tmp_path, name, *words))


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.activation_checkpointing=blocks",),
        pytest.param(("compile=default", "compile.backend=eager"), marks=pytest.mark.slow),
    ],
)
def test_options_of_speed_and_memory_keep_the_losses(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Compilation of the core and recomputation of its repeated layers, found by their class."""
    cfgs = [cfg_of(tmp_path / str(number), "LanguageModel", *some) for number, some in enumerate(((), words))]
    plain, other = (train(cfg)["val_loss"] for cfg in cfgs)
    assert other == pytest.approx(plain, rel=1e-5)
    call = Call.load(directory(cfgs[1]) / "example.pt")
    assert [tuple(tensor.shape) for tensor in call.tensors().values()] == [(8, 5), (5, 5)]


@pytest.mark.parametrize("method", ["ptq_static", "prune"])
def test_a_finished_run_is_compressed_and_evaluated(tmp_path: Path, method: str) -> None:
    """Through the module's own steps: evaluate.py finds the loss that compress.py reports."""
    trust.allow({"trusted": ["support"]})
    dense = cfg_of(tmp_path, "Classifier")
    before = train(dense)["val_loss"]
    source = RunDir(directory(dense))
    words = (f"compression={method}", "compression.receipt=none", "trusted=[support]")
    result = compress(request(source, *words, name="compress"))
    assert result["source/val_loss"] == pytest.approx(before, abs=1e-6)
    made = next(path for path in source.path.parent.iterdir() if path.name not in ("latest", source.path.name))
    found = evaluate(request(RunDir(made), "split=val", "trusted=[support]", name="evaluate"))
    assert found["val_loss"] == pytest.approx(result["val_loss"], abs=1e-6)
    assert found["val_loss"] != before


def test_an_example_stands_in_for_a_step_that_cant_run_alone(tmp_path: Path) -> None:
    words = ("compression=qat", "trainer.num_sanity_val_steps=0")
    with pytest.raises(UserError, match=r"validation_step raises AttributeError .*modules.py:\d+\): .*model.example"):
        train(cfg_of(tmp_path / "alone", "Prepared", *words))
    torch.save(torch.randn(4, 1, 8, 8), tmp_path / "example.pt")
    cfg = cfg_of(tmp_path / "given", "Prepared", *words, f"model.example={tmp_path / 'example.pt'}")
    assert train(cfg)["qat/layers"] == 2


def result_of(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    return train(cfg)


@pytest.mark.slow
def test_two_processes_prune_and_quantize_as_one(tmp_path: Path) -> None:
    words = (*PRUNE, "compression=[prune,qat]", "compression.qat.start=0.5")
    words = tuple(word for word in words if word != "compression=prune")
    one, two = (cfg_of(tmp_path / str(n), "Classifier", *words, f"trainer.devices={n}") for n in (1, 2))
    expected, found = train(one), on_ranks(result_of, two)[0]
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-3)
    assert found["prune/sparsity"] == expected["prune/sparsity"]
    assert (directory(two) / "example.pt").is_file()
