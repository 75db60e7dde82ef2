"""torch.compile of the net or of a whole step, and the memory format of its convolutions."""

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import ArgumentError, require
from lathe.nets import blocks_of

log = logging.getLogger(__name__)
REPEATED = 12  # from this number of blocks, compiling each by itself is faster than compiling the whole net
KINDS = 6  # of blocks; torch compiles a function at most eight times, some of them for other batch sizes
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@validated
def compile_net(
    net: nn.Module,
    device_type: str,
    enabled: bool = True,
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
    regional: bool | Literal["auto"] = "auto",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile `net`, or with `regional` each of its `blocks`, in place; parameter names do not change.

    `regional=auto` compiles blocks if a net has many of few kinds, and logs that. Compilation happens at the first
    call. The task around the net stays eager, because its logging can't be traced.

    `backend` is inductor or, to find the part of the compiler that fails, aot_eager (capture and differentiate, run
    torch's own kernels) or eager (only capture). `options` are inductor's (`torch._inductor.list_options()`) and
    replace those of a mode.
    """
    if not enabled:
        return
    arguments = compiler_arguments(net, mode, dynamic, fullgraph, backend, options, device_type)
    if mode == "reduce-overhead" and device_type == "cpu":
        warnings.warn(
            "compile=reduce-overhead means CUDA graphs, which a CPU does not have: it acts as compile=default.",
            stacklevel=2,
        )
    regions = blocks_of(net) if regional else []
    if regional is True and not regions:
        raise ArgumentError(f"regional=true: {type(net).__name__} names no repeated `blocks` to compile: use false.")
    if regional == "auto":
        # blocks of equal repr and weight shapes can share one compiled function
        kinds = {(repr(block), *(tuple(parameter.shape) for parameter in block.parameters())) for block in regions}
        if len(regions) < REPEATED or len(kinds) > KINDS:
            regions = []
        else:
            log.info("compile.regional=auto: %d blocks of %d kinds, each compiled by itself", len(regions), len(kinds))
    for region in regions or [net]:
        region.compile(**arguments)


def compile_task(task: Any, device_type: str, options: Mapping[str, Any], cache: Path | None = None) -> None:
    """Compile a task's net, and its training step with `scope=step`, in place.

    Inductor caches its output in the folder `cache` for later runs, unless TORCHINDUCTOR_CACHE_DIR names another.
    """
    if options.get("enabled") and cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute()))
    scope = options.get("scope", "net")
    of_net = {key: value for key, value in options.items() if key != "scope"}
    if scope == "step" and of_net.get("regional") == "auto":
        of_net["regional"] = False  # evaluation is one function too
    require(
        task.core is not task.driven or not options.get("enabled"),
        "compile: a whole LightningModule is not compiled, whose steps call self.log. Name a submodule as model.core.",
    )
    compile_net(task.core, device_type, **of_net)
    if scope == "step" and options.get("enabled"):
        from lathe.strategies.whole_step import WholeStep  # few runs compile the step

        own = {key: options[key] for key in ("mode", "dynamic", "backend", "options") if key in options}
        vars(task.driven)["whole_step"] = WholeStep(task, **own, device_type=device_type)


def compiler_arguments(
    net: nn.Module, mode: str, dynamic: bool | None, fullgraph: bool, backend: str, options: Any, device_type: str
) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    On a CPU, modes lose their CUDA graphs: with them, a compiled step gave NaN on an x86 CPU without AVX-512 (torch
    2.13). Inductor's choice of channels_last is turned off for nets with `unsafe_convolutions`.
    """
    arguments: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}
    if backend != "inductor" and (mode != "default" or options):
        raise ArgumentError(f"mode and options are inductor's: leave them out with backend={backend}.")
    if mode != "default" and options:
        raise ArgumentError(f"options replace those of mode={mode}: use mode=default, or leave them out.")
    if device_type == "cpu":
        mode = WITHOUT_GRAPHS.get(mode, mode)
        if backend == "inductor" and unsafe_convolutions(net):  # torch takes options or a mode
            own = options or torch._inductor.list_mode_options(mode)
            return {**arguments, "options": {"layout_optimization": False, **own}}
    return {**arguments, "options": dict(options)} if options else {**arguments, "mode": mode}


def channels_last(net: nn.Module, strategy: Strategy, wanted: bool | Literal["auto"]) -> None:
    """Put weights of 2-d convolutions, and input images, in channels_last format, in place.

    Low-precision convolutions are computed in this order. Shapes, names and values do not change; sums are added in
    another order. `auto` skips nets without 2-d convolutions (`true` warns), nets that a strategy shards, and on a CPU
    those with `unsafe_convolutions`.
    """
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if wanted is True and not whole:
        raise ArgumentError(
            f"channels_last=true is for nets that are whole on each device, and {type(strategy).__name__} spreads "
            "them: use auto, or strategy=ddp."
        )
    unsafe = unsafe_convolutions(net) if whole and strategy.root_device.type == "cpu" else []
    if wanted is True and unsafe:
        raise ArgumentError(
            f"channels_last=true is not safe for {unsafe[0]} on a CPU: oneDNN's gradient of a strided 1x1 "
            "convolution of fewer than 16 channels writes beyond its memory. Use auto or false."
        )
    convolves = any(isinstance(module, nn.Conv2d) for module in net.modules())
    if wanted is True and not convolves:
        warnings.warn(
            f"trainer.channels_last=true has no effect: {type(net).__name__} has no 2-d convolution.", stacklevel=2
        )
    if wanted and whole and convolves and not unsafe:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stub
        net.register_forward_pre_hook(
            lambda net, args: tuple(
                value.contiguous(memory_format=torch.channels_last)
                if isinstance(value, Tensor) and value.ndim == 4
                else value
                for value in args
            )
        )


def unsafe_convolutions(net: nn.Module) -> list[str]:
    """Return the names of convolutions whose gradient must not be computed in channels_last format on a CPU.

    For strided 1x1 convolutions of fewer channels than a vector has numbers, oneDNN writes out of bounds
    (github.com/uxlfoundation/oneDNN/issues/6035).
    """
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels // module.groups < 16
    ]
