"""Compression of a finished run as a new run; the source is only read."""

from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run, request
from torch import nn

from lathe.compression.quantization.net import integer_weight, quantized_layers
from lathe.errors import UserError
from lathe.runs import inference
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs import compress as verb
from lathe.verbs.compress import compress
from lathe.verbs.evaluate import evaluate

NET = ("model=resnet20", "model.net.depth=8", "model.net.width=8", "data.batch_size=64", "trainer.max_epochs=4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small trained ResNet."""
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL[3:6], *NET)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(autouse=True)
def receipts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of receipt.write, which is replaced."""
    calls: list[Any] = []
    monkeypatch.setattr(verb.receipt, "write", lambda *arguments: calls.append(arguments))
    return calls


def done(run: RunDir, *overrides: str) -> tuple[RunDir, dict[str, Any]]:
    """The new run and its result."""
    before = set(run.path.parent.iterdir())
    result = compress(request(run, "compress", *overrides))
    (path,) = set(run.path.parent.iterdir()) - before
    return RunDir(path), result


@pytest.fixture(scope="module")
def weight_only(source: RunDir) -> tuple[RunDir, dict[str, Any]]:
    return done(source, "compression=weight_only", "compression.receipt=none")


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_static_int8_as_a_new_run(source: RunDir, receipts: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = files(source)
    run, result = done(source, "compression=ptq_static")
    assert files(source) == before
    assert result == run.result
    assert result["source/test/accuracy"] == pytest.approx(source.result["test/accuracy"], abs=1e-6)
    assert result["source/val/accuracy"] == pytest.approx(source.result["val/accuracy"], abs=1e-6)
    assert result["test/accuracy"] > 0.9
    assert abs(result["test/accuracy"] - result["source/test/accuracy"]) <= 0.005
    assert result["objective"] == result["val/accuracy"]
    assert result["ptq_static/layers"] == 13
    cfg = run.config
    assert cfg["ckpt_path"] == result["source"] == str(source.path)
    assert cfg["compression"]["ptq_static"]["batches"] == 16
    assert all(cfg[key] == source.config[key] for key in ("data", "model", "trainer", "strategy"))
    assert run.environment["packages"]["torch"]
    ((written, config_, baseline, effort),) = receipts
    assert (written.path, config_, baseline, effort) == (run.path, cfg, source.path, "quick")
    assert (run.path.parent.parent / "latest").resolve() == run.path.resolve()
    assert f"python scripts/export.py run={run.path} target=onnx_int8\n" in capsys.readouterr().out
    # and other commands see the integers
    task, _ = inference.open_run_net(run.path)
    assert len(quantized_layers(task.net)) == 13
    state = torch.load(run.best, weights_only=True)
    assert state["global_step"] == torch.load(source.best, weights_only=True)["global_step"]
    assert set(state["structure"]) == {"quantization"}
    evaluated = evaluate(request(run, "evaluate", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"))
    assert evaluated["test/accuracy"] == pytest.approx(result["test/accuracy"], abs=1e-6)


@pytest.mark.filterwarnings("ignore:compression.ptq_dynamic quantizes linear layers alone")
def test_the_other_quantizations(source: RunDir, weight_only: tuple[RunDir, dict[str, Any]]) -> None:
    dynamic = done(source, "compression=ptq_dynamic", "compression.receipt=none")[1]
    for name, layers, result in (("ptq_dynamic", 1, dynamic), ("weight_only", 10, weight_only[1])):
        assert result[f"{name}/layers"] == layers
        assert abs(result["test/accuracy"] - result["source/test/accuracy"]) <= 0.005


def test_a_run_that_has_not_ended(source: RunDir, weight_only: tuple[RunDir, dict[str, Any]]) -> None:
    """Its best checkpoint exists all the same."""
    path, ended = source.path / "result.json", source.result
    text = path.read_text()
    path.unlink()
    try:
        result = done(source, "compression=weight_only", "compression.receipt=none")[1]
    finally:
        path.write_text(text)
    assert (result["steps"], result["best_step"]) == (ended["best_step"], ended["best_step"])
    assert result["seed"] == ended["seed"]
    assert result["test/accuracy"] == weight_only[1]["test/accuracy"]


def zeros(net: nn.Module) -> float:
    weights = [m.weight for m in net.modules() if isinstance(m, nn.Conv2d)]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def test_masks_then_integers(source: RunDir) -> None:
    run, result = done(source, "compression=[prune,ptq_static]", "compression.prune.sparsity=0.5")
    assert result["prune/sparsity"] == pytest.approx(0.5, abs=1e-3)
    net = inference.open_run_net(run.path)[0].net
    assert zeros(net) == pytest.approx(0.5, abs=1e-3)
    for layer in quantized_layers(net).values():
        if isinstance(layer, nn.Conv2d):
            assert not integer_weight(layer)[0][layer.weight == 0].any()
    assert result["test/accuracy"] > 0.8


def test_channels_are_removed_at_once(source: RunDir) -> None:
    run, result = done(source, "compression=prune_channels", "compression.prune_channels.share=0.7")
    assert result["prune_channels/macs_share"] <= 0.7
    assert result["parameters"] < source.result["parameters"]
    net = inference.open_run_net(run.path)[0].net
    assert sum(p.numel() for p in net.parameters()) == result["parameters"]
    second = compress(request(run, "compress", "compression=ptq_static", "name=smaller"))
    (again,) = map(RunDir, (run.path.parent.parent / "smaller").iterdir())
    assert again.config["name"] == second["name"] == again.result["name"] == "smaller"
    assert second["source/test/accuracy"] == pytest.approx(result["test/accuracy"], abs=1e-6)
    assert set(torch.load(again.best, weights_only=True)["structure"]) == {"channels", "quantization"}


def test_a_quantized_run_is_refused(weight_only: tuple[RunDir, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="is quantized already, compression=prune would act on rounded weights"):
        compress(request(weight_only[0], "compress", "compression=prune"))


def test_mistakes_leave_nothing_behind(source: RunDir) -> None:
    before = sorted(source.path.parent.iterdir())
    for overrides, sentence in (
        (["compression=none"], "^compression=none leaves the run as it is"),
        (["compression=prune", "compression.prune.criterion=taylor"], r"^compression\.prune\.criterion=taylor"),
        (["compression=ptq_static", "compression.ptq_static.exclude=[nothing]"], "the pattern 'nothing'"),
    ):
        with pytest.raises(UserError, match=sentence):
            compress(request(source, "compress", *overrides))
    assert sorted(source.path.parent.iterdir()) == before
