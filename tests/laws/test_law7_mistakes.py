"""Law 7: a mistake costs one line. Each is typed into the real command line; what comes back names the key, the value
and the way out.
"""

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
# The sentence has to come before anybody looks for the data, which is not there.
NO_DATA = ("data=cifar10", "data.source.download=false")


def _one_sentence(result: tuple[int, str], *words: str) -> None:
    code, errors = result
    assert code == 1, errors
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1, errors
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]


TYPED = {
    "unknown key": (["optimizer.lrr=0.1"], ["optimizer.lrr", "did you mean lr?"]),
    "unknown key at the root": (["sed=1"], ["sed", "did you mean seed?"]),
    "a key without its group": (["lr=0.1"], ["lr", "did you mean optimizer.lr?"]),
    "a group left out": (["~model"], ["model is missing", "leave ~model out"]),
    "an unknown choice among several": (["logger=[csv,wandbb]"], ["logger=wandbb", "did you mean wandb?"]),
    "unknown group": (["optmizer=adamw"], ["optmizer", "did you mean optimizer?"]),
    "unknown choice": (["model=rsnet20"], ["model=rsnet20", "did you mean resnet20?"]),
    "not an override": (["optimizer.lr=["], ["optimizer.lr=[", "key=value"]),
    "a word for a number": (["optimizer.lr=fast"], ["optimizer.lr=fast", "a number above 0"]),
    "a fraction for a count": (["data.batch_size=12.5"], ["data.batch_size=12.5", "a whole number"]),
    "a number for a switch": (["trainer.enable_progress_bar=3"], ["trainer.enable_progress_bar=3", "true or false"]),
    "a list for a number": (["model.net.width=[1,2]"], ["model.net.width=[1, 2]", "a whole number"]),
    "a negative seed": (["seed=-1"], ["seed=-1", "from 0"]),
    "no batch": (["data.batch_size=0"], ["data.batch_size=0", "from 1"]),
    "indivisible batch": (
        ["data.batch_size=33", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["data.batch_size=33", "trainer.devices", "multiple of 2"],
    ),
    "more GPUs than there are": (
        ["trainer.accelerator=gpu", "trainer.devices=999"],
        ["trainer.", "999" if HAS_GPU else "gpu"],
    ),
    "more processes than makes sense": (
        ["trainer.accelerator=cpu", "trainer.devices=999"],
        ["trainer.devices=999", "at most"],
    ),
    "unknown accelerator": (["trainer.accelerator=gpus"], ["trainer.accelerator=gpus", "did you mean gpu?"]),
    "several nodes by hand": (["trainer.num_nodes=2"], ["trainer.num_nodes=2", "torchrun or srun"]),
    "no end": (["trainer.max_epochs=null"], ["trainer.max_epochs=null", "trainer.max_steps"]),
    "a metric that no task logs": (
        ["callbacks.checkpoint.monitor=val/acc"],
        ["callbacks.checkpoint.monitor=val/acc", "did you mean val/accuracy?"],
    ),
    "unknown argument of a net": (["+model.net.widht=3"], ["model.net.widht", "did you mean width?"]),
    "impossible depth": (["model.net.depth=21"], ["model.net.depth=21"]),
    "dp without a GPU": (["strategy=dp"], ["strategy=dp", "strategy=ddp"]),
    "images for a language model": (["model=gpt_nano"], ["model.net.vocab_size", "data=synthetic_tokens"]),
    "sizes that do not multiply to the world": (
        ["strategy=3d", "strategy.tensor=3", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["strategy.tensor=3", "trainer.devices x trainer.num_nodes = 2"],
    ),
    "more stages than blocks": (
        [
            "strategy=pipeline",
            "model=mlp",
            "model.net.depth=2",
            *NO_DATA,
            "trainer.devices=2",
            "trainer.accelerator=cpu",
        ],
        ["strategy.stages", "blocks"],
    ),
    "heads that do not divide": (
        ["strategy=tensor", "model=vit_tiny", *NO_DATA, "trainer.devices=2", "trainer.accelerator=cpu"],
        ["model.net.heads=3", "strategy.tensor=2"],
    ),
    "a net without a tensor plan": (
        ["strategy=tensor", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["strategy", "tensor_plan"],
    ),
    "a precision that a strategy refuses": (
        ["strategy=pipeline", "precision=16-true", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["precision.name=16-true", "Pipeline takes"],
    ),
    "unknown activation checkpointing": (
        ["trainer.activation_checkpointing=block"],
        ["trainer.activation_checkpointing=block", "did you mean blocks?"],
    ),
    "unknown hook": (["strategy=ddp", "strategy.comm_hook=fp8"], ["strategy.comm_hook=fp8", "fp16"]),
    "unknown precision": (["precision=fp16"], ["precision=fp16", "16-"]),
    "a key of another choice of compile": (
        ["compile.scope=step"],
        ["compile.scope", "compile=none", "compile=default"],
    ),
    "compile options without a compiler": (
        ["+compile.scope=step"],
        ["compile.scope=step", "no effect", "compile=default"],
    ),
    "an experiment's compile options": (
        ["experiment=cifar10_speedrun", "trainer=cpu", "compile=none"],
        ["compile.scope=step", "no effect", "~compile.scope"],
    ),
    "unknown compile mode": (["compile=default", "compile.mode=fast"], ["compile.mode=fast", "default"]),
    "warm-up longer than the run": (["scheduler.warmup=5000"], ["scheduler.warmup=5000", "optimizer steps"]),
    "wrong facts about the data": (["data.num_classes=7"], ["data.num_classes=7", "10"]),
    "batch larger than the data": (["data.batch_size=5000"], ["data.batch_size=5000", "1300"]),
    "no data and no download": (
        ["data=cifar10", "data.source.download=false"],
        ["paths.data_dir", "cifar-10-binary.tar.gz"],
    ),
    "no such run": (["resume=logs/nowhere"], ["resume=logs/nowhere", "no such directory"]),
    "not a run": (["resume=."], ["resume=.", "not a run directory"]),
    "no such checkpoint": (["ckpt_path=missing.ckpt"], ["ckpt_path=", "missing.ckpt", "no such file"]),
    "unknown ckpt_mode": (["ckpt_path=x.ckpt", "ckpt_mode=all"], ["ckpt_mode=all", "weights or trainer"]),
    "unknown method of compression": (["compression=pruning"], ["compression=pruning", "prune"]),
    "methods out of order": (["compression=[qat,prune]"], ["compression=[qat,prune]", "write compression=[prune,qat]"]),
    "a sparsity beyond all": (
        ["compression=prune", "compression.prune.sparsity=1.5", *NO_DATA],
        ["compression.prune.sparsity=1.5"],
    ),
    "a layer that is not there": (
        ["compression=prune", "compression.prune.layers=[stage.*]", *NO_DATA],
        ["compression.prune.layers", "stage.*", "matches no layer"],
    ),
    "too few bits": (["compression=qat", "compression.qat.bits=1", *NO_DATA], ["compression.qat.bits=1"]),
    "no teacher": (["compression=distill", *NO_DATA], ["compression.distill.teacher=None", "finished run"]),
    "a teacher that is not there": (
        ["compression=distill", "compression.distill.teacher=logs/nowhere", *NO_DATA],
        ["compression.distill.teacher=logs/nowhere", "no such directory"],
    ),
    "a stage of nothing": (
        ["compression=[prune,qat]", "compression.stages=[prune]"],
        ["compression.stages", "leaves out qat"],
    ),
    "no such receipt": (["compression=prune", "compression.receipt=long"], ["compression.receipt=long", "quick"]),
    "a strategy that does not take it": (
        ["compression=qat", "strategy=pipeline", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["compression=qat", "Pipeline", "choose another strategy"],
    ),
    "a budget of everything": (
        ["compression=prune_channels", "compression.prune_channels.share=1.2", *NO_DATA],
        ["compression.prune_channels.share=1.2"],
    ),
    "a choice of another group": (["trainer=ddp"], ["trainer=ddp", "strategy=ddp"]),
    "the Trainer's precision": (
        ["+trainer.precision=bf16-mixed"],
        ["trainer.precision=bf16-mixed", "precision=bf16-mixed"],
    ),
    "the Trainer's logger": (["+trainer.logger=false"], ["trainer.logger=false", "logger=tensorboard"]),
    "a name that leads outside": (["name=../x"], ["name='../x'", "letters, digits"]),
    "the name of the newest run": (["name=latest"], ["name=latest", "none of latest"]),
    "a sweep of nothing": (["-m", "seed=range(1,1)"], ["seed=range(1,1)", "no job"]),
    "no place to write": (["paths.log_dir=/proc/nowhere"], ["/proc/nowhere", "paths.log_dir"]),
}


# They start two processes; the strategies' tests check the messages too.
ON_RANKS = ("more stages than blocks", "heads that do not divide", "a net without a tensor plan")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ON_RANKS)) for name in TYPED])
def test_typed(cli: Cli, tmp_path: Path, name: str) -> None:
    arguments, words = TYPED[name]
    _one_sentence(cli("trainer.max_epochs=1", "trainer.enable_model_summary=false", *arguments), *words)
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
