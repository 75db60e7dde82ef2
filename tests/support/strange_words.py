"""Bodies that are not inputs of a net, and headers that two servers may read differently."""

import json

import numpy as np

BODIES = [
    b"[" * 3000,
    b'{"image":' * 500,
    b'{"image": NaN}',
    b'{"image": [[-1e999]]}',
    b'{"image": [[1e400]]}',
    b'{"images": []}',
    b'{"image": "\xff"}',
    b"null",
    b'{"image": [[' + b"9" * 5000 + b"]]}",
    b'{"image": [[-1]]}',
    b'{"image": [[1.5]]}',
    b'{"image": [[true]]}',
    b'{"image": ""}',
    b'{"image": {}}',
    b'{"image": [[]]}',
    b'{"images": [[[[[[1]]]]]]}',
    b"\x00" * 50,
    '{"image": "\u202e\ud83d\ude00"}'.encode("utf-8", "surrogatepass"),
    b"{}",
    b'{"image": [[1]], "image": [[2]]}',
    b'"',
    b"\xef\xbb\xbf{}",
    json.dumps({"image": np.zeros((8, 8)).tolist()}).encode(),
    b'{"tokens": [1]}',
    b"1" * 10_000,
]
FRAMINGS = [
    b"content-length: 64\r\ncontent-length: 64",
    b"content-length: 64\r\ntransfer-encoding: chunked",
    b"content-length: -1",
    b"transfer-encoding: chunked, gzip",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: xchunked",
    b"transfer-encoding:\x0bchunked",
    b"content-length: 6 4",
    b"content-length: 0x40",
    b"content-length: 1e3",
    b"content-length: " + b"9" * 40,
    b"x: a\r\n b",
    b"x\x00: a",
    b"x : a",
    b": a",
    b"x: a\x00b",
    b"x: a\rb",
    b"x",
]
