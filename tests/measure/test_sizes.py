"""Counts of parameters compared with arithmetic, and sizes of files on disk and after gzip."""

import random
from pathlib import Path

import torch
from torch import nn

from lathe.measure import FileSize, count_parameters, file_size


def test_counts_of_a_small_net() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net[1].weight.requires_grad_(False)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].weight[0].zero_()
        net[0].bias.zero_()
        net[0].bias[1] = -1.0
    count = count_parameters(net)
    assert count.total == 12 + 4 + 4 + 4
    assert count.trainable == 20
    assert count.non_zero == 9 + 1 + 4 + 0
    assert count.bytes == 4 * 24 + 4 * 8 + 8  # running mean and variance, and the int64 count of batches
    assert count.sparsity == 1 - 14 / 24


def test_shared_parameters_count_once_and_dtype_counts() -> None:
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    assert (count_parameters(net).total, count_parameters(net).bytes) == (25, 50)


def test_zeros_show_in_gzip_alone(tmp_path: Path) -> None:
    noise = bytearray(random.Random(0).randbytes(100_000))
    (tmp_path / "dense").write_bytes(noise)
    for i in range(0, 100_000, 4):
        if i % 20:
            noise[i : i + 4] = bytes(4)  # four of five words
    (tmp_path / "sparse").write_bytes(noise)
    dense, sparse = file_size(tmp_path / "dense"), file_size(tmp_path / "sparse")
    assert dense.bytes == sparse.bytes == 100_000
    assert 0.2 < sparse.gzipped / dense.gzipped < 0.35


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 1000)
    (tmp_path / "a" / "b" / "two").write_bytes(b"y" * 500)
    parts = [file_size(tmp_path / "a" / "one"), file_size(tmp_path / "a" / "b" / "two")]
    assert file_size(tmp_path / "a") == FileSize(1500, parts[0].gzipped + parts[1].gzipped)
