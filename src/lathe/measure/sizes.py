"""Number of a net's parameters and their bytes in memory, and sizes of exported files on disk and compressed."""

import gzip
from dataclasses import dataclass
from pathlib import Path

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
    return ParamCount(
        total=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        non_zero=sum(int(whole(p).count_nonzero()) for p in parameters),
        bytes=sum(t.numel() * t.element_size() for t in [*parameters, *net.buffers()]),
    )


@dataclass(frozen=True)
class FileSize:
    """`bytes` on disk and after gzip at level 6; only the latter shows unstructured zeros."""

    bytes: int
    gzipped: int


def file_size(path: Path) -> FileSize:
    """Return the size of a file, or of all files in a folder, each compressed separately.

    Raises:
        FileNotFoundError: there is nothing at `path`.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    sizes = [(file.stat().st_size, len(gzip.compress(file.read_bytes(), 6, mtime=0))) for file in files]
    return FileSize(sum(size for size, _ in sizes), sum(gzipped for _, gzipped in sizes))
