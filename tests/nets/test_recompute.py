"""Recomputing activations changes memory only, never a loss, gradient, buffer or name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lathe.errors import UserError
from lathe.nets import GPT, CifarResNet, DeepMLP, ViT
from lathe.nets.recompute import Offloaded, apply, check_device
from lathe.strategies.ddp import SyncBatchNorm

Make = Callable[[], tuple[nn.Module, Tensor]]
NETS: dict[str, Make] = {
    "deep_mlp": lambda: (
        DeepMLP(channels=1, image_size=4, num_classes=3, width=8, depth=7, dropout=0.3),
        torch.rand(5, 1, 4, 4),
    ),
    "resnet20": lambda: (CifarResNet(depth=20, width=4, num_classes=3), torch.rand(5, 3, 8, 8)),
    "resnet8": lambda: (CifarResNet(depth=8, width=4, num_classes=3), torch.rand(5, 3, 8, 8)),
    "vit": lambda: (
        ViT(channels=1, image_size=8, num_classes=3, patch_size=4, width=8, depth=4, heads=2, dropout=0.2),
        torch.rand(3, 1, 8, 8),
    ),
    "gpt": lambda: (
        GPT(vocab_size=11, max_length=6, width=8, depth=4, heads=2, dropout=0.2),
        torch.randint(11, (3, 6)),
    ),
}


def deep(blocks: int, width: int = 16) -> DeepMLP:
    return DeepMLP(channels=1, image_size=4, num_classes=4, width=width, depth=blocks)


def step(net: nn.Module, x: Tensor, times: int = 2) -> dict[str, Tensor]:
    """Take two steps from the same random numbers; return the loss, each gradient and each buffer."""
    torch.manual_seed(5)
    for _ in range(times):
        loss = net(x).logsumexp(-1).sum()
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"loss": loss.detach(), **gradients, **dict(net.named_buffers()), "random state": torch.get_rng_state()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """Return the bytes saved for the backward pass of `net`: each storage once, without parameters."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(x)
    for parameter in net.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    total = sum(storage.nbytes() for storage in storages.values())
    out.sum().backward()
    return total


@pytest.mark.parametrize("how", ["blocks", "every_3", "sqrt", "offload"])
@pytest.mark.parametrize("name", ["deep_mlp", "resnet20", "gpt"])
def test_losses_gradients_and_buffers_are_equal_bit_for_bit(name: str, how: str) -> None:
    net, x = NETS[name]()
    other = copy.deepcopy(net)
    apply(other, how)
    assert list(other.state_dict()) == list(net.state_dict())
    assert differing(step(net, x), step(other, x)) == []
    assert differing({"eval": net.eval()(x)}, {"eval": other.eval()(x)}) == []


@pytest.mark.parametrize("how", ["blocks", "sqrt", "offload"])
def test_autocast_is_that_of_the_forward_pass(how: str) -> None:
    net, x = NETS["vit"]()
    other = copy.deepcopy(net)
    apply(other, how)

    def cast(net: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().logsumexp(-1).sum()
        loss.backward()  # outside, as Lightning does
        return {name: parameter.grad for name, parameter in net.named_parameters()}

    assert differing(cast(net), cast(other)) == []


@pytest.mark.parametrize("how", ["blocks", "sqrt", "offload"])
def test_a_copy_recomputes_its_own_blocks(how: str) -> None:
    net = deep(9)
    apply(net, how)
    other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    plain = copy.deepcopy(other)
    apply(plain, "none")
    assert differing(step(plain, x), step(other, x)) == []
    assert saved_bytes(other, x) < saved_bytes(plain, x)


def calls(net: nn.Module, x: Tensor) -> list[int]:
    """Return how often each block runs in one step."""
    ran: list[nn.Module] = []
    handles = [block.linear.register_forward_pre_hook(lambda layer, _: ran.append(layer)) for block in net.blocks]
    net(x).sum().backward()
    for handle in handles:
        handle.remove()
    return [ran.count(block.linear) for block in net.blocks]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", [1] * 7),
        ("offload", [1] * 7),
        ("blocks", [2] * 7),
        ("every_2", [2, 1, 2, 1, 2, 1, 2]),
        ("every_7", [2, 1, 1, 1, 1, 1, 1]),
        ("sqrt", [2] * 7),
    ],
)
def test_which_blocks_compute_twice(how: str, expected: list[int]) -> None:
    net, x = deep(7), torch.rand(2, 1, 4, 4)
    apply(net, how)
    assert calls(net, x) == expected
    net.eval()
    assert calls(net, x) == [1] * 7  # as often as in a forward pass
    net.train()
    apply(net, "blocks")
    apply(net, None)
    assert calls(net, x) == [1] * 7
    assert all("forward" not in block.__dict__ for block in net.blocks)


