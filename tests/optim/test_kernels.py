"""trainer.fused_optimizer uses an optimizer's fast kernels, with the same steps up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import interruption
from support.runs import SMALL, config, new_run, weights
from torch import nn

from lathe.optim.build import with_kernels
from lathe.runs.build import make_optimizer, make_task
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture


def taken(*words: str, parameters: list[nn.Parameter] | None = None, late: bool = False) -> tuple[Any, str]:
    """Return the optimizer of these overrides over one weight, and the message that names its kernels."""
    net = nn.Linear(3, 2)
    given = list(net.parameters()) if parameters is None else parameters
    factory, line = with_kernels(make_optimizer(config(*words)), given, late)
    return factory(net), line


@pytest.mark.parametrize(
    ("words", "fused", "foreach", "line"),
    [
        (("optimizer=sgd",), True, None, " took fused: SGD"),
        (("optimizer=radam",), None, True, " took foreach: RAdam"),
        (("optimizer=lamb",), None, None, ": the optimizer's step stays as it is"),
        (("optimizer=sgd", "optimizer.fused=false"), False, None, ": fused=false"),
    ],
)
def test_what_an_optimizer_has_is_taken(words: tuple[str, ...], fused: Any, foreach: Any, line: str) -> None:
    optimizer, said = taken(*words)
    assert (optimizer.defaults.get("fused"), optimizer.defaults.get("foreach")) == (fused, foreach)
    assert said.startswith(line)


def test_clipped_and_scaled_gradients_leave_one_kernel_out() -> None:
    optimizer, said = taken("optimizer=adamw", late=True)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (None, True)
    assert said.startswith(" took foreach")


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


def test_a_module_with_an_optimizer_of_its_own_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=lightning", "model.net={_target_: support.own_lightning.LitNet}", "trainer.fused_optimizer=auto")
    make_task(config(*words))
    assert "no effect on the optimizer that support.own_lightning.LitNet makes." in capsys.readouterr().out
