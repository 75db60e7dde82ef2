"""What a run leaves on disk. Imports no torch.

A run directory holds config.yaml, overrides.yaml, environment.json, checkpoints/, metrics.csv and, once the run is
complete, result.json. One process at a time may write to it; a lock says so.
"""

import json
import os
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lathe import trust
from lathe.config.resolve import newest_run
from lathe.config.validate import GROUPS as PARTS
from lathe.errors import UserError, require
from lathe.files import disk_sentence, remove, require_plain, sweep, whole, write_atomically
from lathe.runs.environment import describe_environment, digest_own_files
from lathe.runs.lock import locked
from lathe.runs.places import nearest
from lathe.runs.typed import without_replaced
from lathe.trust.export_signing import signed_config
from lathe.trust.safe_yaml import as_yaml, is_signed, read_mapping, read_yaml

# What every configuration of a run has, as groups of keys.
GROUPS = ("paths", *PARTS)
# What stands in a run directory, besides what loggers make: nobody else may write there.
_OWN = (
    "config.yaml overrides.yaml environment.json metrics.csv run.log output.log result.json receipt.json receipt.md "
    ".lock checkpoints exports"
)
OWN_FILES = tuple(_OWN.split())
# What may differ between a run and its continuation without making it another experiment.
NOT_THE_EXPERIMENT = ("resume", "launch", "paths", "hydra", "sweep", "trusted", "tags", "data.class_names")


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path | str, where: str | None = None) -> None:
        self.path = Path(path)
        self.where = where or str(self.path)  # how the user has named it, for sentences

    @property
    def last(self) -> Path:
        """The newest whole checkpoint, which a continuation starts from."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint with the best monitored value."""
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def complete(self) -> bool:
        """Whether the run reached its end."""
        return (self.path / "result.json").is_file()

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run has trained with.

        Raises:
            UserError: it is no configuration, or names what a saved configuration may not build (lathe.trust).
        """
        return trust.checked_config(self.path / "config.yaml", self.where)

    @property
    def typed(self) -> list[str]:
        """What was typed when the run was started, then what changed it on resume. Raises UserError where it is no list
        of overrides.
        """
        return trust.checked_overrides(self.path / "overrides.yaml", self.where)

    @property
    def overrides(self) -> list[str]:
        """The same with the last value of each key. Raises as `typed`."""
        return without_replaced(self.typed)

    @property
    def result(self) -> dict[str, Any]:
        """The final metrics."""
        return trust.read_json(self.path / "result.json", f"{self.where}: its result.json")

    @property
    def receipt(self) -> dict[str, Any]:
        """What the run's receipt says."""
        return trust.read_json(self.path / "receipt.json", str(self.path / "receipt.json"))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware and the state of the code at the start."""
        return trust.read_json(self.path / "environment.json", f"{self.where}: its environment.json")

    def warn_of_changes(self) -> None:
        """Warn in one line of the user's own files that are not as they were when the run began."""
        now, then = digest_own_files(), self.environment.get("own_files") or {}
        changed = [f"src/{name}" for name in then if now.get(name) != then[name]]
        if changed:
            warnings.warn(f"{self.path}: changed since this run began: {', '.join(changed)}.", stacklevel=1)

    @property
    def started(self) -> datetime:
        """When the run was created, in UTC; the beginning of 1970 where environment.json can't be read. The name of the
        directory is local time, which does not order runs of two time zones.
        """
        with suppress(UserError, OSError):
            return datetime.fromisoformat(self.environment["started"]).astimezone(UTC)
        return datetime.fromtimestamp(0, UTC)

    @property
    def readable(self) -> bool:
        """Whether config.yaml and environment.json are whole, and the former names nothing that may not be built."""
        try:
            return "name" in self.known_config and "launch_id" in self.environment
        except Exception:  # a torn YAML file can raise nearly anything
            return False

    @property
    def known_config(self) -> dict[str, Any]:
        """The configuration to compare with, not to build from: nothing is imported to check it. Raises as `config`."""
        return trust.checked_config(self.path / "config.yaml", self.where, kinds=False)

    def plain(self, name: str, known: dict[str, Any] | None = None) -> Any:
        """What one of its YAML files says, to be looked at alone: nothing that it names is judged, or may be built. Of
        many runs that are given the same `known`, equal groups are parsed once; nobody may change what is returned.

        Raises:
            UserError: it is no YAML that Lathe has written.
            OSError: it can't be read at all.
        """
        path, words = self.path / name, f"{self.where}: its {name}"
        return read_yaml(path, words) if known is None else read_mapping(path, words, known)

    def checkpoint(self, name: str, key: str = "") -> Path:
        """Where checkpoint `name`, `best` or `last`, is: a file, or a folder if ranks wrote their own parts. `key` is
        the option that another can be asked for with.

        Raises:
            UserError: the run has no such checkpoint.
        """
        home = self.path / "checkpoints"
        path = home / f"{name}.ckpt"
        if not path.exists():
            files = [*home.glob("*.ckpt"), *home.glob("own/*.ckpt")]  # own: of a ModelCheckpoint of the user's
            there = sorted(str(file.relative_to(home).with_suffix("")) for file in files)
            way = f"; {key}={there[-1]} takes that" if key and there else ""
            raise UserError(f"{self.path} has no checkpoint {name!r}: it has {', '.join(there) or 'none at all'}{way}.")
        return path

    @property
    def signed(self) -> bool:
        """Whether config.yaml is as this user's own command wrote it."""
        return is_signed(self.path)

    def save_config(self, cfg: dict[str, Any], signed: bool = True) -> None:
        """Writes config.yaml, `signed` where all that it names was typed or trusted by this user."""
        text = as_yaml(cfg)
        write_atomically(self.path / "config.yaml", signed_config(text) if signed else text)

    @property
    def begun(self) -> bool:
        """Whether training had started, so that there is something to keep."""
        return (self.path / "metrics.csv").exists()

    def reopen(self, cfg: dict[str, Any], words: Sequence[str] = ()) -> None:
        """Makes the run unfinished again, to be continued under `cfg`; its overrides get the `words` of the resume."""
        (self.path / "result.json").unlink(missing_ok=True)
        if words:
            kept = [word for word in self.typed if word not in words]
            write_atomically(self.path / "overrides.yaml", as_yaml([*kept, *words]))
        self.save_config(cfg)

    @contextmanager
    def reopened(self, cfg: dict[str, Any], words: Sequence[str] = ()) -> Iterator[None]:
        """As `reopen`; what stood there comes back if an error ends the job before training has gone on, which begins
        by writing metrics.csv anew.

        Raises:
            NotPlain: something else stands where a file belongs that is written now.
        """
        for name in ("config.yaml", "overrides.yaml", "metrics.csv", "result.json"):
            require_plain(self.path / name)
        require_plain(self.path / "run.log", links=False)
        kept = [
            self.path / name for name in ("config.yaml", "overrides.yaml", "result.json") if (self.path / name).exists()
        ]
        before, lines = {path: path.read_bytes() for path in kept}, self.path / "metrics.csv"
        # Not its inode, which a file that takes its place may be given again.
        mark = lines.exists() and lines.stat().st_mtime_ns
        self.reopen(cfg, words)
        try:
            yield
        except BaseException:
            for path, content in before.items() if (lines.exists() and lines.stat().st_mtime_ns) == mark else ():
                with whole(path) as temporary:
                    temporary.write_bytes(content)
            raise

    def remove(self) -> None:
        """Deletes a directory whose run never began, and the folder above it if that is empty then."""
        with suppress(OSError):
            remove(self.path)
        with suppress(OSError):
            self.path.parent.rmdir()

    def finish(self, result: dict[str, Any]) -> None:
        """Writes result.json, which makes the run complete."""
        write_atomically(
            self.path / "result.json", json.dumps(result, indent=2, sort_keys=True, allow_nan=False) + "\n"
        )

    @contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """As `lathe.runs.lock.locked`, without what killed processes have left half-written."""
        with locked(self.path, shared):
            self.sweep()
            yield

    def sweep(self) -> None:
        """Removes what killed processes have left half-written in it."""
        sweep(self.path, self.path / "checkpoints", self.path / "exports")

    @property
    def busy(self) -> bool:
        """Whether a live process holds the directory."""
        try:
            with self.locked():
                return False
        except UserError:
            return True


