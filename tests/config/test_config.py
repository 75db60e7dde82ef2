"""Every mistake in a configuration is one sentence with the key, the value and the way out."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from support.runs import config

from lathe.config.composed import check, differences, flatten, mistyped, resolve
from lathe.errors import UserError, did_you_mean, refuse


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return config()


def changed(defaults: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`defaults` with another value at the dotted `key`."""
    node = OmegaConf.create(defaults)
    OmegaConf.update(node, key, value, force_add=True)
    return resolve(node)


def test_did_you_mean() -> None:
    assert did_you_mean("adamv", ["sgd", "adamw", "muon"]) == "did you mean adamw?"
    assert did_you_mean("adam", ["radam", "adamw", "sgd"]) == "did you mean adamw?"
    assert did_you_mean("mnist", ["mist", "fashion_mnist"]) == "did you mean fashion_mnist?"
    assert did_you_mean("xyz", ["sgd", "adamw"]) == "choose one of adamw, sgd"
    assert did_you_mean("xyz", []) == ""
    assert did_you_mean("val_loss", ["train_loss", "val_loss/dataloader_idx_0"]) == (
        "did you mean val_loss/dataloader_idx_0?"
    )
    assert did_you_mean("@@", [f"name{i}" for i in range(41)]) == ""


def test_flatten_takes_lists_and_empty_groups_as_leaves() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None}) == {
        "a.b": 1,
        "a.c.d": [1, {"e": 2}],
        "f": {},
        "g": None,
    }


def test_resolve_gives_plain_data_without_interpolations() -> None:
    cfg = resolve(OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": ["${a}"]}}))
    assert cfg == {"a": 1, "b": {"c": 1, "d": [1]}}
    assert type(cfg["b"]) is dict
    assert type(cfg["b"]["d"]) is list


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"a": {"b": "${nope}"}}, "a.b: it follows nope, which is not there; give either."),
        ({"a": {"b": "???"}}, "a.b: a value has to be given, a.b=...; --help a.b says what it takes."),
    ],
)
def test_resolve_names_the_key_that_leads_nowhere(tree: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(OmegaConf.create(tree))
    assert str(caught.value) == sentence


# types


@pytest.fixture(scope="module")
def own(defaults: dict[str, Any]) -> dict[str, Any]:
    """`defaults` with a net that no table knows."""
    return changed(
        defaults,
        "model.net",
        {"_target_": "mine.Net", "width": 16, "rate": 0.1, "on": True, "kinds": ["a"], "how": "x"},
    )


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 1), ("rate", 0.5), ("width", None), ("on", False), ("kinds", ["b", 1]), ("how", "y")]
)
def test_right_types_pass(own: dict[str, Any], key: str, value: Any) -> None:
    assert list(mistyped([f"model.net.{key}"], changed(own, f"model.net.{key}", value), own)) == []


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("width", "many", "model.net.width='many' is a word, but it takes a whole number, such as 16."),
        ("width", 12.5, "model.net.width=12.5 is a number, but it takes a whole number, such as 16."),
        ("width", True, "model.net.width=True is true or false, but it takes a whole number, such as 16."),
        ("rate", "fast", "model.net.rate='fast' is a word, but it takes a number, such as 0.1."),
        ("rate", False, "model.net.rate=False is true or false, but it takes a number, such as 0.1."),
        ("on", 1, "model.net.on=1 is a whole number, but it takes true or false, such as True."),
        ("kinds", "norm", "model.net.kinds='norm' is a word, but it takes a list, such as ['a']."),
        ("how", 3, "model.net.how=3 is a whole number, but it takes a word, such as 'x'."),
        ("rate", {"x": 1}, "model.net.rate is a group of keys here, but it takes a number, such as 0.1."),
    ],
)
def test_wrong_types_of_an_unknown_part_are_named_with_an_example(
    own: dict[str, Any], key: str, value: Any, sentence: str
) -> None:
    assert list(mistyped([f"model.net.{key}"], changed(own, f"model.net.{key}", value), own)) == [
        (f"model.net.{key}", sentence)
    ]


