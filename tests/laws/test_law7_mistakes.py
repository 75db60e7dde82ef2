"""Law 7: a mistake costs one line. Each is typed into the real command line; the answer has key, value and fix."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import run
from support.runs import SMALL, new_run, runs

import lathe.training.train

HAS_GPU = torch.cuda.is_available()
Cli = Callable[..., tuple[int, str]]


def _one_sentence(result: tuple[int, str], *words: str) -> None:
    code, errors = result
    assert code == 1, errors
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1, errors
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]


# Overrides, and words of the answer. With data=cifar10, it comes before a search for the data, which are missing.
TYPED = {
    "unknown key": ("optimizer.lrr=0.1", ["optimizer.lrr", "did you mean lr?"]),
    "a key without its group": ("lr=0.1", ["lr", "did you mean optimizer.lr?"]),
    "a group left out": ("~model", ["model is missing", "leave ~model out"]),
    "unknown group": ("optmizer=adamw", ["optmizer", "did you mean optimizer?"]),
    "unknown choice": ("model=rsnet20", ["model=rsnet20", "did you mean resnet20?"]),
    "not an override": ("optimizer.lr=[", ["optimizer.lr=[", "key=value"]),
    "a word for a number": ("optimizer.lr=fast", ["optimizer.lr=fast", "a number above 0"]),
    "indivisible batch": (
        "data.batch_size=33 trainer.devices=2 trainer.accelerator=cpu",
        ["data.batch_size=33", "trainer.devices", "multiple of 2"],
    ),
    "more GPUs than there are": (
        "trainer.accelerator=gpu trainer.devices=999",
        ["trainer.", "999" if HAS_GPU else "gpu"],
    ),
    "no end": ("trainer.max_epochs=null", ["trainer.max_epochs=null", "trainer.max_steps"]),
    "a metric that no task logs": (
        "callbacks.checkpoint.monitor=val/acc",
        ["callbacks.checkpoint.monitor=val/acc", "did you mean val/accuracy?"],
    ),
    "unknown argument of a net": ("+model.net.widht=3", ["model.net.widht", "did you mean width?"]),
    "dp without a GPU": ("strategy=dp", ["strategy=dp", "strategy=ddp"]),
    "images for a language model": ("model=gpt_nano", ["model.net.vocab_size", "data=synthetic_tokens"]),
    "unknown precision": ("precision=fp16", ["precision=fp16", "16-"]),
    "a key of another choice of compile": ("compile.scope=step", ["compile.scope", "compile=none", "compile=default"]),
    "warm-up longer than the run": ("scheduler.warmup=5000", ["scheduler.warmup=5000", "optimizer steps"]),
    "wrong facts about the data": ("data.num_classes=7", ["data.num_classes=7", "10"]),
    "batch larger than the data": ("data.batch_size=5000", ["data.batch_size=5000", "1300"]),
    "no data and no download": (
        "data=cifar10 data.source.download=false",
        ["data.source.data_dir", "cifar-10-binary.tar.gz"],
    ),
    "no such run": ("resume=logs/nowhere", ["resume=logs/nowhere", "no such directory"]),
    "not a run": ("resume=.", ["resume=.", "not a run directory"]),
    "no such checkpoint": ("ckpt_path=missing.ckpt", ["ckpt_path=", "missing.ckpt", "no such file"]),
    "unknown method of compression": ("compression=pruning", ["compression=pruning", "prune"]),
    "methods out of order": ("compression=[qat,prune]", ["compression=[qat,prune]", "write compression=[prune,qat]"]),
    "a layer that is not there": (
        "compression=prune compression.prune.layers=[stage.*] data=cifar10 data.source.download=false",
        ["compression.prune.layers", "stage.*", "matches no layer"],
    ),
    "no teacher": (
        "compression=distill data=cifar10 data.source.download=false",
        ["compression.distill.teacher=None", "finished run"],
    ),
    "a teacher that is not there": (
        "compression=distill compression.distill.teacher=logs/nowhere data=cifar10 data.source.download=false",
        ["compression.distill.teacher=logs/nowhere", "no such directory"],
    ),
    "a strategy that does not take it": (
        "compression=qat strategy=pipeline trainer.devices=2 trainer.accelerator=cpu",
        ["compression=qat", "Pipeline", "choose another strategy"],
    ),
    "a choice of another group": ("trainer=ddp", ["trainer=ddp", "strategy=ddp"]),
    "the Trainer's precision": (
        "+trainer.precision=bf16-mixed",
        ["trainer.precision=bf16-mixed", "precision=bf16-mixed"],
    ),
    "the name of the newest run": ("name=latest", ["name=latest", "none of latest"]),
    "no place to write": ("paths.log_dir=/proc/nowhere", ["/proc/nowhere", "paths.log_dir"]),
    "an average after the end": (
        "callbacks=[default,ema] callbacks.ema.start_step=10000",
        ["callbacks.ema.start_step=10000 is above the run's"],
    ),
    "options of a callback that is not there": ("+callbacks.ema.decay=0.9", ["callbacks.ema", "does not have"]),
    "more workers than make sense": ("data.num_workers=100000", ["data.num_workers=100000 "]),
    "a device twice": ("trainer.devices=[0,0]", ["trainer.devices=[0, 0] names a device twice"]),
    "what Lightning refuses": ("trainer.val_check_interval=10000", ["trainer.val_check_interval (10000) must be"]),
}


@pytest.mark.parametrize("name", TYPED)
def test_typed(cli: Cli, tmp_path: Path, name: str) -> None:
    overrides, words = TYPED[name]
    _one_sentence(cli("trainer.max_epochs=1", "trainer.enable_model_summary=false", *overrides.split()), *words)
    assert runs(tmp_path / "logs") == [], "nothing half-written"
    assert not (tmp_path / "logs" / "latest").is_symlink()


ON_A_RUN = ("compress", "evaluate", "export", "predict", "profile", "receipt", "reproduce", "sensitivity", "serve")


@pytest.mark.parametrize("verb", ON_A_RUN)
def test_a_run_that_is_not_there_leaves_nothing(cli: Cli, tmp_path: Path, verb: str) -> None:
    words = ["input=x.npy", "output=y.csv"] if verb == "predict" else []
    words += {"compress": ["compression=prune"], "export": ["target=onnx"]}.get(verb, [])
    done = cli("run=logs/latest", *words, script=f"scripts/{verb}.py")
    _one_sentence(done, "run=logs/latest: there is no such directory; python train.py makes a run.")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    cfg = new_run(tmp_path_factory.mktemp("trained") / "logs", *SMALL)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def test_damaged_and_foreign_checkpoints(cli: Cli, trained: Path, tmp_path: Path) -> None:
    whole = (trained / "checkpoints" / "best.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    _one_sentence(cli(*SMALL, "ckpt_path=cut.ckpt"), "ckpt_path=", "cut.ckpt", "cut off")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    _one_sentence(cli(*SMALL, "ckpt_path=text.ckpt"), "ckpt_path=", "text.ckpt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "foreign.ckpt")
    _one_sentence(cli(*SMALL, "ckpt_path=foreign.ckpt"), "ckpt_path=", "foreign.ckpt", "does not fit", "stem.")
    torch.save({"state_dict": {}, "global_step": 1, "code": Path("x")}, tmp_path / "code.ckpt")
    _one_sentence(cli(*SMALL, "ckpt_path=code.ckpt"), "ckpt_path=", "code.ckpt", "could run code")
    _one_sentence(cli(*SMALL, "model.net.width=8", f"ckpt_path={trained}"), "does not fit", "stem.linear.weight")
    assert runs(tmp_path / "logs") == []


def test_a_damaged_archive(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(b"half of an archive")
    _one_sentence(cli(*SMALL, "data=cifar10", "data.source.download=false"), "cifar-10-binary.tar.gz")
    assert runs(tmp_path / "logs") == []
    assert [path.name for path in (tmp_path / "data").iterdir() if not path.name.startswith(".")] == [
        "cifar-10-binary.tar.gz"
    ]


def test_resuming_with_other_values_is_refused_with_a_diff(cli: Cli, trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    _one_sentence(
        cli(f"resume={trained}", "optimizer.lr=0.2", "model=resnet20"), "optimizer.lr: 0.1 -> 0.2", "ckpt_path"
    )
    _one_sentence(cli(f"resume={trained}", "trainer.max_epochs=1"), "trainer.max_epochs: 2 -> 1")
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_a_run_that_someone_writes_to_is_not_continued(cli: Cli, trained: Path) -> None:
    from lathe.runs.rundir import RunDir

    with RunDir(trained).locked():
        _one_sentence(cli(f"resume={trained}", "trainer.max_epochs=3"), "another process")


def test_evaluate_and_predict(cli: Cli, trained: Path, tmp_path: Path) -> None:
    evaluate, predict = "scripts/evaluate.py", "scripts/predict.py"
    _one_sentence(cli(script=evaluate), "run")
    _one_sentence(cli("run=nowhere", script=evaluate), "run=nowhere", "no such directory")
    _one_sentence(cli(f"run={trained}", "split=tset", script=evaluate), "split=tset", "test")
    _one_sentence(cli(f"run={trained}", "checkpoint=worst", script=evaluate), "worst", "best, last or")
    _one_sentence(cli(f"run={trained}", "input=no.npy", "output=o.csv", script=predict), "input=no.npy")
    np.save(tmp_path / "wide.npy", np.zeros((2, 9, 9), np.uint8))
    _one_sentence(
        cli(f"run={trained}", "input=wide.npy", "output=o.csv", script=predict), "9 x 9", "8 x 8", "resize=true"
    )
    assert not (tmp_path / "o.csv").exists()


def test_the_traceback_comes_back_when_asked_for(tmp_path: Path) -> None:
    done = run("optimizer.lrr=0.1", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
