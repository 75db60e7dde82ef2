"""Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.nets.blocks import Blocks


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)  # evaluation depends mostly on the last few steps
    norm.weight.requires_grad_(False)
    return norm


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first filters start as the identity of their channels."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:in_channels])
    return convolution


class AirbenchBlock(nn.Module):
    """Convolution, pooling by `pool`, norm and GELU, then the same without pooling.

    `[batch, in_channels, H, W] -> [batch, out_channels, H // pool, W // pool]`.
    """

    def __init__(self, in_channels: int, out_channels: int, pool: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, out_channels)
        self.pool = nn.MaxPool2d(pool) if pool > 1 else nn.Identity()
        self.norm1 = _norm(out_channels)
        self.gelu1 = nn.GELU()
        self.conv2 = _convolution(out_channels, out_channels)
        self.norm2 = _norm(out_channels)
        self.gelu2 = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu1(self.norm1(self.pool(self.conv1(x))))
        return self.gelu2(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """A frozen 2x2 whitening convolution, three blocks, the maximum of each channel, and a linear head.

    `forward` takes `[batch, in_channels, image_size, image_size]` and returns logits `[batch, num_classes]`. The first
    convolution has two filters, of either sign, for each direction of a patch: an orthonormal basis until `whiten` is
    called. The first block has `width` channels, the others `growth` times as many. A block halves the image if at
    least two pixels are left.

    In evaluation and in exports, logits are a mean over `views` of each image: itself (1), its mirror image (2), and
    both shifted by a pixel up-left and down-right, with half of the total weight (6).
    """

    @validated
    def __init__(
        self,
        *,
        width: Count = 64,
        growth: Count = 4,
        in_channels: Count,
        image_size: Annotated[int, Field(ge=2)],
        num_classes: Count,
        views: Annotated[int, Field(ge=1, le=2)] | Literal[6] = 1,
    ) -> None:
        super().__init__()
        self.views = views
        self.whitening = nn.Conv2d(in_channels, 8 * in_channels, kernel_size=2)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        nn.init.orthogonal_(self.whitening.weight[: 4 * in_channels])
        self._mirror_filters()
        self.whitened: Tensor
        self.register_buffer("whitened", torch.tensor(False))
        self.gelu = nn.GELU()
        self.blocks = Blocks()
        channels, size = 8 * in_channels, image_size - 1
        for out_channels in (width, growth * width, growth * width):
            pool = 2 if size > 1 else 1
            self.blocks.append(AirbenchBlock(channels, out_channels, pool))
            channels, size = out_channels, size // pool
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.head = nn.Linear(channels, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    @torch.no_grad()
    def _mirror_filters(self) -> None:
        half = len(self.whitening.weight) // 2
        self.whitening.weight[half:] = -self.whitening.weight[:half]

    @torch.no_grad()
    def whiten(self, images: Tensor, eps: float = 5e-4) -> None:
        """Make the first convolution's outputs uncorrelated with variance 1 over the patches of `images`.

        `images` are `[n, in_channels, H, W]`, as in batches. The filters are eigenvectors of the patches' second
        moments over the roots of the eigenvalues plus `eps`. The largest entry of each is positive, because the sign of
        an eigenvector is arbitrary and depends on the processor.
        """
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)  # [n, in_channels, H - 1, W - 1, 2, 2]
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1] * 4)
        values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
        vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
        filters = (vectors / (values.clamp(min=0) + eps).sqrt()).T.reshape(-1, images.shape[1], 2, 2)
        self.whitening.weight[: len(filters)] = filters.to(self.whitening.weight)
        self._mirror_filters()
        self.whitened.fill_(True)

    def settle(self) -> None:
        """Freeze the bias, the only trainable parameter of the first layer; backward then skips the layer."""
        self.whitening.bias.requires_grad_(False)  # type: ignore[union-attr]
        self.whitening.bias.grad = None  # type: ignore[union-attr]

    def enter(self, x: Tensor) -> Tensor:
        return self.gelu(self.whitening(x))

    def leave(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x).flatten(1)) / self.head.in_features

    def _logits(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.views == 1:
            return self._logits(x)
        if self.views == 2:
            return _mean([self._logits(x), self._logits(x.flip(-1))])
        height, width = x.shape[-2:]
        padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
        shifted = [padded[..., :height, :width], padded[..., 2:, 2:]]
        centred = _mean([self._logits(x), self._logits(x.flip(-1))])
        return _mean([centred, _mean([self._logits(view) for image in shifted for view in (image, image.flip(-1))])])


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)
