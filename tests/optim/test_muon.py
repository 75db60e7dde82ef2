"""Muon compared with torch's if torch has one, else with the paper's claims."""

from typing import Any

import pytest
import torch
from torch import nn

from lathe.errors import UserError
from lathe.nets import MLP, CifarResNet
from lathe.optim import LAMB, LARS, Muon, build_optimizer
from lathe.optim.optimizers import orthogonalise


def build(net: nn.Module, **options: object) -> Muon:
    fixed = {"weight_decay": 0.01, "no_decay": ["norm", "bias"], "reference_batch_size": 8, "batch_size": 8}
    optimizer = build_optimizer(net, kind=Muon, lr=0.02, **{**fixed, **options})  # type: ignore[arg-type]
    assert isinstance(optimizer, Muon)
    return optimizer


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalise(matrix, 5))
    assert 0.65 < values.min() <= values.max() < 1.25  # the quintic's band
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    cosine = (orthogonalise(matrix, 5) * (u @ vh)).sum() / orthogonalise(matrix, 5).norm() / (u @ vh).norm()
    assert cosine > 0.97


@pytest.mark.parametrize(
    ("shape", "nesterov", "adjust_lr_fn"),
    [((12, 5), True, "original"), ((5, 12), False, "original"), ((12, 5), False, "match_rms_adamw")],
)
def test_matrices_follow_torch_s_muon(shape: tuple[int, int], nesterov: bool, adjust_lr_fn: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    optimizers = [Muon([ours], **options), torch.optim.Muon([theirs], **options)]
    for _ in range(5):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(optimizers[0].state[ours]["momentum_buffer"], optimizers[1].state[theirs]["momentum_buffer"])
    moved = (theirs - start).norm().item()
    assert (ours - theirs).norm().item() < 0.02 * moved  # torch iterates in bfloat16, we in float32


def test_a_convolution_is_its_flattened_matrix() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    convolution, matrix = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1).clone())
    convolution.grad, matrix.grad = gradient, gradient.flatten(1)
    for parameter in (convolution, matrix):
        Muon([parameter], lr=0.1).step()
    assert torch.equal(convolution.flatten(1), matrix)
    values = torch.linalg.svdvals((start - convolution.detach()).flatten(1) / 0.1)
    assert 0.65 < values.min() <= values.max() < 1.25


REST: dict[str, dict[str, Any]] = {
    "adamw": {"adamw_lr_ratio": 0.25, "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-7},
    "sgd": {"rest": "sgd", "sgd_lr_ratio": 0.25, "sgd_momentum": 0.85},
}


@pytest.mark.parametrize("rest", REST)
def test_the_rest_takes_the_steps_of_torchs_optimizers(rest: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(7)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = Muon([{"params": [ours], "role": "adamw"}], lr=0.02, weight_decay=0.1, **REST[rest])
    adamw = torch.optim.AdamW([theirs], lr=0.005, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-7)
    sgd = torch.optim.SGD([theirs], lr=0.005, momentum=0.85, nesterov=True)
    for _ in range(4):
        gradient = torch.randn(7)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        if rest == "sgd":  # whose decay is not decoupled in torch
            with torch.no_grad():
                theirs.mul_(1 - 0.005 * 0.1)
        (adamw if rest == "adamw" else sgd).step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if rest == "adamw" else 1e-6)
    assert muon.param_groups[0]["role"] == rest


def test_hidden_weights_may_be_brought_to_a_norm_before_each_step() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start * 6**0.5 / start.norm())
    for parameter, normalize in ((ours, True), (theirs, False)):
        parameter.grad = gradient
        Muon([parameter], lr=0.1, normalize=normalize).step()
    torch.testing.assert_close(ours, theirs)


def test_roles_and_learning_rates_of_a_resnet() -> None:
    net = CifarResNet(depth=8, width=4)
    optimizer = build(net)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert [names[id(parameter)] for parameter in groups["adamw/decay"]["params"]] == ["conv.weight", "head.weight"]
    hidden = [name for name, parameter in net.named_parameters() if name.startswith("blocks.") and parameter.ndim == 4]
    assert len(hidden) == 8
    assert [names[id(parameter)] for parameter in groups["muon/decay"]["params"]] == hidden
    assert len(groups["adamw/no_decay"]["params"]) == 19
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "adamw/decay": (pytest.approx(0.001), 0.01),
        "adamw/no_decay": (pytest.approx(0.001), 0.0),
        "muon/decay": (0.02, 0.01),
    }
    scaled = build(net, scale_lr="linear", batch_size=16)
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([0.002, 0.002, 0.04])


def test_a_net_without_hidden_weights_is_refused() -> None:
    with pytest.raises(UserError, match="Muon found no hidden weight in MLP's `blocks`"):
        build(MLP(channels=3, image_size=8, num_classes=10, width=4, depth=1))


def test_orthogonalise_at_the_edges() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 4), 5), torch.zeros(3, 4))
    assert orthogonalise(torch.rand(3, 4).bfloat16(), 5).dtype == torch.float32
    assert orthogonalise(torch.rand(3, 4).double(), 5).dtype == torch.float64
    matrix = torch.randn(4, 6)
    torch.testing.assert_close(orthogonalise(1000 * matrix, 5), orthogonalise(matrix, 5))
    torch.testing.assert_close(orthogonalise(matrix.T, 5), orthogonalise(matrix, 5).T)


@pytest.mark.parametrize("kind", [Muon, LAMB, LARS])
def test_steps_with_a_rate_in_a_tensor(kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(rate: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = MLP(channels=1, image_size=2, num_classes=3, width=5, depth=2)
        optimizer = build_optimizer(net, kind=kind, lr=0.1, weight_decay=0.1, no_decay=["norm", "bias"])
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = rate(group["lr"]) if not isinstance(group["lr"], torch.Tensor) else group["lr"]
            for number, parameter in enumerate(net.parameters()):
                draw = torch.Generator().manual_seed(10 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    numbers = trained(float)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # otherwise torch's AdamW requires a GPU
    for found, wanted in zip(trained(torch.tensor), numbers, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
