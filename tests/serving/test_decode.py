"""Every form of a request's body with the decoded array; damage and wrong shapes; answers of logits."""

import base64
import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lathe.serving.decode import BadRequest, Limits, answer, decode

LIMITS = Limits(body=200_000, pixels=10_000, samples=5, tokens=64)
PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)  # [height, width, channels]
GREY = np.arange(20, dtype=np.uint8).reshape(4, 5) * 12


def facts(*shape: Any) -> dict[str, Any]:
    return {"input": {"dtype": "uint8", "shape": ["batch", *shape], "layout": "NCHW"}, "preprocess": {"in_graph": True}}


ONE, THREE, ANY = facts(1, 4, 5), facts(3, 4, 5), facts(3, "height", "width")
WORDS = {
    "input": {"dtype": "int64", "shape": ["batch", "time"], "layout": "NT", "longest": 8, "vocab_size": 50},
    "preprocess": None,
}


def file_of(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind, **options)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def as_json(**content: Any) -> bytes:
    return json.dumps(content).encode()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def refused(body: bytes, kind: str, given: dict[str, Any] = ONE, shape: str | None = None) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        decode(body, kind, given, LIMITS, shape)
    sentence = caught.value.sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 260
    return caught.value.status, sentence


def decoded(body: bytes, kind: str, given: dict[str, Any] = ONE, shape: str | None = None) -> tuple[np.ndarray, bool]:
    array, single = decode(body, kind, given, LIMITS, shape)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.dtype == given["input"]["dtype"]
    return array, single


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def bomb(width: int, height: int) -> bytes:
    """Return a few kilobytes of PNG that unpack to width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )


def header(content: str, data: bytes = b"") -> bytes:
    padded = content.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (file_of(GREY), "image/png"),
        (file_of(GREY), "Image/PNG; name=x"),
        (npy(GREY), "application/x-npy"),
        (npy(np.asfortranarray(GREY)), "application/x-npy"),
        (npy(GREY[None]), "application/x-npy"),
        (as_json(image=GREY.tolist()), "application/json; charset=utf-8"),
        (as_json(image=GREY[:, :, None].tolist()), "application/json"),
        (as_json(image=text(file_of(GREY))), "application/json"),
        (as_json(image="data:image/png;base64," + text(file_of(GREY))), "application/json"),
        (GREY.tobytes(), "application/octet-stream"),
    ],
)
def test_a_grey_image_in_every_form(body: bytes, kind: str) -> None:
    array, single = decoded(body, kind)
    assert single
    assert array.shape == (1, 1, 4, 5)
    assert np.array_equal(array[0, 0], GREY)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (npy(np.stack([PIXELS, PIXELS[::-1]])), "application/x-npy"),
        (npy(np.stack([PIXELS, PIXELS[::-1]]).transpose(0, 3, 1, 2)), "application/x-npy"),
        (as_json(images=[PIXELS.tolist(), PIXELS[::-1].tolist()]), "application/json"),
        (as_json(images=[text(file_of(PIXELS)), text(file_of(PIXELS[::-1]))]), "application/json"),
        (PIXELS.transpose(2, 0, 1).tobytes() + PIXELS[::-1].transpose(2, 0, 1).tobytes(), "application/octet-stream"),
    ],
)
def test_several_colour_images_in_every_form(body: bytes, kind: str) -> None:
    array, single = decoded(body, kind, THREE)
    assert not single
    assert array.shape == (2, 3, 4, 5)
    assert np.array_equal(array[0], PIXELS.transpose(2, 0, 1))
    assert np.array_equal(array[1], PIXELS[::-1].transpose(2, 0, 1))


def test_several_grey_images_need_no_channel_axis() -> None:
    both = np.stack([GREY, GREY[::-1]])
    for body, kind in ((npy(both), "application/x-npy"), (as_json(images=both.tolist()), "application/json")):
        array, single = decoded(body, kind)
        assert not single
        assert np.array_equal(array[:, 0], both)
    assert decoded(as_json(images=[GREY.tolist()]), "application/json")[1] is False  # a list of one stays a list
    assert decoded(npy(GREY[None]), "application/x-npy")[1] is True


def test_colours_follow_the_net() -> None:
    array, _ = decoded(file_of(GREY), "image/png", THREE)
    assert np.array_equal(array[0], np.stack([GREY] * 3))
    array, _ = decoded(file_of(PIXELS), "image/png")
    assert np.array_equal(array[0, 0], np.asarray(Image.fromarray(PIXELS).convert("L")))


def test_pictures_are_scaled_but_arrays_are_not() -> None:
    large = np.kron(GREY, np.ones((8, 8), np.uint8))
    array, _ = decoded(file_of(large), "image/png")
    assert array.shape == (1, 1, 4, 5)
    assert np.abs(array[0, 0].astype(int) - GREY).max() <= 40  # the filter is wider than a block
    assert np.corrcoef(array[0, 0].ravel(), GREY.ravel())[0, 1] > 0.99
    flat, _ = decoded(file_of(np.full((50, 70), 77, np.uint8)), "image/png")
    assert (flat == 77).all()
    assert refused(npy(large), "application/x-npy")[0] == 422
    assert refused(as_json(image=large.tolist()), "application/json")[0] == 413


def test_nets_for_any_size_take_pictures_as_they_are() -> None:
    image = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    planes = image.transpose(2, 0, 1)
    for body, kind, shape in (
        (file_of(image), "image/png", None),
        (npy(image), "application/x-npy", None),
        (npy(planes), "application/x-npy", None),
        (as_json(image=image.tolist()), "application/json", None),
        (planes.tobytes(), "application/octet-stream", " 7 , 9 "),
    ):
        array, single = decoded(body, kind, ANY, shape)
        assert single
        assert np.array_equal(array[0], planes)
    several, single = decoded(as_json(images=[text(file_of(image))] * 2), "application/json", ANY)
    assert (several.shape, single) == ((2, 3, 7, 9), False)
    assert refused(as_json(images=[text(file_of(image)), text(file_of(image[:5]))]), "application/json", ANY)[0] == 422
    for shape, status in ((None, 422), ("7,8", 422), ("999999999,999999999", 413), ("7x9", 400)):
        assert refused(planes.tobytes(), "application/octet-stream", ANY, shape)[0] == status
    assert refused(npy(np.zeros((3, 101, 100), np.uint8)), "application/x-npy", ANY)[0] == 413


def test_binary_has_whole_samples() -> None:
    assert decoded(GREY.tobytes() * 5, "application/octet-stream")[0].shape == (5, 1, 4, 5)
    assert decoded(GREY.tobytes(), "application/octet-stream", shape="4,5")[1] is True
    assert refused(GREY.tobytes()[:-1], "application/octet-stream")[0] == 422
    assert refused(GREY.tobytes() * 6, "application/octet-stream")[0] == 413
    assert refused(GREY.tobytes(), "application/octet-stream", shape="5,4")[0] == 422


def test_types_and_bodies() -> None:
    for kind, body, facts_of in (("text/html", b"x", ONE), ("", b"x", ONE), ("image/png", b"x", WORDS)):
        assert refused(body, kind, facts_of)[0] == 415
    for kind in ("image/png", "application/x-npy", "application/json", "application/octet-stream"):
        assert refused(b"", kind)[0] == 400
    assert refused(bytes(200_001), "image/png")[0] == 413


@pytest.mark.parametrize(
    ("body", "kind", "shape", "single"),
    [
        (as_json(tokens=[3, 1, 49]), "application/json", None, True),
        (as_json(tokens=[[3, 1, 49]]), "application/json", None, False),
        (npy(np.array([3, 1, 49], np.int32)), "application/x-npy", None, True),
        (npy(np.array([[3, 1, 49]], ">u2")), "application/x-npy", None, False),
        (np.array([3, 1, 49], "<i8").tobytes(), "application/octet-stream", None, True),
        (np.array([3, 1, 49], "<i8").tobytes(), "application/octet-stream", "1,3", False),
    ],
)
def test_token_ids_in_every_form(body: bytes, kind: str, shape: str | None, single: bool) -> None:
    array, alone = decoded(body, kind, WORDS, shape)
    assert alone is single
    assert array.tolist() == [[3, 1, 49]]


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
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 99, 99, 9, 9, 9)) + chunk(b"IEND", b""),
    ],
)
def test_damaged_pictures_are_refused(damage: bytes) -> None:
    assert refused(damage, "image/png")[0] == refused(damage, "image/jpeg")[0] == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"[]," * 100_000, 413),
        (b'{"image": ' + b"[" * 200 + b"]" * 200 + b"}", 422),
        (b"[1, 2]", 422),
        (b'{"tokens": [1]}', 422),
        (b'{"image": [[NaN]]}', 400),
        (b'{"image": [[0.5]]}', 422),
        (b'{"image": [[1, true]]}', 422),
        (b'{"images": []}', 422),
        (b'{"image": [[1, 2], [3]]}', 422),
        (as_json(image=np.stack([GREY, GREY]).tolist()), 422),
        (as_json(image=(GREY.astype(int) + 30).tolist()), 422),
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
            if rng.random() < 0.3:
                del changed[rng.integers(1, len(body) + 1) :]
            try:
                array, _ = decode(bytes(changed), kind, ONE, LIMITS)
                assert array.shape[1:] == (1, 4, 5)
                counts["read"] += 1
            except BadRequest:
                counts["refused"] += 1
    assert min(counts.values()) > 50


NAMED = {"classes": ["cat", "dog", "ship"]}
LOGITS = np.log(np.array([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]])).astype(np.float32)


def test_the_likeliest_come_first_with_their_names() -> None:
    found = answer(LOGITS, NAMED, 2, single=False)
    assert [[line["class"] for line in row] for row in found["predictions"]] == [["dog", "cat"], ["cat", "dog"]]
    assert [[line["index"] for line in row] for row in found["predictions"]] == [[1, 0], [0, 1]]
    shares = [line["probability"] for row in found["predictions"] for line in row]
    assert shares == pytest.approx([0.7, 0.2, 0.5, 0.25], abs=1e-6)
    assert json.loads(json.dumps(found)) == found
    assert answer(LOGITS, NAMED, 2, single=True)["predictions"] == found["predictions"][0]


def test_all_probabilities_add_up_also_of_huge_logits() -> None:
    rows = answer(np.array([[1e30, 1e30, -1e30]], np.float32), NAMED, 99, single=True)["predictions"]
    assert [line["probability"] for line in rows] == [0.5, 0.5, 0.0]
    assert [line["index"] for line in rows] == [0, 1, 2]  # ties go to the lower index
    half = answer(np.array([[60000, 59999, 0]], np.float16), NAMED, 3, single=True)["predictions"]
    assert sum(line["probability"] for line in half) == pytest.approx(1, abs=1e-12)


def test_tokens_are_answered_at_the_last_position() -> None:
    logits = np.zeros((1, 3, 40), np.float32)
    logits[0, 0, 5] = logits[0, 2, 31] = 9
    best = answer(logits, {"classes": None}, 2, single=True)["predictions"]
    assert (best[0]["class"], best[0]["index"], best[1]["index"]) == ("31", 31, 0)
    assert best[0]["probability"] == pytest.approx(np.exp(9) / (np.exp(9) + 39))


def test_logits_that_are_not_finite_are_an_error() -> None:
    for bad in ([[0.0, np.nan, 1.0]], [[0.0, np.inf, 1.0]], [[-np.inf] * 3]):
        with pytest.raises(ValueError, match="NaN or infinite logits"):
            answer(np.array(bad), NAMED, 1, single=True)


def test_a_class_that_cant_be_has_no_probability() -> None:
    rows = answer(np.array([[0.0, -np.inf, 0.0]]), NAMED, 3, single=True)["predictions"]
    assert [(line["class"], line["probability"]) for line in rows] == [("cat", 0.5), ("ship", 0.5), ("dog", 0.0)]
