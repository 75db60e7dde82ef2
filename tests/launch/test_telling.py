"""One sentence on stderr for a mistake, a traceback for a bug, and the exit code that says so."""

import errno
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.commands import command, start
from support.runs import ROOT
from torch import Tensor, nn
from torch.utils.data import Dataset

from lathe.config.schema import key_schemas
from lathe.data.workers import Reader
from lathe.errors import Stopped, UserError, is_own
from lathe.launch.telling import FULL_ERROR, one_sentence, own_sentence, sentence_for, tell, warn_of_another_clone
from lathe.runs.score import outputs_of


@pytest.mark.parametrize("script", ["train.py", "scripts/evaluate.py"])
def test_the_code_of_another_clone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str) -> None:
    warn_of_another_clone(ROOT / script)
    assert not capsys.readouterr().err
    (tmp_path / "src/lathe").mkdir(parents=True)
    (tmp_path / "src/lathe/__init__.py").touch()
    warn_of_another_clone(tmp_path / script)
    assert f"Warning: {tmp_path / script} imports lathe from {ROOT / 'src/lathe'}, another clone" in (
        capsys.readouterr().err
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in (FULL_ERROR, "HYDRA_FULL_ERROR", "RANK", "SLURM_PROCID"):
        monkeypatch.setenv(key, "x")  # so that what the code sets is taken back after the test
        monkeypatch.delenv(key)
    monkeypatch.setattr("sys.argv", [str(ROOT / "train.py")])
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_mistake_is_one_line_on_stderr_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(UserError("seed=-1: give another.")) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Error: seed=-1: give another.\n")


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError) as caught:
        key_schemas(3, "train")  # type: ignore[arg-type]  # where Lathe's own code fails
    assert tell(caught.value) == 1
    assert "Traceback" in (text := capsys.readouterr().err)
    assert "AttributeError: 'int' object has no attribute" in text


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3)

    def asked(self) -> Tensor:
        return self.weight  # type: ignore[return-value]  # which it has not

    def bug(self) -> None:
        key_schemas(3, "train")  # type: ignore[arg-type]


class Bare(nn.Module):
    def forward(self) -> None: ...


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Tensor:
        raise OSError(f"sample {row} is gone")


def test_whose_code_a_file_is() -> None:
    assert [is_own(str(ROOT / name)) for name in ("train.py", "scripts/make_shards.py", "src/lathe/errors.py")] == [
        False
    ] * 3
    assert [is_own(name) for name in (torch.__file__, os.__file__, "<string>", "None", "")] == [None] * 5
    assert is_own(str(ROOT / "src" / "mine" / "net.py"))


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        call()
    assert isinstance(caught.value, Exception)
    return caught.value


def test_what_a_users_own_part_raises_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, full = re.escape(__file__), "; HYDRA_FULL_ERROR=1 shows the traceback"
    for call, words in {
        lambda: Net()(torch.zeros(2, 2)): rf"Net\.forward at {here}:\d+ failed: RuntimeError: .*mat1 and mat2 .*",
        lambda: Net().asked(): rf"Net\.asked at {here}:\d+ failed: AttributeError: 'Net' object has no .*'weight'",
        lambda: outputs_of(Bare(), [(torch.zeros(1),)]): (
            rf"Bare\.forward at {here}:\d+ can't be called so: TypeError: Bare\.forward\(\) takes 1 positional .*"
        ),
        lambda: next(iter(Reader(Samples(), num_workers=1))): (
            rf"\S*__getitem__ at {here}:\d+ failed: OSError: sample 0 is gone"
        ),
    }.items():
        assert tell(raised(call)) == 1
        assert re.fullmatch(f"Error: {words}{full}\\.\n", said := capsys.readouterr().err), said
    assert own_sentence(raised(Net().bug)) is None  # the deepest code is Lathe's
    assert sentence_for(raised(lambda: Net()(torch.zeros(2, 2)))) is None  # from Python it is raised as it is
    monkeypatch.setenv(FULL_ERROR, "1")
    assert tell(raised(lambda: Net()(torch.zeros(2, 2)))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_parameter_that_ddp_waits_for() -> None:
    from lightning.pytorch.strategies import ddp

    said = re.sub(r'"\s+(f?)"', "", Path(ddp.__file__).read_text(encoding="utf-8"))
    words = "parameters that were not used in producing the loss"
    assert words in said  # of Lightning
    told = str(sentence_for(RuntimeError(f"It looks like your LightningModule has {words} returned.")))
    assert told.startswith("strategy=ddp: some parameter had no part in a loss")
    assert "strategy.find_unused_parameters=true" in told


def test_a_clause_without_a_proposal_is_left_out() -> None:
    assert str(UserError("x: no such key; ", "y: no; did you mean z?")) == "x: no such key.\ny: no; did you mean z?"


def test_a_full_error_is_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FULL_ERROR, "1")
    assert tell(UserError("a sentence.")) == 1
    assert "lathe.errors.UserError: a sentence." in capsys.readouterr().err


