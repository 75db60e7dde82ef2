"""How long OpenMP's threads spin at a barrier: briefly next to other programs, and as the user says."""

import os
import subprocess
import sys

import pytest

SHOW = "import os, lathe; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin_count(**variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not os.path.exists("/proc/loadavg"), reason="the system does not count its running threads")
def test_it_is_short_next_to_busy_programs() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert spin_count() == "10000"
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("variables", "found"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_the_users_choice_is_kept(variables: dict[str, str], found: str) -> None:
    assert spin_count(**variables) == found
