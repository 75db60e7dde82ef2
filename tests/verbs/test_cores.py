"""Runs of a user's LightningModule: exported with parity, predicted with and served."""

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from support.exports import left, made
from support.exports import request as export_request
from support.own_cores import Fusion, Rows
from support.own_lightning import QUICK
from support.runs import config
from support.runs import request as request_of
from support.server_in_process import Here
from torch import nn
from torch.utils.data import DataLoader, default_collate

import lathe
from lathe import trust
from lathe.errors import UserError
from lathe.export.bundle import open_bundle
from lathe.export.inputs import FlatCore
from lathe.measure.calls import Call
from lathe.runs.rundir import RunDir
from lathe.serving import model as served
from lathe.serving.decode import BadRequest, Limits
from lathe.serving.model import decode_named, is_batched, unpack
from lathe.serving.options import read
from lathe.verbs import export as parity
from lathe.verbs import export_probe
from lathe.verbs.export import ship
from lathe.verbs.predict import gather, predict

pytestmark = pytest.mark.law6
BATCH = default_collate([Rows(26)[row] for row in range(26)])
INPUTS = {"tokens": BATCH["tokens"], "extra.mask": BATCH["mask"], "extra.vector": BATCH["vector"]}
ARRAYS = {name: tensor.numpy() for name, tensor in INPUTS.items()}


def run_of(folder: Path, name: str) -> RunDir:
    trust.allow({"trusted": ["support"]})
    parts = (f"model.net={{_target_: support.own_cores.{name}}}", "data={_target_: support.own_cores.FusionData}")
    monitor = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min")
    words = ("optimizer=none", "scheduler=none", "test=false", "trainer.log_every_n_steps=1")
    return made(folder, *QUICK, *parts, *monitor, *words)


@pytest.fixture(scope="module", autouse=True)
def _in_process() -> Iterator[None]:
    """Run files of exports in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_run", lambda words: export_probe.main(Path(words[3])))
        yield


@pytest.fixture(scope="module")
def fusion(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose core takes nested inputs, with an export to ONNX in this process."""
    run = run_of(tmp_path_factory.mktemp("logs"), "LitFusion")
    ship(export_request(run, "target=onnx"))
    return run


@pytest.fixture(scope="module")
def regressor(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_of(tmp_path_factory.mktemp("logs"), "Regressor")


@torch.no_grad()
def outputs_of(run: RunDir) -> dict[str, np.ndarray]:
    """The core's outputs for `INPUTS`, by their names in the manifest."""
    core = lathe.load(run.path).task.backbone
    found = core(BATCH["tokens"], extra={"mask": BATCH["mask"], "vector": BATCH["vector"]}, scale=0.5)
    named = {"logits": found["logits"], "parts.0": found["parts"][0], "parts.1": found["parts"][1]}
    return {f"output.{name}": tensor.numpy() for name, tensor in named.items()}


def agree(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], rows: slice = slice(None)) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array[rows], rtol=1e-5, atol=1e-5)


def test_an_export_computes_what_the_core_does(fusion: RunDir) -> None:
    folder = fusion.path / "exports" / "onnx"
    bundle, report = open_bundle(folder, 1), json.loads((folder / "parity.json").read_text())
    assert [(entry["name"], entry["dtype"], entry["shape"]) for entry in bundle.manifest["inputs"]] == [
        ("tokens", "int64", ["batch", 6]),
        ("extra.mask", "float32", ["batch", 6]),
        ("extra.vector", "float32", ["batch", 3]),
    ]
    assert [entry["shape"] for entry in bundle.manifest["outputs"]] == [["batch", 2], ["batch", 8], ["batch"]]
    wanted = outputs_of(fusion)
    agree(bundle(**ARRAYS), wanted)
    agree(bundle(*(array[3:4] for array in ARRAYS.values())), wanted, slice(3, 4))
    assert (report["split"], report["samples"], report["metric"]) == ("val", 26, "val_loss")
    assert report["held_out"]["relative"] < 1e-6
    assert report["odd_inputs"]["agreement"] == 1.0
    assert report["figures"]["trained"]["val_loss"] == pytest.approx(fusion.result["val_loss"], rel=1e-5)
    assert report["figures"]["file"] == pytest.approx(report["figures"]["trained"], rel=1e-5)


