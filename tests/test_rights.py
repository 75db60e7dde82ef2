"""Messages for files that this user may not read or write."""

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


FORBIDDEN = "this user is not permitted to read or write there: choose another place"


def test_files_that_may_not_be_read(place: Path) -> None:
    file = place / "best.ckpt"
    file.write_text("whole")
    file.chmod(0)
    for read in (file.read_text, lambda: read_checkpoint(file)):
        assert as_nobody(read).startswith(f"{file}: {FORBIDDEN}")


def test_a_folder_that_may_not_be_written_to(place: Path) -> None:
    def write() -> None:
        with files.whole(place / "trace.json"):
            pass  # a writer that hides its error

    files.require_writable(place)
    place.chmod(0o555)
    asked = {"output": str(place / "scores.json"), "run": "logs/latest"}
    for act in (write, lambda: files.require_writable(place), lambda: check_request(asked)):
        assert as_nobody(act).startswith(f"{place}: {FORBIDDEN}")
