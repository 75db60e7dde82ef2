"""Partition of a net at its blocks: the modules of one pipeline stage, its optimizer, and its part of a checkpoint."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.errors import require
from lathe.nets import Blocks, blocks_of
from lathe.strategies.dtensors import entry_like, full, shard_like


def chain_of(net: nn.Module, strategy: str, stages: int = 1, slices: int = 1) -> list[nn.Module]:
    """Return the blocks of a net that can be cut into `stages` times `slices` parts; raise UserError for others."""
    blocks, problem = blocks_of(net), None
    missing = [part for part in ("blocks", "enter", "leave") if not hasattr(net, part)]
    if missing or not blocks or len(block_names(net)) < len(blocks):
        problem = f"has no `{(missing or ['blocks'])[0]}`"
    elif not getattr(net, "is_its_parts", lambda: True)():
        problem = "does more than run them one after the other"
    name = type(net).__name__
    require(
        problem is None,
        f"strategy={strategy} cuts a net between its repeated blocks, and {name} {problem}: use strategy=ddp or fsdp.",
    )
    require(
        stages * slices <= len(blocks),
        f"strategy.stages={stages} needs at least {stages * slices} blocks, and {name} has {len(blocks)}: choose fewer "
        "stages or a deeper net.",
    )
    return blocks


def block_names(net: nn.Module) -> list[str]:
    """Return the names of the blocks that the net owns, in order."""
    container = net._modules.get("blocks")
    if isinstance(container, nn.ModuleList | nn.Sequential):
        return [f"blocks.{name}" for name in container._modules]
    names = {id(module): name for name, module in net.named_modules()}
    return [names[id(block)] for block in blocks_of(net) if id(block) in names]


class Slice(nn.Module):
    """Consecutive blocks, with the modules before the first and after the last. It does not own its modules."""

    def __init__(self, net: nn.Module, blocks: list[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        own_blocks = Blocks(blocks)
        own_blocks.in_segments = getattr(net.blocks, "in_segments", False)
        self.__dict__.update(net=net, own_blocks=own_blocks)
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        net, own_blocks = self.__dict__["net"], self.__dict__["own_blocks"]
        own_blocks.training = net.training
        if self.first:
            x = net.enter(x)
        x = own_blocks(x)
        out: Tensor = net.leave(x) if self.last else x.contiguous()  # sending needs contiguous memory
        return out


class Partition:
    """The part of a net that stage `stage` of `stages` runs, in `slices` interleaved pieces.

    Blocks of other stages become `nn.Identity`, so names do not change. Modules outside the blocks are kept on the
    first and the last stage (both use a tied embedding) and dropped on the others. Before that, `apply_sharding` may
    shard the tensors of the whole net over the ranks of a stage.
    """

    def __init__(
        self,
        net: nn.Module,
        stages: int,
        stage: int,
        slices: int,
        strategy: str = "pipeline",
        apply_sharding: Callable[[nn.Module], None] = lambda net: None,
    ) -> None:
        blocks, total = chain_of(net, strategy, stages, slices), stages * slices
        edges = [index * len(blocks) // total for index in range(total + 1)]
        homes = [home % stages for home, (start, end) in enumerate(pairwise(edges)) for _ in range(start, end)]
        self.net, self.stage, self.stages, self.total = net, stage, stages, total
        self.first, self.last = stage == 0, stage == stages - 1
        self.blocks = block_names(net)
        self._check_shared(blocks, homes)
        self.skeleton = copy_without_memory(net)
        self.tensors = list(net.state_dict())
        self.outside = [name for name in self.tensors if not self._inside(name)]
        apply_sharding(net)
        net_blocks: Any = net.blocks
        for index, home in enumerate(homes):
            if home != stage:
                net_blocks[index] = nn.Identity()
                parent, _, attribute = self.blocks[index].rpartition(".")
                net.get_submodule(parent)._modules[attribute] = net_blocks[index]
        if not (self.first or self.last):
            _drop_outside(net, self.blocks)
        self.slices = {
            k: Slice(net, blocks[start:end], first=k == 0, last=k == total - 1)
            for k, (start, end) in enumerate(pairwise(edges))
            if k % stages == stage
        }
        self.used: set[str] = set()  # modules with buffers outside the blocks that this stage has run
        for name, module in net.named_modules():
            if not self._inside(name) and module is not net and module._buffers:
                module.register_forward_pre_hook(lambda module, args, name=name: self.used.add(name))
        self.groups: list[list[str]] = []  # names of the optimizer's parameters by group, for the whole net

    def _check_shared(self, blocks: list[nn.Module], homes: list[int]) -> None:
        """Raise UserError if two stages use the same tensor, but for those outside the blocks."""
        stages_of: dict[int, set[int]] = {}
        for block, home in zip(blocks, homes, strict=True):
            for tensor in [*block.parameters(), *block.buffers()]:
                stages_of.setdefault(id(tensor), set()).add(home)
        named = self.net.named_parameters(remove_duplicate=False), self.net.named_buffers(remove_duplicate=False)
        for name, tensor in chain.from_iterable(named):
            if not self._inside(name) and id(tensor) in stages_of:
                stages_of[id(tensor)].add(-1)
            require(
                len(stages_of.get(id(tensor), ())) < 2,
                f"strategy.stages cuts between two uses of the weight {name}, which a pipeline can't share: use "
                "strategy=fsdp.",
            )

    def _inside(self, name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)

    def shared(self) -> list[nn.Parameter]:
        """Return the parameters that the first and the last stage both have, in the same order on both."""
        outside = set(self.outside)
        return [p for name, p in self.net.named_parameters() if name in outside and p.requires_grad]

    # -- the optimizer

    def make_optimizer(self, factory: Callable[[nn.Module], Optimizer], net: nn.Module) -> Optimizer:
        """Return the optimizer that `factory` makes for the whole net, without the parameters of other stages.

        The whole net decides groups and roles, so every stage has the same groups, some of them empty.
        """
        own = dict(self.net.named_parameters(remove_duplicate=False))
        device = next((p.device for p in own.values()), torch.device("cpu"))
        away: dict[int, nn.Parameter] = {}  # one parameter for all names of a tied weight
        for name, stand_in in list(self.skeleton.named_parameters(remove_duplicate=False)):
            if name not in own and id(stand_in) not in away:
                away[id(stand_in)] = nn.Parameter(stand_in.detach().to(device), stand_in.requires_grad)
            module, _, leaf = name.rpartition(".")
            self.skeleton.get_submodule(module)._parameters[leaf] = own[name] if name in own else away[id(stand_in)]
        optimizer = factory(self.skeleton)
        names = {id(p): name for name, p in self.skeleton.named_parameters()}
        mine = {id(p) for p in own.values()}
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        for parameter in [p for p in optimizer.state if id(p) not in mine]:
            del optimizer.state[parameter]
        return optimizer

    def optimizer_ids(self) -> dict[int, int]:
        """Return the id in the whole net's optimizer of each parameter of this stage's, by its own id."""
        own = {name for name, _ in self.net.named_parameters()}
        names = [name for group in self.groups for name in group]
        return dict(enumerate(number for number, name in enumerate(names) if name in own))

    def local_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this stage's part of the whole net's optimizer state, by this stage's ids."""
        sizes, own_sizes = [len(group["params"]) for group in state["param_groups"]], [len(g) for g in self.groups]
        if sizes != own_sizes:
            raise ValueError(f"the checkpoint's optimizer has groups of {sizes} parameters, this one of {own_sizes}")
        names = [name for group in self.groups for name in group]
        parameters, ids = dict(self.net.named_parameters()), self.optimizer_ids()
        entries = {
            own: {key: entry_like(value, parameters[names[number]]) for key, value in state["state"][number].items()}
            for own, number in ids.items()
            if number in state["state"]
        }
        own_of = {number: own for own, number in ids.items()}
        groups = [
            {**group, "params": [own_of[number] for number in group["params"] if number in own_of]}
            for group in state["param_groups"]
        ]
        return {"state": entries, "param_groups": groups}

    # -- checkpoints

    def localize(self, checkpoint: dict[str, Any]) -> None:
        """Reduce a full checkpoint to this stage's tensors, but for the optimizer's state."""
        own = self.net.state_dict()
        for _, table in list(tables(checkpoint, set(self.tensors))):
            for name in list(table):
                if name in own:
                    table[name] = shard_like(table[name], own[name])
                else:
                    del table[name]

    def gather(self, checkpoint: dict[str, Any], stages: dist.ProcessGroup, send: bool = True) -> None:
        """Complete the checkpoint of the first rank of `stages`, one of each stage, with the others' tensors.

        Collective. Ranks without `send` only help to gather tensors that are sharded over them. The values share no
        memory with the net.
        """
        own_names, ids = set(self.net.state_dict()), self.optimizer_ids()
        if self.last and not self.first:  # tensors of two stages come from the first, used buffers from the last
            used = {name for name, _ in self.net.named_buffers() if name.rpartition(".")[0] in self.used}
            own_names = {name for name in own_names if self._inside(name) or name in used}
        mine = {
            path: {name: full(value).clone() for name, value in table.items() if name in own_names}
            for path, table in tables(checkpoint, set(self.tensors))
        }
        states = [
            {
                ids[own]: {
                    key: full(value).clone() if isinstance(value, Tensor) else value for key, value in entry.items()
                }
                for own, entry in state["state"].items()
            }
            for state in checkpoint.get("optimizer_states", [])
        ]
        if not send:
            return
        first = dist.get_group_rank(stages, dist.get_rank()) == 0
        box: list[Any] | None = [None] * self.stages if first else None
        dist.gather_object((mine, states), box, dst=dist.get_global_rank(stages, 0), group=stages)
        if box is None:
            return
        for other_tables, other_states in box[1:]:
            for path, table in other_tables.items():
                mine.setdefault(path, {}).update(table)
            for state, other in zip(states, other_states, strict=True):
                state.update({number: entry for number, entry in other.items() if number not in state})
        order = {name: position for position, name in enumerate(self.tensors)}
        for (*parents, last), table in mine.items():
            node = checkpoint
            for key in parents:
                node = node[key]
            node[last] = dict(sorted(table.items(), key=lambda item: order[item[0]]))
        for saved, state in zip(checkpoint.get("optimizer_states", []), states, strict=True):
            numbers = iter(range(sum(map(len, self.groups))))
            for group, names in zip(saved["param_groups"], self.groups, strict=True):
                group["params"] = [next(numbers) for _ in names]
            saved["state"] = dict(sorted(state.items()))


def tables(
    state: Any, names: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield each dict in a checkpoint of tensors by the net's names, such as the weights, with its path."""
    if not isinstance(state, dict) or not state:
        return
    if all(isinstance(value, Tensor) for value in state.values()) and names.issuperset(state):
        yield path, state
        return
    for key, value in state.items():
        if isinstance(key, str) and key != "optimizer_states":
            yield from tables(value, names, (*path, key))


def copy_without_memory(net: nn.Module) -> nn.Module:
    """Return a copy of the net whose tensors have a shape but no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*net.parameters(), *net.buffers()]:
        empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(net, memo)


def _drop_outside(net: nn.Module, blocks: list[str]) -> None:
    for name in list(net._modules):
        below = [block[len(name) + 1 :] for block in blocks if block.startswith(f"{name}.")]
        if below:
            _drop_outside(net.get_submodule(name), below)
        elif name not in blocks and net._modules[name] is not None:
            net._modules[name] = nn.Identity()
    for table in (net._parameters, net._buffers):
        for name in list(table):
            table[name] = None
