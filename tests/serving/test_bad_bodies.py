"""Invalid requests: bombs, damage, wrong shapes and types, each refused with the right status."""

import struct

import numpy as np
import pytest
from support.request_bodies import (
    GREY,
    LIMITS,
    ONE,
    PIXELS,
    WORDS,
    as_json,
    bomb,
    chunk,
    decoded,
    file_of,
    header,
    npy,
    refused,
    text,
)

from lathe.serving.decode import decode
from lathe.serving.limits import BadRequest


def test_pixels_are_counted_before_they_are_unpacked() -> None:
    for width, height in ((10_000, 10_000), (2**31 - 1, 2**31 - 1), (101, 100)):
        assert refused(bomb(width, height), "image/png")[0] == 413
        assert refused(as_json(image=text(bomb(width, height))), "application/json")[0] == 413
    assert not decoded(bomb(100, 100), "image/png")[0].any()  # data beyond the header's size are not unpacked
    assert decoded(file_of(np.zeros((100, 100), np.uint8)), "image/png")[0].shape == (1, 1, 4, 5)
    half = text(file_of(np.zeros((60, 100), np.uint8)))
    assert refused(as_json(images=[half, half]), "application/json")[0] == 413


@pytest.mark.parametrize(
    "damage",
    [
        file_of(GREY)[:60],
        b"hello",
        file_of(GREY, "GIF"),
        file_of(GREY)[:50] + b"\xff" * 20 + file_of(GREY)[70:],
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"short"),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 99, 99, 9, 9, 9)) + chunk(b"IEND", b""),
    ],
)
def test_damaged_pictures_are_refused(damage: bytes) -> None:
    assert refused(damage, "image/png")[0] == refused(damage, "image/jpeg")[0] == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 413),
        (b'{"image": ' + b"[" * 200 + b"]" * 200 + b"}", 422),
        (b"[1, 2]", 422),
        (b'{"tokens": [1]}', 422),
        (b'{"image": [[NaN]]}', 400),
        (b'{"image": [[1]], "image": [[2]]}', 422),
        (b'{"image": [[1e999]]}', 422),
        (b'{"image": [[0.5]]}', 422),
        (b'{"image": [[1, true]]}', 422),
        (b'{"image": [{"a": 1}]}', 422),
        (b'{"images": []}', 422),
        (b'{"image": [[1, 2], [3]]}', 422),
        (b'{"images": "abcd"}', 422),
        (as_json(image=np.stack([GREY, GREY]).tolist()), 422),
        (as_json(image=(GREY.astype(int) + 30).tolist()), 422),
        (b'{"image": [[' + b"9" * 30 + b"]]}", 422),
        (b'{"image": [[' + b"9" * 5000 + b"]]}", 400),
        (b'{"image": "aGVsbG8="}', 400),
        (as_json(images=[GREY.tolist()] * 6), 413),
    ],
)
def test_bad_json_bodies_are_refused(body: bytes, status: int) -> None:
    assert refused(body, "application/json")[0] == status


U1 = "{'descr': '|u1', 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"hello", 400),
        (b"\x93NUMPY\x09\x00" + npy(GREY)[8:], 400),
        (npy(GREY)[:-1], 400),
        (npy(GREY) + b"x", 400),
        (header(U1 % "(1000000, 1000000, 3)"), 400),
        (header(U1 % "(-4, -5)", bytes(20)), 422),
        (header(U1 % str((1,) * 70), b"1"), 422),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (4, 5), }", bytes(160)), 422),
        (header(U1 % "__import__('os').getcwd()"), 400),
        (header("[" * 9000 + "]" * 9000), 400),
        (npy(GREY.astype(np.float32)), 422),
        (npy(PIXELS), 422),
        (npy(np.zeros((6, 4, 5), np.uint8)), 413),
    ],
)
def test_bad_npy_bodies_are_refused(body: bytes, status: int) -> None:
    assert refused(body, "application/x-npy")[0] == status


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (as_json(tokens=[50]), "application/json", 422),
        (as_json(tokens=[-1, 3]), "application/json", 422),
        (as_json(tokens=list(range(9))), "application/json", 422),
        (as_json(tokens=[[1]] * 6), "application/json", 413),
        (npy(np.array([1.5])), "application/x-npy", 422),
        (npy(np.array([2**63], np.uint64)), "application/x-npy", 422),
        (b"1234567", "application/octet-stream", 422),
    ],
)
def test_bad_token_bodies_are_refused(body: bytes, kind: str, status: int) -> None:
    assert refused(body, kind, WORDS)[0] == status


def test_noise_is_refused_or_read_but_nothing_else() -> None:
    """Bodies cut, flipped and swapped at random give an array of the net's shape or an error message."""
    rng = np.random.default_rng(0)
    bodies = {
        "image/png": file_of(PIXELS),
        "image/jpeg": file_of(PIXELS, "JPEG"),
        "application/x-npy": npy(GREY),
        "application/json": as_json(image=GREY.tolist()),
    }
    counts = {"read": 0, "refused": 0}
    for _ in range(150):
        for kind, body in bodies.items():
            changed = bytearray(body)
            for at in rng.integers(0, len(body), rng.integers(1, 6)):
                changed[at] = rng.integers(256)
            try:
                array, _ = decode(
                    bytes(changed[: rng.integers(1, len(body) + 1)] if rng.random() < 0.3 else changed),
                    kind,
                    ONE,
                    LIMITS,
                )
                assert array.shape[1:] == (1, 4, 5)
                counts["read"] += 1
            except BadRequest:
                counts["refused"] += 1
    assert min(counts.values()) > 50
