"""Receipts of short runs; compiled forms run eagerly here, for compilers take longer than these nets."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_lightning import QUICK
from support.runs import SMALL, new_run, request
from torch import nn

from lathe import export, trust
from lathe.errors import UserError
from lathe.measure import Agreement
from lathe.nets import MLP
from lathe.receipt import measured, write
from lathe.receipt.measured import changed_nothing, receipt, scored
from lathe.receipt.page import findings
from lathe.runs import inference
from lathe.runs.rundir import RunDir
from lathe.tasks import ClassificationTask
from lathe.training.train import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:compression.*of the weights"),
    pytest.mark.filterwarnings("ignore:compression.receipt=quick will be without"),
]
SHORT = measured.Effort(repeats=5, warmup=1, seconds=1.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(measured.EFFORTS, "quick", SHORT)
    monkeypatch.setitem(
        measured.EFFORTS, "full", dataclasses.replace(SHORT, batches=(2,), all_cores=True, compiled=True)
    )
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out exports, which take most of a small net's receipt."""
    monkeypatch.setattr(
        type(export.get("onnx")),
        "available",
        lambda self: None if self.integers else "target=onnx needs a package: pip install it.",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, "model.net.width=32", "seed=1")
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def requested(run: RunDir, *overrides: str) -> dict[str, Any]:
    return request(run, "receipt", "trainer.accelerator=cpu", *overrides)


def test_a_plain_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = run.path / "exports" / "onnx" / "model.onnx"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(b"made by scripts/export.py")
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    found = receipt(requested(run, "effort=quick"))
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), random)) == (threads, True)
    assert json.loads((run.path / "receipt.json").read_text()) == found
    rows = {(row["of"], row["backend"], row["split"]): row for row in found["figures"]}
    for split in ("val", "test"):
        assert rows["this", "eager", split]["figures"]["accuracy"] == pytest.approx(
            run.result[f"{split}/accuracy"], abs=1e-7
        )
    assert rows["this", "onnx", "test"]["figures"]["loss"] == pytest.approx(run.result["test/loss"], rel=1e-5)
    assert found["size"]["parameters"] == found["dense"]["size"]["parameters"] == run.result["parameters"]
    assert found["size"]["macs"] == 64 * 16 + 16 * 10
    assert (found["warnings"], found["left_out"]) == ([], [])
    text, page = capsys.readouterr().out, (run.path / "receipt.md").read_text()
    assert found["findings"][0] in text  # the verdict
    assert all(sentence in page for sentence in found["findings"])
    assert (run.path / "receipt.svg").read_text().count("<svg") == 3
    assert [path.read_bytes() for path in (run.path / "exports").rglob("*") if path.is_file()] == [
        b"made by scripts/export.py"
    ]


@pytest.mark.usefixtures("no_onnx")
def test_a_trained_baseline(run: RunDir, wider: RunDir) -> None:
    found = receipt(requested(run, "effort=quick", f"baseline={wider.path}"))
    assert found["dense"] == {
        "size": {**found["dense"]["size"], "parameters": wider.result["parameters"]},
        "trained": True,
    }
    rows = {(row["of"], row["backend"], row["split"]): row for row in found["figures"]}
    assert rows["dense", "eager", "test"]["figures"]["accuracy"] == pytest.approx(
        wider.result["test/accuracy"], abs=1e-7
    )
    answers = []
    for source in (run, wider):
        task, cfg = inference.open_run_net(source.path)
        loader = inference.open_data(cfg).eval_loader("test")
        counted = torch.cat([y for _, y in loader]) != -100  # the last batch is filled up
        answers.append(torch.cat([task.net(batch[0]) for batch in loader])[counted])
    agreement = rows["this", "eager", "test"]["agreement"]
    assert agreement["n"] == 297
    equal = (answers[0].argmax(1) == answers[1].argmax(1)).float().mean()
    assert agreement["share"] == pytest.approx(equal.item(), abs=1e-7)
    assert agreement["largest"] == pytest.approx((answers[0] - answers[1]).abs().max().item(), rel=1e-4)


