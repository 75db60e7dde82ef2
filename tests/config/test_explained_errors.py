"""What Hydra raises becomes one sentence; a bug does not."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from support.runs import config

from lathe.config.mistakes import explain
from lathe.config.schema.trainer import with_keys
from lathe.errors import UserError

GROUPS = {
    "model": [],
    "data": [],
    "optimizer": [],
    "scheduler": [],
    "trainer": [],
    "logger": ["csv", "wandb"],
    "callbacks": ["default", "early_stopping"],
    "experiment": ["digits_quickstart"],
    "seed": [],
    "resume": [],
}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "strategy=ddp_find_unused_parameters_true",
            "strategy=ddp_find_unused_parameters_true: there is no such choice; write strategy=ddp "
            "strategy.find_unused_parameters=true.",
        ),
        (
            "strategy=deepspeed_stage_3_offload",
            "strategy=deepspeed_stage_3_offload: there is no such choice; write strategy=deepspeed_3_offload.",
        ),
        ("strategy=ddp_spawn", "strategy=ddp_spawn: there is no such choice; write strategy=ddp."),
        ("model=rsnet20", "model=rsnet20: there is no such choice; did you mean resnet20?"),
        (
            "optimizer.rl=1",
            "optimizer.rl: there is no such key in optimizer; did you mean lr? (to add a new key, put a + before it)",
        ),
        (
            "optimizer.learning_rate=1",
            "optimizer.learning_rate: there is no such key in optimizer; did you mean optimizer.lr?",
        ),
        ("learning_rate=1", "learning_rate: there is no such key; did you mean optimizer.lr?"),
        ("logger=tb", "logger=tb: there is no such choice; did you mean tensorboard?"),
        ("modle=mlp", "modle: there is no such key; did you mean model? (to add a new key, put a + before it)"),
        ("model.width=8", "model.width: there is no such key in model; did you mean model.net.width?"),
        ("model.net.widht=3", "model.net.widht: there is no such key in model.net; did you mean width?"),
        (
            "callbacks.chekpoint.monitor=x",
            "callbacks.chekpoint: there is no such key in callbacks; did you mean checkpoint?",
        ),
        (
            "callbacks.early_stopping.patience=3",
            "callbacks.early_stopping: the run has no early_stopping among its callbacks: add it by "
            "callbacks=[default,early_stopping].",
        ),
        (
            "logger.wandb.project=x",
            "logger.wandb: the run has no wandb among its logger: add it by logger=[csv,wandb].",
        ),
        ("model.optimizer.lr=1", "model.optimizer: there is no such key in model; did you mean optimizer?"),
        ("model=resnet", "model=resnet: there is no such choice; did you mean resnet20?"),
        ("optimizer=adam", "optimizer=adam: there is no such choice; did you mean adamw?"),
        ("debug=default", "debug=default: there is no such choice; choose one of "),
        ("model=not/there", "model=not/there: there is no such choice"),
        ("experiment=sub/example", "experiment=sub/example: there is no such choice"),
        ("optimizer.lr=[1", "'optimizer.lr=[1' can't be read as an override: write key=value, and quote"),
        ("model=mlp,", "model=mlp,: a comma stands at its end: leave it out, or write what is to follow."),
        ("foo bar", "'foo bar' can't be read as an override"),
        ("+optimizer.lr=3", "+optimizer.lr: the key is there already: write it without the plus."),
        ("~optimizer.rl", "~optimizer.rl: there is no such key to leave out, or its value is null"),
        ("~optimizer.foreach=[inf]", "~optimizer.foreach: there is no such key to leave out, or its value is null"),
        ("~resume", "~resume: its value is null, so there is nothing to leave out: leave that word out."),
        ("~seed=7", "~seed: its value is 42: write ~seed, which leaves it out whatever it is."),
        ("data.mean.x=0.5", "x: a list has no such key; its items have numbers from 0, as in data.mean.0=0.5."),
        ("seed=1,2", "seed=1,2 has several values: add -m for a sweep, or write seed=[1,2] for a list."),
        (
            "logger=csv,wandb",
            "logger=csv,wandb has several values: add -m for a sweep, or write logger=[csv,wandb] for",
        ),
        ("experiment=null", "experiment=null: write ~experiment to leave it out, or nothing where it holds none"),
        ("data.batch_size=${nope}", "data.batch_size: it follows nope, which is not there; give either."),
        ("seed=${oc.env:NOPE_}", "seed: the environment variable NOPE_ is not set: set it, or write ${oc.env:NOPE_,<a"),
        ("seed=${nope:1}", "seed: ${nope:...}: there is no such resolver; give a value, or ${a.key}."),
        ("optimizer.lr=${optimizer.lr}", "optimizer.lr: it follows itself: give a value."),
        ("seed=${oc.env:}", "seed: its ${...} can't be resolved (env() missing 1 required positional argument: 'key'"),
        ("seed=${oc.create:[1}", "seed: its ${...} can't be read: write ${a.key}, or a value."),
        ("model=???", "model=???: expected a choice; choose one of "),
        ("model=1_000", "model=1_000: there is no such choice"),
        ("model=true", "model=true: there is no such choice"),
        ("~model=1", "~model=1: expected ~model, which leaves it out whatever its choice is."),
        ("model=${nope}", "${nope}: a choice can follow another group alone, as ${model} does, and that is none: name"),
        ("compression=[${nope}]", "a list of choices: such a list holds names of choices alone"),
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


def test_a_word_in_a_file_is_no_key_of_a_list() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("hello")
    assert explain(caught.value, GROUPS) is None


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("optimiser@x=sgd")
    told = str(explain(caught.value, GROUPS))
    assert "'optimiser'" in told


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UserError, match=r"^run: a value has to be given, run=\.\.\.; --help run says what it takes\.$"):
        config(name="evaluate")


def test_a_sentence_without_options_ends_well() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("seed.x=1")
    assert explain(caught.value, GROUPS) == "seed.x: there is no such key in seed (to add a new key, put a + before it)"


def test_a_key_of_hydras_own_is_not_proposed() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config("run=x", "job_name=3", "verbose=true", name="receipt")
    told = str(explain(caught.value, GROUPS))
    assert told.startswith("job_name: there is no such key")
    assert "hydra" not in told


@pytest.mark.parametrize("word", ["model@x=mlp", "optimizer@model.net=sgd"])
def test_a_group_at_another_place_is_told_by_what_was_typed(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own
        config(word)
    from_a_file = explain(caught.value, GROUPS)
    monkeypatch.setattr("sys.argv", ["train.py", word])
    group = word.partition("@")[0]
    told = f"{group}@...: a group's keys stand in one place: write {group}=<choice>, without the @."
    assert explain(caught.value, GROUPS) == told != from_a_file


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


@pytest.mark.parametrize(
    ("override", "end"),
    [
        ("data.folder=../Bilder größe/raw", ": \"data.folder='../Bilder größe/raw'\"."),
        ("+name=größe $1", ": '+name='\"'\"'größe $1'\"'\"''."),
        ("größe=1", " in it."),
        ("optimizer.lr=[1", " in it."),
        ("name='größe", " in it."),
    ],
)
def test_a_value_that_lacks_quotes_is_told_with_them(override: str, end: str) -> None:
    with pytest.raises(OverrideParseException) as caught:
        config(override)
    told = explain(caught.value, GROUPS)
    assert told is not None
    assert told.endswith(f"digits and . _ - / : in it{end.removeprefix(' in it')}")
    if end.startswith(": "):
        (word,) = shlex.split(end[2:-1])
        assert OverridesParser.create().parse_override(word).value() == override.partition("=")[2]


def test_arguments_of_lightnings_trainer_are_keys_here() -> None:
    said = (
        "`val_check_interval` (9)\nis much: set `limit_val_batches` to 0, `check_val_every_n_epoch=None` or `x=None`."
    )
    assert with_keys(said) == (
        "trainer.val_check_interval (9) is much: set trainer.limit_val_batches to 0, "
        "trainer.check_val_every_n_epoch=null or `x=None`."
    )


def test_a_run_that_goes_on_keeps_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "resume=logs/latest", "callbacks.early_stopping.patience=3"])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of Hydra's
        config("callbacks.early_stopping.patience=3")
    assert explain(caught.value, GROUPS) == (
        "callbacks.early_stopping: a run that goes on keeps its own callbacks: leave early_stopping out, or start a "
        "new run from its weights with ckpt_path."
    )
