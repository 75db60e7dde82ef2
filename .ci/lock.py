"""Writes requirements.lock: requirements.txt and all dependencies, each with its version and hash.

    python .ci/lock.py

pip resolves in a dry run for this Python and this machine. The repository's lock is for Linux, x86-64, Python 3.11 and
torch's CPU build, so pip must be configured to find that build. The lock has hashes of files, not their addresses.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEAD = (
    "# From requirements.txt by .ci/lock.py, for {platform_system} on {platform_machine}, Python {python_version}, "
    "torch's CPU build:\n"
    "#   pip install --require-hashes -r requirements.lock && pip install --no-deps --no-build-isolation -e .\n"
)


def ask_pip() -> dict[str, Any]:
    """Return pip's installation report of requirements.txt, as if nothing was installed."""
    words = (
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        "-r",
        str(ROOT / "requirements.txt"),
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "pip", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return report


def lock(report: dict[str, Any]) -> str:
    """Return the text of requirements.lock for an installation report of pip (its version 1)."""
    lines = []
    for item in report["install"]:
        if "dir_info" in item["download_info"]:
            continue  # this package itself
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}\n")
    return HEAD.format(**report["environment"]) + "".join(sorted(lines))


if __name__ == "__main__":
    (ROOT / "requirements.lock").write_text(lock(ask_pip()))
