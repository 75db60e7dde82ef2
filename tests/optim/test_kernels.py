"""trainer.fused_optimizer uses an optimizer's fast kernels, with the same steps up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import interruption
from support.runs import SMALL, config, new_run, weights
from torch import nn

from lathe.optim.build import with_kernels
from lathe.runs.build import make_optimizer
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture


@pytest.mark.parametrize(
    ("words", "fused", "foreach", "line"),
    [
        (("optimizer=sgd",), True, None, " took fused: SGD"),
        (("optimizer=radam",), None, True, " took foreach: RAdam"),
        (("optimizer=lamb",), None, None, ": the optimizer's step stays as it is"),
        (("optimizer=sgd", "optimizer.fused=false"), False, None, ": fused=false"),
        (("late", "optimizer=adamw"), None, True, " took foreach"),  # clipped and scaled gradients
    ],
)
def test_what_an_optimizer_has_is_taken(words: tuple[str, ...], fused: Any, foreach: Any, line: str) -> None:
    net, late = nn.Linear(3, 2), words[0] == "late"
    factory, said = with_kernels(make_optimizer(config(*words[late:])), net.parameters(), late)
    optimizer = factory(net)
    assert (optimizer.defaults.get("fused"), optimizer.defaults.get("foreach")) == (fused, foreach)
    assert said.startswith(line)


def test_a_run_ends_with_the_same_weights_but_for_their_last_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for word in ("false", "auto"):
        cfg = new_run(tmp_path / word, *SMALL, "optimizer=adamw", f"trainer.fused_optimizer={word}", "test=false")
        train(cfg)
        found.append(weights(Path(cfg["paths"]["run_dir"])))
        assert (" took fused: " in capsys.readouterr().out) == (word == "auto")
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)
