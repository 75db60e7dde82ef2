"""Quantization-aware training: start, bit-exact resume, and equality under every precision that supports it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins import MixedPrecision
from support.net_state import assert_same
from support.qat_fit import STEPS, Data, Saves, fit, without_decay
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.strategy_fit import NETS, batches
from torch import nn

from lathe.compression.quantization.callback import QAT
from lathe.compression.quantization.net import describe, integer_weight, quantized_layers, quantizers
from lathe.compression.quantization.ptq import quantize_static
from lathe.errors import UserError
from lathe.strategies import DDP
from lathe.strategies.fsdp import FSDP
from lathe.tasks import ClassificationTask


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run of a ResNet, and its checkpoint after step 3."""
    path = tmp_path_factory.mktemp("qat") / "a.ckpt"
    return {**fit("resnet", save=path, at=3), "checkpoint": path}


def test_rounding_begins_and_ranges_are_fixed_when_it_says(plain: dict[str, Any]) -> None:
    done = plain
    assert done["seen"] == {step: (step >= 3, step < 7, step < 8) for step in range(1, 11)}
    net = done["task"].net
    assert done["report"] == {
        "qat/layers": len([1 for layer in quantized_layers(net).values() if hasattr(layer, "weight")]),
        "qat/bits": pytest.approx(8, abs=1.5),
    }
    assert done["ready"]
    assert all(int(q.updates) == 7 for q in quantizers(net) if not q.symmetric)
    assert integer_weight(net.conv)[0].abs().amax() == 127


def test_a_resumed_run_is_bit_equal(plain: dict[str, Any]) -> None:
    checkpoint = torch.load(plain["checkpoint"], weights_only=True)
    assert not any(name.startswith("net.") for name in checkpoint["state_dict"])
    rest = fit("resnet", resume=plain["checkpoint"])
    assert_same(rest["state"], plain["state"])
    assert rest["losses"] == plain["losses"][3:]


def test_learned_steps_resume_bit_for_bit_and_learn(tmp_path: Path) -> None:
    options = {"lsq": True, "bits": 4}
    whole = fit("vit", save=tmp_path / "a.ckpt", options=options)
    rest = fit("vit", resume=tmp_path / "a.ckpt", options=options)
    assert_same(rest["state"], whole["state"])
    at = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    scales = [name for name in at if name.endswith("_quantizer.scale")]
    assert all(not torch.equal(at[name], whole["state"][name]) for name in scales)
    assert all((whole["state"][name] > 0).all() for name in scales)


def test_recomputed_blocks_observe_once(plain: dict[str, Any]) -> None:
    assert_same(fit("resnet", recomputed="blocks")["state"], plain["state"])


