"""Comparison of an export with its run, and the measures of their difference."""

import dataclasses
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import GPT, made, request

from lathe import trust
from lathe.errors import UserError
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.verbs import export as parity
from lathe.verbs.export import ship

pytestmark = pytest.mark.law6


def test_held_out_samples_are_those_of_the_split_without_filling_rows(mlp: RunDir) -> None:
    ready = open_export_model(mlp.path)
    held = parity.held_out(ready, "test", None)
    assert (held.n, len(held.batches)) == (297, 5)
    assert all((batch[1] != -100).all() for batch in held.batches)
    source = ready.data.source.load().test
    assert torch.equal(torch.cat(held.inputs), torch.from_numpy(source.read()[0]))
    assert parity.held_out(ready, "val", 70).n == 70
    assert [len(x) for x in parity.held_out(ready, "val", 70).inputs] == [64, 6]


def test_a_dataset_may_divide_as_torchvision_does(here: None, tmp_path: Path) -> None:
    run = normalised(tmp_path, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    held = parity.held_out(open_export_model(run.path), "test", None)
    assert torch.cat(held.inputs).unique().tolist() == list(range(256))
    assert held.batches[0][0].unique().numel() > 250
    report = ship(request(run, "target=onnx"))["onnx"]
    assert report["held_out"]["n"] == held.n
    assert report["figures"]["file"] == pytest.approx(report["figures"]["trained"], rel=1e-4)


def test_data_that_are_not_normalised_pixels(here: None, tmp_path: Path) -> None:
    run = normalised(tmp_path, [0.5], [0.25], gamma=1.2)
    with pytest.raises(UserError) as error:
        parity.held_out(open_export_model(run.path), "test", None)
    assert re.fullmatch(r"target\.preprocess=true: the data differ by 0\.00\d+ from .*", str(error.value))
    assert ship(request(run, "target=onnx", "target.preprocess=false"))["onnx"]["held_out"]["n"] == 4


def normalised(folder: Path, mean: list[float], std: list[float], gamma: float = 1.0) -> RunDir:
    """A run on `own_datasets.normalised`."""
    trust.allow({"trusted": ["support"]})
    node = f"{{_target_: support.own_datasets.normalised, mean: {mean}, std: {std}, gamma: {gamma}}}"
    facts = (f"data.channels={len(mean)}", "data.image_size=16", "data.num_classes=2", f"data.mean={mean}")
    words = ("model=mlp", "trainer.max_epochs=1", "data.batch_size=8", "data=dataset", f"data.train={node}")
    return made(folder, *words, *facts, f"data.std={std}")


def test_odd_inputs(mlp: RunDir) -> None:
    ready = open_export_model(mlp.path)
    odd = parity.odd_inputs(ready)
    assert [len(x) for x in odd] == [1, 1, 2, 2, 3, 7, 16, 33]
    assert all(x.dtype == torch.uint8 and x.shape[1:] == (1, 8, 8) for x in odd)
    assert (int(odd[1].max()), int(odd[3].min())) == (0, 255)
    assert all(torch.equal(x, y) for x, y in zip(odd, parity.odd_inputs(ready), strict=True))
    assert parity.odd_inputs(open_export_model(mlp.path, preprocess=False))[0].dtype == torch.float32
    sizes = {tuple(x.shape[2:]) for x in parity.odd_inputs(open_export_model(mlp.path, input_size="any"))}
    assert (1, 1) in sizes
    assert max(max(size) for size in sizes) > 16


def test_the_worst_difference_of_several_outputs() -> None:
    reference = torch.tensor([[1.0, -4.0, 2.0], [0.0, 1.0, 0.5]])
    other = torch.tensor([[1.0, -4.0, 2.5], [1.25, 1.0, 0.5]])
    found = parity.compare([[other]], [[reference]], "classes")
    assert found == {"largest": 1.25, "scale": 4.0, "relative": 1.25 / 4, "n": 2, "agreement": 0.5}
    assert parity.compare([[other]], [[reference]], "values")["agreement"] is None
    whole, one_off = torch.tensor([1, 2]), torch.tensor([1, 3])  # integers: the share of equal ones
    found = parity.compare([[other, one_off]], [[reference, whole]], "values")
    assert (found["relative"], found["agreement"]) == (1.25 / 4, 0.5)
    for value in (math.nan, math.inf):
        broken = reference.clone()
        broken[0, 0] = value
        outputs = [[broken, whole], [reference, whole]]
        assert not parity.compare(outputs, [[reference, whole]] * 2, "values")["relative"] <= 1e9
    with pytest.raises(UserError, match=r"an output has shape \[2, 2\] instead of \[2, 3\]"):
        parity.compare([[reference[:, :2]]], [[reference]], "classes")


def test_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SECONDS", 0.5)
    with pytest.raises(UserError, match=r"^a fresh process did not answer within 0\.5 seconds$"):
        parity._run([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_step_of_fewer_bits_is_larger(monkeypatch: pytest.MonkeyPatch, mlp: RunDir) -> None:
    ready = open_export_model(mlp.path, integers=True)
    assert ready.activation_bits == 8
    for bits, largest in ((8, 0.1), (6, 0.1 * 255 / 63), (4, 0.5)):
        monkeypatch.setattr(type(ready), "activation_bits", bits)
        assert parity.tolerances(ready, "int8") == (pytest.approx(largest), 0.97)


def test_the_figure_that_is_judged(mlp: RunDir) -> None:
    ready = open_export_model(mlp.path)

    def told(trained: dict[str, float], found: dict[str, float], most: float | None = 0.02) -> dict[str, Any]:
        return parity.metric_drop(ready, {"trained": trained, "module": trained, "file": found}, most, "onnx")

    assert told({"accuracy": 0.8, "loss": 1.0}, {"accuracy": 0.79, "loss": 9.0})["drop"] == pytest.approx(0.0125)
    assert told({"accuracy": 0.8}, {"accuracy": 0.9})["drop"] == pytest.approx(-0.125)
    with pytest.raises(UserError, match=r"worse by 0\.025 of it"):
        told({"accuracy": 0.8}, {"accuracy": 0.78})
    assert told({"accuracy": 0.8}, {"accuracy": 0.1}, None)["max_drop"] is None
    perplexed = type(
        "Task", (), {"monitor": "val/loss", "computed": ("perplexity",), "minimised": ("loss", "perplexity")}
    )
    ready = dataclasses.replace(ready, task=perplexed)
    metrics = {"loss": 1e-4, "perplexity": 1.0001}
    assert told(metrics, {"loss": 2e-4, "perplexity": 1.0002})["metric"] == "perplexity"
    with pytest.raises(UserError, match="worse by nan"):
        told({"loss": 1.0, "perplexity": math.inf}, {"loss": 1.0, "perplexity": math.inf})


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small net of token ids."""
    return made(tmp_path_factory.mktemp("logs"), *GPT)


@pytest.mark.usefixtures("stub")
def test_tokens_have_other_times(words: RunDir, tmp_path: Path) -> None:
    shutil.copytree(words.path, tmp_path / "run")
    ready = open_export_model(words.path)
    facts = ready.facts["input"]
    assert (facts["dtype"], facts["shape"]) == ("int64", ["batch", "time"])
    assert (facts["longest"], facts["vocab_size"]) == (32, 32)
    assert ready.facts["output"]["shape"] == ["batch", "time", 32]
    odd = parity.odd_inputs(ready)
    assert odd[0].shape == (1, 1)
    assert len({x.shape[1] for x in odd}) > 3
    assert max(x.shape[1] for x in odd) <= 32
    report = ship(request(RunDir(tmp_path / "run"), "target=onnx"))["onnx"]
    assert (report["metric"], report["held_out"]["n"], report["held_out"]["agreement"]) == ("perplexity", 32 * 32, 1.0)
    assert report["figures"]["file"]["perplexity"] == pytest.approx(words.result["test/perplexity"], rel=1e-4)


@pytest.mark.slow
def test_documents_of_different_lengths(tmp_path: Path) -> None:
    documents = ("data=documents", "data.length=32", "data.source.longest=31", "data.max_tokens=512")
    run = made(tmp_path, *GPT, *documents)
    for report in ship(request(run, "target=[onnx,onnx_int8]")).values():
        assert report["samples"] == 32
        assert report["figures"]["trained"]["loss"] == pytest.approx(run.result["test/loss"], rel=1e-5)
        assert report["figures"]["file"]["loss"] == pytest.approx(run.result["test/loss"], rel=1e-2)