def test_weights_have_the_cores_own_names(fusion: RunDir) -> None:
    report = ship(export_request(fusion, "target=safetensors"))["safetensors"]
    assert report["held_out"]["largest"] == 0
    card = (fusion.path / "exports/safetensors/README.md").read_text()
    assert 'net = restore(LitFusion().get_submodule("backbone"), "model.safetensors").eval()' in card


def test_declared_axes_are_dynamic(fusion: RunDir, tmp_path: Path) -> None:
    shutil.copytree(fusion.path, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    ship(export_request(run, "target=onnx", "target.axes={tokens: {1: time}, extra.mask: {1: time}}"))
    bundle = open_bundle(run.path / "exports" / "onnx", 1)
    assert bundle.manifest["inputs"][0]["shape"] == ["batch", "time"]
    short = {**ARRAYS, "tokens": ARRAYS["tokens"][:, :4], "extra.mask": ARRAYS["extra.mask"][:, :4] * 0 + 1}
    core = lathe.load(run.path).task.backbone
    extra = {"mask": torch.ones(26, 4), "vector": BATCH["vector"]}
    with torch.no_grad():
        wanted = core(BATCH["tokens"][:, :4], extra, 0.5)["logits"].numpy()
    np.testing.assert_allclose(bundle(**short)["output.logits"], wanted, atol=1e-5)
    with pytest.raises(UserError, match=r"target\.axes\.words: the inputs are tokens, extra\.mask, extra\.vector"):
        ship(export_request(run, "target=onnx", "target.axes={words: {1: time}}"))


def test_a_core_is_calibrated_on_recorded_training_batches(fusion: RunDir) -> None:
    report = ship(export_request(fusion, "target=onnx_int8"))["onnx_int8"]
    assert report["arithmetic"] == "int8"
    assert 0 < report["held_out"]["relative"] < 0.02
    figures = report["figures"]
    assert figures["module"] != figures["trained"]
    assert figures["file"]["val_loss"] == pytest.approx(figures["module"]["val_loss"], rel=1e-3)


def test_a_target_that_does_not_take_a_core(fusion: RunDir, tmp_path: Path) -> None:
    shutil.copytree(fusion.path, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    run = RunDir(tmp_path / "run")
    with pytest.raises(UserError, match=r"^target=torchscript takes nets of images and tokens, not the core of a"):
        ship(export_request(run, "target=torchscript"))
    assert left(run) == []


def test_random_cores_and_fixed_sizes(fusion: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatCore, "find_batch", lambda self: None)  # as for a core that mixes samples
    report = ship(export_request(fusion, "target=torch_export", "target.samples=100"))["torch_export"]
    assert (report["samples"], report["odd_inputs"]["shapes"]) == (16, [[16, 6]])
    monkeypatch.setattr(Fusion, "forward", lambda self, tokens, **_: self.head(torch.randn(len(tokens), 8)))
    with pytest.raises(UserError, match=r"model\.core: Fusion draws random numbers: name a submodule that does not"):
        ship(export_request(fusion, "target=torch_export"))


def test_a_graph_that_depends_on_values_leaves_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, "Branching")
    with pytest.raises(UserError, match=r"^target=torch_export: torch\.export can't trace Sorting .*"):
        ship(export_request(run, "target=torch_export"))
    with pytest.raises(
        UserError, match=r"^target=onnx can't take this net \(.*own_cores\.py:\d+\) \(.* data-dependent"
    ):
        ship(export_request(run, "target=onnx"))
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["executorch", "aot_inductor"])
def test_other_targets(fusion: RunDir, target: str) -> None:
    report = ship(export_request(fusion, f"target={target}"))[target]
    assert report["held_out"]["relative"] < 1e-6
    assert report["figures"]["file"] == pytest.approx(report["figures"]["trained"], rel=1e-5)
    agree(open_bundle(fusion.path / "exports" / target, 1)(**ARRAYS), outputs_of(fusion))


