"""Quantization-aware training acts when it says, resumes bit for bit, and is the same under every strategy and precision that takes it."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from ranks import on_ranks
from sharding import NETS, adamw, batches
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.callbacks import EMA, ExactResume
from lathe.callbacks.qat import QAT
from lathe.compression.quantize import describe, integer_weight, quantized_layers, quantizers
from lathe.compression.structure import apply_structure
from lathe.errors import UserError
from lathe.nets import recompute
from lathe.strategies import DDP, SyncBatchNorm, compile_net
from lathe.strategies.fsdp import FSDP
from lathe.tasks import ClassificationTask, LanguageModellingTask, Task

STEPS = 10


class Loader:
    """Batches that remember how far they got."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.done, self.begin = items, 0, 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for i, item in enumerate(self.items[begin:], begin):
            self.done = i + 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]


class Data(LightningDataModule):
    """The rank's part of each batch; validation is the first batch."""

    def __init__(self, name: str, n: int, part: tuple[int, int]) -> None:
        super().__init__()
        self.items = [(x.chunk(part[1])[part[0]], y.chunk(part[1])[part[0]]) for x, y in batches(name, n)]

    def train_dataloader(self) -> Loader:
        return Loader(self.items)

    def val_dataloader(self) -> Loader:
        return Loader(self.items[:1])


