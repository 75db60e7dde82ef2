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

log = logging.getLogger(__name__)
REPEATED = 12  # blocks from which on each alone is compiled sooner than the whole net
KINDS = 6  # of blocks; torch compiles one function at most eight times, of which some are for other batch sizes
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
    """Compiles `net`, or with `regional` each of its `blocks`, in place, so parameter names and checkpoints stay as
    they are. `auto` compiles blocks where a net has many of few kinds, and says so in the log.

    Compilation happens at the first call. The task around the net stays eager: its logging can't be traced.

    `backend` is inductor, or for finding out which part of the compiler does something wrong, aot_eager (graphs are
    captured and differentiated, and run by torch's own kernels) or eager (captured alone).

    `options` are inductor's own, by name (`torch._inductor.list_options()`), which stand in the place of a mode's.

    Raises:
        ArgumentError: a mode that the backend does not have, options that it does not have or beside a mode, or
            `regional` for a net that names no blocks.
    """
    if not enabled:
        return
    arguments = compiler_arguments(mode, dynamic, fullgraph, backend, options, device_type)
    if mode != "default" and backend != "inductor":
        raise ArgumentError(f"mode={mode} is inductor's: use mode=default with backend={backend}.")
    if mode == "reduce-overhead" and device_type == "cpu":
        warnings.warn(
            "compile=reduce-overhead means CUDA graphs, which a CPU does not have: it acts as compile=default.",
            stacklevel=2,
        )
    regions = _regions(net, regional)
    if not regions:
        raise ArgumentError(
            f"regional=true compiles a net's repeated blocks, but {type(net).__name__} names no `blocks`: use false."
        )
    for region in regions:
        region.compile(**arguments)


def _regions(net: nn.Module, regional: bool | Literal["auto"]) -> list[nn.Module]:
    """What is compiled by itself."""
    blocks = blocks_of(net) if regional else []
    if regional is True:
        return blocks
    kinds = {_kind(block) for block in blocks}
    if len(blocks) < REPEATED or len(kinds) > KINDS:
        return [net]
    log.info("compile.regional=auto: %d blocks of %d kinds, each compiled by itself", len(blocks), len(kinds))
    return blocks


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that one compiled function can stand for: layers as they print, and the shapes of weights."""
    return (repr(block), *(tuple(parameter.shape) for parameter in block.parameters()))


def compiler_arguments(
    mode: str,
    dynamic: bool | None,
    fullgraph: bool,
    backend: str,
    options: Mapping[str, Any] | None,
    device_type: str,
) -> dict[str, Any]:
    """What torch.compile is called with. A CPU gets no mode with CUDA graphs, which it does not have, and which are not
    without effect there: with them, a compiled step gave NaN on an x86 CPU without AVX-512 (torch 2.13).

    Raises:
        ArgumentError: as `compile_net`.
    """
    arguments: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}
    if not options:
        return {**arguments, "mode": WITHOUT_GRAPHS.get(mode, mode) if device_type == "cpu" else mode}
    if backend != "inductor":
        raise ArgumentError(f"options are inductor's: leave them out with backend={backend}.")
    if mode != "default":
        raise ArgumentError(f"options stand in the place of those of mode={mode}: use mode=default, or leave them out.")
    known = torch._inductor.list_options()
    for name in options:
        if name not in known:
            raise ArgumentError(f"options.{name}: inductor has no such option; {did_you_mean(name, known)}")
    return {**arguments, "options": dict(options)}
