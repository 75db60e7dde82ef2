"""Converts a ZeRO engine's weights and optimizer state to and from those of a single process."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.errors import require

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def full_weights(module: nn.Module, keep: bool) -> dict[str, Any]:
    """Return `module`'s state dict as full CPU tensors, parameters in float32; {} without `keep`. Collective."""
    state: dict[str, Any] = {}
    seen: dict[int, Tensor] = {}  # a tied weight is gathered once
    for name, value in module.state_dict(keep_vars=True).items():
        state[name] = value
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = _full(value, keep)
            state[name] = seen[id(value)]
    return state if keep else {}


def _full(value: Any, keep: bool) -> Tensor:
    import deepspeed

    if isinstance(value, nn.Parameter):
        attached = hasattr(value, "_z3_optimizer") or hasattr(value, "_hp_mapping")
        master = deepspeed.utils.safe_get_full_fp32_param(value) if value.requires_grad and attached else None
        if master is not None:
            return _on_cpu(master, keep)
        if hasattr(value, "ds_id"):
            with deepspeed.zero.GatheredParameters([value]):
                return _on_cpu(value, keep)
    return _on_cpu(value, keep)


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
        self._zero: Any = None

    def attach(self, zero: Any) -> None:
        """Set the ZeRO optimizer that DeepSpeed made from the plain one.

        Its flat shards share memory with the net's where both have the same dtype: DeepSpeed 0.19 keeps a second copy
        of a float32 net's shards, a third of stage 3's memory with AdamW.
        """
        self._zero = zero
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
        if hasattr(self._zero, "fp32_partitioned_groups_flat"):
            yield from zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True)
        else:
            yield from zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups, strict=True)

    def _link(self) -> None:
        # DeepSpeed 0.19 links parameters to their state (stages 1 and 2) right after its first group's first step, so
        # the other groups, which have no state yet, are never linked
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the `state_dict()` of the plain optimizer in a single process; {} without `keep`. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        number = {id(p): n for n, p in enumerate(p for group in self._groups for p in group)}
        state: dict[int, dict[str, Any]] = {}
        for flat, parameters in self._pieces():
            known = self._zero.optimizer.state.get(flat, {})
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
                self._zero.optimizer.param_groups, self._options, self._groups, strict=True
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
        base = self._zero.optimizer
        for group, options, old in zip(base.param_groups, self._options, saved["param_groups"], strict=True):
            group.update({key: old[key] for key in options if key in old})
        ids = [n for group in saved["param_groups"] for n in group["params"]]
        every = [parameter for group in self._groups for parameter in group]
        entries = {id(p): saved["state"].get(n, {}) for n, p in zip(ids, every, strict=True)}
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
                    self._write(parameter, value, key)

    def load_weights(self, names: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Set the optimizer's float32 copies; the parameters already have the rounded values."""
        for name, parameter in names.items():
            if parameter.requires_grad and name in weights:
                self._write(parameter, weights[name], None)

    def _write(self, parameter: Any, value: Tensor, key: str | None) -> None:
        value = value.to(parameter.device, torch.float32)
        if not hasattr(parameter, "ds_id"):
            parameter.set_full_hp_param(value, key)
            return
        # DeepSpeed's own function for full tensors does not pad a tensor whose size the ranks do not divide
        part = parameter.ds_tensor.numel()
        first = part * self._zero._get_param_partition_rank(parameter)
        mine = value.new_zeros(part)
        held = value.flatten()[first : first + part]
        mine[: held.numel()] = held
        self._zero.set_local_hp_param(mine, parameter, key)

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of a dynamic loss scale; {} for formats without one."""
        scaler = getattr(self._zero, "loss_scaler", None)
        if not getattr(self._zero, "dynamic_loss_scale", False):
            return {}
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def load_scaler_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state from `scaler_state`."""
        for key, value in (state or {}).items():
            setattr(self._zero.loss_scaler, key, value)


def _is_elementwise(key: str, value: Tensor, parameter: nn.Parameter) -> bool:
    return key != "step" and value.shape == getattr(parameter, "ds_shape", parameter.shape)