@pytest.mark.usefixtures("no_onnx")
def test_a_run_is_not_its_own_baseline_and_a_sparse_baseline_is_named(run: RunDir, tmp_path: Path) -> None:
    """logs/latest in `ckpt_path` of a run directory may lead to the run itself by now."""
    cfg = new_run(tmp_path, *SMALL, "compression=prune", "compression.receipt=none", f"ckpt_path={run.path}")
    train(cfg)
    pruned, latest = RunDir(cfg["paths"]["run_dir"]), tmp_path / "latest"
    assert write(pruned, cfg, None, "quick")["baseline"] == str(run.path)  # the run that it started from
    assert latest.resolve() == pruned.path
    pruned.save_config({**pruned.config, "ckpt_path": str(latest)})
    assert write(pruned, cfg, None, "quick")["baseline"] is None
    note = "The baseline is itself a compressed net: ratios are to it, not to a dense one."
    assert note in write(run, run.config, pruned.path, "quick")["findings"]


@pytest.mark.usefixtures("no_onnx")
def test_full_measures_compiled_forms_and_all_cores(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.measure.usable_cores", lambda: 2)
    found = receipt(requested(run, "effort=full"))
    cells = {(row["of"], row["backend"], row["threads"]) for row in found["latency"]}
    compiled = {(of, f"compiled_{dtype}") for of in ("this", "dense") for dtype in ("fp32", "bf16")}
    assert {(*form, threads) for form in compiled for threads in (1, 2)} <= cells
    scores = {row["backend"]: row["figures"] for row in found["figures"] if row["split"] == "test"}
    assert scores["compiled_fp32"]["loss"] == pytest.approx(scores["eager"]["loss"], rel=1e-4)
    assert scores["compiled_bf16"]["loss"] == pytest.approx(scores["eager"]["loss"], rel=0.05)
    assert scores["compiled_bf16"]["loss"] != scores["eager"]["loss"]


@pytest.mark.usefixtures("no_onnx")
def test_a_test_split_that_is_kept_unseen_stays_so(tmp_path: Path) -> None:
    """The energy that callbacks=[default,device_stats] writes down where there is a counter is in it, too."""
    cfg = new_run(tmp_path, *SMALL, "test=false")
    train(cfg)
    path = Path(cfg["paths"]["run_dir"]) / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "energy_gpu_j": 9000.0}))
    found = write(RunDir(path.parent), cfg, None, "quick")
    assert {row["split"] for row in found["figures"]} == {"val"}
    assert found["energy"] == {"this": {"energy_gpu_j": 9000.0}, "dense": {}}
    assert "Training took 2.5 Wh of the GPUs." in found["findings"]
    assert "keeps the test split unseen" in found["findings"][1]


