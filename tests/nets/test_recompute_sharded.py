"""Recomputed blocks on two ranks: sharded by fully_shard, and with BatchNorm over all ranks under DDP."""

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lathe.nets import GPT, CifarResNet
from lathe.nets.recompute import apply
from lathe.strategies import SyncBatchNorm


def train(rank: int, spread: str, how: str) -> dict[str, Tensor]:
    """Train three steps; return this rank's losses, and the final weights and buffers."""
    torch.manual_seed(0)
    net: nn.Module
    if spread == "fully_shard":
        net = GPT(vocab_size=11, max_length=8, width=16, depth=5, heads=4, dropout=0.1)
        x = torch.randint(11, (2, 3, 8))[rank]
    else:
        net = CifarResNet(depth=14, width=4)
        x = torch.rand(2, 4, 3, 8, 8)[rank]
    apply(net, how)
    called: Any = net
    if spread == "fully_shard":
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    else:
        called = DistributedDataParallel(SyncBatchNorm().apply(net), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = called(x).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in net.state_dict().items()}
    return {"losses": torch.stack(losses), **whole}


def train_in_every_way(rank: int) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {
        spread: {how: train(rank, spread, how) for how in ("none", "every_2", "sqrt", "offload")}
        for spread in ("fully_shard", "ddp")
    }


@pytest.mark.slow
def test_sharded_and_synchronised_blocks_are_recomputed_bit_for_bit() -> None:
    for found in (found for ranks in on_ranks(train_in_every_way) for found in ranks.values()):
        plain = found.pop("none")
        assert plain["losses"][2] < plain["losses"][0]
        for how, other in found.items():
            assert [name for name in plain if not torch.equal(plain[name], other[name])] == [], how