def create(
    log_dir: Path, cfg: dict[str, Any], overrides: list[str], launch_id: str | None = None, signed: bool = True
) -> RunDir:
    """Makes a fresh directory `<log_dir>/<name>/<date>_<time>_<short id>`, and writes what is known at the start.
    `launch_id` is what an outer launcher (torchrun, SLURM) calls this run, `signed` as in `RunDir.save_config`.

    Raises:
        UserError: the place can't be written to. Nothing is left behind then.
    """
    parent = log_dir.absolute() / str(cfg["name"])
    while True:
        path = parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
        if not os.path.lexists(path):
            break
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as making:  # a kill leaves no run directory without its files
            making.mkdir()
            cfg["paths"]["run_dir"] = str(path)
            RunDir(making).save_config(cfg, signed)
            write_atomically(making / "overrides.yaml", as_yaml(overrides))
            environment = describe_environment(launch_id) | {"choices": _chosen_groups()}
            write_atomically(making / "environment.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        with suppress(OSError):
            parent.rmdir()
        sentence = disk_sentence(error)
        if sentence is None:
            raise
        raise UserError(sentence) from error
    return RunDir(path)


def _chosen_groups() -> dict[str, str]:
    """The choice of each group of the command that is running; empty outside of one."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return {group: str(choice) for group, choice in choices.items() if choice is not None and "/" not in group}


def point_latest(log_dir: Path, target: Path) -> None:
    """Makes `<log_dir>/latest` a link to `target`, in one step, so that it always leads somewhere. What somebody else
    has put there stays: a file, a folder, or a link to anything but a run.
    """
    place = log_dir / "latest"
    ours = place.is_symlink() and (not place.exists() or (place / "environment.json").is_file())
    if os.path.lexists(place) and not ours:
        print(f"{place} is no link to a run, and stays as it is.")
        return
    with suppress(OSError), whole(place) as link:  # a file system without links: the run itself is not hurt
        link.symlink_to(os.path.relpath(target, log_dir.absolute()), target_is_directory=True)


def open_run(path: str | Path, key: str, trusted: Sequence[str] = (), look: bool = False) -> RunDir:
    """The run directory that `key` (such as `resume`) names; with `look` it may be of parts that a saved configuration
    may not build, and is to be read alone. Packages that are `trusted` are so in this process from now on.

    Raises:
        UserError: it does not exist or is not a run directory.
    """
    if trusted:
        trust.allow({"trusted": list(trusted)})
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise UserError(f"{key}={path}: expected the path of a run directory; logs/latest is the newest run.")
    try:
        run = RunDir(Path(newest_run(str(path), key not in ("resume", "compare"))).resolve(), f"{key}={path}")
        there = run.path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long or with a null byte
        why = str(error.strerror if isinstance(error, OSError) else error)[:200]
        raise UserError(f"{key}={str(path)[:200]!r} leads nowhere: {why}; logs/latest is the newest run.") from error
    way = "python train.py makes a run." if run.path.name == "latest" else "logs/latest is the newest run."
    if not there:
        raise UserError(f"{key}={path}: there is no such directory; {nearest(Path(path), way)}")
    home = run.path.parent.parent
    if run.path.suffix == ".ckpt" and (home / "config.yaml").is_file():
        raise UserError(f"{key}={path} is a checkpoint; expected its run: {key}={Path(path).parent.parent}.")
    if not (run.path / "config.yaml").is_file() or not (run.path / "environment.json").is_file():
        raise UserError(
            f"{key}={path} is not a run directory (it has no config.yaml and environment.json); logs/latest is the "
            "newest run."
        )
    trust.tell_owner(run.path, run.path / "config.yaml", run.path / "checkpoints")
    require("launch_id" in run.environment, f"{key}={path}: its environment.json is not one that a run has written.")
    saved = run.plain("config.yaml") if look else run.known_config
    require(
        isinstance(saved, dict) and "name" in saved, f"{key}={path}: its config.yaml can't be read as a configuration."
    )
    for group in GROUPS:
        lacks = (
            f"{key}={path}: its config.yaml has no group {group}, which every run has: take a run directory as Lathe "
            "has written it."
        )
        require(isinstance(saved.get(group), dict), lacks)
    run.sweep()
    return run
