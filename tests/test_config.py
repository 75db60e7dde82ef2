"""Every mistake in a configuration is one sentence with the key, the value and the way out."""

from typing import Any

import pytest
from helpers import config
from omegaconf import OmegaConf

from lathe.config import check_types, check_values, did_you_mean, differences, flatten, resolve
from lathe.errors import UserError
from lathe.words import explain

GROUPS = {
    "model": [],
    "data": [],
    "optimizer": [],
    "scheduler": [],
    "trainer": [],
    "logger": ["csv", "wandb"],
    "seed": [],
    "resume": [],
}


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
    assert did_you_mean("xyz", ["sgd", "adamw"]) == "choose one of adamw, sgd"
    assert did_you_mean("xyz", []) == ""
    assert did_you_mean("@@", [f"name{i}" for i in range(41)]) == ""


def test_flatten_takes_lists_and_empty_groups_as_leaves() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None}) == {
        "a.b": 1, "a.c.d": [1, {"e": 2}], "f": {}, "g": None,
    }  # fmt: skip


def test_resolve_gives_plain_data_without_interpolations() -> None:
    cfg = resolve(OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": ["${a}"]}}))
    assert cfg == {"a": 1, "b": {"c": 1, "d": [1]}}
    assert type(cfg["b"]) is dict
    assert type(cfg["b"]["d"]) is list


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"a": {"b": "${nope}"}}, "a.b: Interpolation key 'nope' not found"),
        ({"a": {"b": "???"}}, "a.b: Missing mandatory value: b"),
    ],
)
def test_resolve_names_the_key_that_leads_nowhere(tree: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(OmegaConf.create(tree))
    assert str(caught.value) == sentence


# types


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1), ("optimizer.lr", 0.5), ("seed", 0), ("seed", None), ("optimizer.nesterov", False), ("resume", "auto"),
        ("trainer.devices", "auto"), ("trainer.devices", [0, 1]), ("trainer.limit_train_batches", 3), ("trainer.fast_dev_run", 2),
        ("trainer.deterministic", "warn"), ("trainer.max_steps", 100), ("optimizer.no_decay", ["norm"]), ("ckpt_path", "a.ckpt"),
        ("trainer.gradient_clip_val", 1),
    ],
)  # fmt: skip
def test_right_types_pass(defaults: dict[str, Any], key: str, value: Any) -> None:
    check_types([key], changed(defaults, key, value), defaults)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("data.batch_size", "many", "data.batch_size='many' is a word, but it takes a whole number, such as {default}."),
        ("data.batch_size", 12.5, "data.batch_size=12.5 is a number, but it takes a whole number, such as {default}."),
        ("data.batch_size", True, "data.batch_size=True is true or false, but it takes a whole number, such as {default}."),
        ("optimizer.lr", "fast", "optimizer.lr='fast' is a word, but it takes a number, such as 0.1."),
        ("optimizer.lr", False, "optimizer.lr=False is true or false, but it takes a number, such as 0.1."),
        ("optimizer.nesterov", 1, "optimizer.nesterov=1 is a whole number, but it takes true or false, such as True."),
        ("optimizer.no_decay", "norm", "optimizer.no_decay='norm' is a word, but it takes a list, such as ['norm', 'bias']."),
        ("trainer.accelerator", 3, "trainer.accelerator=3 is a whole number, but it takes a word, such as 'auto'."),
        ("trainer.devices", 1.5, "trainer.devices=1.5 is a number, but it takes a whole number, such as 1."),
        ("trainer.limit_val_batches", "all", "trainer.limit_val_batches='all' is a word, but it takes a number, such as 1.0."),
    ],
)  # fmt: skip
def test_wrong_types_are_named_with_an_example(defaults: dict[str, Any], key: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_types([key], changed(defaults, key, value), defaults)
    assert str(caught.value) == sentence.format(default=defaults["data"]["batch_size"])


def test_a_group_is_checked_leaf_by_leaf_and_not_in_place_of_a_value(defaults: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^model\.net\.width='wide' is a word, but it takes a whole number"):
        check_types(["model.net"], changed(defaults, "model.net.width", "wide"), defaults)
    with pytest.raises(UserError, match=r"^optimizer\.lr is a group of keys here, but it takes a number, such as 0\.1\.$"):
        check_types(["optimizer.lr"], changed(defaults, "optimizer.lr", {"x": 1}), defaults)


def test_only_what_was_typed_is_checked(defaults: dict[str, Any]) -> None:
    check_types(["seed"], changed(defaults, "optimizer.lr", "fast"), defaults)


# values


def test_the_defaults_are_fine(defaults: dict[str, Any]) -> None:
    check_values(defaults)


@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
def test_seeds(defaults: dict[str, Any], value: int) -> None:
    check_values(changed(defaults, "seed", value))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("seed", -1, "seed=-1: give a whole number from 0 to 4294967295."),
        ("seed", 2**32, "seed=4294967296: give a whole number"),
        ("seed", None, "seed=None: give a whole number"),
        ("ckpt_mode", "weigths", "ckpt_mode='weigths': choose weights or trainer."),
        ("data.batch_size", 0, "data.batch_size=0: give a whole number above 0."),
        ("data.batch_size", -8, "data.batch_size=-8: give"),
        ("trainer.num_nodes", 0, "trainer.num_nodes=0: give a whole number from 1."),
        ("trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches=0: give"),
        ("trainer.log_every_n_steps", 0, "trainer.log_every_n_steps=0: give"),
        ("trainer.devices", 0, "trainer.devices=0: give 1 or more"),
        ("trainer.devices", -2, "trainer.devices=-2: give 1 or more"),
        ("trainer.devices", "all", "trainer.devices='all': give a number, auto, or a list"),
        ("trainer.max_epochs", None, "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time."),
        ("trainer.accelerator", "gpus", "trainer.accelerator='gpus': did you mean gpu?"),
        ("trainer.use_distributed_sampler", True, "trainer.use_distributed_sampler=true would shuffle validation"),
    ],
)
def test_bad_values_are_refused(defaults: dict[str, Any], key: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_values(changed(defaults, key, value))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(("key", "value"), [("max_steps", 10), ("max_time", "00:00:01:00")])
def test_a_run_may_end_by_steps_or_time_alone(defaults: dict[str, Any], key: str, value: Any) -> None:
    check_values(changed(changed(defaults, "trainer.max_epochs", None), f"trainer.{key}", value))


# what Hydra raises


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model=rsnet20", "model=rsnet20: there is no such choice; did you mean resnet20?"),
        (
            "optimizer.rl=1",
            "optimizer.rl: there is no such key in optimizer; did you mean lr? (to add a new key, put a + before it)",
        ),
        ("modle=mlp", "modle: there is no such key; did you mean model? (to add a new key, put a + before it)"),
        ("model.net.widht=3", "model.net.widht: there is no such key in model.net; did you mean width?"),
        ("callbacks.chekpoint.monitor=x", "callbacks.chekpoint: there is no such key in callbacks; did you mean checkpoint?"),
        ("optimizer.lr=[1", "'optimizer.lr=[1' can't be read as an override: write key=value, and quote"),
        ("foo bar", "'foo bar' can't be read as an override"),
        ("+optimizer.lr=3", "Could not append to config. An item is already at 'optimizer.lr'."),
        ("~optimizer.rl", "Could not delete from config. 'optimizer.rl' does not exist."),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("data.batch_size=${nope}", "data.batch_size: Interpolation key 'nope' not found"),
        (
            "model=gpt_nano",
            "model.net.vocab_size follows data.vocab_size, which this data set does not declare: choose data for this",
        ),
        ("data=synthetic_tokens", "model.net.in_channels follows data.channels, which this data set does not declare"),
    ],
)
def test_hydras_errors_are_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several kinds
        config(override)
    told = explain(caught.value, GROUPS)
    assert told is not None
    assert told.startswith(sentence)
    assert "\n" not in told


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("optimiser@x=sgd")
    told = str(explain(caught.value, GROUPS))
    assert "'optimiser'" in told


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UserError, match=r"^run: Missing mandatory value: run$"):
        config(name="evaluate")


def test_a_sentence_without_options_ends_well() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("seed.x=1")
    assert explain(caught.value, GROUPS) == "seed.x: there is no such key in seed (to add a new key, put a + before it)"


def test_an_unknown_choice_in_a_list_is_compared_with_the_choices() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("logger=[csv,wandbb]")
    assert "did you mean wandb?" in str(explain(caught.value, GROUPS))


@pytest.mark.parametrize("override", ["model=null", "=3"])
def test_a_value_that_hydra_chokes_on_is_a_sentence(override: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config(override)
    assert explain(caught.value, GROUPS) is not None


def test_a_bug_is_not_explained() -> None:
    assert explain(ValueError("a bug")) is None
    assert explain(KeyError("a bug")) is None
    assert explain(UserError("a sentence")) == "a sentence"


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
