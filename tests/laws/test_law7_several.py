"""Law 7 for several mistakes in one command: all are reported together, a line each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import runs

Cli = Callable[..., tuple[int, str]]
# The overrides, and the start of each line of the answer: a line for each mistake. Cross-key mistakes are reported only
# if each key is valid.
SEVERAL = {
    "three values": (
        ["optimizer.lr=-1", "data.batch_size=0", "trainer.max_epochs=x"],
        ["data.batch_size=0: ", "optimizer.lr=-1: ", "trainer.max_epochs=x: "],
    ),
    "keys that nothing reads": (
        ["+foo=1", "+trainer.bar=2", "+model.net.widht=3", "+launch.x=1", "name=latest"],
        ["name=latest", "model.net.widht: ", "trainer.bar: ", "launch.x: ", "foo: "],
    ),
    "keys together, once each of them fits": (
        [
            "ckpt_mode=trainer",
            "trainer.min_epochs=9",
            "trainer.accelerator=cpu",
            "data.batch_size=33",
            "trainer.devices=2",
        ],
        ["trainer.min_epochs=9 is above", "ckpt_mode=trainer", "data.batch_size=33"],
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
        ["trainer.max_epochs=x", "trainer.devices=0", "compression.qat.bits=1"],
    ),
    "keys that Hydra does not know": (
        ["optimizer.lrr=1", "sed=1", "model=rsnet20", "optmizer=adamw", "data.batch_size=0"],
        ["model=rsnet20: ", "optimizer.lrr: ", "sed: ", "optmizer: ", "data.batch_size=0: "],
    ),
    "interpolations that lead nowhere": (
        ["data.batch_size=${nope}", "seed=${neither}"],
        ["data.batch_size: it follows nope", "seed: it follows neither"],
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
    assert [line.split(":")[1].strip() for line in errors.splitlines()] == ["run", "output"]
    code, errors = cli("shard_size=0", "encoding=jpg", script="scripts/make_shards.py")
    assert [line.split("=")[0] for line in errors.splitlines()] == ["Error: shard_size", "Error: encoding"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"optimizer:\n  lr: [\n", "own.yaml, line 3: invalid YAML"),
        (b"\xff\xfe", "own.yaml: the file is not UTF-8 text"),
        (b"", "experiment: the chosen file sets no key of the run"),
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
