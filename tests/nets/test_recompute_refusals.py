"""What activation checkpointing cannot do costs one sentence."""

from collections.abc import Callable

import pytest
from torch import nn

from lathe.errors import UserError
from lathe.nets import MLP, DeepMLP
from lathe.nets.recompute import apply, check_device


def deep(blocks: int) -> DeepMLP:
    return DeepMLP(channels=1, image_size=4, num_classes=4, width=16, depth=blocks)


class Nameless(nn.Module):
    """A net of somebody's own."""

    def __init__(self, count: int, listed: bool) -> None:
        super().__init__()
        if listed:
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


@pytest.mark.parametrize(
    ("how", "make", "sentence"),
    [
        ("block", lambda: deep(2), "activation_checkpointing=block: did you mean blocks?"),
        (
            "zzz",
            lambda: deep(2),
            "activation_checkpointing=zzz: choose none, blocks, every_<n> (such as every_2), sqrt or offload.",
        ),
        ("every_n", lambda: deep(2), "activation_checkpointing=every_n: did you mean every_2?"),
        (
            "every_0",
            lambda: deep(2),
            "activation_checkpointing=every_0: n must be a whole number of at least 1, such as every_2.",
        ),
        (
            "every_3",
            lambda: deep(2),
            "activation_checkpointing=every_3: DeepMLP has 2 blocks: take an n of at most that.",
        ),
        (
            "blocks",
            lambda: Nameless(2, listed=False),
            "activation_checkpointing=blocks recomputes a net's repeated blocks, but Nameless names no "
            "`blocks`: set activation_checkpointing=none.",
        ),
        (
            "offload",
            lambda: Nameless(2, listed=False),
            "activation_checkpointing=offload moves what repeated blocks keep, but Nameless names no `blocks`: set "
            "activation_checkpointing=none.",
        ),
        (
            "sqrt",
            lambda: Nameless(2, listed=True),
            "activation_checkpointing=sqrt runs the blocks in segments, which Nameless does not let it: make "
            "its `blocks` "
            "a lathe.nets.Blocks and call that in forward, or set activation_checkpointing=blocks.",
        ),
        (
            "sqrt",
            lambda: MLP(channels=1, image_size=4, num_classes=3, width=8, depth=1),
            "activation_checkpointing=sqrt recomputes a net's repeated blocks, but MLP has none: set "
            "activation_checkpointing=none.",
        ),
    ],
)
def test_what_it_cannot_do_costs_one_sentence(how: str, make: Callable[[], nn.Module], sentence: str) -> None:
    net = make()
    with pytest.raises(UserError) as caught:
        apply(net, how)
    assert str(caught.value) == sentence


def test_offloading_from_the_host_to_the_host_is_refused() -> None:
    check_device("offload", "cuda")
    check_device("blocks", "cpu")
    check_device(None, "cpu")
    for device in ("cpu", "mps"):
        with pytest.raises(UserError, match=rf"=offload moves activations .* this run is on {device}, where it has no"):
            check_device("offload", device)


def test_none_is_taken_by_any_net() -> None:
    apply(nn.ReLU(), "none")
    apply(nn.ReLU(), None)