def test_a_group_is_checked_leaf_by_leaf(own: dict[str, Any]) -> None:
    wrong = changed(changed(own, "model.net.width", "wide"), "model.net.on", 1)
    assert [key for key, _ in mistyped(["model.net"], wrong, own)] == ["model.net.width", "model.net.on"]


def test_only_what_was_typed_is_checked(own: dict[str, Any]) -> None:
    assert list(mistyped(["seed"], changed(own, "model.net.width", "fast"), own)) == []


# values


def test_the_defaults_are_fine(defaults: dict[str, Any]) -> None:
    assert check(defaults) == []


@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
def test_seeds(defaults: dict[str, Any], value: int) -> None:
    assert check(changed(defaults, "seed", value)) == []


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("seed", -1, "seed=-1: expected a whole number from 0 to 4294967295, got one out of this range."),
        ("seed", 2**32, "seed=4294967296: expected a whole number"),
        ("seed", None, "seed=null: expected a whole number from 0 to 4294967295, got null."),
        ("ckpt_mode", "weigths", "ckpt_mode=weigths: expected weights or trainer, got a word; did you mean weights?"),
        ("data.batch_size", 0, "data.batch_size=0: expected a whole number from 1"),
        ("data.batch_size", 12.5, "data.batch_size=12.5: expected a whole number from 1, got a number."),
        ("trainer.num_nodes", 0, "trainer.num_nodes=0: expected a whole number from 1"),
        ("trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches=0: expected"),
        ("trainer.devices", -2, "trainer.devices=-2: expected a whole number from 1"),
        (
            "trainer.devices",
            "all",
            "trainer.devices=all: expected a whole number from 1, -1, auto or a list",
        ),
        (
            "trainer.max_epochs",
            None,
            "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time.",
        ),
        (
            "trainer.accelerator",
            "gpus",
            "trainer.accelerator=gpus: expected auto, cpu, gpu, cuda, mps, tpu or hpu, got a word; did you",
        ),
        (
            "trainer.use_distributed_sampler",
            True,
            "trainer.use_distributed_sampler=true: expected false, as Lathe's loaders shard",
        ),
        ("launch.max_restarts", -1, "launch.max_restarts=-1: expected a whole number from 0"),
        ("launch.timeout", 0, "launch.timeout=0: expected a number above 0, got one out of this range."),
        (
            "model",
            None,
            "model=null: a run needs this group; choose one of the files in configs/model, in a "
            "YAML file by - override /model: <name> in its defaults.",
        ),
        ("trainer.min_epochs", 31, "trainer.min_epochs=31 is above trainer.max_epochs=30, which ends the run first"),
        ("ckpt_mode", "trainer", "ckpt_mode=trainer says what is taken from ckpt_path, which is null"),
        ("trainer.devices", [0, 0], "trainer.devices=[0, 0] names a device twice"),
        ("optimizer.momentum", 0, "optimizer.nesterov=true needs a momentum above 0"),
        ("trainer.gradient_clip_algorithm", "value", "trainer.gradient_clip_algorithm=value clips nothing with"),
        ("trainer.check_val_every_n_epoch", None, "trainer.check_val_every_n_epoch=null counts batches across epochs"),
        (
            "precision.init_scale",
            2.0,
            "precision.init_scale is of the gradient scaler that precision=16-mixed alone has",
        ),
    ],
)
def test_bad_values_are_refused(defaults: dict[str, Any], key: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse(check(changed(defaults, key, value)))
    assert str(caught.value).startswith(sentence)


def test_combinations_of_three_keys_are_refused() -> None:
    fused = config("optimizer.fused=true", "precision=16-mixed", "trainer.gradient_clip_val=1.0")
    with pytest.raises(UserError, match="unscales the gradients of precision=16-mixed in its own step"):
        refuse(check(fused))
    with pytest.raises(UserError, match=r"^optimizer\.foreach=true and optimizer\.fused=true exclude each other"):
        refuse(check(config("optimizer.fused=true", "optimizer.foreach=true")))
    with pytest.raises(
        UserError, match=r"^callbacks\.whitening: CifarResNet has no layer to whiten: use model=airbench"
    ):
        refuse(check(config("callbacks=[default,whitening]", "model=resnet20")))
    with pytest.raises(
        UserError, match=r"^callbacks\.ema can't average a net that strategy Pipeline cuts between processes"
    ):
        refuse(check(config("callbacks=[default,ema]", "strategy=pipeline")))


@pytest.mark.parametrize(
    ("rest", "typed", "other"),
    [
        ("adamw", "sgd_momentum=0.8", "sgd"),
        ("adamw", "sgd_lr_ratio=2", "sgd"),
        ("sgd", "adamw_lr_ratio=0.1", "adamw"),
        ("sgd", "adamw_betas=[0.8, 0.9]", "adamw"),
        ("sgd", "adamw_eps=1e-6", "adamw"),
    ],
)
def test_keys_of_the_other_rest_of_muon(rest: str, typed: str, other: str) -> None:
    found = check(config("optimizer=muon", f"optimizer.rest={rest}", f"optimizer.{typed}"))
    key = typed.partition("=")[0]
    assert len(found) == 1
    assert str(found[0]).startswith(f"optimizer.{key}=")
    assert str(found[0]).endswith(
        f" is for optimizer.rest={other}, and it is {rest}: leave it out, or set optimizer.rest={other}."
    )
    assert check(config("optimizer=muon", f"optimizer.rest={other}", f"optimizer.{typed}")) == []


def test_limits_that_overfitting_takes_the_place_of() -> None:
    few = "trainer.overfit_batches=3"
    for limit in ("trainer.limit_train_batches=5", "trainer.limit_val_batches=0", "trainer.limit_train_batches=1"):
        (found,) = check(config(few, limit))
        assert str(found).startswith(f"{limit} has no effect beside {few}, which says how many batches train")
    assert check(config(few, "trainer.limit_train_batches=3", "trainer.limit_test_batches=1")) == []
    assert check(config("debug=overfit")) == []


def test_what_a_command_on_a_run_does_not_build_is_not_checked(defaults: dict[str, Any]) -> None:
    fast = changed(defaults, "optimizer.foreach", True)
    refuse(check(changed(fast, "optimizer.fused", True), saved="parts"))  # evaluated: no optimizer is built
    with pytest.raises(UserError, match=r"^precision\.name=16-true: strategy Pipeline takes"):
        refuse(check(config("strategy=pipeline", "precision=16-true"), saved="parts"))


@pytest.mark.parametrize(("key", "value"), [("max_steps", 10), ("max_time", "00:00:01:00")])
def test_a_run_may_end_by_steps_or_time_alone(defaults: dict[str, Any], key: str, value: Any) -> None:
    assert check(changed(changed(defaults, "trainer.max_epochs", None), f"trainer.{key}", value)) == []


# differences


def test_differences_name_each_leaf() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    new = {"a": 1, "b": {"c": 4, "x": 5}, "e": [1, 2]}
    assert differences(old, new) == ["b.c: 2 -> 4", "b.d: 3 -> absent", "b.x: absent -> 5", "e: [1] -> [1, 2]"]
    assert differences(old, old) == []


def test_differences_ignore_keys_and_what_is_below_them() -> None:
    assert differences({"a": {"b": 1}, "ab": 1}, {"a": {"b": 2}, "ab": 2}, ignore=["a"]) == ["ab: 1 -> 2"]


def test_null_is_as_good_as_absent() -> None:
    assert differences({"b": 1}, {"a": None, "b": 1}) == []  # a run of an older version is the same experiment
