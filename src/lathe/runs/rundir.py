"""The directory of a run, the lock of the process that writes to it, and commands about it. Imports no torch.

A run directory holds config.yaml, overrides.yaml, environment.json, checkpoints/, metrics.csv and, once the run is
complete, result.json.
"""

import json
import os
import platform
import re
import secrets
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig

from lathe import trust
from lathe.config.compression_plan import methods
from lathe.config.override_parsing import as_typed, key_of
from lathe.config.resolve import newest_run
from lathe.config.validate import GROUPS as COMPONENTS
from lathe.configs import SOURCE
from lathe.errors import UserError, did_you_mean, require
from lathe.files import disk_sentence, open_plain, remove, require_plain, sha256, sweep, whole, write_atomically
from lathe.trust import signed_config
from lathe.trust.safe_yaml import as_yaml, read_mapping, read_yaml

GROUPS = ("paths", *COMPONENTS)  # in the configuration of every run
# in a run directory, besides the files of loggers; nothing else may be written there
OWN_FILES = (
    *("config.yaml", "overrides.yaml", "environment.json", "metrics.csv", "run.log", "output.log", "result.json"),
    *("receipt.json", "receipt.md", "example.pt", ".lock", "checkpoints", "exports"),
)
# keys in which a resumed run may differ from its first part
NOT_THE_EXPERIMENT = ("resume", "launch", "paths", "hydra", "sweep", "trusted", "tags", "data.class_names")
# in environment.json; threads decide in which order numbers are added
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("lathe", "torch", "lightning", "hydra-core", "omegaconf", "numpy", "torchmetrics")

ENDS = ("max_epochs", "max_steps", "max_time")  # keys of the Trainer
CONFIG_DIR = "LATHE_CONFIG_DIR"  # the variable with the folder of --config-dir

_locks: set[IO[str]] = set()  # the lock files that this process holds


