"""Compare the environments of two runs: versions, hardware, code."""

import hashlib
from typing import Any


def differing_environments(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the differing entries of environment.json by name; a diff is given by length and SHA-256."""
    mine, theirs = _facts(a), _facts(b)
    return {
        key: (mine.get(key, "absent"), theirs.get(key, "absent"))
        for key in [*mine, *(key for key in theirs if key not in mine)]
        if mine.get(key) != theirs.get(key)
    }


def _facts(environment: dict[str, Any]) -> dict[str, str]:
    packages = environment.get("packages")
    found = {key: str(environment.get(key)) for key in ("python", "platform", "cpu", "cores")}
    found |= {str(key): str(value) for key, value in (packages if isinstance(packages, dict) else {}).items()}
    threads = environment.get("threads")
    found |= {str(key): str(value) for key, value in (threads if isinstance(threads, dict) else {}).items()}
    diff = environment.get("git_diff")
    found["commit"] = str(environment.get("git_commit"))
    found["uncommitted diff"] = _short(diff) if isinstance(diff, str) and diff else "none"
    return found


def _short(diff: str) -> str:
    return f"{len(diff.splitlines())} lines, {hashlib.sha256(diff.encode()).hexdigest()[:12]}"
