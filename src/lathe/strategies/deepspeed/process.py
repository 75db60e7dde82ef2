"""Sets up DeepSpeed in this process: import, device and process group."""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def _absent(package: str) -> Iterator[None]:
    """Make imports of the package fail in this context, unless it is already imported."""
    there = package in sys.modules
    if not there:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not there:
            del sys.modules[package]


def _import_muon() -> None:
    from deepspeed.runtime import compiler

    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_


def import_deepspeed(level: int) -> None:
    """Import DeepSpeed without its warning about a missing GPU and its logs on stdout.

    Also skip imports that take nine tenths of the time and are not used here: mlflow (for the autotuner), and Inductor
    (which compiles DeepSpeed's Muon, a class that its optimizer checks need).
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings(), _absent("mlflow"):
        warnings.simplefilter("ignore")
        import deepspeed

        with suppress(ImportError, AttributeError):  # other versions may lack it; their import is slower
            _import_muon()
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        category=FutureWarning,
    )
    deepspeed.utils.logging.logger.setLevel(level)
    for handler in deepspeed.utils.logging.logger.handlers:
        # its own handler has a level too; never raise it: a handler may be shared with other loggers
        handler.setLevel(min(level, handler.level))


def use_accelerator(device_type: str) -> None:
    """Make DeepSpeed use the Trainer's device type; by default it takes a GPU if the machine has one."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type:
        return
    if device_type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())


def adopt_process_group(backend: str) -> None:
    """Make DeepSpeed use the existing process group.

    On CPUs DeepSpeed would first compile a shared-memory all-reduce (about a minute, and it needs a compiler); gloo
    does the same.
    """
    import deepspeed

    backends = importlib.import_module(
        "deepspeed.comm.torch"
    )  # as an attribute of its package the name is torch itself

    build = getattr(backends, "build_shm_op", None)
    setattr(backends, "build_shm_op", lambda: None)  # noqa: B010
    try:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    finally:
        setattr(backends, "build_shm_op", build)  # noqa: B010


def restore_linear() -> None:
    """Restore torch's `linear`; stage 3's replacement keeps no gathered weight from forward to backward."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patch

    torch.nn.functional.linear = getattr(Patch, "linear_bk", torch.nn.functional.linear)


def share_equal_copies(zero: Any) -> None:
    """Let the optimizer's flat shards share memory with the net's where both have the same dtype.

    DeepSpeed 0.19 keeps a second copy of a float32 net's shards: a third of stage 3's memory with AdamW.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        pairs = list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
    else:
        ranks = [torch.distributed.get_rank(group) for group in zero.real_dp_process_group]
        held = [pieces[rank] for pieces, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
        pairs = list(zip(zero.single_partition_of_fp32_groups, held, strict=True))
    for stepped, own in pairs:
        if own is not None and (own.dtype, own.device, own.shape) == (stepped.dtype, stepped.device, stepped.shape):
            stepped.data = own.data
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._link_all_hp_params()
