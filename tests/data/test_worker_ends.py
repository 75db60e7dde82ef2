"""A worker process that dies, as by the OOM killer, ends the run with one message."""

import os
import signal
from collections.abc import Callable
from multiprocessing import active_children
from typing import Any

import pytest
from torch.utils.data import Dataset

from lathe.data.workers import Reader
from lathe.errors import UserError, worker_message

WAY = "Lower data.num_workers, or find the cause with data.num_workers=0."


class Ending(Dataset[int]):
    """A dataset whose process exits while it reads the third sample."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        if row == 2:
            self.end()
        return row


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal: Killed"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by signal: Terminated"),
        (lambda: os._exit(3), "exited unexpectedly with exit code 3"),
    ],
)
def test_a_worker_that_dies_ends_the_run_and_the_other_workers(
    end: Any, words: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fit with workers restores at its end the handling of SIGCHLD that torch replaced.
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    children = set(active_children())
    with pytest.raises((UserError, RuntimeError)) as caught:  # torch's own if the signal arrives between two batches
        list(Reader(Ending(end), batch_size=1, num_workers=2, persistent_workers=stays))
    said = str(caught.value if isinstance(caught.value, UserError) else worker_message(caught.value))
    # torch gets the signal, unless it sees a closed queue first
    assert any(said.startswith(f"a DataLoader worker {how}; ") for how in (words, "ended unexpectedly")), said
    assert said.endswith(WAY)
    assert not [child for child in set(active_children()) - children if child.is_alive()]


def test_shared_memory_is_named_and_other_errors_are_left_alone() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that")
    assert "was killed by signal: Bus error; " in str(worker_message(error))
    assert "/dev/shm" in str(worker_message(error))
    text = "Caught ConnectionError in DataLoader worker process 0.\nOriginal Traceback"
    for other in (RuntimeError("shapes"), ConnectionError(text), ValueError("x")):
        assert worker_message(other) is None
