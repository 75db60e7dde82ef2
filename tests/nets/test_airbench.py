"""The airbench net: its parameters, its whitening and its averaging in evaluation."""

import pytest
import torch
import torch.nn.functional as F

from lathe.nets import Airbench


def net_of(**options: object) -> Airbench:
    torch.manual_seed(0)
    return Airbench(**{"width": 4, "growth": 2, "in_channels": 3, "image_size": 32, "num_classes": 10, **options})  # type: ignore[arg-type]


def test_it_has_the_published_parameters() -> None:
    """Those of airbench94_muon.py, layer by layer: a whitening of 24 filters, widths 64, 256, 256."""
    net = Airbench(in_channels=3, image_size=32, num_classes=10)
    counts = {name: parameter.numel() for name, parameter in net.named_parameters()}
    assert {name: counts[name] for name in ("whitening.weight", "whitening.bias", "head.weight")} == {
        "whitening.weight": 24 * 3 * 4,
        "whitening.bias": 24,
        "head.weight": 2560,
    }
    convolutions = [counts[f"blocks.{block}.conv{number}.weight"] for block in range(3) for number in (1, 2)]
    assert convolutions == [9 * a * b for a, b in [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)]]
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    norms = {f"blocks.{block}.norm{number}.weight" for block in range(3) for number in (1, 2)}
    assert frozen == norms | {"whitening.weight"}


def test_whitened_patches_are_uncorrelated_and_of_variance_one() -> None:
    net = net_of()
    torch.manual_seed(1)
    images = F.avg_pool2d(torch.randn(64, 3, 24, 24), 3, stride=1)  # neighbouring pixels are correlated
    out = F.conv2d(images, net.whitening.weight).permute(0, 2, 3, 1).reshape(-1, 24)
    assert (out[:, :12].T @ out[:, :12] / len(out) - torch.eye(12)).abs().max() > 0.5  # not before
    net.whiten(images, eps=0.0)
    out = F.conv2d(images, net.whitening.weight).permute(0, 2, 3, 1).reshape(-1, 24)
    torch.testing.assert_close(out[:, :12].T @ out[:, :12] / len(out), torch.eye(12), atol=1e-3, rtol=0)
    torch.testing.assert_close(out[:, 12:], -out[:, :12])
    assert net.whitened


@pytest.mark.parametrize("size", [2, 3, 9])
def test_it_takes_small_images_too(size: int) -> None:
    net = net_of(image_size=size)
    assert net(torch.rand(4, 3, size, size)).shape == (4, 10)


def test_views_are_averaged() -> None:
    net = net_of().eval()
    x = torch.rand(2, 3, 32, 32)
    plain, mirrored = net(x), net(x.flip(-1))
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    moved = [net(v) for p in (padded[..., :32, :32], padded[..., 2:, 2:]) for v in (p, p.flip(-1))]
    assert not torch.equal(plain, mirrored)
    net.views = 2
    torch.testing.assert_close(net(x), (plain + mirrored) / 2)
    net.views = 6
    torch.testing.assert_close(net(x), (plain + mirrored) / 4 + sum(moved) / 8)
    net.train()
    torch.manual_seed(0)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    out = net(x)
    net.load_state_dict(before, strict=False)
    net.views = 1
    torch.testing.assert_close(net(x), out)  # training uses each image once


def test_logits_are_divided_by_the_width() -> None:
    net = net_of()
    x = torch.rand(2, 8, 3, 3)
    torch.testing.assert_close(net.leave(x), F.linear(x.amax((2, 3)), net.head.weight) / 8)
    assert net.head.weight.std().item() == pytest.approx(1)
