"""The handler of an archive as TorchServe calls it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torchserve_archives import NAMES, encoded, pictures, same, shipped

from lathe.contrib import torchserve_handler as handler

pytest.importorskip("model_archiver")


def test_every_form_of_a_request_gets_the_same_answer(folder: Path, serve: Callable[..., Any]) -> None:
    net, pixels = shipped(), pictures(1)[0]
    with torch.no_grad():
        shares = net(torch.from_numpy(pixels)[None, None]).softmax(1)[0]
    best = shares.argsort(descending=True)[:3].tolist()
    bodies = [
        (encoded(pixels, "PNG"), ""),  # curl --upload-file
        (bytearray(encoded(pixels, "npy")), "application/octet-stream"),  # curl --form
        (json.dumps({"image": pixels.tolist()}).encode(), "application/octet-stream"),
        (pixels.tobytes(), ""),
        ({"image": pixels.tolist()}, "application/json"),  # as TorchServe decodes it
    ]
    for status, answer in serve(folder, *bodies):
        assert (status, [row["class"] for row in answer["predictions"]]) == (200, [NAMES[index] for index in best])
        assert [row["probability"] for row in answer["predictions"]] == pytest.approx(shares[best].tolist(), abs=1e-6)
    # pixels that begin as a JPEG or JSON does
    for start in (b"\xff\xd8\xff", b"{"):
        body = start + pixels.tobytes()[len(start) :]
        ((status, answer),) = serve(folder, (body, "application/octet-stream"))
        with torch.no_grad():
            want = net(torch.frombuffer(bytearray(body), dtype=torch.uint8).view(1, 1, 8, 8)).softmax(1)
        assert answer["predictions"][0]["probability"] == pytest.approx(float(want.max()), abs=1e-6)
    # several samples in one request, with one in another
    (_, of_three), (_, of_one) = serve(folder, (pictures(3).tobytes(), "application/octet-stream"), bodies[0])
    assert len(of_three["predictions"]) == 3
    assert same({"predictions": of_three["predictions"][0]}, of_one)


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
