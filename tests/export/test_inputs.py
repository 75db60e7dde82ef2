import torch
from torch import nn

from lathe.export.inputs import dynamic_axes, stand_in
from lathe.export.preprocess import Preprocess, Shipped


def shipped(size: object) -> Shipped:
    return Shipped(nn.Flatten(), Preprocess([0.5], [0.5], (8, 8), size))  # type: ignore[arg-type]


def test_what_is_traced_holds_none_of_the_example() -> None:
    for example, dtype in (
        (torch.rand(7, 3, 8, 8, dtype=torch.float64), torch.float32),
        (torch.ones(1, 9, dtype=torch.int64), torch.int64),
        (torch.full((5, 1, 8, 8), 9, dtype=torch.uint8), torch.uint8),
    ):
        found = stand_in(example)
        assert (found.dtype, tuple(found.shape)) == (dtype, (2, *example.shape[1:]))
        assert not found.any()
        assert found.untyped_storage().data_ptr() != example.untyped_storage().data_ptr()


def test_which_axes_may_differ() -> None:
    images, pixels, ids = (
        torch.zeros(2, 1, 8, 8),
        torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 9, dtype=torch.int64),
    )
    assert dynamic_axes(nn.Identity(), images)[0].keys() == {0}
    assert dynamic_axes(shipped(None), pixels)[0].keys() == {0}
    assert dynamic_axes(shipped([20, 30]), pixels)[0].keys() == {0}
    assert dynamic_axes(shipped("any"), pixels)[0].keys() == {0, 2, 3}
    assert dynamic_axes(nn.Identity(), ids)[0].keys() == {0, 1}
    one_length = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(18, 3))
    assert dynamic_axes(one_length, ids)[0].keys() == {0}