@pytest.mark.usefixtures("no_onnx")
def test_a_back_end_that_fails_is_listed_and_the_others_are_measured(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = receipt(requested(run, "effort=quick"))
    assert {"form": "this onnx", "reason": "target=onnx needs a package: pip install it."} in found["left_out"]
    assert "this onnx: target=onnx needs a package" in (run.path / "receipt.md").read_text()
    assert {row["backend"] for row in found["latency"]} == {"eager", "compiled_bf16"}

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", breaks)
    found = receipt(requested(run, "effort=quick"))
    lines = [entry for entry in found["left_out"] if entry["form"].startswith("dense compiled_bf16")]
    assert [entry["reason"] for entry in lines] == ["RuntimeError: no compiler here"] * 2
    assert all(row["over_bf16"] is None for row in found["latency"])


@pytest.mark.usefixtures("no_onnx")
def test_baselines_that_do_not_fit_are_refused(run: RunDir, tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "data.source.test_size=200", "data.image_size=12", "trainer.max_epochs=1")
    train(cfg)
    with pytest.raises(UserError, match=r"^baseline=.* takes inputs of another kind"):
        receipt(requested(run, f"baseline={cfg['paths']['run_dir']}"))
    with pytest.raises(UserError, match=r"^baseline=.* is this run itself"):
        receipt(requested(run, f"baseline={run.path}"))
    with run.locked(), pytest.raises(UserError, match="is being written to by another process"):
        receipt(requested(run))


def test_a_run_without_checkpoints_warns_and_has_no_receipt(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.enable_checkpointing=false", "trainer.max_epochs=1")
    train(cfg)
    with pytest.warns(UserWarning, match="has no receipt: it kept no best checkpoint"):
        assert write(RunDir(cfg["paths"]["run_dir"]), cfg, None, "quick") == {}


TABLE = ["data=dataset", "data.channels=1", "data.image_size=4", "data.batch_size=20", "optimizer.lr=0.01"]


@pytest.mark.parametrize(
    ("task", "data", "sentence"),  # about the dense net's answers
    [
        ("regression", "values", r"\. Outputs differ by [\d.e-]+ at most\.$"),
        ("multi_label", "labels", r"\. 0\.[5-9]\d+ of 40 predictions are equal\.$"),
    ],
)
def test_values_and_labels_have_receipts_too(
    tmp_path: Path, no_onnx: None, task: str, data: str, sentence: str
) -> None:
    trust.allow({"trusted": ["support"]})
    data = f"data.train={{_target_: support.own_datasets.{data}}}"
    words = [*SMALL, *TABLE, f"task={task}", data, "data.num_classes=2"]
    cfg = new_run(tmp_path / "dense", *words)
    train(cfg)
    cfg = new_run(tmp_path / "small", *words, "compression=prune", f"ckpt_path={cfg['paths']['run_dir']}")
    result, found = train(cfg), RunDir(cfg["paths"]["run_dir"]).receipt
    assert re.search(sentence, found["findings"][2])
    (own,) = [row for row in found["figures"] if (row["of"], row["backend"], row["split"]) == ("this", "eager", "test")]
    for name, value in own["figures"].items():
        assert value == pytest.approx(result[f"test/{name}"], rel=1e-4), name
    agreement = own["agreement"]
    assert agreement["n"] == 40  # 20 samples of two
    assert agreement["largest"] > 0
    assert (agreement["share"] is None) == (task == "regression")
    assert found["warnings"] == []


def test_methods_that_left_no_trace_are_named() -> None:
    net = MLP(channels=1, image_size=4, num_classes=3, width=8, depth=2)
    kinds = {"distill": "distillation", "prune": "masks", "qat": "quantization", "prune_channels": "structure"}
    warnings = changed_nothing({**kinds, "ptq_static": "after"}, net)
    names = ("prune", "qat", "prune_channels", "ptq_static")
    assert [text.split(":")[0] for text in warnings] == [f"compression={name} changed nothing" for name in names]
    with torch.no_grad():
        net.head.weight[0].zero_()
    assert changed_nothing({"prune": "masks"}, net) == []


def test_agreement_leaves_out_what_does_not_count() -> None:
    net = nn.Identity()
    batches = [(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([1, -100])), (torch.eye(2), torch.tensor([0, 0]))]
    metrics, agreement = scored(ClassificationTask(net), net, batches, torch.neg)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert agreement == Agreement(0.0, 4.0, 3)


def row(of: str, backend: str, median: float, **changes: Any) -> dict[str, Any]:
    times = {"n": 9, **dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), median)}
    for key in ("eager", "bf16", "twin"):
        times |= {f"over_{key}": 1.0, f"beside_{key}": "same"}
    return {"of": of, "backend": backend, "device": "cpu", "batch": 1, "threads": 1, **times, **changes}


def sentences(**changes: Any) -> str:
    content = {
        **{"chosen": {"by": "val/accuracy", "step": 7}, "split": "test", "metric": "accuracy"},
        **{"figures": [], "files": [], "latency": [], "structure": ["quantization"], "size": {"sparsity": 0.0}},
        **{"compression": {"qat": "quantization"}, "energy": {"this": {}, "dense": {}}},
    }
    return "\n".join(findings({**content, **changes}))


def test_the_verdict_is_one_sentence_and_integers_that_lose_against_bf16_are_reported() -> None:
    file = {"of": "this", "target": "onnx_int8", "bytes": 270, "gzipped": 150, "ratio": 0.25, "gzipped_ratio": 0.15}
    quick = {"over_eager": 1 / 2.6, "beside_eager": "faster", "over_twin": 1.9, "beside_twin": "slower"}
    rows = [row("this", "onnx_int8", 2.0, **quick), row("this", "onnx_int8", 9.0, batch=32, over_eager=0.1)]
    assert sentences(latency=rows, files=[file]).splitlines()[0] == (
        "Verdict: onnx_int8 at batch 1 is 2.6x faster than PyTorch eager, 1.9x slower than the dense ONNX file; "
        "the onnx_int8 file is 4.0x smaller."
    )
    slow = row("this", "onnx_int8", 2.0, over_bf16=1.4, beside_bf16="slower", over_eager=0.5, beside_eager="faster")
    text = sentences(latency=[row("this", "eager", 9.0), slow])
    assert "onnx_int8 is 1.4x slower than the dense net compiled in bf16, which needs no quantization" in text
    assert "saves bytes, not time" in text
    fast = row("this", "onnx_int8", 2.0, over_bf16=0.4, beside_bf16="faster")
    assert "saves bytes" not in sentences(latency=[fast])