class RunDir:
    """The directory of one run. `where` is how the user has named it, for messages."""

    def __init__(self, path: Path | str, where: str | None = None) -> None:
        self.path = Path(path)
        self.where = where or str(self.path)

    @property
    def last(self) -> Path:
        """The newest checkpoint, from which a resume continues."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint with the best monitored value."""
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def complete(self) -> bool:
        """True if the run reached its end."""
        return (self.path / "result.json").is_file()

    @property
    def begun(self) -> bool:
        """True if training has started; the directory of another run is removed."""
        return (self.path / "metrics.csv").exists()

    @property
    def signed(self) -> bool:
        """True if config.yaml is as a command of this user wrote it."""
        with suppress(UserError, OSError):
            return trust.read_signed(self.path / "config.yaml", str(self.path))[1]
        return False

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration.

        Raises UserError if it is not one, or names what a saved configuration may not build (lathe.trust).
        """
        from lathe.trust.allowlist import checked_config  # of runs that exist

        return checked_config(self.path / "config.yaml", self.where)

    @property
    def known_config(self) -> dict[str, Any]:
        """The configuration to compare with, not to build from: nothing is imported to check it. Raises as `config`."""
        from lathe.trust.allowlist import checked_config

        return checked_config(self.path / "config.yaml", self.where, kinds=False)

    @property
    def typed(self) -> list[str]:
        """The overrides of the command that started the run, then those of its resumes."""
        path, file = self.path / "overrides.yaml", f"{self.where}: its overrides.yaml"
        require(path.is_file(), f"{file} is missing: use a run directory as Lathe wrote it.")
        content = read_yaml(path, file)
        if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
            raise UserError(f"{file} can't be read as a list of overrides.")
        for item in content:  # a search path imports what it names
            is_hydra = re.match(r"[+~]*hydra\b", item)
            require(not is_hydra, f"{file} holds {item[:80]!r}, which changes Hydra itself: it is not read.")
        return content

    @property
    def overrides(self) -> list[str]:
        """The overrides with the last value of each key."""
        return last_values(self.typed)

    @property
    def result(self) -> dict[str, Any]:
        """The final metrics."""
        return trust.read_json(self.path / "result.json", f"{self.where}: its result.json")

    @property
    def receipt(self) -> dict[str, Any]:
        """The receipt of a compressed run."""
        return trust.read_json(self.path / "receipt.json", str(self.path / "receipt.json"))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware and the state of the code at the start."""
        return trust.read_json(self.path / "environment.json", f"{self.where}: its environment.json")

    @property
    def started(self) -> datetime:
        """The time of creation in UTC; the beginning of 1970 if environment.json can't be read.

        The directory is named by local time, which does not order runs of two time zones.
        """
        with suppress(UserError, OSError):
            return datetime.fromisoformat(self.environment["started"]).astimezone(UTC)
        return datetime.fromtimestamp(0, UTC)

    @property
    def readable(self) -> bool:
        """True if config.yaml and environment.json are intact, and the former names nothing that may not be built."""
        try:
            return "name" in self.known_config and "launch_id" in self.environment
        except Exception:  # a torn YAML file can raise nearly anything
            return False

    @property
    def busy(self) -> bool:
        """True if a live process holds the lock of the directory."""
        try:
            with self.locked():
                return False
        except UserError:
            return True

    @property
    def stopping_key(self) -> str:
        """The key whose value ended the complete run, according to its result."""
        trainer, result = self.known_config["trainer"], self.result
        epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
        epochs_left = epochs in (None, -1) or result.get("epochs", 0) < epochs
        if trainer.get("max_time") is not None and epochs_left and result.get("steps") != steps:
            return "trainer.max_time"
        return "trainer.max_steps" if result.get("steps") == steps else "trainer.max_epochs"

    def lacks_receipt(self, cfg: dict[str, Any]) -> bool:
        """True if the complete run of `cfg` was compressed and ended before its receipt was measured."""
        compression = cfg.get("compression") or {}
        has_one = bool(methods(compression)) and compression.get("receipt", "none") != "none"
        return has_one and self.best.exists() and not (self.path / "receipt.json").exists()

    def warn_of_changes(self) -> None:
        """Warn about the user's own files that have changed since the run began."""
        now, then = digest_own_files(), self.environment.get("own_files") or {}
        changed = [f"src/{name}" for name in then if now.get(name) != then[name]]
        if changed:
            warnings.warn(f"{self.path}: changed since this run began: {', '.join(changed)}.", stacklevel=1)

    def plain(self, name: str, known: dict[str, Any] | None = None) -> Any:
        """Read one of the YAML files without judging the names in it, which must not be built.

        Runs that are given the same `known` share parsed groups, so the returned value must not be changed.
        """
        path, where = self.path / name, f"{self.where}: its {name}"
        return read_yaml(path, where) if known is None else read_mapping(path, where, known)

    def checkpoint(self, name: str, key: str = "") -> Path:
        """Return the path of checkpoint `name`, such as best or last: a file, or the folder of a sharded one.

        `key` is the option that selects another.
        """
        folder = self.path / "checkpoints"
        path = folder / f"{name}.ckpt"
        if not path.exists():
            files = [*folder.glob("*.ckpt"), *folder.glob("own/*.ckpt")]  # own: of a ModelCheckpoint of the user's
            names = sorted(str(file.relative_to(folder).with_suffix("")) for file in files)
            fix = f"; {key}={names[-1]} takes that" if key and names else ""
            raise UserError(f"{self.path} has no checkpoint {name!r}: it has {', '.join(names) or 'none at all'}{fix}.")
        return path

    def save_config(self, cfg: dict[str, Any], signed: bool = True) -> None:
        """Write config.yaml, `signed` if all that it names was typed or trusted by this user."""
        text = as_yaml(cfg)
        write_atomically(self.path / "config.yaml", signed_config(text) if signed else text)

    @contextmanager
    def reopened(self, cfg: dict[str, Any], overrides: Sequence[str] = ()) -> Iterator[None]:
        """Make the run unfinished again, with the configuration and the overrides `words` of its resume.

        That is undone if an error ends the job before it has written a new metrics.csv.
        """
        for name in ("config.yaml", "overrides.yaml", "metrics.csv", "result.json"):
            require_plain(self.path / name)
        require_plain(self.path / "run.log", links=False)
        saved = [self.path / name for name in ("config.yaml", "overrides.yaml", "result.json")]
        before, lines = {path: path.read_bytes() for path in saved if path.exists()}, self.path / "metrics.csv"
        mark = lines.exists() and lines.stat().st_mtime_ns  # not the inode, which may be used again
        (self.path / "result.json").unlink(missing_ok=True)
        if overrides:
            earlier = [word for word in self.typed if word not in overrides]
            write_atomically(self.path / "overrides.yaml", as_yaml([*earlier, *overrides]))
        self.save_config(cfg)
        try:
            yield
        except BaseException:
            for path, content in before.items() if (lines.exists() and lines.stat().st_mtime_ns) == mark else ():
                with whole(path) as temporary:
                    temporary.write_bytes(content)
            raise

    def remove(self) -> None:
        """Delete the directory of a run that never began, and its parent if that is empty then."""
        with suppress(OSError):
            remove(self.path)
        with suppress(OSError):
            self.path.parent.rmdir()

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, which makes the run complete."""
        text = json.dumps(result, indent=2, sort_keys=True, allow_nan=False)
        write_atomically(self.path / "result.json", f"{text}\n")

    @contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """Hold the lock of the directory for this process, or with `shared` for the other machines of its launch too.

        The kernel releases it however the process ends. Forked children don't hold it: data workers outlive a killed
        parent by seconds. Half-written files of killed processes are removed.
        """
        with open_plain(self.path / ".lock", "a") as file:
            if sys.platform != "win32":  # which has no flock: two writers are not kept apart
                import fcntl

                try:
                    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                except OSError as error:
                    message = f"{self.path} is being written to by another process: wait for it, or stop it first."
                    raise UserError(message) from error
            _locks.add(file)
            try:
                self.sweep()
                yield
            finally:
                _locks.discard(file)

    def sweep(self) -> None:
        """Remove the half-written files of killed processes."""
        sweep(self.path, self.path / "checkpoints", self.path / "exports")


def _release_in_child() -> None:
    with open(os.devnull) as nothing:
        for file in _locks:  # keeps the descriptor's number in use, so that closing it closes no other file
            os.dup2(nothing.fileno(), file.fileno(), inheritable=False)
    _locks.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_release_in_child)


def create(
    log_dir: Path, cfg: dict[str, Any], overrides: list[str], launch_id: str | None = None, signed: bool = True
) -> RunDir:
    """Create `<log_dir>/<name>/<date>_<time>_<short id>` with config.yaml, overrides.yaml and environment.json.

    `launch_id` is the run's name in an external launcher (torchrun, SLURM), `signed` as in `RunDir.save_config`. If it
    can't be written, nothing is left of it.
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
            choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
            chosen = {group: str(name) for group, name in choices.items() if name is not None and "/" not in group}
            environment = describe_environment(launch_id) | {"choices": chosen}
            write_atomically(making / "environment.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        with suppress(OSError):
            parent.rmdir()
        message = disk_sentence(error)
        if message is None:
            raise
        raise UserError(message) from error
    return RunDir(path)


def point_latest(log_dir: Path, target: Path) -> None:
    """Make `<log_dir>/latest` a link to `target` in one step. Leave anything there that is not a link to a run."""
    link = log_dir / "latest"
    ours = link.is_symlink() and (not link.exists() or (link / "environment.json").is_file())
    if os.path.lexists(link) and not ours:
        print(f"{link} is not a link to a run, and stays as it is.")
        return
    with suppress(OSError), whole(link) as temporary:  # some file systems have no links, which harms no run
        temporary.symlink_to(os.path.relpath(target, log_dir.absolute()), target_is_directory=True)


def open_run(path: str | Path, key: str, trusted: Sequence[str] = (), look: bool = False) -> RunDir:
    """Open the run directory that `key` (such as `resume`) names.

    With `look` it is only read, so its configuration may name what may not be built. The packages `trusted` stay
    trusted in this process.
    """
    if trusted:
        trust.allow({"trusted": list(trusted)})
    try:
        run = RunDir(Path(newest_run(str(path), key not in ("resume", "compare"))).resolve(), f"{key}={path}")
        exists = bool(str(path).strip()) and run.path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long or with a null byte
        raise UserError(f"{key}={str(path)[:200]!r} leads nowhere: {str(error)[:200]}.") from error
    if not exists:
        fix = "python train.py makes a run." if run.path.name == "latest" else "logs/latest is the newest run."
        raise UserError(f"{key}={path}: there is no such directory; {suggest_folder(Path(path), fix)}")
    above = run.path.parent.parent
    if run.path.suffix == ".ckpt" and (above / "config.yaml").is_file():
        raise UserError(f"{key}={path} is a checkpoint; expected its run: {key}={Path(path).parent.parent}.")
    for name in ("config.yaml", "environment.json"):
        is_there = (run.path / name).is_file()
        require(is_there, f"{key}={path} is not a run directory, it has no {name}; logs/latest is the newest run.")
    saved = run.plain("config.yaml") if look else run.known_config
    require_groups(saved, f"{key}={path}")
    require("launch_id" in run.environment, f"{key}={path}: its environment.json is not one that a run has written.")
    run.sweep()
    return run


def require_groups(config: Any, where: str) -> None:
    """Raise UserError unless a run's configuration has a name and every group."""
    groups = config if isinstance(config, dict) else {}
    missing = ["name"] * (groups.get("name") is None)
    missing += [name for name in GROUPS if not isinstance(groups.get(name), dict)]
    require(not missing, f"{where}: its config.yaml has no {', '.join(missing)}, which every run has.")


def display_path(path: Path) -> str:
    """Return a path for lists of runs: relative if it is below the working directory."""
    with suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def suggest_folder(path: Path, otherwise: str) -> str:
    """Return a hint at the folder that is named most like the first missing part of `path`."""
    above = next((folder for folder in path.parents if folder.is_dir()), Path())
    names: list[str] = []
    with suppress(OSError):  # no permission
        names = [entry.name for entry in above.iterdir() if entry.is_dir() and entry.name[0] != "."]
    return did_you_mean(path.parts[len(above.parts)] if path.parts else "", names, otherwise)


# environment.json


def describe_environment(launch_id: str | None = None) -> dict[str, Any]:
    """Return time in UTC, versions, hardware, command, git commit and diff, and digests of the user's files."""
    cpu = None
    with suppress(OSError):
        cpu = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": sys.argv,
        "launch_id": launch_id,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        "gpus": (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
        "packages": {package: version for package in PACKAGES if (version := _version(package)) is not None},
        "git_commit": _output("git", "rev-parse", "HEAD"),
        "git_diff": _output("git", "diff", "HEAD"),
        "own_files": digest_own_files(),
    }


def digest_own_files() -> dict[str, str]:
    """Return the SHA-256 of each Python file below `src/` that is not Lathe's, by its path from there."""
    if SOURCE is None:
        return {}
    packages = [folder for folder in sorted(SOURCE.iterdir()) if folder.name not in ("lathe", "hydra_plugins")]
    files = [file for folder in packages for file in sorted(folder.rglob("*.py")) if file.is_file()]
    files += [file for file in packages if file.suffix == ".py"]
    return {str(file.relative_to(SOURCE)): sha256(file) for file in files}


def _version(package: str) -> str | None:
    from importlib import metadata  # not needed for --help

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return what a program prints; None if it is missing or fails."""
    import subprocess  # not needed for --help

    try:
        done = subprocess.run(  # noqa: S603
            command,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a diff is in the encoding of its files
            timeout=10,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None


# Shell commands about a run directory, as the user would type them in this folder


def script_path(name: str) -> str:
    """Return the path of the script `name` of this project, relative to the folder of the running command."""
    running = Path(sys.argv[0])
    root = running.parent
    if root.resolve().name == "scripts":
        root = root.parent if root.name == "scripts" else root / ".."
    is_elsewhere = (root / "train.py").is_file() and (root / name).is_file() and root.resolve() != Path.cwd()
    return os.path.normpath(root / name) if is_elsewhere else name


def train_command() -> list[str]:
    """Return the beginning of a command that trains, with the --config-dir of this one."""
    folder = os.environ.get(CONFIG_DIR)
    return ["python", script_path("train.py"), *(["--config-dir", folder] if folder else [])]


def run_command(script: str, key: str, run: str | Path, *more: str) -> str:
    """Return the shell command that runs `script` on the directory `run`, which it takes as `key`."""
    return shlex.join(["python", script_path(script), f"{key}={quote_value(str(run))}", *more])


def quote_value(text: str) -> str:
    """Return `text` as the value of an override, quoted if Hydra's grammar requires it."""
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else as_typed(text)


def rerun_overrides(overrides: list[str], leaves: dict[str, Any]) -> list[str]:
    """Return the overrides of another run like the one with the overrides `words` and the dotted config `leaves`.

    Overrides that name the one run are left out. The runs that it started or learned from have their resolved paths,
    since logs/latest may be another run now.
    """
    rerun = []
    for word in drop_overrides(last_values(overrides), "resume", "sweep", "hydra", "launch.id", "paths.run_dir"):
        key = key_of(word)
        path = leaves.get(key) if key.endswith(("ckpt_path", "teacher")) else None
        rerun.append(f"{word.partition('=')[0]}={quote_value(path)}" if isinstance(path, str) else word)
    return rerun


def drop_overrides(overrides: list[str], *keys: str) -> list[str]:
    """Return the `words` that set nothing at `keys` or below."""
    return [
        word
        for word in overrides
        if not any(key_of(word) == key or key_of(word).startswith((f"{key}.", f"{key}/")) for key in keys)
    ]


def last_values(overrides: list[str]) -> list[str]:
    """Return the overrides without those that a later one replaces, as a resume does."""
    return [
        word
        for i, word in enumerate(overrides)
        if word.partition("=")[0] not in {w.partition("=")[0] for w in overrides[i + 1 :] if w[0] not in "+~"}
    ]
