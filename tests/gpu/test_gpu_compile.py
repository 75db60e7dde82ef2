"""Every way to compile, on the device, compared with eager float32 on a CPU."""

import pytest
from support.gpu import CONVOLUTIONS, PLAIN, Acceptance, close

# On the stand-in, aot_eager captures and differentiates the same graphs without kernels.
BACKEND = {True: (), False: ("compile.backend=aot_eager",)}


@pytest.mark.stand_in("")
@pytest.mark.parametrize("words", ["", "compile.regional=true", "compile.dynamic=true", "compile.fullgraph=true"])
def test_default(gpu: Acceptance, words: str) -> None:
    found = gpu.curve(*PLAIN, "compile=default", *words.split(), *BACKEND[gpu.real])
    close(found, gpu.reference(*PLAIN), 1e-4)


@pytest.mark.stand_in(why="tests/strategies compile on a CPU")
def test_default_of_convolutions(gpu: Acceptance) -> None:
    close(gpu.curve(*CONVOLUTIONS, "compile=default", *BACKEND[gpu.real]), gpu.reference(*CONVOLUTIONS), 1e-3)


@pytest.mark.stand_in(why="tests/strategies compile on a CPU")
def test_whole_step(gpu: Acceptance) -> None:
    words = ("compile=default", "compile.scope=step", "trainer.gradient_clip_val=0.5", *BACKEND[gpu.real])
    close(gpu.curve(*PLAIN, *words), gpu.reference(*PLAIN, "trainer.gradient_clip_val=0.5"), 1e-4)


@pytest.mark.stand_in(why="inductor captures CUDA graphs on GPUs alone")
@pytest.mark.parametrize("scope", ["net", "step"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs(gpu: Acceptance, mode: str, scope: str) -> None:
    """Both modes replay graphs: inductor counts the functions that it could not capture."""
    from torch._dynamo.utils import counters

    counters.clear()
    words = (*PLAIN, "trainer.max_steps=8")
    found = gpu.curve(*words, f"compile={mode}", f"compile.scope={scope}")
    close(found, gpu.reference(*words), 1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.stand_in("bf16-mixed")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed(gpu: Acceptance, precision: str) -> None:
    words = (*PLAIN, "optimizer=sgd", "optimizer.lr=0.05")
    found = gpu.curve(*words, "compile=default", f"precision={precision}", *BACKEND[gpu.real])
    close(found, gpu.reference(*words), 2e-2)
