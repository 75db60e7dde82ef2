"""Parsing of bytes in arbitrary pieces: sizes, framing, pipelines, and clients that close their side."""

from collections.abc import Callable
from typing import Any

import pytest
from support.protocol_pipe import exchange

from lathe.serving.protocol import HEADER_BYTES

HEAD = b"POST /a HTTP/1.1\r\nhost: a\r\n"
FIRST = b"POST /first HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n\r\n\r\nx"
CHUNKS = (
    b"POST /first HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5;a=b\r\n\r\n\r\nx\r\n0;c\r\nhost: "
    b"evil\r\n\r\n"
)
GET = b"GET /g HTTP/1.1\r\nhost: a\r\n\r\n"


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def padded(total: int, shape: str) -> bytes:
    """A request whose request line and headers have `total` bytes."""
    if shape == "one":
        head, tail, unit = b"GET /g HTTP/1.1\r\nhost: a\r\nx: ", b"\r\n\r\n", b"a"
    elif shape == "line":
        head, tail, unit = b"GET /g?", b" HTTP/1.1\r\nhost: a\r\n\r\n", b"a"
    elif shape == "space":
        head, tail, unit = b"GET /g HTTP/1.1\r\nhost: a\r\nx:", b"a\r\n\r\n", b" "
    else:
        head, tail, unit = b"GET /g HTTP/1.1\r\nhost: a\r\n", b"\r\n", b"b:c\r\n"
    count, rest = divmod(total - len(head) - len(tail), len(unit))
    return head + unit * (count - 1) + unit[:1] * rest + unit + tail


@pytest.mark.parametrize("shape", ["one", "many", "line", "space"])
@pytest.mark.parametrize("before", [b"", FIRST, CHUNKS], ids=["first", "behind a body", "behind chunks"])
def test_headers_have_an_exact_size(options: Callable[..., Any], shape: str, before: bytes) -> None:
    for size in (1 << 20, 50_000, 997):
        good, ended = exchange(options(), *cut(before + padded(HEADER_BYTES, shape) + GET, size))
        assert ([status for status, _ in good], ended) == ([200] * (2 + bool(before)), False)
        for total in (HEADER_BYTES + 1, 300_000):
            found, ended = exchange(options(), *cut(before + padded(total, shape), size))
            assert ([status for status, _ in found], ended) == ([200] * bool(before) + [431], True)


def test_trailers_have_the_same_size(options: Callable[..., Any]) -> None:
    begin = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    for size in (1 << 20, 997):
        good, _ = exchange(options(), *cut(begin + b"0\r\nx: " + b"a" * (HEADER_BYTES - 10) + b"\r\n\r\n" + GET, size))
        assert [status for status, _ in good] == [200, 200]
        assert good[0][1]["names"] == ["host", "transfer-encoding"]
        for rest in (b"0\r\nx: " + b"a" * HEADER_BYTES, b"0\r\n" + b"b:c\r\n" * 13_200, b"1;" + b"a" * HEADER_BYTES):
            found, ended = exchange(options(), *cut(begin + rest + b"\r\n\r\n", size))
            assert ([status for status, _ in found], ended) == ([431], True)


@pytest.mark.parametrize("before", [b"", FIRST])
def test_every_cut_of_a_request_reads_the_same(options: Callable[..., Any], before: bytes) -> None:
    sent = before + CHUNKS + FIRST + GET
    expected, _ = exchange(options(), sent)
    assert [found["body"] for _, found in expected] == ["\r\n\r\nx"] * (2 + bool(before)) + [""]
    assert expected[-2][1]["names"] == ["host", "content-length"]
    for at in range(1, len(sent)):
        assert exchange(options(), sent[:at], sent[at:]) == (expected, False)
    assert exchange(options(), *cut(sent, 1)) == (expected, False)


def test_an_offer_of_another_protocol_keeps_the_rest(options: Callable[..., Any]) -> None:
    offer = (
        HEAD + b"connection: keep-alive, Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: "
        b"A\r\ncontent-length: 3\r\n\r\nabc"
    )
    for at in range(1, len(offer)):
        found, ended = exchange(options(), offer[:at], offer[at:] + GET)
        assert ([told["body"] for _, told in found], ended) == (["abc", ""], False)
    assert exchange(options(), offer.replace(b"keep-alive", b"close") + GET)[1]  # is still honoured
    assert [status for status, _ in exchange(options(), b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")[0]] == [400]


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 3\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +3\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n",
        b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: 1\r\n folded\r\n",
        b"GET / HTTP/1.1\nhost: a\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
    ],
)
def test_what_two_servers_may_read_differently_is_refused(options: Callable[..., Any], head: bytes) -> None:
    """Nothing after it is read, as it may be part of the body."""
    for before in (b"", FIRST):
        for size in (1, 1 << 20):
            found, ended = exchange(options(), *cut(before + head + b"\r\n3\r\nabc\r\n0\r\n\r\n" + GET, size))
            assert ([status for status, _ in found], ended) == ([200] * bool(before) + [400], True), found


@pytest.mark.parametrize("size", [b"-3", b"0x3", b"", b"f" * 17])
def test_chunks_of_no_size(options: Callable[..., Any], size: bytes) -> None:
    found, ended = exchange(
        options(), HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\nabc\r\n0\r\n\r\n" + GET
    )
    assert ([status for status, _ in found], ended) == ([400], True)


def test_a_client_that_ends_its_side_gets_its_answers(options: Callable[..., Any]) -> None:
    found, ended = exchange(options(), FIRST + CHUNKS + GET, end=True)
    assert ([told["path"] for _, told in found], ended) == (["/first", "/first", "/g"], True)
    assert exchange(options(), end=True) == ([], True)
    assert exchange(options(), b"\r\n", end=True) == ([], True)
    for whole in (FIRST, CHUNKS):
        for at in range(1, len(whole)):
            found, ended = exchange(options(), GET + whole[:at], end=True)
            assert ([status for status, _ in found], ended) == ([200, 400], True), whole[:at]
