"""Mistakes that several keys make together: each is one message that begins with a key."""

from typing import Any

import pytest
from support.commands import in_process
from support.runs import config

from lathe.config.compression_plan import windows
from lathe.config.validate import READ_WITH, check, check_compression, unused_keys
from lathe.errors import UserError

TOGETHER: dict[str, tuple[list[str], str]] = {
    "no end": (["trainer.max_epochs=null"], "trainer.max_epochs=null needs an end: set trainer.max_steps or"),
    "min above max": (["trainer.min_epochs=31"], "trainer.min_epochs=31 is above trainer.max_epochs=30"),
    "a scaler without 16-mixed": (["+precision.init_scale=2.0"], "precision.init_scale is of the gradient scaler"),
    "a mode without a checkpoint": (["ckpt_mode=trainer"], "ckpt_mode=trainer requires ckpt_path."),
    "a precision of another strategy": (
        ["strategy=pipeline", "precision=16-true"],
        "precision.name=16-true: strategy Pipeline takes ",
    ),
    "the average of a split net": (
        ["callbacks=[default,ema]", "strategy=pipeline"],
        "callbacks.ema needs a whole net, and strategy Pipeline cuts it.",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_keys_that_do_not_go_together(name: str) -> None:
    overrides, message = TOGETHER[name]
    (found,) = check(config(*overrides))
    assert found.startswith(message)


def test_a_command_on_a_run_checks_only_what_it_builds() -> None:
    cfg = config("ckpt_mode=trainer")
    assert check(cfg) != []
    assert check(cfg, saved="parts") == []  # evaluating starts no run
    (message,) = check(config("strategy=pipeline", "precision=16-true"), saved="parts")
    assert message.startswith("precision.name=16-true: strategy Pipeline takes")


# Keys without an effect


VALUES = {"block": "[2,2]", "percentile": "60", "norm": "1", "adamw_betas": "[0.8,0.9]"}
OTHERS = {"schedule": "cubic", "criterion": "taylor", "granularity": "unstructured", "observer": "minmax"}


@pytest.mark.parametrize(("group", "rule"), [(group, rule) for group, rules in READ_WITH.items() for rule in rules])
def test_a_key_that_nothing_reads(group: str, rule: tuple[str, str, str]) -> None:
    key, other, value = rule
    away = {"sgd": "adamw", "adamw": "sgd"}.get(value) or OTHERS[other]
    choice = "optimizer=muon" if group == "optimizer" else f"compression={group.partition('.')[2]}"
    word = f"{group}.{key}={VALUES.get(key, '1')}"
    ((found, message),) = unused_keys([word], config(choice, f"{group}.{other}={away}", word))
    assert found == f"{group}.{key}"
    assert message.startswith(f"{word} has no effect: it is read with {group}.{other}={value}, and here that is {away}")
    assert list(unused_keys([word], config(choice, f"{group}.{other}={value}", word))) == []


def test_a_key_that_nothing_reads_is_refused_at_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compression=prune", "compression.prune.criterion=taylor", "compression.prune.batches=3"]
    assert in_process("train.py", *words) == 1
    assert "Error: compression.prune.batches=3 has no effect" in capsys.readouterr().err


# Compression


KINDS = {
    "distill": "distillation",
    "prune_channels": "structure",
    "prune": "masks",
    "rigl": "masks",
    "qat": "quantization",
    "ptq_static": "after",
}


def compressed(*names: str, stages: Any = None, **strategy: Any) -> dict[str, Any]:
    nodes = {name: {"_target_": "a.b", "kind": KINDS[name]} for name in names}
    return {"compression": {"stages": stages, **nodes}, "strategy": {"_target_": "a.Mine", **strategy}}


@pytest.mark.parametrize(
    "names", [(), ("prune",), ("distill", "prune_channels", "prune", "qat"), ("distill", "prune", "ptq_static")]
)
def test_orders_of_methods(names: tuple[str, ...]) -> None:
    check_compression(compressed(*names))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("qat", "prune"), r"^compression=\[qat,prune\] is out of order.*write compression=\[prune,qat\]\.$"),
        (("prune", "rigl"), r"has prune and rigl, which decide over the same weights: keep one\.$"),
        (("qat", "ptq_static"), "quantizes in training and again after it"),
    ],
)
def test_methods_that_do_not_go_together(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_compression(compressed(*names))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["prune"], r"^compression\.stages=.* leaves out qat"),
        ([], "give a list of methods, or null"),
    ],
)
def test_stages_that_do_not_fit_the_methods(stages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_compression(compressed("prune", "qat", stages=stages))


def test_a_strategy_lists_the_kinds_of_compression_that_it_takes() -> None:
    check_compression(compressed("distill", "prune", compressions=["distillation", "masks"]))
    with pytest.raises(UserError, match=r"^compression=qat: strategy Mine takes distillation and masks compression"):
        check_compression(compressed("distill", "prune", "qat", compressions=["distillation", "masks"]))
    with pytest.raises(UserError, match="takes no compression"):
        check_compression(compressed("prune", compressions=[]))


def test_a_method_of_your_own_needs_a_kind() -> None:
    with pytest.raises(UserError, match=r"^compression\.mine\.kind=None: choose one of distillation, structure"):
        check_compression({"compression": {"mine": {"_target_": "a.b"}}, "strategy": {}})


@pytest.mark.parametrize("override", ["trainer.enable_checkpointing=false", "callbacks.checkpoint=null"])
def test_methods_after_training_need_a_best_checkpoint(override: str) -> None:
    for method in ("prune_channels", "ptq_static"):
        with pytest.raises(UserError, match=rf"^compression={method} acts on best\.ckpt after training"):
            check_compression(config(f"compression={method}", override))
    check_compression(config("compression=prune_channels", "compression.prune_channels.mode=one_shot", override))
    check_compression(config("compression=prune_channels", override, "trainer.fast_dev_run=true"))


def group(*names: str, stages: Any = None) -> dict[str, Any]:
    return {"stages": stages, "receipt": "none", **{name: {"_target_": "a.b"} for name in names}}


def test_stages_share_the_run() -> None:
    assert windows(group("distill", "prune", "qat", stages=[["distill", "prune"], "qat"])) == {
        "distill": (0.0, 0.5),
        "prune": (0.0, 0.5),
        "qat": (0.5, 1.0),
    }
    assert windows(group("distill", "prune", stages=["prune", "distill"]))["distill"] == (0.5, 1.0)
