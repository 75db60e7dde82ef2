"""A checkpoint at an address of the web."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lathe.data.download import check, download, locked
from lathe.errors import require

ADDRESS = ("http://", "https://")


def checkpoint_path(cfg: dict[str, Any]) -> Path:
    """Where `ckpt_path` is on this machine: an address is fetched into `paths.data_dir`, once
    for all processes and runs.
    Where `ckpt_sha256` is given, it is checked, before anything in the file is believed.

    Raises:
        UserError: the address does not answer, or the file has another hash.
    """
    given, digest = str(cfg["ckpt_path"]), str(cfg.get("ckpt_sha256") or "").lower()
    if not given.startswith(ADDRESS):
        if digest:
            require(
                Path(given).is_file(), f"ckpt_sha256 is that of a file, and ckpt_path={given} is none: leave it out."
            )
            check(Path(given), digest)
        return Path(given)
    folder = Path(cfg["paths"]["data_dir"]) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(urlsplit(given).path).name or "weights"
    path = folder / f"{digest[:16]}_{name}"
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.is_file():
            download(given, path, digest, "or fetch it by hand, and give its path as ckpt_path")
    return path