class TimeFirst(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.sum(0) / lengths.unsqueeze(1)


def test_an_axis_of_samples_is_found_where_the_outputs_follow_it() -> None:
    fusion = FlatCore(Fusion(), (BATCH["tokens"],), {"extra": {"mask": BATCH["mask"], "vector": BATCH["vector"]}})
    fusion.find_batch()
    assert fusion.names == ["tokens", "extra.mask", "extra.vector"]
    assert fusion.axes == [{0: "batch"}] * 3
    assert fusion.nest(fusion.outputs)["nothing"] is None
    with pytest.raises(UserError, match=r"differ in the arguments.* nesting"):
        fusion.tensors_of((BATCH["tokens"],), {"extra": {"mask": BATCH["mask"]}})
    causal = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for length in (5, 4):  # the mask has as many rows as there are samples, or others
        masked = FlatCore(causal, (torch.randn(4, length, 8), torch.zeros(length, length)), {})
        masked.find_batch()
        assert masked.axes == [{0: "batch"}, {}]
    for length in (7, 4):  # at 4 time and samples have the same size
        fixed = FlatCore(TimeFirst(), (torch.ones(length, 4, 3), torch.ones(4)), {})
        fixed.find_batch()
        assert (fixed.axes, fixed.has_batch) == ([{}, {}], False)


def asked(run: RunDir, *overrides: str, export: str | None = None) -> dict[str, Any]:
    cfg = request_of(run, "predict", "trainer.enable_progress_bar=false", *overrides)
    return {**cfg, "request": {**cfg["request"], "export": export}}


class OfADict(nn.Module):
    """Reads two entries of a batch that has more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.linear(batch["vector"]) * batch.get("scale", 1.0)


class OfAllOfADict(OfADict):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return super().forward({**batch})


def test_the_inputs_are_what_a_core_reads_of_a_batch(tmp_path: Path) -> None:
    core, x = OfADict(), torch.randn(4, 3)
    flat = FlatCore(core, ({"name": ["a", "b", "c", "d"], "vector": x, "label": torch.zeros(4), "scale": 2.0},), {})
    assert flat.names == ["batch.vector"]
    Call(({"name": ["a", "b", "c", "d"], "vector": x, "label": torch.zeros(4)},)).save(tmp_path / "example.pt")
    flat.find_batch()
    asked = served.example(flat.describe(), tmp_path)
    np.testing.assert_array_equal(asked["batch.vector"], x[:1])
    torch.testing.assert_close(flat(x), 2 * core.linear(x))
    other = {"name": ["e"], "vector": x[:1], "label": torch.ones(1), "scale": 2.0}
    assert torch.equal(flat.tensors_of((other,), {})[0], x[:1])
    with pytest.raises(UserError, match=r"2\.0 in one call and 3\.0 in another"):
        flat.tensors_of(({**other, "scale": 3.0},), {})
    batch = {"vector": x, "label": torch.zeros(4), "scale": torch.ones(4, 1)}  # a scale without effect is read, too
    assert FlatCore(core, (batch,), {}).names == ["batch.vector", "batch.scale"]
    assert FlatCore(OfAllOfADict(), (batch,), {}).names == ["batch.vector", "batch.label", "batch.scale"]


def test_predictions_with_the_names_of_files() -> None:
    batches = [{"name": ["a", "b"], "p": torch.zeros(2)}, {"name": ["c"], "p": torch.ones(1)}]
    found = gather(batches)
    assert found["name"].tolist() == ["a", "b", "c"]
    assert found["p"].tolist() == [0, 0, 1]
    assert gather([["a", "b"], ["c"]])["prediction"].tolist() == ["a", "b", "c"]


@torch.no_grad()
def test_the_modules_own_predictions(fusion: RunDir, tmp_path: Path) -> None:
    wanted = lathe.load(fusion.path).task.predict_step(BATCH, 0)
    assert predict(asked(fusion, f"output={tmp_path}/own.npz")) == 26
    np.savez(tmp_path / "in.npz", **{name: tensor.numpy() for name, tensor in BATCH.items()})
    predict(asked(fusion, f"input={tmp_path}/in.npz", f"output={tmp_path}/given.npz", "batch_size=7"))
    for name in ("own", "given"):
        arrays = dict(np.load(tmp_path / f"{name}.npz"))
        assert list(arrays) == ["label", "probabilities"]
        assert (arrays["label"] == wanted["label"].numpy()).all()
        np.testing.assert_allclose(arrays["probabilities"], wanted["probabilities"].numpy(), atol=1e-6)
    predict(asked(fusion, f"output={tmp_path}/own.csv"))
    header, *lines = (tmp_path / "own.csv").read_text().split()
    assert (header, len(lines)) == ("label,probabilities.0,probabilities.1", 26)
    assert float(lines[4].split(",")[1]) == pytest.approx(float(wanted["probabilities"][4, 0]), abs=1e-6)


def test_predictions_in_python(fusion: RunDir, regressor: RunDir, tmp_path: Path) -> None:
    """By predict_step in the run's Trainer, of arrays or of its own loader; a plain Trainer takes the task as it is."""
    run = lathe.load(fusion.path)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    plain = gather(list(Trainer(accelerator="cpu", **off).predict(run.task, DataLoader(Rows(26), batch_size=10)) or []))
    for found in (run.predict(BATCH, batch_size=7), run.predict(), run.predict()):
        assert list(found) == ["label", "probabilities"]
        np.testing.assert_allclose(found["probabilities"], plain["probabilities"], atol=1e-6)
    x, own = BATCH["vector"], lathe.load(regressor.path)
    np.save(tmp_path / "x.npy", x.numpy())
    with torch.no_grad():
        wanted = own.task(x)
    for given in (x, x.numpy(), tmp_path / "x.npy"):
        np.testing.assert_allclose(own.predict(given)["prediction"], wanted, atol=1e-5)


@torch.no_grad()
def test_a_table_is_one_tensor(regressor: RunDir, tmp_path: Path) -> None:
    x = BATCH["vector"]
    np.savetxt(tmp_path / "in.csv", x.numpy(), delimiter=",", header="a,b,c", comments="")
    predict(asked(regressor, f"input={tmp_path}/in.csv", f"output={tmp_path}/out.npz", "batch_size=2"))
    wanted = lathe.load(regressor.path).task(x).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["prediction"], wanted, atol=1e-5)
    np.savez(tmp_path / "uneven.npz", a=np.zeros(3), b=np.zeros(4))
    with pytest.raises(UserError, match=r"its arrays have \{'a': 3, 'b': 4\} rows"):
        predict(asked(regressor, f"input={tmp_path}/uneven.npz", f"output={tmp_path}/no.npz"))
    with pytest.raises(UserError, match=r"^output=.*: name a file of .npz or .csv or .parquet"):
        predict(asked(regressor, f"input={tmp_path}/in.csv", f"output={tmp_path}/no.json"))
    np.save(tmp_path / "bytes.npy", np.zeros((4, 3), np.uint8))
    with pytest.raises(
        UserError, match=r"^input holds uint8, and predict_step of \w+ fails \(.*give arrays of the type"
    ):
        predict(asked(regressor, f"input={tmp_path}/bytes.npy", f"output={tmp_path}/no.npz"))
    assert not list(tmp_path.glob("no.*"))


