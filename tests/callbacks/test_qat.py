"""Quantization-aware training acts when it says, resumes bit for bit, and is the same under every precision that takes
it.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins import MixedPrecision
from support.net_state import assert_same
from support.qat_fit import STEPS, Data, fit
from support.strategy_fit import NETS, batches

from lathe.callbacks import EMA
from lathe.callbacks.methods.qat import QAT
from lathe.compression.quantization.net import describe, integer_weight, quantized_layers, quantizers
from lathe.errors import ArgumentError, UserError
from lathe.tasks import ClassificationTask
from lathe.trainer import Trainer


def test_rounding_begins_and_ranges_are_fixed_when_it_says() -> None:
    done = fit("resnet")
    assert done["seen"] == {step: (step >= 3, step < 7, step < 8) for step in range(1, 11)}
    net = done["task"].net
    assert done["report"] == {
        "qat/layers": len([1 for layer in quantized_layers(net).values() if hasattr(layer, "weight")]),
        "qat/bits": pytest.approx(8, abs=1.5),
    }
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

    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[QAT(lsq=True)],
    )
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
    assert mixed["losses"][:3] == pytest.approx(
        plain["losses"][:3], rel=0.1
    )  # then eight samples a step go their own ways
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


def test_another_plan_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    fit("mlp", save=tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="quantized already, with other bits"):
        fit("mlp", resume=tmp_path / "a.ckpt", options={"bits": 4})


def test_ranges_are_fixed_after_rounding_begins() -> None:
    with pytest.raises(ArgumentError, match=r"^freeze_observers=0\.1 lies before start=0\.2: freeze later\.$"):
        QAT(freeze_observers=0.1)
