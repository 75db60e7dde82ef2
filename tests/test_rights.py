"""Messages for files that this user may not read or write."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lathe import files
from lathe.errors import UserError
from lathe.files import disk_sentence
from lathe.runs.checkpoints import read_checkpoint
from lathe.verbs.evaluate import check_request


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_nobody(act: Callable[[], object]) -> str:
    """Return the message for an error in an unprivileged process; tests may run as root."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            try:
                act()
                told = "nothing happened"
            except OSError as error:
                told = str(disk_sentence(error))
            except UserError as error:
                told = str(error)
            os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as answer:
        return answer.read().decode()


@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_files_that_may_not_be_read(place: Path, hidden: str) -> None:
    (place / "run").mkdir(mode=0o755)
    file = place / "run" / "best.ckpt"
    file.write_text("whole")
    (file if hidden == "file" else file.parent).chmod(0)
    try:
        assert as_nobody(file.read_text) == (
            f"{file} can't be read, this user is not permitted to: change its rights (chmod), or take another."
        )
        if hidden == "file":
            assert "can't be read, this user is not" in as_nobody(lambda: read_checkpoint(file))
    finally:
        file.parent.chmod(0o755)


def test_of_another_users_run_make_a_copy(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "new").mkdir()
    error = PermissionError(errno.EACCES, "no", str(tmp_path / "new" / "receipt.json"))
    assert disk_sentence(error) == (
        f"{tmp_path}/new/receipt.json can't be written, writing there is not permitted: copy the run, {tmp_path}, to a "
        "place of your own."
    )


def test_a_writer_that_hides_its_error(place: Path) -> None:
    def write() -> None:
        with files.whole(place / "trace.json"):
            pass

    place.chmod(0o555)
    assert as_nobody(write) == (
        f"{place} can't be written, writing there is not permitted: choose another place (paths.log_dir and "
        "paths.data_dir say where things go)."
    )


def test_a_folder_is_checked_before_writing(place: Path) -> None:
    assert as_nobody(lambda: files.require_writable(place)) == (
        f"{place} can't be written, writing there is not permitted: choose another place (paths.log_dir and "
        "paths.data_dir say where things go)."
    )
    files.require_writable(place)


def test_the_output_is_checked_before_evaluating(place: Path) -> None:
    place.chmod(0o555)
    asked = {"output": str(place / "scores.json"), "run": "logs/latest"}
    assert as_nobody(lambda: check_request(asked)).startswith(f"{place} can't be written, writing there is not ")
