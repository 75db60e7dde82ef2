"""Quantized nets as integer layers compute what training simulated."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan, integer_weight, quantize, quantized_layers
from lathe.errors import UserError
from lathe.export.integer_layers import Inductor, deployable
from lathe.export.targets.onnx import OnnxDialect

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]


def run(net: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return net(inputs)


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(weight_bits=4),
        LayerPlan(activation="dynamic"),
        LayerPlan(activation="none", group_size=9),
        LayerPlan(per_channel=False, lsq=True),
    ],
)
def test_folded_integers_compute_what_was_simulated(
    make_resnet: Make, images: Tensor, plan: LayerPlan, quantized: Quantized
) -> None:
    net = quantized(make_resnet(), images, plan)
    want, plain = run(net, images), run(make_resnet(), images)
    got = run(deployable(net, images[:2], Inductor()), images)
    # one or two values round the other way; the whole effect of quantization is much larger
    assert (got - want).abs().mean() < 0.2 * (plain - want).abs().mean()
    assert (got.argmax(1) == want.argmax(1)).float().mean() >= 0.99


def test_inductor_gets_a_second_channel_of_zeros(quantized: Quantized) -> None:
    """Its integer kernel for one channel gives wrong results; ONNX Runtime's is right and keeps one channel."""
    torch.manual_seed(0)
    x = torch.randn(8, 1, 6, 6)
    net = quantized(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4)).eval(), x)
    found = deployable(net, x[:2], Inductor())
    assert [tuple(found[index].integers.shape) for index in (0, 2)] == [(4, 2, 3, 3), (4, 1, 3, 3)]
    assert found[0].integers[:, 1].count_nonzero() == 0
    torch.testing.assert_close(run(found, x), run(net, x), rtol=1e-5, atol=1e-5)
    assert tuple(deployable(net, x[:2], OnnxDialect())[0].integers.shape) == (4, 1, 3, 3)


def test_the_net_stays_as_it_is_and_no_norm_is_left(make_resnet: Make, images: Tensor, quantized: Quantized) -> None:
    net = quantized(make_resnet(), images).train()
    before = {name: (type(module), module.training) for name, module in net.named_modules()}
    values = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = deployable(net, images[:2], OnnxDialect())
    assert {name: (type(module), module.training) for name, module in net.named_modules()} == before
    assert all(torch.equal(values[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in found.modules())
    assert not any(module.training for module in found.modules())
    assert not list(found.parameters())


def test_integers_are_those_of_training(make_resnet: Make, images: Tensor, quantized: Quantized) -> None:
    net = make_resnet()
    with torch.no_grad():
        net.blocks[0].conv1.weight[:, 1] = 0  # masked
        net.blocks[0].conv2.weight[3] = 0  # a pruned channel: only its bias is left
    quantized(net, images)
    found = deployable(net, images[:2], OnnxDialect())
    for name, layer in quantized_layers(net).items():
        if not hasattr(layer, "weight"):
            continue
        integers, _ = integer_weight(layer)
        folded = found.get_submodule(name)
        norm = name.replace("conv", "bn")
        signs = torch.ones(len(integers)) if name == "head" else net.get_submodule(norm).weight.sign()
        sign = signs.view(-1, *[1] * (integers.dim() - 1))
        assert torch.equal(folded.integers, (integers * sign).to(torch.int8)), name
        assert (folded.integers[layer.weight == 0] == 0).all()
    head = found.get_submodule("head")
    expected = net.head.bias / (head.scale * head.source.scale)
    assert head.offset.dtype == torch.int32
    assert (head.offset - expected).abs().max() <= 0.51


def test_a_bias_that_dwarfs_its_weights_fits_32_bits(make_mlp: Make, images: Tensor, quantized: Quantized) -> None:
    net = make_mlp()
    with torch.no_grad():
        net.head.weight[0] *= 1e-12
        net.head.weight[1] = 0
        net.head.bias[:2] = 3.0
    quantized(net, images)
    head = deployable(net, images[:2], OnnxDialect()).head
    back = head.offset.double() * head.offset_scale
    torch.testing.assert_close(back[:2], torch.tensor([3.0, 3.0], dtype=torch.float64), rtol=1e-5, atol=0)
    assert (head.integers[:2] == 0).all()


def test_a_net_that_is_not_quantized_is_refused(make_mlp: Make, images: Tensor) -> None:
    net = make_mlp()
    with pytest.raises(UserError, match="the net has no quantized layer"):
        deployable(net, images[:2], OnnxDialect())
    quantize(net, images[:2])
    with pytest.raises(UserError, match=r"stem\.linear is not rounded yet"):
        deployable(net, images[:2], OnnxDialect())
