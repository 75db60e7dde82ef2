"""torch.compile of the net, in place."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from lathe.config.validation import validated
from lathe.errors import ArgumentError, did_you_mean
from lathe.nets import blocks_of
from lathe.strategies.memory_format import unsafe_convolutions

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

    Raises:
        ArgumentError: the backend lacks the mode or an option, both mode and options are set, or `regional` is true and
            the net has no blocks.
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
        raise ArgumentError(
            f"regional=true compiles a net's repeated blocks, but {type(net).__name__} names no `blocks`: use false."
        )
    if regional == "auto":
        # blocks of equal repr and weight shapes can share one compiled function
        kinds = {(repr(block), *(tuple(parameter.shape) for parameter in block.parameters())) for block in regions}
        if len(regions) < REPEATED or len(kinds) > KINDS:
            regions = []
        else:
            log.info("compile.regional=auto: %d blocks of %d kinds, each compiled by itself", len(regions), len(kinds))
    for region in regions or [net]:
        region.compile(**arguments)


def compiler_arguments(
    net: nn.Module,
    mode: str,
    dynamic: bool | None,
    fullgraph: bool,
    backend: str,
    options: Mapping[str, Any] | None,
    device_type: str,
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
    known = torch._inductor.list_options() if options else []
    for name in options or ():
        if name not in known:
            raise ArgumentError(f"options.{name}: inductor has no such option; {did_you_mean(name, known)}")
    if device_type == "cpu":
        mode = WITHOUT_GRAPHS.get(mode, mode)
        if backend == "inductor" and unsafe_convolutions(net):  # torch takes options or a mode
            own = options or torch._inductor.list_mode_options(mode)
            return {**arguments, "options": {"layout_optimization": False, **own}}
    return {**arguments, "options": dict(options)} if options else {**arguments, "mode": mode}
