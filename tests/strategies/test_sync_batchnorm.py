"""Two ranks with half a batch each equal one process with the whole batch."""

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn

from lathe.strategies import SyncBatchNorm

BATCHES = 3  # steps, so that running statistics have a history

# name: (layer, shape of the whole batch, mean, autocast to bfloat16)
CASES: dict[str, tuple[Any, tuple[int, ...], float, bool]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (8, 5), 0.5, False),
    "1d sequence": (lambda: nn.BatchNorm1d(5), (8, 5, 3), 0.5, False),
    "2d": (lambda: nn.BatchNorm2d(4), (6, 4, 3, 3), -2.0, False),
    "cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), (6, 4, 3, 3), 0.5, False),
    "not affine": (lambda: nn.BatchNorm2d(4, affine=False), (6, 4, 3, 3), 0.5, False),
    "no running statistics": (lambda: nn.BatchNorm1d(5, track_running_stats=False), (8, 5), 0.5, False),
    "far from zero": (lambda: nn.BatchNorm1d(5), (8, 5), 100.0, False),
    "autocast": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)), (8, 6), 0.5, True),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = CASES[name][0]()
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.uniform_(norm.bias, -1.0, 1.0)
    return net


def data(name: str) -> list[tuple[Tensor, Tensor]]:
    _, shape, mean, _ = CASES[name]
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.5, 2, shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    inputs = [torch.randn(shape, generator=generator) * scale + mean for _ in range(BATCHES)]
    width = build(name)(inputs[0]).shape
    return [(x, torch.randn(width, generator=generator)) for x in inputs]


def steps(net: nn.Module, batches: list[tuple[Tensor, Tensor]], autocast: bool) -> dict[str, Any]:
    """Return outputs and gradients of a weighted sum, accumulated parameter gradients, and buffers."""
    outputs, gradients = [], []
    for x, weight in batches:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x)
        (y.float() * weight).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    net.eval()
    return {
        "outputs": torch.stack(outputs),
        "gradients": torch.stack(gradients),
        "parameters": {name: parameter.grad for name, parameter in net.named_parameters()},
        "buffers": dict(net.named_buffers()),
        "evaluated": net(batches[0][0][:2]).detach(),
    }


def all_cases(rank: int) -> dict[str, dict[str, Any]]:
    results = {}
    for name, (_, shape, _, autocast) in CASES.items():
        net = SyncBatchNorm().apply(build(name))
        half = slice(rank * shape[0] // 2, (rank + 1) * shape[0] // 2)
        results[name] = steps(net, [(x[half], weight[half]) for x, weight in data(name)], autocast)
    x = data("1d")[0][0]
    results["uneven"] = {"outputs": SyncBatchNorm().apply(build("1d"))(x[:3] if rank == 0 else x[3:]).detach()}
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return on_ranks(all_cases)


@pytest.mark.parametrize("name", CASES)
def test_two_halves_are_one_whole(ranks: list[dict[str, dict[str, Any]]], name: str) -> None:
    autocast = CASES[name][3]
    whole = steps(build(name), data(name), autocast)
    first, second = (rank[name] for rank in ranks)
    assert first["outputs"].dtype == whole["outputs"].dtype == (torch.bfloat16 if autocast else torch.float32)
    # bfloat16 has 8 bits, and the last may be rounded the other way; float32 has steps of 8e-6 at 100
    tolerance = 2**-7 if autocast else 5e-5 if name == "far from zero" else 1e-6
    for what in ("outputs", "gradients"):
        torch.testing.assert_close(
            torch.cat([first[what], second[what]], dim=1), whole[what], rtol=tolerance, atol=tolerance
        )
    assert first["parameters"].keys() == whole["parameters"].keys()
    for key, gradient in whole["parameters"].items():
        both = first["parameters"][key] + second["parameters"][key]
        torch.testing.assert_close(
            both, gradient, rtol=tolerance, atol=5 * tolerance
        )  # sums over the batch and three steps
    for rank in (first, second):
        assert rank["buffers"].keys() == whole["buffers"].keys()
        for key, buffer in whole["buffers"].items():
            torch.testing.assert_close(rank["buffers"][key], buffer, rtol=1e-6, atol=1e-6)


def test_uneven_halves_count_every_sample_once(ranks: list[dict[str, dict[str, Any]]]) -> None:
    outputs = torch.cat([rank["uneven"]["outputs"] for rank in ranks])
    torch.testing.assert_close(outputs, build("1d")(data("1d")[0][0]).detach(), rtol=1e-6, atol=1e-6)


def test_evaluation_is_that_of_the_plain_layer(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank, half in zip(ranks, (slice(0, 3), slice(3, 6)), strict=True):
        plain = build("2d")
        plain.load_state_dict({**plain.state_dict(), **rank["2d"]["buffers"]})
        plain.eval()
        torch.testing.assert_close(rank["2d"]["evaluated"], plain(data("2d")[0][0][half][:2]).detach(), rtol=0, atol=0)


def test_apply_and_revert_leave_names_and_objects_alone() -> None:
    class Mine(nn.BatchNorm2d):
        pass

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Mine(4), nn.LayerNorm(4))
    before = {name: id(tensor) for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    plain = [type(module) for module in net]
    sync = SyncBatchNorm()
    assert sync.apply(net) is net
    assert [type(module) for module in net] != plain
    assert isinstance(net[1], nn.modules.batchnorm._BatchNorm)  # so that rules for norm layers still match it
    assert {name: id(tensor) for name, tensor in [*net.named_parameters(), *net.named_buffers()]} == before
    assert list(net.state_dict()) == list(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Mine(4), nn.LayerNorm(4)).state_dict()
    )
    assert sync.revert(sync.apply(net)) is net  # applied twice, as a second fit does
    assert [type(module) for module in net] == plain
    assert {name: id(tensor) for name, tensor in [*net.named_parameters(), *net.named_buffers()]} == before
    assert "_plain_class" not in net[1].__dict__


def test_one_process_computes_torchs_batchnorm() -> None:
    x = data("2d")[0][0]
    plain, synchronised = build("2d"), SyncBatchNorm().apply(build("2d"))
    assert torch.equal(plain(x), synchronised(x))
    assert torch.equal(plain.running_var, synchronised.running_var)
