"""What is no request: bombs, damage, wrong shapes and types, each refused with one sentence."""

import re
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
        status, sentence = refused(bomb(width, height), "image/png")
        assert status == 413
        assert f"{height} x {width} pixels, more than 10000" in sentence
        assert refused(as_json(image=text(bomb(width, height))), "application/json")[0] == 413
    assert not decoded(bomb(100, 100), "image/png")[0].any()  # what is more than its header says is not unpacked
    assert decoded(file_of(np.zeros((100, 100), np.uint8)), "image/png")[0].shape == (1, 1, 4, 5)
    half = text(file_of(np.zeros((60, 100), np.uint8)))
    status, sentence = refused(as_json(images=[half, half]), "application/json")
    assert (status, "10000 for all images of a request" in sentence) == (413, True)


@pytest.mark.parametrize(
    "damage",
    [
        file_of(GREY)[:60],
        file_of(GREY)[:20],
        b"\x89PNG",
        b"hello",
        b"\0" * 100,
        file_of(GREY, "JPEG"),
        file_of(GREY, "GIF"),
        file_of(GREY, "BMP"),
        file_of(GREY)[:50] + b"\xff" * 20 + file_of(GREY)[70:],
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"short"),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 0, 0, 0, 0)) + chunk(b"IEND", b""),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 99, 99, 9, 9, 9)) + chunk(b"IEND", b""),
    ],
)
def test_what_is_no_png_is_refused(damage: bytes) -> None:
    status, sentence = refused(damage, "image/png")
    assert (status, sentence) == (
        400,
        "The image can't be read as a PNG image: send a whole one, and declare its type.",
    )
    jpeg = damage[: len(damage) // 2] if damage.startswith(b"\xff\xd8") else damage
    assert refused(jpeg, "image/jpeg")[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "can't be read as JSON"),
        (b"\xff\xfe", 400, "can't be read as JSON"),
        (b"[" * 100_000, 413, "more than 100 numbers"),
        (b'{"image": ' + b"[" * 200 + b"]" * 200 + b"}", 422, "something else|too deep"),
        (b"[1, 2]", 422, "one JSON object with image or images and nothing else"),
        (b"3", 422, "one JSON object"),
        (b"{}", 422, "one JSON object"),
        (b'{"tokens": [1]}', 422, "image or images"),
        (b'{"image": [[1]], "images": []}', 422, "nothing else"),
        (b'{"image": [[NaN]]}', 400, "The JSON has NaN, which is no number"),
        (b'{"image": [[1]], "image": [[2]]}', 422, "The JSON has a key twice, 'image' last: send one JSON object"),
        (b'{"image": [[-Infinity]]}', 400, "The JSON has -Infinity"),
        (b'{"image": [[1e999]]}', 422, "something else than whole numbers"),
        (b'{"image": [[0.5]]}', 422, "something else than whole numbers"),
        (b'{"image": [[1, true]]}', 422, "something else than whole numbers"),
        (b'{"image": [["1", 1]]}', 422, "something else than whole numbers"),
        (b'{"image": [[null]]}', 422, "something else than whole numbers"),
        (b'{"image": [{"a": 1}]}', 422, "something else than whole numbers"),
        (b'{"image": []}', 422, "at least one"),
        (b'{"images": []}', 422, "at least one"),
        (b'{"image": [[1, 2], [3]]}', 422, "unequal lengths"),
        (b'{"image": [[1, 2], 3]}', 422, "unequal lengths"),
        (b'{"image": null}', 422, "image is null"),
        (b'{"images": 3}', 422, "images is no list"),
        (b'{"images": "abcd"}', 422, "images is no list"),
        (b'{"image": ["abcd"]}', 422, "something else"),
        (
            b'{"image": [[1, 2]]}',
            422,
            r"image has shape \[1, 2\], but the net takes \[4, 5\] or \[1, 4, 5\]: send that",
        ),
        (as_json(image=np.stack([GREY, GREY]).tolist()), 422, r"shape \[2, 4, 5\]"),
        (as_json(images=GREY.tolist()), 422, r"but the net takes \[n, 1, 4, 5\]"),
        (
            as_json(image=(GREY.astype(int) + 30).tolist()),
            422,
            "image has pixels from 30 to 258: send whole numbers from 0 to 255",
        ),
        (as_json(image=(GREY.astype(int) - 1).tolist()), 422, "pixels from -1 to 227"),
        (b'{"image": [[' + b"9" * 30 + b"]]}", 422, "above 64 bits"),
        (b'{"image": [[' + b"9" * 5000 + b"]]}", 400, "can't be read as JSON"),
        (b'{"image": "..."}', 400, "not base64"),
        (b'{"image": ""}', 400, "neither PNG nor JPEG"),
        (b'{"image": "aGVsbG8="}', 400, "neither PNG nor JPEG"),
        (b'{"images": [' + b'"aGVsbG8=",' * 5 + b'"aGVsbG8="]}', 413, "6 images, more than 5"),
        (as_json(images=[GREY.tolist()] * 6), 413, "6 images, more than 5"),
    ],
)
def test_what_is_no_json_image_is_refused(body: bytes, status: int, words: str) -> None:
    found, sentence = refused(body, "application/json")
    assert found == status
    assert re.search(words, sentence), sentence


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"hello", 400, "what numpy.save writes"),
        (b"\x93NUMPY\x01\x00", 400, "what numpy.save writes"),
        (b"\x93NUMPY\x09\x00" + npy(GREY)[8:], 400, "what numpy.save writes"),
        (npy(GREY)[:-1], 400, "19 bytes of array, but its header declares 20"),
        (npy(GREY) + b"x", 400, "21 bytes of array"),
        (
            header("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }"),
            400,
            "declares 3000000000000",
        ),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (-4, -5), }", bytes(20)), 422, "up to 4 axes"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (0, 4, 5), }"), 422, "up to 4 axes"),
        (
            header("{'descr': '|u1', 'fortran_order': False, 'shape': " + str((1,) * 70) + ", }", b"1"),
            422,
            "up to 4 axes",
        ),
        (header("{'descr': ('|u1', (20,)), 'fortran_order': False, 'shape': (1,), }", bytes(20)), 422, "send numbers"),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (4, 5), }", bytes(160)), 422, "send numbers"),
        (
            header("{'descr': '|u1', 'fortran_order': False, 'shape': __import__('os').getcwd(), }"),
            400,
            "what numpy.save",
        ),
        (header("(" * 3000), 400, "what numpy.save"),
        (header("[" * 9000 + "]" * 9000), 400, "what numpy.save"),
        (npy(GREY.astype(np.float32)), 422, "The array is of float32: send pixels from 0 to 255 as uint8"),
        (npy(GREY.astype(np.int64)), 422, "The array is of int64"),
        (npy(np.array(["a"])), 422, "send numbers"),
        (npy(PIXELS[:0]), 422, "send numbers, at least one, up to 4 axes"),
        (npy(PIXELS), 422, r"shape \[4, 5, 3\], but the net takes"),
        (npy(np.zeros((6, 4, 5), np.uint8)), 413, "6 images, more than 5: send it in parts"),
    ],
)
def test_what_is_no_npy_image_is_refused(body: bytes, status: int, words: str) -> None:
    found, sentence = refused(body, "application/x-npy")
    assert (found, bool(re.search(words, sentence))) == (status, True), sentence


