"""The peak memory of a process."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from lathe.measure.processes import peak_resident, reset_peak

# alone: its module imports torch
ALONE = f"import re, sys, psutil; from pathlib import Path\n{inspect.getsource(peak_resident)}peak = peak_resident; "


def test_it_is_the_fullest_moment_of_this_process_and_not_of_the_one_that_forked_it() -> None:
    block = bytearray(b"1") * 2**27
    code = (
        "n = peak() + 2**25; block = bytearray(b'1') * n; full = peak(); del block; "
        f"print(n <= full < {len(block)}, abs(peak() - full) < 2**22)"
    )
    found = subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "True True"  # the kernel counts pages in batches


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_the_peak_can_be_reset() -> None:
    block = bytearray(b"1") * 2**27
    high = peak_resident()
    del block
    assert reset_peak()
    assert high - peak_resident() > 2**26
