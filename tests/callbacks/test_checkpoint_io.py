"""A file under its final name is always whole; writing in a thread changes only who waits."""

import errno
import io
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.commands import start

from lathe.callbacks import Checkpoint, checkpoint_io
from lathe.callbacks.checkpoint_io import AsyncCheckpointIO, AtomicCheckpointIO
from lathe.errors import UserError
from lathe.strategies.fsdp import FSDP


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


# atomic files

BIG = {"state_dict": {"weight": torch.arange(300_000.0)}, "global_step": 2}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 1}, path)
    return path


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_takes_the_place_of_a_folder(tmp_path: Path, linked: bool) -> None:
    """Of a sharded strategy, written as a link to a hidden folder; a copy may have followed the link."""
    folder, path = tmp_path / (".last.ckpt.1a2b" if linked else "last.ckpt"), tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / "meta.pt").touch()
    if linked:
        path.symlink_to(folder.name)
    plugin = AtomicCheckpointIO(lambda path: {"read": path.name})
    assert plugin.load_checkpoint(path) == {"read": "last.ckpt"}
    plugin.save_checkpoint(BIG, path)
    assert plugin.load_checkpoint(path)["global_step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device", "last.ckpt")

    monkeypatch.setattr(checkpoint_io, "open", lambda path, mode: Full(path, "wb"), raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        AtomicCheckpointIO().save_checkpoint(BIG, old)
    assert step_of(old) == 1
    assert [file.name for file in old.parent.iterdir()] == ["last.ckpt"]


# writing in a thread


class Slow:
    """Blocks every file until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.writing, self.errors = threading.Event(), threading.Event(), [None]
        fsync = os.fsync

        def wait(number: int) -> None:
            self.writing.set()
            assert self.go.wait(30)
            error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
            if error is not None:
                raise error
            fsync(number)

        monkeypatch.setattr(os, "fsync", wait)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def test_a_save_does_not_wait_for_the_disk_and_keeps_the_moment(tmp_path: Path, slow: Slow) -> None:
    io, path = AsyncCheckpointIO(), tmp_path / "last.ckpt"
    weight = torch.arange(4.0)
    state = {"state_dict": {"a": weight, "b": weight.view(2, 2)}, "loops": {"done": [1, 2]}, "global_step": 1}
    io.save_checkpoint(state, path)
    assert slow.writing.wait(30)
    weight.add_(100)  # the next steps of the training
    state["loops"]["done"].append(3)
    assert not path.exists()
    slow.go.set()
    loaded = io.load_checkpoint(path, weights_only=True)  # waits
    assert loaded["state_dict"]["a"].tolist() == [0, 1, 2, 3]
    assert loaded["loops"] == {"done": [1, 2]}
    a, b = loaded["state_dict"]["a"], loaded["state_dict"]["b"]
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    io.teardown()


def test_one_write_is_in_flight_and_files_come_in_order(tmp_path: Path, slow: Slow) -> None:
    io, path = AsyncCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, path)
    second = threading.Thread(target=io.save_checkpoint, args=({"state_dict": {}, "global_step": 2}, path))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # the first is not on disk yet
    slow.go.set()
    second.join(30)
    assert step_of(path) in (1, 2)
    io.teardown()
    assert step_of(path) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_went_wrong_in_the_thread_is_raised_once(tmp_path: Path, slow: Slow) -> None:
    io, path = AsyncCheckpointIO(), tmp_path / "last.ckpt"
    slow.errors = [OSError(errno.ENOSPC, "No space left on device", str(path)), None]
    slow.go.set()
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, path)
    with pytest.raises(OSError, match="No space left on device"):
        io.save_checkpoint({"state_dict": {}, "global_step": 2}, path)
    io.save_checkpoint({"state_dict": {}, "global_step": 3}, path)
    io.teardown()
    assert step_of(path) == 3


def test_the_end_of_a_fit_waits_and_raises(tiny: SimpleNamespace, tmp_path: Path, slow: Slow) -> None:
    slow.go.set()
    slow.errors = [None, OSError(errno.ENOSPC, "No space left on device", "last.ckpt")]
    trainer = tiny.trainer(Checkpoint(monitor=None, **{"async": True}), default_root_dir=tmp_path, max_epochs=1)
    with pytest.raises(OSError, match="No space left on device"):
        trainer.fit(tiny.Task(), tiny.Loader())
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["best.ckpt"]


def test_an_exception_leaves_whole_files_behind(tiny: SimpleNamespace, tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                raise KeyError

    trainer = tiny.trainer(Checkpoint(every_n_train_steps=4, **{"async": True}), Dies(), default_root_dir=tmp_path)
    with pytest.raises(KeyError):
        trainer.fit(tiny.Task(), tiny.Loader())
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


WRITER = """
import sys, torch
from lathe.callbacks.checkpoint_io import AsyncCheckpointIO
io = AsyncCheckpointIO()
for step in range(100000):
    weight = torch.full((500_000,), float(step))
    io.save_checkpoint({"state_dict": {"weight": weight}, "global_step": step}, sys.argv[1])
    print(step, flush=True)
"""


def test_kill_9_while_writing_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    (script := tmp_path / "writer.py").write_text(WRITER)

    def whole() -> None:
        state = torch.load(path, weights_only=True)
        assert torch.equal(state["state_dict"]["weight"], torch.full((500_000,), float(state["global_step"])))

    with start([sys.executable, str(script), str(path)], tmp_path) as process:
        for kill in range(8):
            while process.stdout.readline().strip() != str(3 + kill):
                assert process.poll() is None
            time.sleep(0.0007 * kill)
            process.send_signal(signal.SIGSTOP)  # as dead as after SIGKILL, for the files
            if path.exists():
                whole()
            process.send_signal(signal.SIGCONT)
        process.kill()
    whole()


def test_a_ctrl_c_while_writing_waits_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer calls Python for each piece, where the signal would arrive."""
    path, pieces = tmp_path / "last.ckpt", []

    class Interrupted(io.FileIO):
        def write(self, data: Any) -> int:
            pieces.append(len(data))
            if len(pieces) == 9:
                signal.raise_signal(signal.SIGINT)
            return super().write(data)

    def open_(name: Path, mode: str) -> Any:
        return Interrupted(name, "wb") if mode == "wb" else open(name, mode)

    monkeypatch.setattr(checkpoint_io, "open", open_, raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # torch's elastic agent leaves its own
    try:
        with pytest.raises(KeyboardInterrupt):
            AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(1000)}, path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(pieces) > 9
    assert torch.load(path, weights_only=True)["weights"].equal(torch.ones(1000))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


CHECKPOINT: dict[Any, Any] = {
    "state_dict": OrderedDict(weight=torch.ones(2, 3), bias=torch.zeros(2)),
    "global_step": 7,
    "structure": {"quantization": {"head": {"bits": 8}}},
    "callbacks": {"support.own.Own": {"seen": [1, 2], "rate": 0.5, "name": "a\nb"}, "Empty": {}},
    7: [torch.Size([1, 2])],
}
DAMAGE = {
    "del state['global_step']": "something in `global_step` is not there",
    "del state['callbacks']['support.own.Own']['seen'][1]": "something in `callbacks`",
    "state['callbacks']['support.own.Own']['seen'] = (1, 2)": "or is of another type or shape",
    "state['state_dict']['bias'] = torch.zeros(3)": "something in `state_dict`",
    "state['outline'] = 5": "something in `outline`",
    # values may be changed and parts reordered
    "state['callbacks']['support.own.Own'].update(rate=0.25, name='c')": None,
    "state['callbacks'] = dict(reversed(state['callbacks'].items()))": None,
    "del state['outline']": None,  # as in a checkpoint of Lightning's
}


@pytest.mark.parametrize("edit", DAMAGE)
def test_what_was_taken_out_is_noticed(edit: str, tmp_path: Path) -> None:
    strategy, path = FSDP(), tmp_path / "last.ckpt"
    strategy.checkpoint_io = AtomicCheckpointIO()
    strategy.checkpoint_io.save_checkpoint(CHECKPOINT, path)
    state = torch.load(path, weights_only=True)
    exec(edit, {"state": state, "torch": torch})
    torch.save(state, path)
    if DAMAGE[edit] is None:
        assert strategy.load_checkpoint(path)
        return
    with pytest.raises(UserError) as caught:
        strategy.load_checkpoint(path)
    message = str(caught.value)
    assert f"ckpt_path={path} is not as it was written: " in message
    assert str(DAMAGE[edit]) in message
    assert "\n" not in message