@pytest.mark.parametrize("key", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(key, "1")
    assert tell(UserError("a sentence.")) == 1
    assert capsys.readouterr().err == ""
    assert tell(KeyError("a bug")) == 1
    assert "KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 138), ("SIGINT", 130)])
def test_a_stopped_run_leaves_with_the_code_of_its_signal(
    capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    assert tell(Stopped(name, "python train.py resume=logs/x")) == code
    assert capsys.readouterr().err == f"Error: stopped by {name}; continue with: python train.py resume=logs/x\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "x", "/a"), "/a can't be written, the disk is full"),
        (torch.OutOfMemoryError("x"), "the GPU's memory is used up: lower data.batch_size"),
        (MisconfigurationException("two\n  lines"), "two lines"),
        (
            RuntimeError("gloo: Timed out waiting 2000ms for recv operation to complete"),
            "rank 0 waited longer than launch.timeout=2 seconds in a collective: another rank did not come (if it "
            "was only slow, raise",
        ),
        (RuntimeError('Could not detect "srun", are you'), "launch=slurm submits to SLURM, and srun is not here"),
        (ValueError("a bug"), None),
        (FileNotFoundError(errno.ENOENT, "x", "/a"), None),
    ],
)
def test_other_libraries_mistakes(error: Exception, sentence: str | None) -> None:
    told = sentence_for(error)
    assert told == sentence if sentence is None else str(told).startswith(sentence)


def test_a_torchvision_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever imports it."""
    (tmp_path / "torchvision").mkdir()
    text = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        import_module("torchvision")
    assert sentence_for(caught.value) == (
        "the installed torchvision can't be imported beside this torch (operator torchvision::nms does not exist): "
        "install the one that was made for it, from the index that torch came from, or uninstall it."
    )


@pytest.mark.parametrize("script", ["train.py", "scripts/evaluate.py"])
def test_groups_are_read_off_the_configuration_folder(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    class ConfigCompositionException(Exception):
        pass

    monkeypatch.setattr("sys.argv", [str(ROOT / script)])
    told = sentence_for(ConfigCompositionException("Could not override 'optimiser'."))
    assert told == "optimiser: there is no such group or key; did you mean optimizer?"


def test_a_script_elsewhere_has_no_groups_to_propose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "mine.py")])
    assert sentence_for(UserError("x")) == "x"


def main_that(error: Exception | None) -> Any:
    @one_sentence
    def main() -> None:
        if error is not None:
            raise error

    return main


def test_a_main_leaves_with_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main_that(UserError("a sentence."))()
    assert left.value.code == 1
    assert capsys.readouterr().err == "Error: a sentence.\n"
    main_that(None)()


def test_what_the_user_had_set_for_hydra_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit):
        main_that(UserError("a sentence."))()
    assert "Traceback" in capsys.readouterr().err


def test_a_launcher_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class MissingConfigException(Exception):
        missing_cfg_file = "hydra/launcher/submitit_slurm"

    monkeypatch.setattr("lathe.launch.telling.find_spec", lambda name: None)
    told = sentence_for(MissingConfigException("x"))
    assert (
        told == "launch=slurm submits jobs through hydra-submitit-launcher, which is not installed: pip install -e "
        "'.[slurm]'."
    )


def test_ctrl_c_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        one_sentence(main)()
    assert (ended.value.code, capsys.readouterr().err) == (130, "Error: stopped by Ctrl-C.\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--help",), 0),
        (("--cfg", "job"), 1),
        (("model=mlp", "trainer.max_epochs=1", "trainer.enable_model_summary=false"), 1),
        (("model=mlp", "trainer.max_epochs=1"), 1),  # rich writes first, which leaves by itself
    ],
    ids=["help", "configuration", "line", "table"],
)
def test_output_that_nobody_reads_ends_a_command_in_one_sentence(
    words: tuple[str, ...], told: int, tmp_path: Path
) -> None:
    """As behind `| head`: exit code 141, which a shell gives for it; of a page of help nothing more is said."""
    process = start(command(*words), tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        err = stderr.read()
    assert process.wait(60) == 128 + signal.SIGPIPE, err
    assert err.count("Error: nobody reads standard output any more") == told
    assert "Traceback" not in err


def test_a_file_of_variables_is_read_and_named_without_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_text('# of this machine\nLATHE_TOKEN="hush hush"\nLATHE_SET=file\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATHE_SET", "before")
    monkeypatch.setenv("LATHE_TOKEN", "x")  # so that it is taken back after the test
    monkeypatch.delenv("LATHE_TOKEN")
    found: dict[str, str] = {}
    one_sentence(lambda: found.update(os.environ))()
    assert (found["LATHE_TOKEN"], found["LATHE_SET"]) == ("hush hush", "before")
    assert capsys.readouterr().out == ".env sets LATHE_TOKEN.\n"


def test_a_file_of_variables_that_is_no_text_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe=1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        one_sentence(lambda: None)()
    assert capsys.readouterr().err.startswith("Error: .env can't be read (")
