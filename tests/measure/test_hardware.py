"""The CPU's name and instruction sets from /proc/cpuinfo."""

import platform
from pathlib import Path

import pytest
import torch

from lathe.measure.hardware import describe_cpu, usable_cores

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse4_2 fma avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16 sve\n"


@pytest.mark.parametrize(
    ("text", "name", "sets"),
    [
        (
            INTEL,
            "Intel(R) Xeon(R) Platinum 8488C",
            "avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16",
        ),
        (ARM, None, "asimd asimddp i8mm bf16 sve"),
    ],
    ids=["intel", "arm"],
)
def test_cpu(tmp_path: Path, text: str, name: str | None, sets: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = describe_cpu(tmp_path / "cpuinfo")
    assert found["name"] == (name or platform.processor() or platform.machine())
    assert sorted(found["instruction_sets"]) == sorted(sets.split())
    assert found["cores"] == usable_cores() >= 1
    assert found["torch"] == torch.backends.cpu.get_cpu_capability()