MONITOR = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min", "test=false")
SCHEDULE = ("compression.prune.start=0", "compression.prune.end=0.5")
PRUNE = ("compression=prune", "compression.prune.sparsity=0.5", *SCHEDULE)


def fit(folder: Path, net: str, kind: str, *words: str) -> RunDir:
    trust.allow({"trusted": ["support"]})
    cfg = new_run(folder, *QUICK, *MONITOR, f"model.net={{_target_: support.modules.{net}}}", *words)
    cfg["data"] = {"_target_": "support.modules.Data", "kind": kind}
    (Path(cfg["paths"]["run_dir"]) / "config.yaml").write_text(json.dumps(cfg))
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.mark.law5
def test_a_pruned_classifier_beside_the_run_that_it_started_from(tmp_path: Path, no_onnx: None) -> None:
    """Sizes by arithmetic, the metrics of result.json, and times of both."""
    dense = fit(tmp_path / "dense", "Classifier", "image")
    words = (*PRUNE, "compression.prune.head=true", f"ckpt_path={dense.path}")
    run = fit(tmp_path / "pruned", "Classifier", "image", *words)
    found: dict[str, Any] = run.receipt
    parameters = 64 * 32 + 32 + 32 * 4 + 4
    assert found["size"]["parameters"] == found["dense"]["size"]["parameters"] == parameters
    assert found["size"]["non_zero"] == pytest.approx(parameters - (64 * 32 + 32 * 4) / 2, abs=40)
    assert found["size"]["macs"] == 64 * 32 + 32 * 4
    assert [row["name"] for row in found["layers"]] == ["1", "3"]
    rows = {(row["of"], row["split"]): row["figures"] for row in found["figures"]}
    assert rows == {
        (of, "val"): {"loss": source.result["val_loss"]} for of, source in (("this", run), ("dense", dense))
    }
    assert {(row["of"], row["backend"]) for row in found["latency"]} >= {
        *(("this", "eager"), ("dense", "eager"), ("dense", "compiled_bf16")),
    }
    left = ["dense onnx", "this onnx", "metrics of the files, and equal predictions"]
    assert [row["form"] for row in found["left_out"]] == left
    assert "Verdict: " in (run.path / "receipt.md").read_text()


@pytest.mark.law5
def test_the_dense_run_may_have_named_no_core(tmp_path: Path, no_onnx: None) -> None:
    dense = fit(tmp_path / "dense", "Convolutional", "image")
    words = (*PRUNE, "compression.prune.head=true", "model.core=backbone", f"ckpt_path={dense.path}")
    found: dict[str, Any] = fit(tmp_path / "pruned", "Convolutional", "image", *words).receipt
    assert found["size"]["parameters"] == found["dense"]["size"]["parameters"] < dense.result["parameters"]
    assert found["size"]["non_zero"] < found["dense"]["size"]["non_zero"]


@pytest.mark.law5
def test_a_core_of_several_inputs(tmp_path: Path, no_onnx: None) -> None:
    """The untrained dense net has no metric."""
    run = fit(tmp_path, "Recurrent", "sequence", *PRUNE)
    found: dict[str, Any] = run.receipt
    assert [row["name"] for row in found["layers"]] == ["head.0", "head.2"]
    assert [(row["of"], row["figures"]) for row in found["figures"]] == [("this", {"loss": run.result["val_loss"]})]
    assert found["size"]["macs"] > 0
    assert {row["batch"] for row in found["latency"] if row["backend"] == "eager"} == {1, 32}


@pytest.mark.slow
@pytest.mark.law5
def test_files_are_timed_and_weighed(tmp_path: Path) -> None:
    run = fit(tmp_path, "LanguageModel", "text", "compression=qat", "compression.qat.start=0.3")
    found: dict[str, Any] = run.receipt
    assert {row["backend"] for row in found["latency"] if row["of"] == "this"} >= {"eager", "onnx_int8"}
    files = {(row["of"], row["target"]): row["bytes"] for row in found["files"]}
    assert set(files) >= {("this", "onnx_int8"), ("this", "weights"), ("dense", "onnx")}
    assert [row["form"] for row in found["left_out"]] == ["metrics of the files, and equal predictions"]
