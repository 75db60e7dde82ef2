"""torch.compile of the net, in place."""

import warnings

from torch import nn

from lathe.config.schema.held import held
from lathe.errors import ArgumentError
from lathe.nets import blocks_of


@held("compile")
def compile_net(
    net: nn.Module,
    device_type: str,
    enabled: bool = True,
    mode: str = "default",
    regional: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: str = "inductor",
) -> None:
    """Compiles `net`, or with `regional` each of its `blocks`, in place, so parameter names and checkpoints stay as
    they are.

    Compilation happens at the first call. The task around the net stays eager: its logging can't be traced.

    `backend` is inductor, or for finding out which part of the compiler does something wrong, aot_eager (graphs are
    captured and differentiated, and run by torch's own kernels) or eager (captured alone).

    Raises:
        ArgumentError: a mode that the backend does not have, or `regional` for a net that names no blocks.
    """
    if not enabled:
        return
    if mode != "default" and backend != "inductor":
        raise ArgumentError(f"mode={mode} is inductor's: use mode=default with backend={backend}.")
    if mode == "reduce-overhead" and device_type == "cpu":
        warnings.warn(
            "compile=reduce-overhead means CUDA graphs, which a CPU does not have: it acts as compile=default.",
            stacklevel=2,
        )
    regions = blocks_of(net) if regional else [net]
    if not regions:
        raise ArgumentError(
            f"regional=true compiles a net's repeated blocks, but {type(net).__name__} names no `blocks`: use false."
        )
    for region in regions:
        region.compile(mode=mode, dynamic=dynamic, fullgraph=fullgraph, backend=backend)