@pytest.mark.parametrize(
    ("body", "kind", "shape", "status", "words"),
    [
        (as_json(tokens=[50]), "application/json", None, 422, "tokens has ids from 50 to 50: the net knows 0 to 49"),
        (as_json(tokens=[-1, 3]), "application/json", None, 422, "ids from -1 to 3"),
        (as_json(tokens=list(range(9))), "application/json", None, 422, "9 token ids, more than 8: send its last 8"),
        (as_json(tokens=[]), "application/json", None, 422, "at least one"),
        (as_json(tokens=[[1], [1, 2]]), "application/json", None, 422, "unequal lengths"),
        (as_json(tokens=[[[1]]]), "application/json", None, 422, "shape"),
        (as_json(tokens="hello"), "application/json", None, 422, "tokens is no list"),
        (as_json(tokens=[[1]] * 6), "application/json", None, 413, "6 sequences, more than 5"),
        (npy(np.array([1.5])), "application/x-npy", None, 422, "of float64: send token ids as whole numbers"),
        (npy(np.array([2**63], np.uint64)), "application/x-npy", None, 422, "the net knows 0 to 49"),
        (b"1234567", "application/octet-stream", None, 422, "7 bytes: send token ids as int64"),
        (bytes(24), "application/octet-stream", "2,2", 422, "X-Shape is 2,2, but the body has 3 ids"),
    ],
)
def test_what_is_no_sequence_is_refused(body: bytes, kind: str, shape: str | None, status: int, words: str) -> None:
    found, sentence = refused(body, kind, WORDS, shape)
    assert (found, words in sentence) == (status, True), sentence


def test_noise_is_refused_or_read_but_nothing_else() -> None:
    """Bodies cut, flipped and swapped at random: an array of the net's shape, or a sentence."""
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
