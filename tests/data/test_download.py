"""Downloads over a real HTTP server on the loopback device."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.data import Cifar
from lathe.data.published import download
from lathe.errors import UserError

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


def test_wrong_hash_leaves_nothing(serve: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another hash than the published"):
        download(serve(CONTENT).url + "file", tmp_path / "file", "0" * 32, "by hand")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"break_after": 500_000}, r"cannot be fetched \(IncompleteRead.*put it there\.$"),
        ({"status": 404, "reason": "\x1b[31mred\x07"}, r"cannot be fetched \(\\x1b\[31mred\\x07\): put it there\.$"),
    ],
)
def test_a_server_that_fails_is_one_line_of_letters_and_leaves_nothing(
    serve: Callable, tmp_path: Path, fault: dict[str, Any], sentence: str
) -> None:
    server = serve(CONTENT)
    vars(server).update(fault)
    with pytest.raises(UserError, match=sentence) as told:
        download(server.url + "file", tmp_path / "file", MD5, "put it there")
    assert str(told.value).isprintable()
    assert not list(tmp_path.iterdir())


def test_a_login_in_an_address_is_neither_taken_nor_shown(tmp_path: Path) -> None:
    sentence = r"^https://host/x can't be fetched with the login that the address has: put it there\.$"
    with pytest.raises(UserError, match=sentence):
        download("https://user:pa55w@host/x", tmp_path / "file", MD5, "put it there")


def test_cifar_without_a_network_names_the_files_to_fetch_by_hand(serve: Callable, tmp_path: Path) -> None:
    server = serve(b"")
    server.close()  # its port refuses connections now
    with pytest.raises(
        UserError,
        match=r"put cifar-10-binary\.tar\.gz or cifar-10-python\.tar\.gz into data\.source\.data_dir=",
    ):
        Cifar("cifar10", str(tmp_path), base_url=server.url).prepare()
    assert not list(tmp_path.glob("[!.]*"))


def test_cifar_downloads_checks_and_converts(cifar_files: Callable, serve: Callable, tmp_path: Path) -> None:
    archive, truth = cifar_files("cifar10", "binary", tmp_path / "server")
    server = serve((tmp_path / "server" / archive.file).read_bytes())
    data = Cifar("cifar10", str(tmp_path / "data"), val_size=20, archives=[archive], base_url=server.url)
    data.prepare()
    assert np.array_equal(data.load().test.read()[0], truth["test"][0])
    data.prepare()
    assert len(server.asked) == 1
