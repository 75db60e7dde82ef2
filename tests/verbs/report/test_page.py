"""The report's page as a file: what it may load, its size, and its description of itself."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.report_data import HOSTILE, report, run
from support.reports import REQUEST
from support.run_directories import write_run, write_sweep

from lathe.verbs.report.assemble import assemble
from lathe.verbs.report.page import page, page_data


def test_the_policy_runs_two_scripts_by_their_hash_and_loads_nothing() -> None:
    text = page(report(1))
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', text)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy
    assert "unsafe" not in policy.partition("style-src")[0]
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    (plotly,) = re.findall(r'id="plotly">(.*?)</script>', text)
    for content in (script.encode(), gzip.decompress(base64.b64decode(plotly))):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'" in policy
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}  # a namespace, never loaded


def test_names_of_strangers_are_no_html_and_no_marks_of_the_template() -> None:
    text = page(report(1, title=f"{HOSTILE} __PLOTLY__", runs=[run(0, name=HOSTILE)]))
    assert text.count("<script") == page(report(1)).count("<script")
    assert "<img" not in text
    assert "&lt;/script&gt;" in text
    assert "&amp;amp; __PLOTLY__" in text


def test_more_curves_than_fit_are_thinned_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = report(40)
    whole = page(data)
    monkeypatch.setattr("lathe.verbs.report.page.ALL_POINTS", 160 * 50)  # 40 runs have four curves each
    small = page(data)
    assert len(small) < len(whole)
    (packed,) = re.findall(r'id="data">(.*?)</script>', small)
    told = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert told["thinned"] == "So that it stays small, curves have at most 50 points."
    place, values = told["runs"][0]["curves"]["val/accuracy"]
    assert len(told["steps"]) == 1
    assert (len(values), told["steps"][place][0], told["steps"][place][-1]) == (50, 10, 1000)


def data(folder: Path) -> dict[str, Any]:
    found = page_data(assemble({"runs": str(folder), **REQUEST}), folder)
    assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
    assert found["confidence"] == 0.95
    return found


def test_a_sweep_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[dict[str, Any]] = []
    for number, (width, value, seed) in enumerate([(4, 0.7, 1), (4, 0.8, 2), (8, 0.9, 1), (8, 0.8, 2)]):
        jobs.append({"run_dir": str(write_run(tmp_path, number, value, [f"model.net.width={width}"], seed))})
    samples = tmp_path / "train" / "2026-11-23_00-00-03_a1b2c3" / "samples"
    samples.mkdir()
    (samples / "val.html").touch()
    lost = {"overrides": ["model.net.width=8", "seed=3"], "state": "failed", "sentence": "out of memory"}
    jobs += [lost, {"state": "waiting"}]
    found = data(write_sweep(tmp_path, jobs))
    assert found["title"].endswith("sweeps/2026-11-23_10-00-00_abc123")
    assert (found["metric"], found["direction"], found["factors"]) == ("test/accuracy", "max", ["model.net.width"])
    assert found["metrics"][:3] == ["test/accuracy", "test/loss", "val/accuracy"]
    assert (found["counts"]["complete"], found["counts"]["failed"]) == (4, 1)
    assert found["marks"] == ["waiting: 1 job of the sweep"]
    first, second = found["groups"]
    assert (first["label"], first["n"], first["mean"]) == ("model.net.width=4", 2, pytest.approx(0.75))
    assert (first["best"], first["seconds"], first["parameters"]) == (0.8, 2.0, 1000)
    assert second["marks"] == ["1 failed, not in the mean"]
    assert second["why"] == "n = 2: the interval is wide"
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["n"], pair["difference"]) == (1, 0, 2, pytest.approx(0.1))
    runs = found["runs"]
    assert [run["group"] for run in runs] == [0, 0, 1, 1, 1]
    assert runs[0]["path"] == "train/2026-11-23_00-00-00_a1b2c3"
    assert (runs[0]["seed"], runs[0]["fold"], runs[0]["factors"]) == (1, None, {"model.net.width": 4})
    assert runs[0]["curves"] == {"train/loss": [[1, 2], [2.0, 1.0]], "val/accuracy": [[2], [0.02]]}
    assert (runs[0]["diff"], runs[2]["diff"]) == ({}, {"model.net.width": 8})
    assert runs[0]["environment"]["device"] == "cpu x 1"
    assert runs[3]["samples"] == "../../train/2026-11-23_00-00-03_a1b2c3/samples/val.html"
    lost = runs[4]
    assert (lost["path"], lost["state"], lost["sentence"]) == (None, "failed", "out of memory")
    assert lost["command"] == "python train.py model.net.width=8 seed=3"
    assert (lost["metrics"], lost["curves"], lost["seed"]) == ({}, {}, "3")


def test_a_receipt_says_what_a_run_costs(tmp_path: Path) -> None:
    path = write_run(tmp_path, 0, 0.8)
    rows = [("this", "eager", 1, 1, 0.9), ("this", "onnx", 1, 1, 0.4), ("dense", "onnx", 1, 1, 0.1)]
    rows += [("this", "onnx", 32, 1, 8.0), ("this", "onnx", 1, 2, 0.3)]
    names = ("of", "backend", "batch", "threads", "median_ms")
    latency = [dict(zip(names, row, strict=True)) for row in rows]
    sizes = (("dense", "onnx", 900), ("this", "onnx", 300), ("this", "weights", 200))
    files = [{"of": of, "target": target, "bytes": count} for of, target, count in sizes]
    receipt = {"ships": "onnx", "files": files, "size": {"macs": 12345}, "latency": latency}
    (path / "receipt.json").write_text(json.dumps({**receipt, "findings": ["a third of the bytes"]}))
    (run,) = data(tmp_path)["runs"]
    assert run["cost"] == {"bytes": 300, "macs": 12345, "latency_ms": 0.4}
    assert run["receipt"]["findings"] == ["a third of the bytes"]
