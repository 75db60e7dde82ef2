"""The handler of an archive as TorchServe calls it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torchserve_archives import NAMES, PIXELS, archived, encoded, pictures, same, shipped

from lathe.contrib import torchserve_handler as handler
from lathe.nets import GPT

pytest.importorskip("model_archiver")


def test_every_form_of_a_request_gets_the_same_answer(folder: Path, serve: Callable[..., Any]) -> None:
    net = shipped()
    pixels = pictures(1)[0]
    with torch.no_grad():
        shares = net(torch.from_numpy(pixels)[None, None]).softmax(1)[0]
    best = shares.argsort(descending=True)[:3].tolist()
    bodies = [
        (encoded(pixels, "PNG"), "image/png"),
        (encoded(pixels, "PNG"), ""),  # curl --upload-file
        (bytearray(encoded(pixels, "npy")), "application/octet-stream"),  # curl --form
        (json.dumps({"image": pixels.tolist()}).encode(), "application/octet-stream"),
        (pixels.tobytes(), "application/octet-stream"),
        (pixels.tobytes(), ""),
        (json.dumps({"image": pixels.tolist()}).encode(), "application/json; charset=utf-8"),
        ({"image": pixels.tolist()}, "application/json"),  # as TorchServe decodes it
        (json.dumps({"image": pixels.tolist()}), "text/plain"),
    ]
    answers = serve(folder, *bodies)
    assert [status for status, _ in answers] == [200] * len(bodies)
    for _, answer in answers:
        assert [row["index"] for row in answer["predictions"]] == best
        assert [row["class"] for row in answer["predictions"]] == [NAMES[index] for index in best]
        assert [row["probability"] for row in answer["predictions"]] == pytest.approx(shares[best].tolist(), abs=1e-6)
    # pixels that begin as a JPEG or JSON does
    for start in (b"\xff\xd8\xff", b"{"):
        body = start + pixels.tobytes()[len(start) :]
        ((status, answer),) = serve(folder, (body, "application/octet-stream"))
        with torch.no_grad():
            want = net(torch.frombuffer(bytearray(body), dtype=torch.uint8).view(1, 1, 8, 8)).softmax(1)
        assert status == 200
        assert answer["predictions"][0]["probability"] == pytest.approx(float(want.max()), abs=1e-6)
    # several samples in one request, with one in another
    several = pictures(3)
    (_, of_three), (_, of_one) = serve(folder, (several.tobytes(), "application/octet-stream"), bodies[0])
    assert len(of_three["predictions"]) == 3
    assert same({"predictions": of_three["predictions"][0]}, of_one)
    assert same(of_one, answers[0][1])


def test_a_bad_request_does_not_spoil_its_batch(folder: Path, serve: Callable[..., Any]) -> None:
    good = encoded(pictures(1)[0], "PNG")
    ((status, want),) = serve(folder, (good, ""))
    assert status == 200
    bomb = encoded(np.zeros((3000, 3000), np.uint8), "PNG")  # 9 million pixels in 10 kB
    huge = bytearray(encoded(np.zeros((2, 2), np.uint8), "npy").replace(b"(2, 2)", b"(9, 9)"))
    bad = [
        (b"", "", 400),
        (b"hello", "", 422),
        (b'{"image": [[NaN]]}', "application/json", 400),
        (b'{"image": [[1, 2], [3]]}', "application/json", 422),
        (None, "application/json", 422),
        (good[:60], "image/png", 400),
        (bomb, "image/png", 413),
        (bytes(huge), "", 400),
        (encoded(np.zeros((8, 8), np.float32), "npy"), "", 422),
        (encoded(np.zeros((7, 8), np.uint8), "npy"), "", 422),
    ]
    requests = [(good, "")]
    for body, kind, _ in bad:
        requests += [(body, kind), (good, "")]
    answers = serve(folder, *requests)
    assert all(status == 200 and same(answer, want) for status, answer in answers[::2])
    for (status, answer), (*_, code) in zip(answers[1::2], bad, strict=True):
        assert (status, answer["code"]) == (code, code)


def test_a_failure_of_the_net_fails_its_request_alone(
    folder: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = pictures(1)[0], np.zeros((8, 8), np.uint8)
    ((_, want),) = serve(folder, (good.tobytes(), ""))
    assert handler.model is not None
    run = handler.model.run

    def fails(x: np.ndarray) -> np.ndarray:
        if not x.reshape(len(x), -1).any(axis=1).all():
            raise RuntimeError("out of memory")
        return run(x)

    monkeypatch.setattr(handler.model, "run", fails)
    answers = serve(folder, (good.tobytes(), ""), (bad.tobytes(), ""), (good.tobytes(), ""))
    assert all(status == 200 and same(answer, want) for status, answer in answers[::2])
    assert answers[1][0] == 500
    assert "out of memory" not in answers[1][1]["error"]


def test_pixels_are_normalised_where_the_graph_does_not(tmp_path: Path, serve: Callable[..., Any]) -> None:
    net = shipped()
    facts = {
        **PIXELS,
        "input": {**PIXELS["input"], "dtype": "float32"},
        "preprocess": {**PIXELS["preprocess"], "in_graph": False},
    }
    folder = archived(tmp_path / "m.mar", net.net, torch.zeros(2, 1, 8, 8), facts=facts)
    pixels = pictures(1)[0]
    ((_, answer),) = serve(folder, (pixels.tobytes(), ""))
    with torch.no_grad():
        want = net(torch.from_numpy(pixels)[None, None]).softmax(1)[0]
    assert answer["predictions"][0]["probability"] == pytest.approx(float(want.max()), abs=1e-6)


def test_token_ids_get_the_next_ones(tmp_path: Path, serve: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    net = GPT(vocab_size=32, max_length=8, width=16, depth=1, heads=2).eval()
    facts = {
        "input": {
            "name": "input",
            "dtype": "int64",
            "shape": ["batch", "time"],
            "layout": "NT",
            "longest": 8,
            "vocab_size": 32,
        },
        "preprocess": None,
        "classes": None,
    }
    folder = archived(tmp_path / "m.mar", net, torch.zeros(2, 8, dtype=torch.int64), facts=facts, top_k=2)
    ids = [5, 3, 31]
    short, long, wrong, ours = serve(
        folder,
        ({"tokens": ids}, "application/json"),
        (encoded(np.arange(8), "npy"), ""),
        ({"tokens": [32]}, "application/json"),
        (np.array(ids, "<i8").tobytes(), "application/octet-stream"),
    )
    with torch.no_grad():
        shares = net(torch.tensor([ids]))[0, -1].softmax(0)
    assert short == ours
    assert [row["index"] for row in short[1]["predictions"]] == shares.argsort(descending=True)[:2].tolist()
    assert short[1]["predictions"][0]["probability"] == pytest.approx(float(shares.max()), abs=1e-6)
    assert long[0] == 200
    assert wrong[0] == 422
    assert "0 to 31" in wrong[1]["error"]
