"""Hints and attention maps."""

import pytest
import torch
import torch.nn.functional as F

from lathe.compression.distillation.features import attention, attention_map, connector, hint


@pytest.mark.parametrize(("student", "teacher"), [((4, 8, 8), (6, 8, 8)), ((5, 4), (5, 6)), ((4,), (6,))])
def test_a_connector_gives_the_teacher_s_shape(student: tuple[int, ...], teacher: tuple[int, ...]) -> None:
    link = connector(student, teacher)
    assert link(torch.rand(2, *student)).shape == (2, *teacher)
    assert sum(p.numel() for p in link.parameters()) == 4 * 6 + 6


def test_a_hint_is_the_mean_squared_error_over_rows_that_count() -> None:
    ours, theirs = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    torch.testing.assert_close(hint(ours, theirs), F.mse_loss(ours, theirs))
    torch.testing.assert_close(hint(ours, theirs, torch.tensor([True, True, False])), F.mse_loss(ours[:2], theirs[:2]))
    tokens = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    rows = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    expected = (tokens[0] - tokens[1]).square().mean(-1).flatten()[rows].mean()
    torch.testing.assert_close(hint(*tokens, rows), expected)


def test_an_attention_map_is_a_unit_vector_that_ignores_scale() -> None:
    x = torch.rand(2, 3, 4, 4)
    found = attention_map(x)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(attention_map(7 * x), found)
    torch.testing.assert_close(found[0], F.normalize(x[0].square().sum(0).flatten(), dim=0))


def test_attention_averages_the_larger_map_down() -> None:
    large, small = torch.rand(2, 3, 8, 8), torch.rand(2, 5, 4, 4)
    expected = (attention_map(F.avg_pool2d(large, 2)) - attention_map(small)).square().mean()
    torch.testing.assert_close(attention(large, small), expected)
    torch.testing.assert_close(attention(small, large), expected)