def test_an_export_predicts_what_the_core_does(fusion: RunDir, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", **ARRAYS)
    paths = (f"input={tmp_path}/in.npz", f"output={tmp_path}/out.npz")
    predict(asked(fusion, *paths, "batch_size=7", export="onnx"))
    agree(dict(np.load(tmp_path / "out.npz")), outputs_of(fusion))
    np.savez(tmp_path / "in.npz", tokens=ARRAYS["tokens"])
    with pytest.raises(UserError, match=r"the inputs are tokens, extra\.mask, extra\.vector, not tokens"):
        predict(asked(fusion, *paths, export="onnx"))
    np.savez(tmp_path / "in.npz", **{**ARRAYS, "extra.vector": ARRAYS["extra.vector"].astype(np.uint8)})
    with pytest.raises(UserError, match=r"extra\.vector is of uint8, and the net takes float32"):  # raw pixels
        predict(asked(fusion, *paths, export="onnx"))


@pytest.fixture(scope="module", params=["module", "onnx"])
def server(request: pytest.FixtureRequest, fusion: RunDir) -> Any:
    cfg = config(f"run={fusion.path}", name="serve") | {"export": request.param}
    facts = served.describe(str(fusion.path), request.param, "best")
    net: Callable[[Any], Any] = served.load(str(fusion.path), request.param, "best", 1)
    with Here(read(cfg, str(fusion.path)), facts, net) as here:
        yield here


def test_served_answers_are_the_cores(server: Here, fusion: RunDir) -> None:
    wanted = outputs_of(fusion)
    body = json.dumps({name: array.tolist() for name, array in ARRAYS.items()}).encode()
    found = json.loads(server.ask("POST", "/predict", body, content_type="application/json").body)["outputs"]
    agree({name: np.array(value) for name, value in found.items()}, wanted)
    file = io.BytesIO()
    np.savez(file, **{name: array[:5] for name, array in ARRAYS.items()})
    npz = "application/x-npz"
    answer = server.ask("POST", "/predict", file.getvalue(), content_type=npz, accept=npz)
    assert answer.headers["content-type"] == npz
    agree(dict(np.load(io.BytesIO(answer.body))), wanted, slice(5))
    assert server.ask("GET", "/health").status == 200
    assert "extra.mask: float32" in server.ask("GET", "/").body.decode()
    refused = server.ask("POST", "/predict", b'{"tokens": [[1, 2]]}', content_type="application/json")
    assert (refused.status, "the inputs are tokens" in refused.sentence) == (422, True)


def test_bad_requests_of_named_arrays(fusion: RunDir) -> None:
    facts = json.loads((fusion.path / "exports/onnx/manifest.json").read_text())
    few = {name: array[:2].tolist() for name, array in ARRAYS.items()}
    limits = Limits(body=20_000, samples=3)
    packed = decode_named(json.dumps(few).encode(), "application/json", facts, limits)
    assert is_batched(facts)
    for name, array in unpack(packed, True).items():
        assert (array == ARRAYS[name][:2]).all()
    bomb = io.BytesIO()
    np.savez_compressed(bomb, **{**ARRAYS, "tokens": np.zeros((10_000, 6), np.int64)})
    for status, kind, body in (
        (415, "image/png", b""),
        (400, "application/json", b"[1, 2"),
        (400, "application/json", json.dumps({**few, "extra.mask": [[float("nan")] * 6] * 2}).encode()),
        (422, "application/json", json.dumps({**few, "extra.vector": [[1, 2, 3]]}).encode()),
        (413, "application/json", json.dumps({name: array[:4].tolist() for name, array in ARRAYS.items()}).encode()),
        (400, "application/x-npz", b"PK not an archive"),
        (413, "application/x-npz", bomb.getvalue()),
    ):
        with pytest.raises(BadRequest) as error:
            decode_named(body, kind, facts, limits)
        assert error.value.status == status, body[:80]
