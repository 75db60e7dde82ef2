"""The update of all weights as one kernel: taken where there is one, told, and the same step to the last digits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import Interrupted, Interruption, interruption
from support.runs import SMALL, config, new_run, weights
from torch import nn

from lathe.optim.kernels import with_kernels
from lathe.runs.build import make_optimizer, make_task
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture


def taken(*words: str, parameters: list[nn.Parameter] | None = None, late: bool = False) -> tuple[Any, str]:
    """The optimizer of these overrides over one weight, and the line that says which kernels it took."""
    net = nn.Linear(3, 2)
    given = list(net.parameters()) if parameters is None else parameters
    factory, line = with_kernels(make_optimizer(config(*words)), given, late)
    return factory(net), line


@pytest.mark.parametrize(
    ("words", "fused", "foreach", "line"),
    [
        (("optimizer=sgd",), True, None, " took fused: SGD updates all weights of the CPU in one kernel."),
        (("optimizer=adamw",), True, None, " took fused: AdamW updates all weights of the CPU in one kernel."),
        (
            ("optimizer=radam",),
            None,
            True,
            " took foreach: RAdam updates all weights of the CPU in one call for each operation.",
        ),
        (
            ("optimizer=lamb",),
            None,
            None,
            ": the optimizer's step stays as it is, since LAMB has no such kernels.",
        ),
        (
            ("optimizer=sgd", "optimizer.fused=false"),
            False,
            None,
            ": fused=false of the optimizer says it",
        ),
        (
            ("optimizer=sgd", "optimizer.foreach=true"),
            None,
            True,
            ": foreach=true of the optimizer says it",
        ),
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


def test_whole_numbers_and_a_function_of_the_users_own_stay() -> None:
    whole = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert taken("optimizer=sgd", parameters=[whole])[0].defaults["fused"] is None

    def own(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    factory, line = with_kernels(own, [], False)
    assert factory is own
    assert line == ": own makes an optimizer in its own way, which stays."


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_ends_with_the_same_weights_but_for_their_last_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    found = []
    for word in ("false", "auto"):
        cfg = new_run(
            tmp_path / word, *SMALL, f"optimizer={optimizer}", f"trainer.fused_optimizer={word}", "test=false"
        )
        train(cfg)
        found.append(weights(Path(cfg["paths"]["run_dir"])))
        assert (" took fused: " in capsys.readouterr().out) == (word == "auto")
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)


def test_a_continued_run_has_the_same_digits(tmp_path: Path, interruption: Interruption) -> None:
    words = (*SMALL, "optimizer=adamw", "trainer.fused_optimizer=auto", "test=false")
    words = (*words, "callbacks.checkpoint.every_n_train_steps=4")
    alone, cfg = new_run(tmp_path / "alone", *words), new_run(tmp_path / "dies", *words)
    train(alone)
    interruption.hook, interruption.step = "on_train_batch_start", 14
    with pytest.raises(Interrupted):
        train(cfg)
    interruption.hook = ""
    train(cfg)
    ours, theirs = weights(Path(cfg["paths"]["run_dir"])), weights(Path(alone["paths"]["run_dir"]))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_one_kernel_and_clipping_go_together_where_nothing_is_scaled(tmp_path: Path) -> None:
    cfg = new_run(
        tmp_path, *SMALL, "optimizer.fused=true", "precision=bf16-mixed", "trainer.gradient_clip_val=1.0", "test=false"
    )
    train(cfg)
    assert weights(Path(cfg["paths"]["run_dir"]))


def test_a_module_with_an_optimizer_of_its_own_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=lightning", "model.net={_target_: support.own_lightning.LitNet}", "trainer.fused_optimizer=auto")
    make_task(config(*words))
    assert "the optimizer that support.own_lightning.LitNet makes stays as it is." in capsys.readouterr().out


# importing inductor makes what torch 2.13 itself says is deprecated
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_step_that_is_compiled_keeps_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = new_run(
        tmp_path,
        *SMALL,
        "trainer.fused_optimizer=auto",
        "compile=default",
        "compile.scope=step",
        "compile.backend=eager",
        "trainer.max_epochs=1",
        "test=false",
    )
    train(cfg)
    assert "stays as it is, since compile.scope=step compiles it." in capsys.readouterr().out