class Saves(Callback):
    """A checkpoint after optimizer step `at`, and what the quantizers were like after each."""

    def __init__(self, path: Path | None, at: int) -> None:
        self.path, self.at = path, at
        self.seen: dict[int, tuple[bool, bool, bool]] = {}
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        every = quantizers(pl_module.net)
        norms = [module.training for module in pl_module.net.modules() if isinstance(module, _BatchNorm)]
        self.seen[trainer.global_step] = (all(q.is_enabled for q in every), all(q.is_observing for q in every if not q.symmetric),
                                          all(norms))  # fmt: skip
        if trainer.global_step == self.at and self.path is not None and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fit(
    name: str,
    strategy: Any = "auto",
    *,
    part: tuple[int, int] = (0, 1),
    save: Path | None = None,
    at: int = 5,
    resume: Path | None = None,
    compiled: bool = False,
    recomputed: str = "none",
    accumulate: int = 1,
    extra: tuple[Callback, ...] = (),
    plugins: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Ten optimizer steps: rounding from step 3, ranges fixed from 7, BatchNorm's statistics from 8."""
    torch.manual_seed(0)
    net = NETS[name]()
    make = without_decay if (options or {}).get("lsq") else adamw
    task: Task = LanguageModellingTask(net, make) if name in ("gpt", "untied") else ClassificationTask(net, make)
    if resume is not None:
        apply_structure(task.net, torch.load(resume, weights_only=True)["structure"])
    recompute.apply(task.net, recomputed)
    compile_net(task.net, "cpu", enabled=compiled, backend="aot_eager", fullgraph=True)
    qat = QAT(**{"start": 0.3, "freeze_observers": 0.7, "freeze_batchnorm": 0.8, **(options or {})})
    saves = Saves(save, at)
    trainer = Trainer(
        accelerator="cpu", devices=part[1], strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[ExactResume(0), qat, *extra, saves], val_check_interval=1.0, num_sanity_val_steps=1,
        plugins=[*plugins, SyncBatchNorm()] if part[1] > 1 else [*plugins], **trainer_options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer.fit(task, datamodule=Data(name, STEPS * accumulate, part), ckpt_path=resume, weights_only=True)
    state = trainer.strategy.lightning_module_state_dict() if not isinstance(strategy, FSDP) else full_state(task.net)
    return {"state": {k.removeprefix("net."): v.detach().clone() for k, v in state.items()}, "seen": saves.seen,
            "losses": saves.losses, "report": qat.report(), "ready": qat.ready(trainer), "task": None if part[1] > 1 else task}  # fmt: skip


def full_state(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()}


def without_decay(net: nn.Module) -> torch.optim.Optimizer:
    scales = [p for name, p in net.named_parameters() if name.endswith("_quantizer.growth")]
    others = [p for name, p in net.named_parameters() if not name.endswith("_quantizer.growth")]
    return torch.optim.AdamW([{"params": others}, {"params": scales, "weight_decay": 0.0}], lr=1e-2)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_rounding_begins_and_ranges_are_fixed_when_it_says() -> None:
    done = fit("resnet")
    assert done["seen"] == {step: (step >= 3, step < 7, step < 8) for step in range(1, 11)}
    net = done["task"].net
    assert done["report"] == {"qat/layers": len([1 for layer in quantized_layers(net).values() if hasattr(layer, "weight")]),
                              "qat/bits": pytest.approx(8, abs=1.5)}  # fmt: skip
    assert done["ready"]
    assert all(int(q.updates) == 7 for q in quantizers(net) if not q.symmetric)
    assert integer_weight(net.conv)[0].abs().amax() == 127


@pytest.mark.parametrize("at", [1, 3, 6, 9])
def test_a_resumed_run_is_bit_equal(at: int, tmp_path: Path) -> None:
    whole = fit("resnet", save=tmp_path / "a.ckpt", at=at)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not any(name.startswith("net.") for name in checkpoint["state_dict"])
    rest = fit("resnet", resume=tmp_path / "a.ckpt")
    assert_same(rest["state"], whole["state"])
    assert rest["losses"] == whole["losses"][at:]


def test_learned_steps_resume_bit_for_bit_and_learn(tmp_path: Path) -> None:
    options = {"lsq": True, "bits": 4}
    whole = fit("vit", save=tmp_path / "a.ckpt", options=options)
    rest = fit("vit", resume=tmp_path / "a.ckpt", options=options)
    assert_same(rest["state"], whole["state"])
    at = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    scales = [name for name in at if name.endswith("_quantizer.scale")]
    assert all(not torch.equal(at[name], whole["state"][name]) for name in scales)
    assert all((whole["state"][name] > 0).all() for name in scales)


def test_weight_decay_on_learned_steps_is_told() -> None:
    class Plain(ClassificationTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, callbacks=[QAT(lsq=True)])  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        with pytest.warns(UserWarning, match="weight decay also shrinks the learned step sizes"):
            trainer.fit(Plain(NETS["mlp"]()), datamodule=Data("mlp", 2, (0, 1)))


def test_recomputed_blocks_observe_once() -> None:
    assert_same(fit("resnet", recomputed="blocks")["state"], fit("resnet")["state"])
    assert_same(fit("vit", recomputed="sqrt")["state"], fit("vit")["state"])


def test_accumulated_batches_count_as_one() -> None:
    done = fit("mlp", accumulate=2, options={"observer": "minmax", "freeze_observers": None})
    net = done["task"].net
    assert all(int(q.updates) == STEPS for q in quantizers(net) if not q.symmetric)
    first = next(q for q in quantizers(net) if not q.symmetric)
    inputs = torch.cat([x for x, _ in batches("mlp", 2 * STEPS)])
    assert (first.minimum, first.maximum) == (inputs.min(), inputs.max())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision: Any) -> None:
    plain = fit("resnet")
    if precision == "16-mixed":
        scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        mixed = fit("resnet", plugins=(scaler,))
    else:
        mixed = fit("resnet", precision=precision)
    assert mixed["losses"][:3] == pytest.approx(plain["losses"][:3], rel=0.1)  # then eight samples a step go their own ways
    assert all(loss < 2 for loss in mixed["losses"])
    assert mixed["seen"] == plain["seen"]
    assert all(value.dtype == plain["state"][name].dtype for name, value in mixed["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    plain, compiled = fit(name), fit(name, compiled=True)
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert compiled["seen"] == plain["seen"]


def test_averaged_weights_have_whole_zero_points() -> None:
    done = fit("mlp", extra=(EMA(decay=0.5),))
    points = [value for name, value in done["state"].items() if name.endswith("zero_point")]
    assert all(value.dtype == torch.int32 for value in points)
    with torch.no_grad():
        done["task"].net(batches("mlp", 1)[0][0])


def test_layers_by_pattern() -> None:
    done = fit("resnet", options={"layer_bits": {"blocks.*": 4, "head": None}, "exclude": ["conv"]})
    net = done["task"].net
    plans = {name: entry["plan"]["weight_bits"] for name, entry in describe(net).items()}
    assert not {"conv", "head"} & plans.keys()
    assert set(plans.values()) == {4}
    assert integer_weight(net.blocks[0].conv1)[0].abs().amax() == 7
    for options, sentence in (
        ({"layer_bits": {"hed": 4}}, r"compression\.qat\.layer_bits: the pattern 'hed' matches no layer"),
        ({"exclude": ["*"]}, "No layer of CifarResNet would be quantized"),
    ):
        with pytest.raises(UserError, match=sentence):
            fit("resnet", options=options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bits": 9}, r"compression\.qat\.bits=9 "),
        ({"activation_bits": 1}, r"compression\.qat\.activation_bits=1 "),
        ({"layer_bits": {"head": 1.5}}, r"compression\.qat\.layer_bits\[head\]=1\.5 "),
        ({"start": 1.5}, r"compression\.qat\.start=1\.5 "),
        ({"start": None}, r"compression\.qat\.start=None "),
        ({"freeze_observers": 0.1}, r"freeze_observers=0\.1 lies before"),
        ({"observer": "mean"}, r"compression\.qat\.observer='mean' "),
        ({"percentile": 10}, r"compression\.qat\.percentile=10 "),
    ],
)
def test_values_out_of_range(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        QAT(**options)


def test_another_plan_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    fit("mlp", save=tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="quantized already, with other bits"):
        fit("mlp", resume=tmp_path / "a.ckpt", options={"bits": 4})


# -- several processes

Case = tuple[str, dict[str, Any], dict[str, Any]]
DDP_CASES: dict[str, Case] = {"resnet": ("resnet", {}, {}), "lsq": ("mlp", {"lsq": True}, {})}
FSDP_CASES: dict[str, Case] = {"vit": ("vit", {}, {}), "lsq": ("mlp", {"lsq": True}, {})}
MORE_DDP: dict[str, Case] = {"vit": ("vit", {}, {"accumulate": 2}), "bf16": ("gpt", {"lsq": True}, {"precision": "bf16-mixed"})}
MORE_FSDP: dict[str, Case] = {
    "resnet": ("resnet", {}, {}),
    "bf16": ("gpt", {"lsq": True}, {"precision": "bf16-mixed"}),
    "recomputed": ("vit", {}, {"recomputed": "blocks"}),
}


def cases_on(rank: int, strategy: str, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    found = {}
    for case, (name, options, others) in cases.items():
        for suffix, where in (("", {"save": folder / f"{case}.ckpt"}), (" resumed", {"resume": folder / f"{case}.ckpt"})):
            make = DDP() if strategy == "ddp" else FSDP()
            found[case + suffix] = fit(name, make, part=(rank, 2), options=options, **where, **others)
    return found


def compare(first: dict[str, Any], second: dict[str, Any], cases: dict[str, Case]) -> None:
    """Ranks hold the same, a resumed run is the uninterrupted one, and both train as one process does."""
    for case, done in first.items():
        for name, value in done["state"].items():
            if "running" not in name:
                assert torch.equal(value, second[case]["state"][name]), (case, name)
        if case.endswith("resumed"):
            assert_same(done["state"], first[case.removesuffix(" resumed")]["state"])
    for case, (name, options, others) in cases.items():
        alone = fit(name, options=options, **others)
        assert first[case]["seen"] == alone["seen"]
        losses = [sum(pair) / 2 for pair in zip(first[case]["losses"], second[case]["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=0.05), case
        for key, value in alone["state"].items():
            if key.endswith(("maximum", "minimum")):
                torch.testing.assert_close(first[case]["state"][key], value, rtol=0.05, atol=0.05, msg=f"{case} {key}")


def test_ranks_hold_the_ranges_of_one_process(tmp_path: Path) -> None:
    compare(*on_ranks(cases_on, "ddp", DDP_CASES, tmp_path, timeout=120), DDP_CASES)


def test_sharded_weights(tmp_path: Path) -> None:
    compare(*on_ranks(cases_on, "fsdp", FSDP_CASES, tmp_path, timeout=120), FSDP_CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cases"), [("ddp", MORE_DDP), ("fsdp", MORE_FSDP)])
def test_more_nets_on_ranks(strategy: str, cases: dict[str, Case], tmp_path: Path) -> None:
    compare(*on_ranks(cases_on, strategy, cases, tmp_path, timeout=240), cases)
