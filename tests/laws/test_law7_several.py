"""Law 7 of several mistakes in one command: all are reported together, a line each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import runs

Cli = Callable[..., tuple[int, str]]
# The overrides, and the begin of each line of the answer: a line for each mistake, those of keys together only where
# each of them fits.
SEVERAL = {
    "three values": (
        ["optimizer.lr=-1", "data.batch_size=0", "trainer.max_epochs=x"],
        ["data.batch_size=0: ", "optimizer.lr=-1: ", "trainer.max_epochs=x: "],
    ),
    "a value that others follow is one mistake": (
        ["seed=-1", "optimizer.reference_batch_size=0"],
        ["seed=-1: ", "optimizer.reference_batch_size=0: "],
    ),
    "keys that nothing reads": (
        ["+foo=1", "+trainer.bar=2", "+model.net.widht=3", "+launch.x=1", "name=latest"],
        ["name=latest", "model.net.widht: ", "trainer.bar: ", "launch.x: ", "foo: "],
    ),
    "a part that no table knows": (
        ["model.net._target_=mine.Net", "model.net.width=wide", "optimizer.lr=-1"],
        ["optimizer.lr=-1: ", "model.net.width='wide' is a word"],
    ),
    "keys together, once each of them fits": (
        [
            "optimizer.momentum=0",
            "trainer.min_epochs=9",
            "trainer.accelerator=cpu",
            "data.batch_size=33",
            "trainer.devices=2",
        ],
        ["trainer.min_epochs=9 is above", "optimizer.nesterov=true", "data.batch_size=33"],
    ),
    "a refused key is not checked with others": (
        [
            "trainer.min_epochs=9",
            "trainer.max_epochs=x",
            "compression=[qat,prune]",
            "compression.qat.bits=1",
            "trainer.accelerator=cpu",
            "trainer.devices=0",
        ],
        [
            "trainer.max_epochs=x",
            "trainer.devices=0",
            "compression.qat.bits=1",
        ],
    ),
    "a key that was typed twice is one mistake": (
        ["data=dataset", "data.train={_target_: mine.Data}", "data.train={a: 1}", "data.num_classes=0", "seed=-1"],
        ["data.train.a: ", "data.num_classes=0: ", "seed=-1"],
    ),
    "a key that others follow, within the data and in the net, is left out": (
        ["model=gpt_nano", "data=synthetic_tokens", "~data.vocab_size"],
        ["data.source.vocab_size: it follows data.vocab_size"],
    ),
    "keys that Hydra does not know": (
        ["optimizer.lrr=1", "sed=1", "model=rsnet20", "optmizer=adamw", "data.batch_size=0"],
        ["model=rsnet20: ", "optimizer.lrr: ", "sed: ", "optmizer: ", "data.batch_size=0: "],
    ),
    "a key, a choice and values": (
        [
            *("gpus=2", "model=nonet", "model.net.width=3", "callbacks.emma.decay=1", "nonsens=1", "optimizer.lr=ten"),
            *("seed=-1", "name=a/b", "data.batch_size=0"),
        ],
        [
            *("gpus=2: ", "model=nonet: ", "nonsens: ", "callbacks.emma: ", "name=a/b: ", "seed=-1: "),
            *("data.batch_size=0: ", "optimizer.lr=ten: "),
        ],
    ),
    "a word reported once": (
        [" optimizer.lr=1", "optimizer.lr = 1", "=", "seed=-1"],
        ["'='", " opt", "optim", "seed=-1"],
    ),
    "two that can't be read": (["optimizer.lr=[", "data.batch_size={"], ["optimizer.lr=[:", "data.batch_size={:"]),
    "a key that another word leaves out": (
        ["model.net.width=16", "~model.net", "trainer.max_epochs=2", "~trainer.max_epochs"],
        [
            "model.net.width: it was typed, and another word leaves it out",
            "trainer.max_epochs: it was typed, and another",
        ],
    ),
    "keys of other templates": (["gpus=2", "epochs=3"], ["gpus=2: ", "epochs=3: "]),
    "interpolations that lead nowhere": (
        ["data.batch_size=${nope}", "seed=${neither}"],
        ["data.batch_size: it follows nope", "seed: it follows neither"],
    ),
    "keys below a refused key are left out": (
        ["model.net.width=16", "model.net=/dev/null"],
        ["model.net=/dev/null: "],
    ),
    "keys that follow a missing value are left out": (
        ["model=gpt_nano", "data=documents", "data.length=???"],
        ["data.length: "],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_all_mistakes_are_told_at_once(cli: Cli, tmp_path: Path, name: str) -> None:
    typed, begins = SEVERAL[name]
    code, errors = cli("trainer.max_epochs=1", *typed)
    lines = [line.removeprefix("Error: ") for line in errors.splitlines()]
    assert (code, len(lines)) == (1, len(begins)), errors
    for begin in begins:
        assert [line for line in lines if line.startswith(begin)], (begin, errors)
    assert errors.count("Error: ") == len(begins)
    assert runs(tmp_path / "logs") == []
    assert not (tmp_path / "logs" / "latest").is_symlink()


def test_all_mistakes_of_another_verb_are_told_at_once(cli: Cli, tmp_path: Path) -> None:
    code, errors = cli("run=nowhere", "split=tset", "trainer.devices=0", "+foo=1", script="scripts/evaluate.py")
    assert code == 1
    assert [line.split("=")[0].split(":")[1].strip() for line in errors.splitlines()] == [
        "split",
        "trainer.devices",
        "foo",
    ]
    code, errors = cli(script="scripts/predict.py")
    assert [line.split(":")[1].strip() for line in errors.splitlines()] == ["run", "input", "output"]
    code, errors = cli("shard_size=0", "encoding=jpg", script="scripts/make_shards.py")
    assert [line.split("=")[0] for line in errors.splitlines()] == ["Error: shard_size", "Error: encoding"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"optimizer:\n  lr: [\n", "own.yaml, line 3: invalid YAML"),
        (b"optimizer:\n\tlr: 1\n", "own.yaml, line 2: invalid YAML"),
        (b"a: 1\nb: \x07\n", "own.yaml: invalid YAML"),
        (b"\xff\xfe", "own.yaml: the file is not UTF-8 text"),
        (b"", "experiment: the chosen file sets no key of the run"),
        (b"- a\n", "experiment: the chosen file sets no key of the run"),
    ],
)
def test_a_broken_file_of_ones_own_is_one_sentence(cli: Cli, tmp_path: Path, text: bytes, words: str) -> None:
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_bytes(text)
    code, errors = cli(f"--config-dir={tmp_path / 'own'}", "experiment=own", "model=mlp")
    assert (code, errors.count("Error: "), len(errors.splitlines())) == (1, 1, 1), errors
    assert words in errors
    assert runs(tmp_path / "logs") == []


def test_a_sweep_that_hydra_does_not_know_is_one_sentence(cli: Cli) -> None:
    code, errors = cli("-m", "model=mlp", "optimizer.lr=interval(0,1)")
    assert (code, len(errors.splitlines())) == (1, 1), errors
    assert "such as 0.1,0.01" in errors