def test_accumulated_batches_count_as_one() -> None:
    done = fit("mlp", accumulate=2, options={"observer": "minmax", "freeze_observers": None})
    net = done["task"].net
    assert all(int(q.updates) == STEPS for q in quantizers(net) if not q.symmetric)
    first = next(q for q in quantizers(net) if not q.symmetric)
    inputs = torch.cat([x for x, _ in batches("mlp", 2 * STEPS)])
    assert (first.minimum, first.maximum) == (inputs.min(), inputs.max())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision: Any, plain: dict[str, Any]) -> None:
    if precision == "16-mixed":
        scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        mixed = fit("resnet", plugins=(scaler,))
    else:
        mixed = fit("resnet", precision=precision)
    assert mixed["losses"][:3] == pytest.approx(
        plain["losses"][:3], rel=0.1
    )  # afterwards, eight samples a step make the runs diverge
    assert all(loss < 2 for loss in mixed["losses"])
    assert mixed["seen"] == plain["seen"]
    assert all(value.dtype == plain["state"][name].dtype for name, value in mixed["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "freezes"), [("resnet", False), ("linear", True)])
def test_compiled(name: str, freezes: bool) -> None:
    """Each change of rounding, observing and BatchNorm compiles the net again: the ResNet has one of them."""
    options = {} if freezes else {"freeze_observers": None, "freeze_batchnorm": None}
    torch._dynamo.reset()
    eager, compiled = (fit(name, compiled=compiled, options=options) for compiled in (False, True))
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    assert compiled["seen"] == eager["seen"]


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
    with pytest.raises(UserError, match="quantized already"):
        fit("mlp", resume=tmp_path / "a.ckpt", options={"bits": 4})


def train(net: nn.Module, **options: Any) -> dict[int, tuple[bool, bool, bool]]:
    """Train ten more steps; return the quantizers' state after each."""
    saves = Saves(None, 0)
    qat = QAT(**{"start": 0.3, "freeze_observers": 0.7, "freeze_batchnorm": 0.8, **options})
    trainer = quiet_trainer(qat, saves, max_epochs=1, num_sanity_val_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer.fit(ClassificationTask(net.train(), without_decay), datamodule=Data("resnet", STEPS, (0, 1)))
    return saves.seen


@pytest.mark.parametrize("source", ["ptq_static", "qat"])
def test_ranges_are_observed_again(source: str) -> None:
    if source == "qat":
        net = fit("resnet")["task"].net
    else:
        torch.manual_seed(0)
        net = NETS["resnet"]()
        quantize_static(net, [batches("resnet", 1)[0][0]])
    assert not any(q.is_observing for q in quantizers(net) if not q.symmetric)
    before = [q.updates.item() for q in quantizers(net) if not q.symmetric]
    assert train(net) == {step: (step >= 3, step < 7, step < 8) for step in range(1, 11)}
    assert [q.updates.item() for q in quantizers(net) if not q.symmetric] == [count + 7 for count in before]
    for layer in (net.conv, net.head):  # scales of weights follow the weights again
        weight = layer.weight.detach().flatten(1)
        torch.testing.assert_close(integer_weight(layer)[1], weight.abs().amax(1) / 127)


def test_learned_scales_are_learned_further() -> None:
    net = fit("resnet", options={"lsq": True})["task"].net
    for q in quantizers(net):
        q.scale.mul_(1.5)  # as an average may differ from the structure
    before = [q.scale.clone() for q in quantizers(net)]
    seen = train(net, lsq=True, start=0.0)
    assert seen[1] == (True, False, True)
    ratios = torch.cat([q.scale / was for q, was in zip(quantizers(net), before, strict=True)])
    assert ((ratios - 1).abs() < 0.2).all()
    assert (ratios != 1).any()


Case = tuple[str, dict[str, Any], dict[str, Any]]  # the net, and options of the method and of the run
CASES: dict[str, dict[str, Case]] = {
    "ddp": {"resnet": ("resnet", {}, {})},
    "fsdp": {"lsq": ("mlp", {"lsq": True}, {}), "recomputed": ("vit", {}, {"recomputed": "blocks"})},
    "ddp_more": {"bf16": ("gpt", {"lsq": True}, {"precision": "bf16-mixed", "accumulate": 2})},
}


def cases_on(rank: int, name: str, folder: Path) -> dict[str, Any]:
    results = {}
    for case, (net, options, others) in CASES[name].items():
        for suffix, checkpoint in (("", "save"), (" resumed", "resume")):
            where = {checkpoint: folder / f"{case}.ckpt"}
            strategy = FSDP() if name == "fsdp" else DDP()
            results[case + suffix] = fit(net, strategy, part=(rank, 2), options=options, **where, **others)
    return results


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "ddp_more"))]
)
def test_ranks_train_as_one_process_and_resume(name: str, tmp_path: Path) -> None:
    first, second = on_ranks(cases_on, name, tmp_path, timeout=240)
    for case, done in first.items():
        assert done["seen"][STEPS][:2] == (True, False)  # rounded, and no longer observed
        for key, value in done["state"].items():
            if "running" not in key:
                assert torch.equal(value, second[case]["state"][key]), (case, key)
    for case, (net, options, others) in CASES[name].items():
        assert_same(first[f"{case} resumed"]["state"], first[case]["state"])
        alone = fit(net, options=options, **others)
        assert first[case]["seen"] == alone["seen"]
        losses = [sum(pair) / 2 for pair in zip(first[case]["losses"], second[case]["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=0.05), case
        for key, value in alone["state"].items():
            if key.endswith(("maximum", "minimum")):
                torch.testing.assert_close(first[case]["state"][key], value, rtol=0.05, atol=0.05, msg=f"{case} {key}")
