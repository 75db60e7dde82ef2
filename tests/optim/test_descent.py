"""A tensor learning rate, as in a compiled step, takes the same steps as a number."""

from typing import Any

import pytest
import torch

from lathe.nets import MLP
from lathe.optim import LAMB, LARS, Muon, build_optimizer


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
