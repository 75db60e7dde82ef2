"""The methods of a run: made in order with their shares, finalised once, measured in the end without hurting the
run.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from support.runs import SMALL, config, new_run, weights

import lathe.receipt
from lathe.callbacks import Compression
from lathe.callbacks.methods.pruning import Prune
from lathe.callbacks.methods.qat import QAT
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir
from lathe.training.callbacks_and_loggers import make_methods
from lathe.training.compression_finalize import finalize_compression
from lathe.training.train import train

CONV = (
    "model=resnet20",
    "model.net.width=8",
    "model.net.depth=8",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=2",
    "data.batch_size=100",
    "compression.receipt=none",
)


def test_methods_come_in_order_with_their_share_of_the_run() -> None:
    made = make_methods(config("compression=[prune,qat]", "compression.stages=[prune,qat]"))
    assert [type(method) for method in made] == [Prune, QAT]
    assert [method.window for method in made] == [(0.0, 0.5), (0.5, 1.0)]
    assert make_methods(config()) == []


def test_weights_that_are_changed_after_training_are_what_is_evaluated(tmp_path: Path) -> None:
    """Once: a run that is finished again, after a death between the two, does not quantize what is quantized."""
    cfg = new_run(tmp_path, *CONV, "compression=ptq_static")
    train(cfg)
    run = RunDir(cfg["paths"]["run_dir"])
    state = read_checkpoint(run.best)
    assert state["finalised"]
    assert state["structure"]["quantization"]
    assert "optimizer_states" not in state
    assert "quantization" not in read_checkpoint(run.last).get("structure", {})
    before = weights(run.path, "best")
    assert finalize_compression(cfg, run.best, make_methods(cfg))
    after = weights(run.path, "best")
    assert all(torch.equal(before[name], after[name]) for name in before)
    result = run.result
    assert result["best_step"] == 26
    assert 0 < result["val/accuracy"] <= 1


def test_a_net_that_is_not_ready_is_not_the_best(tmp_path: Path) -> None:
    """Masks grow until 0.7 of the run: the better epochs before are no result."""
    cfg = new_run(
        tmp_path,
        *SMALL,
        "trainer.max_epochs=4",
        "compression=prune",
        "compression.prune.sparsity=0.99",
        "compression.prune.end=0.7",
        "compression.receipt=none",
    )
    train(cfg)
    found = json.loads((Path(cfg["paths"]["run_dir"]) / "result.json").read_text())
    assert found["best_step"] > 0.7 * 80
    assert found["prune/sparsity"] == pytest.approx(0.99, abs=0.01)


def test_a_receipt_that_fails_leaves_a_complete_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(lathe.receipt, "write", fail)
    cfg = new_run(tmp_path, *SMALL, "compression=prune")
    with pytest.warns(UserWarning, match=r"receipt failed \(RuntimeError: no clock\): python scripts/receipt\.py run="):
        train(cfg)
    assert RunDir(cfg["paths"]["run_dir"]).complete


def test_a_method_has_what_the_base_promises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = Compression()
    assert (method.report(), method.window) == ({}, (0.0, 1.0))
    assert method.finalise(torch.nn.Linear(1, 1), None) is False


def test_a_quantized_net_that_trains_on_without_qat_is_told_so(tmp_path: Path) -> None:
    first = new_run(tmp_path, *CONV, "compression=ptq_static")
    train(first)
    second = new_run(tmp_path / "on", *CONV, f"ckpt_path={first['paths']['run_dir']}")
    with pytest.warns(
        UserWarning, match=r"^ckpt_path=.* is a quantized net: it trains with rounding on and fixed ranges; add qat"
    ):
        train(second)
