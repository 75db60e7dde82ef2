"""A wrong value, and keys that do not go together, are one message each that begins with a key."""

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


def test_the_defaults_are_right(defaults: dict[str, Any]) -> None:
    assert check(defaults) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", None, "seed=null: expected a whole number from 0 to 4294967295."),
        ("trainer.use_distributed_sampler", True, "trainer.use_distributed_sampler=true: expected false, as Lathe's"),
        ("model", None, "model=null: a run needs this group; choose one of the files in configs/model, in a YAML file"),
    ],
)
def test_a_wrong_value(defaults: dict[str, Any], key: str, value: Any, message: str) -> None:
    (found,) = check(changed(defaults, key, value))
    assert found.startswith(message)


@pytest.mark.parametrize("name", ["resnet20_lr0.1", "größe", "x" * 100, "latest2"])
def test_names_of_runs(name: str, defaults: dict[str, Any]) -> None:
    assert check(defaults | {"name": name}) == []


@pytest.mark.parametrize("name", ["", "../x", "a\\b", ".hidden", "a\nb", "a,b", "-x", "x" * 101, None, 5, "latest"])
def test_names_that_a_folder_or_a_shell_can_not_take(name: Any, defaults: dict[str, Any]) -> None:
    (message,) = check(defaults | {"name": name})
    assert message.startswith("name=")


# Components that the schema does not know: overrides have the types of the defaults that they replace.


@pytest.fixture(scope="module")
def own(defaults: dict[str, Any]) -> dict[str, Any]:
    net = {"_target_": "mine.Net", "width": 16, "rate": 0.1, "on": True, "kinds": ["a"], "how": "x"}
    return changed(defaults, "model.net", net)


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 1), ("rate", 0.5), ("width", None), ("on", False), ("kinds", ["b", 1]), ("how", "y")]
)
def test_values_of_the_default_type(own: dict[str, Any], key: str, value: Any) -> None:
    assert list(check_types([f"model.net.{key}"], changed(own, f"model.net.{key}", value), own)) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("width", "many", "model.net.width=many: expected a whole number, such as 16."),
        ("rate", False, "model.net.rate=false: expected a number, such as 0.1."),
        ("on", 1, "model.net.on=1: expected true or false, such as true."),
        ("kinds", "norm", "model.net.kinds=norm: expected a list, such as ['a']."),
        ("rate", {"x": 1}, "model.net.rate is a group of keys here: expected a number, such as 0.1."),
    ],
)
def test_values_of_another_type(own: dict[str, Any], key: str, value: Any, message: str) -> None:
    wrong = changed(own, f"model.net.{key}", value)
    assert list(check_types([f"model.net.{key}"], wrong, own)) == [(f"model.net.{key}", message)]


def test_each_leaf_of_an_overridden_group_is_checked_and_no_other_key(own: dict[str, Any]) -> None:
    wrong = changed(changed(own, "model.net.width", "wide"), "model.net.on", 1)
    assert [key for key, _ in check_types(["model.net"], wrong, own)] == ["model.net.width", "model.net.on"]
    assert list(check_types(["seed"], wrong, own)) == []


# Keys together


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
