"""Every strategy on one GPU, and on several if available, has the losses of one process on a CPU."""

import pytest
from support.gpu import PLAIN, Acceptance, close

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


@pytest.mark.parametrize("words", ["auto", "ddp", "fsdp", "fsdp strategy.cpu_offload=true", "tensor"])
def test_one_device(gpu: Acceptance, words: str) -> None:
    close(gpu.curve(*PLAIN, *f"strategy={words}".split()), gpu.reference(*PLAIN), 1e-4)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_on_one_device(gpu: Acceptance, name: str) -> None:
    close(gpu.launched(*PLAIN, f"strategy={name}")[1], gpu.reference(*PLAIN), 1e-4)


def test_model_split(gpu: Acceptance) -> None:
    devices = ["cpu:0", "cpu:0"] if not gpu.real else ["cuda:0", f"cuda:{min(1, gpu.count - 1)}"]
    found = gpu.curve(*PLAIN, "strategy=model_split", f"strategy.devices=[{','.join(devices)}]")
    close(found, gpu.reference(*PLAIN), 1e-4)


def test_dp(gpu: Acceptance) -> None:
    close(gpu.curve(*PLAIN, "strategy=dp", f"trainer.devices={gpu.count}"), gpu.reference(*PLAIN), 1e-4)


@pytest.mark.parametrize("name", TWO)
def test_two_devices(gpu: Acceptance, name: str) -> None:
    need_two(gpu)
    found = gpu.launched(*PLAIN, f"strategy={name}", "trainer.devices=2", *TWO[name])[1]
    close(found, gpu.reference(*PLAIN), 1e-4)
