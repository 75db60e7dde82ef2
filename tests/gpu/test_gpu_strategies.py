"""Every strategy on one GPU, and on several if available, has the losses of one process on a CPU."""

from pathlib import Path

import pytest
from support.commands import environment, run
from support.gpu import CONVOLUTIONS, PLAIN, Acceptance, close

DEEPSPEED = ["deepspeed_1", "deepspeed_2", "deepspeed_3", "deepspeed_2_offload", "deepspeed_3_offload"]
TWO = {
    "ddp": [],
    "fsdp": ["strategy.min_params=1"],
    "tensor": [],
    "pipeline": [],
    "3d": [],
    "deepspeed_2": [],
    "deepspeed_3": ["strategy.persistence_threshold=0"],
}


def need_two(gpu: Acceptance) -> None:
    if gpu.count < 2:
        pytest.skip("one GPU is visible, and this body takes two")


@pytest.mark.stand_in("ddp", "fsdp strategy.cpu_offload=true")
@pytest.mark.parametrize("words", ["auto", "ddp", "fsdp", "fsdp strategy.cpu_offload=true", "tensor"])
def test_one_device(gpu: Acceptance, words: str) -> None:
    close(gpu.curve(*PLAIN, *f"strategy={words}".split()), gpu.reference(*PLAIN), 1e-4)


@pytest.mark.stand_in("deepspeed_3_offload")
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_on_one_device(gpu: Acceptance, name: str) -> None:
    close(gpu.launched(*PLAIN, f"strategy={name}")[1], gpu.reference(*PLAIN), 1e-4)


def test_model_split(gpu: Acceptance) -> None:
    devices = ["cpu:0", "cpu:0"] if not gpu.real else ["cuda:0", f"cuda:{min(1, gpu.count - 1)}"]
    found = gpu.curve(*PLAIN, "strategy=model_split", f"strategy.devices=[{','.join(devices)}]")
    close(found, gpu.reference(*PLAIN), 1e-4)


@pytest.mark.stand_in(why="torch's DataParallel drives GPUs alone")
def test_dp(gpu: Acceptance) -> None:
    close(gpu.curve(*PLAIN, "strategy=dp", f"trainer.devices={gpu.count}"), gpu.reference(*PLAIN), 1e-4)


@pytest.mark.stand_in("ddp")
@pytest.mark.parametrize("name", TWO)
def test_two_devices(gpu: Acceptance, name: str) -> None:
    need_two(gpu)
    found = gpu.launched(*PLAIN, f"strategy={name}", "trainer.devices=2", *TWO[name])[1]
    close(found, gpu.reference(*PLAIN), 1e-4)


def test_synchronised_batchnorm(gpu: Acceptance) -> None:
    need_two(gpu)
    found = gpu.launched(*CONVOLUTIONS, "strategy=ddp", "trainer.devices=2")[1]
    close(found, gpu.reference(*CONVOLUTIONS), 1e-3)
    apart = gpu.launched(*CONVOLUTIONS, "strategy=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false")[1]
    assert max(abs(a - b) for a, b in zip(apart, found, strict=True)) > 1e-3  # statistics of half a batch


HANG = """
import time
from lightning.pytorch import Callback

class Hang(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            time.sleep(600)
"""


@pytest.mark.stand_in(why="tests/launch/test_elastic.py has it on a CPU")
def test_a_rank_that_hangs_is_ended_within_the_limit(gpu: Acceptance, tmp_path: Path) -> None:
    """By NCCL's watchdog here, by gloo's timeout on the stand-in."""
    need_two(gpu)
    (tmp_path / "hang.py").write_text(HANG)
    words = gpu.words(*PLAIN, "strategy=ddp", "trainer.devices=2", "launch.timeout=10")
    more = ["+callbacks.hang._target_=hang.Hang", "trusted=[hang]"]
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    done = run(*words, *more, cwd=tmp_path, timeout=200, PYTHONPATH=path)
    assert done.returncode == 1
    assert "waited longer than launch.timeout=10 seconds" in done.stderr
    assert "rank 1 did not come" in done.stderr
