"""Order, kinds and windows of the methods of compression."""

from typing import Any

import pytest
from support.runs import config

from lathe.config.stages import check_compression, methods, windows
from lathe.errors import UserError


def group(*names: str, stages: Any = None) -> dict[str, Any]:
    kinds = {
        "distill": "distillation",
        "prune_channels": "structure",
        "prune": "masks",
        "rigl": "masks",
        "qat": "quantization",
        "ptq_static": "after",
    }
    return {"stages": stages, "receipt": "none", **{name: {"_target_": "a.b", "kind": kinds[name]} for name in names}}


def check(*names: str, stages: Any = None, **strategy: Any) -> None:
    check_compression({"compression": group(*names, stages=stages), "strategy": {"_target_": "a.Mine", **strategy}})


@pytest.mark.parametrize(
    "names", [(), ("prune",), ("distill", "prune_channels", "prune", "qat"), ("distill", "prune", "ptq_static")]
)
def test_orders_that_work(names: tuple[str, ...]) -> None:
    check(*names)
    assert windows(group(*names)) == dict.fromkeys(names, (0.0, 1.0))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("qat", "prune"), r"^compression=\[qat,prune\] is out of order.*write compression=\[prune,qat\]\.$"),
        (("prune", "distill"), r"write compression=\[distill,prune\]"),
        (("prune", "rigl"), r"has prune and rigl, which decide over the same weights: keep one\.$"),
        (("qat", "ptq_static"), "quantizes in training and again after it"),
    ],
)
def test_orders_that_do_not(names: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(*names)


def test_a_strategy_takes_the_kinds_that_it_lists() -> None:
    check("distill", "prune", compressions=["distillation", "masks"])
    with pytest.raises(
        UserError, match=r"^compression=qat: strategy Mine takes distillation and masks of compression; choose another"
    ):
        check("distill", "prune", "qat", compressions=["distillation", "masks"])
    with pytest.raises(UserError, match="takes no kind of compression"):
        check("prune", compressions=[])


def test_a_method_without_a_kind_is_refused() -> None:
    with pytest.raises(UserError, match=r"^compression\.mine\.kind=None: choose one of distillation, structure"):
        check_compression({"compression": {"mine": {"_target_": "a.b"}}, "strategy": {}})


def test_an_unknown_receipt_is_refused() -> None:
    with pytest.raises(UserError, match=r"^compression\.receipt=None: choose one of quick, full, none\.$"):
        check_compression({"compression": {**group("prune"), "receipt": None}, "strategy": {}})


def test_options_of_a_method_that_was_not_chosen_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"^compression\.distill sets options of a method that the run does not have: add distill"
    ):
        check_compression({"compression": {"distill": {"teacher": "logs/a"}}, "strategy": {}})


def test_stages_share_the_run() -> None:
    assert windows(group("distill", "prune", "qat", stages=[["distill", "prune"], "qat"])) == {
        "distill": (0.0, 0.5),
        "prune": (0.0, 0.5),
        "qat": (0.5, 1.0),
    }
    assert windows(group("prune", "qat", stages=["prune", "qat"]))["qat"] == (0.5, 1.0)
    assert windows(group("distill", "prune", stages=["prune", "distill"]))["distill"] == (0.5, 1.0)


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (["prune"], r"^compression\.stages leaves out qat"),
        (["qat", "prune"], "has a later method in an earlier stage"),
        (["prune", "qat", "prune"], "names prune twice"),
        (["prun", "qat"], "names prun, which the run does not have; did you mean prune?"),
        ("prune", "give a list of methods, or null"),
        ([], "give a list of methods, or null"),
    ],
)
def test_stages_that_can_not_be(stages: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check("prune", "qat", stages=stages)


def test_no_method_by_default() -> None:
    cfg = config()
    assert methods(cfg["compression"]) == {}
    check_compression(cfg)


@pytest.mark.parametrize("override", ["trainer.enable_checkpointing=false", "callbacks.checkpoint=null"])
def test_what_acts_on_the_best_checkpoint_needs_one(override: str) -> None:
    for method in ("prune_channels", "ptq_static"):
        with pytest.raises(
            UserError, match=rf"^compression={method} acts on best\.ckpt after training, and this run keeps none: set"
        ):
            check_compression(config(f"compression={method}", override))
    check_compression(config("compression=prune_channels", "compression.prune_channels.mode=one_shot", override))
    check_compression(config("compression=prune", override))
    check_compression(config("compression=prune_channels", override, "trainer.fast_dev_run=true"))
