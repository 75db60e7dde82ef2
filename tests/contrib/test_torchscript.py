"""target=torchscript: traced and scripted files compute the net."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.export import get
from lathe.export.inputs import Preprocess, Shipped
from lathe.nets import ViT

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
target = get("torchscript")
# the tests' own calls
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.load` is")


def shipped(net: nn.Module, input_size: str | None = None) -> nn.Module:
    return Shipped(net, Preprocess([0.5] * 3, [0.25] * 3, (16, 16), input_size))


def pixels(batch: int, height: int = 16, width: int = 16) -> Tensor:
    return torch.randint(
        0, 256, (batch, 3, height, width), generator=torch.Generator().manual_seed(batch), dtype=torch.uint8
    )


def answers(path: Path, net: nn.Module, inputs: list[Tensor], atol: float = 1e-5) -> None:
    run = target.load(path, 1)
    for x in inputs * 2:  # an optimised graph runs from the second call
        with torch.no_grad():
            np.testing.assert_allclose(run(x.numpy()), net(x).numpy(), atol=atol, err_msg=str(x.shape))


@pytest.mark.parametrize(
    ("method", "freeze", "fuse"),
    [
        ("trace", True, True),
        ("trace", False, False),
        ("script", True, True),
    ],
)
def test_a_residual_net_with_each_option(
    make_resnet: Make, tmp_path: Path, method: str, freeze: bool, fuse: bool
) -> None:
    net = shipped(make_resnet())
    get("torchscript", method=method, freeze=freeze, fuse=fuse).export(net, pixels(2), tmp_path / "net.pt")
    answers(tmp_path / "net.pt", net, [pixels(batch) for batch in (1, 2, 7, 3, 5, 4)])
    module = torch.jit.load(str(tmp_path / "net.pt"))
    assert ("batch_norm" in str(module.inlined_graph)) is not freeze


def test_a_vision_transformer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = shipped(
        ViT(channels=3, image_size=16, num_classes=10, patch_size=4, width=16, depth=1, heads=2, pool="token").eval()
    )
    target.export(net, pixels(1), tmp_path / "net.pt")
    answers(tmp_path / "net.pt", net, [pixels(1), pixels(5)])
    with pytest.raises(UserError, match="method=script: ViT has Python code that TorchScript lacks"):
        get("torchscript", method="script").export(net, pixels(1), tmp_path / "script.pt")
    assert not (tmp_path / "script.pt").exists()


def test_where_onednn_fuses_wrongly_nothing_is_fused(make_resnet: Make, tmp_path: Path) -> None:
    """Scaling divides by a tensor of one number, for which oneDNN returns other values or an error."""
    net = shipped(make_resnet(), "any")
    target.export(net, pixels(2), tmp_path / "net.pt")
    with pytest.warns(UserWarning, match="oneDNN can't fuse this net for inputs of shape .*, which run without it"):
        answers(tmp_path / "net.pt", net, [pixels(1, 9, 30), pixels(2, 16, 16), pixels(3, 40, 16)])


def test_a_quantized_net_ships_the_floats_that_its_integers_stand_for(
    make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized
) -> None:
    net = quantized(make_resnet(), images)
    target.export(shipped(net), pixels(1), tmp_path / "net.pt")
    got = target.load(tmp_path / "net.pt")(pixels(64).numpy())
    with torch.no_grad():
        want = shipped(net)(pixels(64)).numpy()
    assert np.abs(got - want).max() < 0.2 * want.std()
    assert "FakeQuantize" not in str(torch.jit.load(str(tmp_path / "net.pt")).graph)


def test_a_torn_file_is_refused(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    target.export(make_mlp(), images, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="can't be read as TorchScript"):
        target.load(path)
