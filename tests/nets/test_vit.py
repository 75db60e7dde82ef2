"""Vision transformers have the published sizes, and read patches and tokens at the right places."""

import pytest
import torch
import torch.nn.functional as F

from lathe.errors import UserError
from lathe.nets import ViT


def tiny(**sizes) -> ViT:
    return ViT(
        **{
            **{"channels": 3, "image_size": 8, "num_classes": 5, "patch_size": 2},
            **{"width": 12, "depth": 2, "heads": 3},
            **sizes,
        }
    )


@pytest.mark.parametrize(
    ("width", "heads", "published"),
    [
        (192, 3, 5_717_416),
        (384, 6, 22_050_664),
    ],  # Touvron et al. 2021, table 1, has 5 M and 22 M; these are the released nets'
    ids=["vit_tiny", "vit_small"],
)
def test_parameters_are_the_published_ones(width: int, heads: int, published: int) -> None:
    sizes = {"image_size": 224, "num_classes": 1000, "patch_size": 16, "width": width, "depth": 12, "heads": heads}
    with torch.device("meta"):
        with_token, mean = tiny(**sizes, pool="token"), tiny(**sizes)
    assert sum(parameter.numel() for parameter in with_token.parameters()) == published
    # mean pooling has neither the class token nor its position
    assert sum(parameter.numel() for parameter in mean.parameters()) == published - 2 * width


def test_a_patch_is_a_token_row_by_row() -> None:
    net = tiny()
    image = torch.rand(1, 3, 8, 8)
    tokens = net.enter(image)
    assert tokens.shape == (1, 16, 12)
    patch = image[0, :, 2:4, 4:6]  # second row, third column: token 1 * 4 + 2
    expected = (net.embed.patch.weight * patch).sum((1, 2, 3)) + net.embed.patch.bias + net.embed.position[0, 6]
    torch.testing.assert_close(tokens[0, 6], expected)


@pytest.mark.parametrize("pool", ["mean", "token"])
def test_the_head_reads_the_mean_or_the_class_token(pool: str) -> None:
    net = tiny(pool=pool)
    x = net.blocks(net.enter(torch.rand(3, 3, 8, 8)))
    assert x.shape[1] == (16 if pool == "mean" else 17)
    normed = F.layer_norm(x, (12,), eps=1e-6)
    read = normed.mean(1) if pool == "mean" else normed[:, 0]
    torch.testing.assert_close(net.leave(x), F.linear(read, net.head.weight, net.head.bias))


def test_patches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"patch_size=3 does not divide .*: set patch_size=2"):
        tiny(patch_size=3)
