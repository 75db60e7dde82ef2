"""Partition of a net at its blocks: the modules of one stage, and its share of the net's optimizer."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.errors import UserError
from lathe.nets import Blocks, blocks_of


def chain_of(net: nn.Module, strategy: str) -> list[nn.Module]:
    """Return the blocks of a net that can be cut between any two of them.

    Raises:
        UserError: the net names no blocks, lacks `enter` or `leave`, or its `is_its_parts` returns false.
    """
    blocks = blocks_of(net)
    name = type(net).__name__
    missing = [part for part in ("enter", "leave") if not callable(getattr(net, part, None))]
    if not blocks or len(block_names(net)) < len(blocks):
        raise UserError(
            f"strategy={strategy} cuts a net between its repeated blocks, and {name} names no `blocks`: use "
            "strategy=ddp or fsdp."
        )
    if missing:
        raise UserError(
            f"strategy={strategy} cuts a net between its repeated blocks, and {name} has no `{missing[0]}` for what is "
            f"{'before' if missing[0] == 'enter' else 'behind'} them: add that method, or use strategy=ddp or fsdp."
        )
    whole = getattr(net, "is_its_parts", None)
    if callable(whole) and not whole():
        raise UserError(
            f"strategy={strategy} cuts a net between its repeated blocks, and {name} does more than run them one after "
            "the other: use strategy=ddp or fsdp."
        )
    return blocks


def block_names(net: nn.Module) -> list[str]:
    """Return the names of the blocks that the net owns, in order."""
    container = net._modules.get("blocks")
    if isinstance(container, nn.ModuleList | nn.Sequential):
        return [f"blocks.{name}" for name in container._modules]
    names = {id(module): name for name, module in net.named_modules()}
    return [names[id(block)] for block in blocks_of(net) if id(block) in names]


def enough_blocks(net: nn.Module, stages: int, slices: int, strategy: str) -> list[nn.Module]:
    """Return the blocks of a net that can be cut into `stages` times `slices` parts."""
    blocks, total = chain_of(net, strategy), stages * slices
    if total > len(blocks):
        what = f"strategy.stages={stages}" + (f" x strategy.slices={slices}" if slices > 1 else "")
        raise UserError(
            f"{what} needs at least {total} blocks, and {type(net).__name__} has {len(blocks)}: choose fewer stages "
            "or a deeper net."
        )
    return blocks


class Slice(nn.Module):
    """Consecutive blocks, with the modules before the first and after the last. It does not own its modules."""

    def __init__(self, net: nn.Module, blocks: list[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        chain = Blocks(blocks)
        chain.in_segments = getattr(net.blocks, "in_segments", False)
        self.__dict__.update(net=net, chain=chain)
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        net, chain = self.__dict__["net"], self.__dict__["chain"]
        chain.training = net.training
        if self.first:
            x = net.enter(x)
        x = chain(x)
        out: Tensor = net.leave(x) if self.last else x.contiguous()  # sending needs contiguous memory
        return out


class Cut:
    """The part of a net that stage `stage` of `stages` runs, in `slices` interleaved pieces.

    Blocks of other stages become `nn.Identity`, so names do not change. Modules outside the blocks are kept on the
    first and the last stage (both use a tied embedding) and dropped on the others. Before that, `spread` may shard the
    tensors of the whole net over the ranks of a stage.
    """

    def __init__(
        self,
        net: nn.Module,
        stages: int,
        stage: int,
        slices: int,
        strategy: str = "pipeline",
        spread: Callable[[nn.Module], None] | None = None,
    ) -> None:
        blocks, total = enough_blocks(net, stages, slices, strategy), stages * slices
        edges = [index * len(blocks) // total for index in range(total + 1)]
        homes = [home % stages for home, (start, end) in enumerate(pairwise(edges)) for _ in range(start, end)]
        self.blocks = block_names(net)
        _refuse_shared(net, blocks, homes, self._inside)
        self.net, self.stage, self.stages, self.total = net, stage, stages, total
        self.first, self.last = stage == 0, stage == stages - 1
        self.skeleton = _skeleton(net)
        self.tensors = list(net.state_dict())
        self.outside = [name for name in self.tensors if not self._inside(name)]
        if spread is not None:
            spread(net)
        chain: Any = net.blocks
        for index, home in enumerate(homes):
            if home != stage:
                chain[index] = nn.Identity()
                parent, _, attribute = self.blocks[index].rpartition(".")
                net.get_submodule(parent)._modules[attribute] = chain[index]
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

    def _inside(self, name: str) -> bool:
        """Return whether a module or a tensor is in a block, or is a block."""
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)

    def owner(self, k: int) -> int:
        """Return the stage that runs slice `k`."""
        return k % self.stages

    def shared(self) -> list[nn.Parameter]:
        """Return the parameters that the first and the last stage both have, in the same order on both."""
        outside = set(self.outside)
        return [p for name, p in self.net.named_parameters() if name in outside and p.requires_grad]

    def shown(self) -> set[str]:
        """Return the names of the tensors for which a checkpoint takes this stage's value.

        Tensors of two stages come from the first; buffers (BatchNorm's statistics) come from the last if it has used
        them.
        """
        own = set(self.net.state_dict())
        if self.first or not self.last:
            return own
        buffers = {name for name, _ in self.net.named_buffers()}
        return {
            name for name in own if self._inside(name) or (name in buffers and name.rpartition(".")[0] in self.used)
        }

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

    def optimizer_names(self) -> list[str]:
        """Return the names of this stage's optimized parameters, in the order of its optimizer."""
        own = {name for name, _ in self.net.named_parameters()}
        return [name for group in self.groups for name in group if name in own]


def _refuse_shared(net: nn.Module, blocks: list[nn.Module], homes: list[int], inside: Callable[[str], bool]) -> None:
    places: dict[int, set[int]] = {}
    for block, home in zip(blocks, homes, strict=True):
        for tensor in [*block.parameters(), *block.buffers()]:
            places.setdefault(id(tensor), set()).add(home)
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if not inside(name) and id(tensor) in places:
            places[id(tensor)].add(-1)
        if len(places.get(id(tensor), ())) > 1:
            raise UserError(
                f"strategy.stages cuts between two uses of the weight {name}, which a pipeline can't share: use "
                "strategy=fsdp."
            )


def _skeleton(net: nn.Module) -> nn.Module:
    """Return a copy of the net whose tensors have a shape but no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*net.parameters(), *net.buffers()]:
        stand_in = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        memo[id(tensor)] = (
            nn.Parameter(stand_in, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stand_in
        )
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