def test_activations_that_are_kept() -> None:
    """64 blocks: each of `none` keeps the inputs of Linear, LayerNorm and GELU; `sqrt` keeps 8 segments' inputs."""
    x = torch.rand(128, 1, 4, 4)
    kept = {}
    for how in ("none", "blocks", "every_2", "sqrt"):
        net = deep(64, width=64)
        apply(net, how)
        kept[how] = saved_bytes(net, x)
    row = 4 * 128 * 64  # bytes of one activation
    # image, statistics of the stem's norm; inputs of its norm and GELU; input of the head
    outside = 4 * 128 * (16 + 2) + 3 * row
    assert kept["none"] == outside + 64 * (3 * row + 4 * 128 * 2)
    assert kept["blocks"] == outside + 64 * row
    assert kept["every_2"] == outside + 32 * row + 32 * (3 * row + 4 * 128 * 2)
    assert kept["sqrt"] == outside + 8 * row
    one_segment = 8 * (3 * row + 4 * 128 * 2)  # the backward pass adds one at a time
    assert kept["sqrt"] + one_segment <= 0.35 * kept["none"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")  # torch's, in the imports of its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # its tracer reads the input of a compiled block
@pytest.mark.parametrize(("name", "how", "compiled"), [("deep_mlp", "sqrt", "blocks"), ("resnet8", "blocks", "net")])
def test_a_compiled_net_computes_the_same(name: str, how: str, compiled: str) -> None:
    torch.compiler.reset()
    net, x = NETS[name]()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled dropout draws other numbers
    plain = step(copy.deepcopy(net), x)
    apply(net, how)
    for region in net.blocks if compiled == "blocks" else [net]:
        region.compile(backend="aot_eager_decomp_partition")  # inductor's steps before it generates code
    found = step(net, x)
    for key in plain:
        torch.testing.assert_close(found[key], plain[key], rtol=1e-3, atol=1e-4)


class Listed(nn.Module):
    """A user's net, whose forward does not call its blocks as a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


@pytest.mark.parametrize(
    ("how", "net", "words"),
    [
        ("block", deep(2), "did you mean blocks"),
        ("every_3", deep(2), "DeepMLP has 2 blocks"),
        ("blocks", nn.Linear(2, 2), "Linear has no `blocks`"),
        ("sqrt", Listed(), "requires Listed.blocks to be a lathe.nets.Blocks"),
    ],
)
def test_nets_that_cannot_recompute_are_refused(how: str, net: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=rf"activation_checkpointing={how}.*{words}"):
        apply(net, how)


def test_offloading_on_the_cpu_is_refused() -> None:
    check_device("offload", "cuda")
    with pytest.raises(UserError, match="=offload moves activations"):
        check_device("offload", "cpu")


def test_offloading_copies_activations_and_not_parameters() -> None:
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    moved = Offloaded(layer)
    assert moved.pack_hook(layer.weight) is layer.weight
    view = layer.weight.t()
    assert moved.pack_hook(view) is view
    kept = moved.pack_hook(x)
    with torch.no_grad():
        found, was = moved.unpack_hook(kept).clone(), x.clone()
        x.zero_()
        assert torch.equal(found, was)
        assert torch.equal(moved.unpack_hook(kept), was)  # no view of what the device has


def test_recomputation_follows_a_changed_class_and_an_instances_forward() -> None:
    net = deep(2)
    first, second = net.blocks

    class Doubled(type(first)):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    plain = second.forward
    second.forward = lambda x: 3 * plain(x)
    apply(net, "blocks")
    first.__class__ = Doubled  # fully_shard and quantization change classes like this
    x = torch.rand(2, 16)
    assert torch.equal(first(x), 2 * type(first).__mro__[1].forward(first, x))
    assert torch.equal(second(x), 3 * plain(x))
    apply(net, "none")
    assert torch.equal(second(x), 3 * plain(x))


def train(rank: int, spread: str, how: str) -> dict[str, Tensor]:
    """Train three steps; return this rank's losses, and the final weights and buffers."""
    torch.manual_seed(0)
    net: nn.Module
    if spread == "fully_shard":
        net = GPT(vocab_size=11, max_length=8, width=16, depth=4, heads=4, dropout=0.1)
        x = torch.randint(11, (2, 3, 8))[rank]
    else:
        net = CifarResNet(depth=8, width=4)
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
