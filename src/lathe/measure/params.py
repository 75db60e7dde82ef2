"""Number of a net's parameters (total, trainable, non-zero), and their bytes in memory."""

from dataclasses import dataclass

from torch import nn

from lathe.measure.shards import whole


@dataclass(frozen=True)
class ParamCount:
    """Counts of a net's parameters; one shared by several modules counts once.

    `total`, `trainable` and `non_zero` are numbers of scalars. `bytes` is the memory of parameters and buffers in their
    present dtype, not the size of a file.
    """

    total: int
    trainable: int
    non_zero: int
    bytes: int

    @property
    def sparsity(self) -> float:
        """Return the share of parameters that are exactly zero; 0 for a net without parameters."""
        return 1 - self.non_zero / self.total if self.total else 0.0


def count_parameters(net: nn.Module) -> ParamCount:
    """Count `net`'s parameters; a collective if sharded. Synchronizes the device once per parameter."""
    parameters = list(net.parameters())
    held = [*parameters, *net.buffers()]
    return ParamCount(
        total=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        non_zero=sum(int(whole(p).count_nonzero()) for p in parameters),
        bytes=sum(t.numel() * t.element_size() for t in held),
    )
