"""`compile.scope=step`: a step compiled as one graph trains as the eager step does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from support.interruptions import Interruption, compare, interruption
from support.runs import SMALL, column, config, new_run, weights
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import lathe.training.train
from lathe.config.validate import check
from lathe.errors import UserError

__all__ = ["interruption"]  # a fixture

STEP = ("compile=default", "compile.scope=step")
GRAPH = (*STEP, "compile.backend=aot_eager")  # captures and differentiates as inductor does, without kernels


# importing inductor uses parts that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    counters.clear()


def trained(folder: Path, *words: str) -> Path:
    cfg = new_run(folder, *SMALL, "test=false", "seed=3", *words)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def alike(left: Path, right: Path) -> None:
    """Compare up to rounding: a graph sums in another order."""
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    for name in ("train/loss", "train/accuracy", "val/loss", "val/accuracy"):
        assert column(left, name) == pytest.approx(column(right, name), rel=1e-3, abs=1e-3)
        assert column(left, name)


RECIPES = {
    "sgd": ("optimizer=sgd", "scheduler=one_cycle", "trainer.gradient_clip_val=0.5"),
    "adamw": ("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value", "callbacks=[default,ema]"),
    "lars": ("optimizer=lars", "optimizer.lr=0.1"),
    "muon": ("optimizer=muon", "model.net.depth=3"),
}


SLOW = ("lars", "muon")


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RECIPES])
def test_it_trains_as_the_step_that_is_written(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it writes to stays where it is, or inductor would make no CUDA graph of it: weights, gradients, states,
    counters and statistics.
    """
    seen: list[tuple[set[int], set[int], list[Any]]] = []

    def watched(graph: Any, inputs: list[Any]) -> Any:
        facts = torch._guards.TracingContext.get().fw_metadata
        assert facts is not None
        written = {number for number, info in enumerate(facts.input_info) if info.mutates_data}
        seen.append((written, set(facts.static_input_indices), inputs))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=watched, keep_inference_input_mutations=True)
    registry.lookup_backend("aot_eager")  # registers torch's backends
    monkeypatch.setitem(registry._COMPILER_FNS, "aot_eager", backend)
    found = trained(tmp_path / "whole", *RECIPES[recipe], *GRAPH)
    assert counters["stats"]["unique_graphs"] == 2  # the step, and the evaluation
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    written, static, inputs = max(seen, key=lambda graph: len(graph[0]))
    assert len(written) > 10
    assert written <= static
    moving = [inputs[number] for number in range(len(inputs)) if number not in static]
    assert sorted(tensor.ndim for tensor in moving) == [1, 4]  # the labels and the images
    alike(found, trained(tmp_path / "eager", *RECIPES[recipe]))


def test_a_pruned_net_keeps_its_zeros(tmp_path: Path) -> None:
    words = ("compression=prune", "compression.receipt=none", "optimizer=sgd", "optimizer.lr=0.01")
    found, written = trained(tmp_path / "whole", *words, *GRAPH), trained(tmp_path / "eager", *words)
    assert column(found, "prune/sparsity") == column(written, "prune/sparsity")
    zeros = [sum(int((value == 0).sum()) for value in weights(run).values()) for run in (found, written)]
    assert zeros[0] == zeros[1] > 500
    assert column(found, "val/accuracy")[-1] == pytest.approx(column(written, "val/accuracy")[-1], abs=0.05)


@pytest.mark.slow
def test_what_inductor_makes_in_bf16_is_right_and_kept_beside_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the run sets its own until its end
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    shallow = ("model.net.depth=1", "precision=bf16-mixed")  # each kernel takes the compiler two seconds
    words = (*STEP, *shallow, f"paths.data_dir={tmp_path / 'mine'}")
    found = trained(tmp_path / "whole", *words)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    written = trained(tmp_path / "eager", *shallow)
    assert column(found, "train/loss") == pytest.approx(column(written, "train/loss"), rel=0.02)
    made = list((tmp_path / "mine" / "compiled").rglob("*.so"))
    assert made
    counters.clear()
    torch.compiler.reset()
    again = trained(tmp_path / "again", *words)
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    assert list((tmp_path / "mine" / "compiled").rglob("*.so")) == made
    assert column(again, "train/loss") == column(found, "train/loss")


def test_a_continued_run_has_the_same_digits(tmp_path: Path, interruption: Interruption) -> None:
    words = (*SMALL, "test=false", "model.net.dropout=0.1", "callbacks.checkpoint.every_n_train_steps=4", *GRAPH)
    compare(tmp_path, interruption, [("on_train_batch_start", 14)], *words)


def test_a_net_that_can_not_be_captured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lathe.nets import MLP

    forward = MLP.forward

    def breaks(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(MLP, "forward", breaks)
    with pytest.raises(UserError, match="the step can't be captured as one graph"):
        trained(tmp_path, *GRAPH)


def test_what_changes_beside_the_learning_rate_is_refused(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, *GRAPH, "test=false", "optimizer=sgd", "scheduler=none")
    cfg["scheduler"] = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "_partial_": True, "max_lr": 0.1}
    with pytest.raises(UserError, match="something changes momentum of SGD during training"):
        lathe.training.train.train(cfg)


OFFLOAD = "trainer.activation_checkpointing=offload"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*STEP, "trainer.accumulate_grad_batches=2"), "trainer.accumulate_grad_batches=2"),
        ((*STEP, "precision=16-mixed"), "precision=16-mixed"),
        ((*STEP, "strategy=ddp", "trainer.devices=2"), "is for one process"),
        ((*STEP, "compression=qat"), "compression=qat"),
        (("compile=default", OFFLOAD), "compile=none"),
        (("strategy=pipeline", "trainer.devices=2", OFFLOAD), "not with Pipeline"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_at_the_launch(words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(check(config(*SMALL, *words)))
