"""A wrong value, and keys that do not go together, are one message each that begins with a key."""

from contextlib import nullcontext
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.commands import in_process
from support.runs import config

from lathe.config.compression_plan import windows
from lathe.config.resolve import resolve
from lathe.config.validate import READ_WITH, check, check_compression, check_types, unused_keys
from lathe.errors import UserError


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return config()


def changed(cfg: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`cfg` with another value at the dotted `key`."""
    node = OmegaConf.create(cfg)
    OmegaConf.update(node, key, value, force_add=True)
    return resolve(node)


def test_a_group_that_is_null_is_a_mistake_of_its_choice(defaults: dict[str, Any]) -> None:
    (message,) = check(defaults | {"model": None})
    assert message.startswith("model=null: a run needs this group; choose one of the files in configs/model, in a YAML")


def test_a_run_has_a_name_that_a_folder_and_a_shell_can_take(defaults: dict[str, Any]) -> None:
    for name in ("resnet20_lr0.1", "größe", "x" * 100, "latest2"):
        assert check(defaults | {"name": name}) == []
    for name in ("", "../x", ".hidden", "a\nb", "a,b", "-x", "x" * 101, None, 5, "latest"):
        (message,) = check(defaults | {"name": name})
        assert message.startswith("name=")


# Components that the schema does not know: overrides have the types of the defaults that they replace.


@pytest.fixture(scope="module")
def own(defaults: dict[str, Any]) -> dict[str, Any]:
    net = {"_target_": "mine.Net", "width": 16, "rate": 0.1, "on": True, "kinds": ["a"], "how": "x"}
    return changed(defaults, "model.net", net)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *[(key, value, "") for key, value in (("rate", 1), ("width", None), ("on", False), ("kinds", ["b", 1]))],
        ("width", "many", "model.net.width=many: expected a whole number, such as 16."),
        ("rate", False, "model.net.rate=false: expected a number, such as 0.1."),
        ("on", 1, "model.net.on=1: expected true or false, such as true."),
        ("kinds", "norm", "model.net.kinds=norm: expected a list, such as ['a']."),
        ("rate", {"x": 1}, "model.net.rate is a group of keys here: expected a number, such as 0.1."),
    ],
)
def test_a_value_has_the_type_of_its_default(own: dict[str, Any], key: str, value: Any, message: str) -> None:
    mistakes = check_types([f"model.net.{key}"], changed(own, f"model.net.{key}", value), own)
    assert list(mistakes) == ([(f"model.net.{key}", message)] if message else [])


def test_each_leaf_of_an_overridden_group_is_checked_and_no_other_key(own: dict[str, Any]) -> None:
    wrong = changed(changed(own, "model.net.width", "wide"), "model.net.on", 1)
    assert [key for key, _ in check_types(["model.net"], wrong, own)] == ["model.net.width", "model.net.on"]
    assert list(check_types(["seed"], wrong, own)) == []


# Keys together


TOGETHER: dict[str, tuple[list[str], str]] = {
    "a sampler besides our own": (
        ["trainer.use_distributed_sampler=true"],
        "trainer.use_distributed_sampler=true: expected false, as Lathe's",
    ),
    "a scaler without 16-mixed": (["+precision.init_scale=2.0"], "precision.init_scale is of the gradient scaler"),
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
    ((unused, message),) = unused_keys([word], config(choice, f"{group}.{other}={away}", word))
    assert unused == f"{group}.{key}"
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
    ("names", "stages", "message"),
    [
        ((), None, None),
        (("distill", "prune_channels", "prune", "qat"), None, None),
        (("distill", "prune", "ptq_static"), None, None),
        (("qat", "prune"), None, r"^compression=\[qat,prune\] is out of order.*write compression=\[prune,qat\]\.$"),
        (("prune", "rigl"), None, r"has prune and rigl, which decide over the same weights: keep one\.$"),
        (("qat", "ptq_static"), None, "quantizes in training and again after it"),
        (("prune", "qat"), ["prune"], r"^compression\.stages=.* leaves out qat"),
        (("prune", "qat"), [], "give a list of methods, or null"),
    ],
)
def test_methods_have_an_order_and_a_stage(names: tuple[str, ...], stages: Any, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_compression(compressed(*names, stages=stages))


def test_stages_share_the_run() -> None:
    def shares(*stages: Any) -> dict[str, tuple[float, float]]:
        return windows(compressed("distill", "prune", "qat", stages=list(stages))["compression"])

    first, second = (0.0, 0.5), (0.5, 1.0)
    assert shares(["distill", "prune"], "qat") == {"distill": first, "prune": first, "qat": second}
    assert shares("prune", ["distill", "qat"])["distill"] == second


def test_a_strategy_lists_the_kinds_of_compression_that_it_takes() -> None:
    check_compression(compressed("distill", "prune", compressions=["distillation", "masks"]))
    with pytest.raises(UserError, match=r"^compression=qat: strategy Mine takes distillation and masks compression"):
        check_compression(compressed("distill", "prune", "qat", compressions=["distillation", "masks"]))
    with pytest.raises(UserError, match="takes no compression"):
        check_compression(compressed("prune", compressions=[]))
    with pytest.raises(UserError, match=r"^compression\.mine\.kind=None: choose one of distillation, structure"):
        check_compression({"compression": {"mine": {"_target_": "a.b"}}, "strategy": {}})


@pytest.mark.parametrize("override", ["trainer.enable_checkpointing=false", "callbacks.checkpoint=null"])
def test_methods_after_training_need_a_best_checkpoint(override: str) -> None:
    for method in ("prune_channels", "ptq_static"):
        with pytest.raises(UserError, match=rf"^compression={method} acts on best\.ckpt after training"):
            check_compression(config(f"compression={method}", override))
    check_compression(config("compression=prune_channels", "compression.prune_channels.mode=one_shot", override))
    check_compression(config("compression=prune_channels", override, "trainer.fast_dev_run=true"))
