"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) on CUDA and on gloo, with plain checkpoints."""

import argparse
import importlib
import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.apply_func import apply_to_collection
from pydantic import Field
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # the state of a dynamic loss scale
WHOLE_WEIGHTS = (LBFGS, Adafactor, SparseAdam, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, with five differences.

    It runs on CPUs as well; it reads and writes one plain checkpoint file that every other strategy opens; gradient
    accumulation ends with the epoch, and bf16-mixed means autocast, as under every strategy; and it is quiet.

    Stage 1 shards the optimizer's state over the ranks, 2 gradients as well, 3 parameters as well. Sizes are numbers of
    scalars.
    """

    # after fit the parameters are views of DeepSpeed's buffers, or empty: the test needs a new net
    reshapes = True

    @validated
    def __init__(
        self,
        stage: Annotated[int, Field(ge=1, le=3)] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        pin_memory: bool = True,
        reduce_bucket_size: Count = 50_000_000,
        allgather_bucket_size: Count = 50_000_000,
        overlap_comm: bool = True,
        contiguous_gradients: bool = True,
        sub_group_size: Count = 1_000_000_000,
        persistence_threshold: NonNegativeInt = 100_000,
        model_persistence_threshold: NonNegativeInt | None = None,
        prefetch_bucket_size: NonNegativeInt = 50_000_000,
        max_live_parameters: NonNegativeInt = 1_000_000_000,
        log_level: Literal["debug", "info", "warning", "error"] = "error",
    ) -> None:
        self._name = f"deepspeed_{stage}{'_offload' if offload_optimizer or offload_parameters else ''}"
        if offload_parameters and stage != 3:
            raise ArgumentError(f"offload_parameters=true: stage {stage} does not split parameters, use stage=3.")
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError(f"strategy={self._name} needs DeepSpeed: pip install -e '.[deepspeed]'")
        zero: dict[str, Any] = {
            "stage": stage,
            "reduce_bucket_size": reduce_bucket_size,
            "allgather_bucket_size": allgather_bucket_size,
            "overlap_comm": overlap_comm,
            "contiguous_gradients": contiguous_gradients,
            "sub_group_size": sub_group_size,
            "stage3_param_persistence_threshold": persistence_threshold,
            "stage3_prefetch_bucket_size": prefetch_bucket_size,
            "stage3_max_live_parameters": max_live_parameters,
        }
        if model_persistence_threshold is not None:
            zero["stage3_model_persistence_threshold"] = model_persistence_threshold
        for key, offloads in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
            if offloads:
                zero[key] = {"device": "cpu", "pin_memory": pin_memory}
        config = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # its own CPU Adam is compiled at first use and has only one update rule
            "zero_force_ds_cpu_optimizer": False,
        }
        level = logging.getLevelNamesMapping()[log_level.upper()]
        _import_quietly(level)
        super().__init__(config=config, logging_level=level)
        self._zero = zero
        self._plain: Any = None  # PlainState of the optimizer

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision not in PRECISIONS:
            raise UserError(f"precision={plugin.precision}: {self._name} takes {', '.join(PRECISIONS)}.")
        self._precision_plugin = None if plugin is None else EnginePrecision(plugin)

    def setup_environment(self) -> None:
        Strategy.setup_environment(self)  # Lightning's own accepts only CUDA
        self.setup_distributed()

    def setup_distributed(self) -> None:
        super(DeepSpeedStrategy, self).setup_distributed()
        # By default DeepSpeed takes a GPU if the machine has one. On CPUs it would first compile a shared-memory
        # all-reduce (about a minute, and it needs a compiler); gloo does the same.
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator

        if self.root_device.type == "cpu" and get_accelerator().device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        backends: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute of its package, torch itself
        build, backends.build_shm_op = backends.build_shm_op, lambda: None
        try:
            deepspeed.init_distributed(self._get_process_group_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            backends.build_shm_op = build

    def setup(self, trainer: Trainer) -> None:
        require(
            not trainer.gradient_clip_val or trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE,
            f"trainer.gradient_clip_algorithm=value: {self._name} clips by the global norm alone, use norm.",
        )
        if self.root_device.type == "cpu":
            require(
                self.precision_plugin.precision != "16-mixed",
                f"precision=16-mixed: {self._name} has no float16 on CPUs, use precision=bf16-mixed.",
            )
            for where in ("offload_optimizer", "offload_param"):
                self._zero.get(where, {})["pin_memory"] = False
        if self._layer_sync is not None and self.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        assert self.lightning_module is not None
        assert isinstance(self.precision_plugin, EnginePrecision)
        # Lightning divides the loss by accumulate_grad_batches; `training_step` sets the boundary before each backward
        self.config |= {
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own samples/s
            "gradient_clipping": self.lightning_module.trainer.gradient_clip_val or 0.0,
            **self.precision_plugin.engine_config(),
        }

    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()
        require(
            not isinstance(optimizer, WHOLE_WEIGHTS) and not getattr(optimizer, "needs_whole_weights", False),
            f"strategy={self._name} cuts parameters into flat pieces, and {type(optimizer).__name__} needs them "
            "whole: use optimizer=adamw or sgd, or strategy=ddp.",
        )
        return optimizer, scheduler

    def _initialize(self, **arguments: Any) -> Any:
        import deepspeed

        index = self.local_rank if self.root_device.index is None else self.root_device.index
        return deepspeed.initialize(args=argparse.Namespace(device_rank=index), dist_init_required=False, **arguments)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        assert optimizer is not None
        self._plain = PlainState(optimizer)
        engine, zero_optimizer, _, _ = self._initialize(
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        self._plain.attach(zero_optimizer)
        return engine, zero_optimizer

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        model.to(self.root_device)
        if self._zero["stage"] == 3:  # the others shard nothing that evaluation uses: run the plain net
            assert isinstance(self.config, dict)
            config = {key: value for key, value in self.config.items() if key != "gradient_clipping"}
            self.model = self._initialize(config=config, model=model, model_parameters=[])[0]

    def teardown(self) -> None:
        super().teardown()
        # stage 3's `linear` keeps no gathered weight from forward to backward
        from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patch

        torch.nn.functional.linear = getattr(Patch, "linear_bk", torch.nn.functional.linear)

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False  # DeepSpeed's own counter would carry an unfinished window into the next epoch

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield  # `set_gradient_accumulation_boundary` does it; no_sync belongs to DistributedDataParallel

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        accumulates = self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not accumulates)
        return super().training_step(*args, **kwargs)

    # -- checkpoints: plain ones, through the trainer's checkpoint_io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # load weights into the plain net, before DeepSpeed shards it

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return full_weights(self.lightning_module, self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._plain.state_dict(self.is_global_zero)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        zero = self._plain.zero
        if getattr(zero, "dynamic_loss_scale", False):
            checkpoint["deepspeed"] = {
                key: getattr(zero.loss_scaler, key) for key in SCALER if hasattr(zero.loss_scaler, key)
            }
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        self._plain.load_state_dict(checkpoint["optimizer_states"][0])
        if self.precision_plugin.precision not in ("32-true", "bf16-mixed"):
            raw = {f"net.{name}": value for name, value in checkpoint.get("ema", {}).get("raw", {}).items()}
            weights = {**checkpoint["state_dict"], **raw}
            # the optimizer's float32 copies; the parameters already have the rounded values
            for name, parameter in self.lightning_module.named_parameters():
                if parameter.requires_grad and name in weights:
                    self._plain.write(parameter, weights[name], None)
        for key, value in checkpoint.get("deepspeed", {}).items():
            setattr(self._plain.zero.loss_scaler, key, value)


def _import_quietly(level: int) -> None:
    """Import DeepSpeed without its warning about a missing GPU and its logs on stdout below `level`."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
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


class EnginePrecision(DeepSpeedPrecision):
    """The precision plugin of a DeepSpeed engine.

    bf16-mixed is torch's autocast around float32 parameters, as under every other strategy. bf16-true and 16-mixed are
    DeepSpeed's formats: parameters and gradients have half the width, and the optimizer updates float32 copies that are
    sharded over the ranks. A GradScaler of the run's plugin sets DeepSpeed's initial loss scale and growth interval.
    """

    def __init__(self, plugin: Precision) -> None:
        super().__init__(plugin.precision)  # type: ignore[arg-type]  # checked by the strategy
        scaler = getattr(plugin, "scaler", None)
        self._init_scale = float(scaler.get_scale()) if scaler is not None else 65536.0
        self._growth_interval = int(scaler.get_growth_interval()) if scaler is not None else 2000

    def convert_module(self, module: nn.Module) -> nn.Module:
        narrow = self.precision in ("bf16-true", "16-mixed")
        return module.to(self._desired_dtype) if narrow else module

    def convert_input(self, data: Any) -> Any:
        dtype = torch.float32 if self.precision == "bf16-mixed" else self._desired_dtype
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        # for evaluation without an engine; an engine has its own autocast
        if self.precision != "bf16-mixed":
            return nullcontext()
        from deepspeed.accelerator import get_accelerator

        return torch.autocast(get_accelerator().device_name(), dtype=torch.bfloat16)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def engine_config(self) -> dict[str, Any]:
        """Return the section of DeepSpeed's configuration for the number format."""
        if self.precision == "bf16-mixed":
            # without "safe" modules, whose gradients would be reduced in bf16, as no other strategy does by default
            return {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
        if self.precision == "16-mixed":
            power = round(math.log2(self._init_scale))
            fp16 = {"enabled": True, "initial_scale_power": power, "loss_scale_window": self._growth_interval}
            return {"fp16": {**fp16, "loss_scale": 0}}  # dynamic
        return {"bf16": {"enabled": True}} if self.precision == "bf16-true" else {}


# -- a ZeRO engine's weights and optimizer state, and those of a single process


def full_weights(module: nn.Module, keep: bool) -> dict[str, Any]:
    """Return `module`'s state dict as full CPU tensors, parameters in float32; {} without `keep`. Collective."""
    import deepspeed

    state: dict[str, Any] = {}
    seen: dict[int, Tensor] = {}  # a tied weight is gathered once
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            attached = hasattr(value, "_z3_optimizer") or hasattr(value, "_hp_mapping")
            master = deepspeed.utils.safe_get_full_fp32_param(value) if value.requires_grad and attached else None
            is_split = master is None and hasattr(value, "ds_id")
            with deepspeed.zero.GatheredParameters([value]) if is_split else nullcontext():
                seen[id(value)] = _on_cpu(value if master is None else master, keep)
        state[name] = seen.get(id(value), value)
    return state if keep else {}


def _on_cpu(value: Tensor, keep: bool) -> Tensor:
    if not keep:
        return torch.empty(0)
    value = value.detach()
    wide = value.float() if value.is_floating_point() and value.dtype != torch.float64 else value
    return wide.to("cpu", copy=True)


class PlainState:
    """Reads and writes ZeRO's flat shards, parameter by parameter.

    Create it from the plain optimizer before the engine, which replaces the parameters by flat ones; then call
    `attach`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._options = [[key for key in group if key != "params"] for group in optimizer.param_groups]
        self.zero: Any = None

    def attach(self, zero: Any) -> None:
        """Set the ZeRO optimizer that DeepSpeed made from the plain one.

        Its flat shards share memory with the net's where both have the same dtype: DeepSpeed 0.19 keeps a second copy
        of a float32 net's shards, a third of stage 3's memory with AdamW.
        """
        self.zero = zero
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            nets = zero.fp16_partitioned_groups_flat
        else:
            ranks = [torch.distributed.get_rank(group) for group in zero.real_dp_process_group]
            nets = [pieces[rank] for pieces, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
        for (flat, _), own in zip(self._pieces(), nets, strict=True):
            if own is not None and (own.dtype, own.device, own.shape) == (flat.dtype, flat.device, flat.shape):
                flat.data = own.data
        if hasattr(zero, "_hp_optimizer_states_linked"):
            zero._link_all_hp_params()

    def _pieces(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """Yield this rank's flat float32 shards with the parameters in each; every rank has the same number."""
        if hasattr(self.zero, "fp32_partitioned_groups_flat"):
            yield from zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)
        else:
            yield from zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True)

    def _link(self) -> None:
        # DeepSpeed 0.19 links parameters to their state (stages 1 and 2) right after its first group's first step, so
        # the other groups, which have no state yet, are never linked
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the `state_dict()` of the plain optimizer in a single process; {} without `keep`. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        number = {id(p): n for n, p in enumerate(p for group in self._groups for p in group)}
        state: dict[int, dict[str, Any]] = {}
        for flat, parameters in self._pieces():
            known = self.zero.optimizer.state.get(flat, {})
            for parameter in parameters if known else ():
                entry = state[number[id(parameter)]] = dict[str, Any]()
                for key, value in known.items():
                    entry[key] = value
                    if isinstance(value, Tensor) and value.shape == flat.shape:
                        entry[key] = _on_cpu(safe_get_full_optimizer_state(parameter, key), keep)
                    elif isinstance(value, Tensor):
                        entry[key] = value.detach().to("cpu", copy=True)
        groups = [
            {**{key: group[key] for key in options}, "params": [number[id(p)] for p in parameters]}
            for group, options, parameters in zip(
                self.zero.optimizer.param_groups, self._options, self._groups, strict=True
            )
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups} if keep else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a plain optimizer's full state, which every rank has, into this rank's shards."""
        sizes, own = [len(group["params"]) for group in saved["param_groups"]], [len(group) for group in self._groups]
        require(
            sizes == own,
            f"ckpt_path: the checkpoint's optimizer has parameter groups of {sizes} tensors, this run's has {own}: use "
            "the optimizer and the net that it was saved with.",
        )
        base = self.zero.optimizer
        for group, options, old in zip(base.param_groups, self._options, saved["param_groups"], strict=True):
            group.update({key: old[key] for key in options if key in old})
        ids = [n for group in saved["param_groups"] for n in group["params"]]
        all_parameters = [parameter for group in self._groups for parameter in group]
        entries = {id(p): saved["state"].get(n, {}) for n, p in zip(ids, all_parameters, strict=True)}
        for flat, parameters in self._pieces():
            known: dict[str, Any] = {}
            for parameter in parameters:
                for key, value in entries[id(parameter)].items():
                    if not isinstance(value, Tensor):
                        known[key] = value
                    elif _is_elementwise(key, value, parameter):
                        known.setdefault(key, torch.zeros_like(flat, requires_grad=False))
                    else:
                        known[key] = value.clone()
            if known:
                base.state[flat] = known
        self._link()
        for parameter in (p for _, parameters in self._pieces() for p in parameters):
            for key, value in entries[id(parameter)].items():
                if isinstance(value, Tensor) and _is_elementwise(key, value, parameter):
                    self.write(parameter, value, key)

    def write(self, parameter: Any, value: Tensor, key: str | None) -> None:
        """Set a parameter's state `key`, or without one its float32 copy, from the full `value`."""
        value = value.to(parameter.device, torch.float32)
        if not hasattr(parameter, "ds_id"):
            parameter.set_full_hp_param(value, key)
            return
        # DeepSpeed's own function for full tensors does not pad a tensor whose size the ranks do not divide
        part = parameter.ds_tensor.numel()
        first = part * self.zero._get_param_partition_rank(parameter)
        mine = value.new_zeros(part)
        values = value.flatten()[first : first + part]
        mine[: values.numel()] = values
        self.zero.set_local_hp_param(mine, parameter, key)


def _is_elementwise(key: str, value: Tensor, parameter: nn.Parameter) -> bool:
    return key != "step" and value.shape == getattr(parameter, "ds_shape", parameter.shape)
