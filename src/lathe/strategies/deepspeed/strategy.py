"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) on CUDA and on gloo, with plain checkpoints."""

import argparse
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from pydantic import Field
from torch import nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.strategies.deepspeed.precision import PRECISIONS, EnginePrecision
from lathe.strategies.deepspeed.process import (
    adopt_process_group,
    import_deepspeed,
    restore_linear,
    share_equal_copies,
    use_accelerator,
)
from lathe.strategies.deepspeed.state import PlainState, full_weights

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, with five differences.

    It runs on CPUs as well; it reads and writes one plain checkpoint file that every other strategy opens; gradient
    accumulation ends with the epoch, and bf16-mixed means autocast, as under every strategy; and it is quiet.

    Stage 1 shards the optimizer's state over the ranks, 2 gradients as well, 3 parameters as well. Sizes are numbers of
    scalars.

    Raises:
        UserError: DeepSpeed is not installed, the stage is unknown or lacks an offload; in `setup`: ZeRO does not
            support the precision, the clipping or the optimizer.
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
        name = f"deepspeed_{stage}{'_offload' if offload_optimizer or offload_parameters else ''}"
        if offload_parameters and stage != 3:
            raise ArgumentError(
                f"offload_parameters=true: stage {stage} does not split parameters, use strategy=deepspeed_3_offload."
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError(f"strategy={name} needs DeepSpeed: pip install -e '.[deepspeed]'")
        self._name = name
        zero: dict[str, Any] = {
            "stage": stage,
            "reduce_bucket_size": reduce_bucket_size,
            "allgather_bucket_size": allgather_bucket_size,
            "overlap_comm": overlap_comm,
            "contiguous_gradients": contiguous_gradients,
            "sub_group_size": sub_group_size,
        }
        if stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": persistence_threshold,
                "stage3_prefetch_bucket_size": prefetch_bucket_size,
                "stage3_max_live_parameters": max_live_parameters,
            }
            if model_persistence_threshold is not None:
                zero["stage3_model_persistence_threshold"] = model_persistence_threshold
        if offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
        if offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
        config = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # its own CPU Adam is compiled at first use and has only one update rule
            "zero_force_ds_cpu_optimizer": False,
        }
        import_deepspeed(LEVELS[log_level])
        super().__init__(config=config, logging_level=LEVELS[log_level])
        self._plain: PlainState | None = None

    # -- precision

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision not in PRECISIONS:
            raise UserError(f"precision={plugin.precision}: {self._name} takes {', '.join(PRECISIONS)}.")
        self._precision_plugin = None if plugin is None else EnginePrecision(plugin)

    @property
    def _engine_precision(self) -> EnginePrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, EnginePrecision)
        return plugin

    # -- processes

    def setup_environment(self) -> None:
        Strategy.setup_environment(self)  # Lightning's own accepts only CUDA
        self.setup_distributed()

    def setup_distributed(self) -> None:
        super(DeepSpeedStrategy, self).setup_distributed()
        use_accelerator(self.root_device.type)
        adopt_process_group(self._get_process_group_backend())

    # -- engine

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE and trainer.gradient_clip_val:
            raise UserError(
                f"trainer.gradient_clip_algorithm=value: {self._name} clips by the global norm alone, use norm."
            )
        if self.root_device.type == "cpu":
            if self.precision_plugin.precision == "16-mixed":
                raise UserError(f"precision=16-mixed: {self._name} has no float16 on CPUs, use precision=bf16-mixed.")
            for where in ("offload_optimizer", "offload_param"):
                self._zero.get(where, {})["pin_memory"] = False
        if self._layer_sync is not None and self.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    @property
    def _device_rank(self) -> int:
        return self.local_rank if self.root_device.index is None else self.root_device.index

    @property
    def _zero(self) -> dict[str, Any]:
        assert isinstance(self.config, dict)
        zero: dict[str, Any] = self.config["zero_optimization"]
        return zero

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        # Lightning divides the loss by accumulate_grad_batches; `training_step` sets the boundary before each backward
        self.config |= {
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own samples/s
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            **self._engine_precision.engine_config(),
        }

    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()
        self._check_optimizer(optimizer)
        return optimizer, scheduler

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        whole = (LBFGS, Adafactor, SparseAdam, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))
        if isinstance(optimizer, whole) or getattr(optimizer, "needs_whole_weights", False):
            raise UserError(
                f"strategy={self._name} cuts parameters into flat pieces, and {type(optimizer).__name__} needs them "
                "whole: use optimizer=adamw or sgd, or strategy=ddp."
            )

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        import deepspeed

        assert optimizer is not None
        self._plain = PlainState(optimizer)
        engine, zero_optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self._device_rank),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        share_equal_copies(zero_optimizer)
        self._plain.attach(zero_optimizer)
        return engine, zero_optimizer

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        # stages 1 and 2 shard nothing that evaluation uses: run the plain net
        model.to(self.root_device)
        if self._zero["stage"] != 3:
            return
        import deepspeed

        assert isinstance(self.config, dict)
        config = {key: value for key, value in self.config.items() if key != "gradient_clipping"}
        self.model = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self._device_rank),
            config=config,
            model=model,
            model_parameters=[],
            dist_init_required=False,
        )[0]

    def teardown(self) -> None:
        super().teardown()
        restore_linear()

    # -- steps

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
        assert self._plain is not None
        return self._plain.state_dict(self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        assert self._plain is not None
        scaler = self._plain.scaler_state()
        if scaler:
            checkpoint["deepspeed"] = scaler
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        Strategy.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._plain is not None
        assert self.lightning_module is not None
        self._plain.load_state_dict(checkpoint["optimizer_states"][0])
        if self.precision_plugin.precision not in ("32-true", "bf16-mixed"):
            weights = {
                **checkpoint["state_dict"],
                **{f"net.{k}": v for k, v in checkpoint.get("ema", {}).get("raw", {}).items()},
            }
            self._plain.load_weights(dict(self.lightning_module.named_parameters()), weights)
        self._plain.load_scaler_state(checkpoint.get("deepspeed"))
