"""A corpus of hostile run directories: a run of Lathe, with functions that each attack one of its files."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.runs.rundir import RunDir
from lathe.training.compression_finalize import write_weights
from support.runs import SMALL, new_run

SECRET = "hunter2-of-the-environment"
CANARY = "canary"
OPEN = b"cbuiltins\nopen\n(V" + CANARY.encode() + b"\nVw\ntR."  # a pickle that leaves the file


def said(call: Callable[[], Any]) -> str:
    """Return the one sentence that `call` ends with, having run nothing of a stranger's."""
    with pytest.raises(UserError) as caught:
        call()
    words = str(caught.value)
    assert "\n" not in words
    assert len(words) < 1500
    assert not Path(CANARY).exists()
    return words


def harmless(log_dir: Path, *overrides: str) -> RunDir:
    """Create a complete run directory with untrained weights."""
    cfg = new_run(log_dir, *SMALL, *overrides)
    run = RunDir(cfg["paths"]["run_dir"])
    run.best.parent.mkdir()
    write_weights(run.best, make_task(cfg, train=False).net, {"epoch": 0, "global_step": 1})
    shutil.copy(run.best, run.last)
    (run.path / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    run.finish({"steps": 1, "seconds": 1.0, "objective": 0.5, "val/loss": 1.0})
    return run


def copied(run: RunDir, folder: Path) -> RunDir:
    """Copy a run directory into `folder`."""
    shutil.copytree(run.path, folder / "foreign")
    return RunDir(folder / "foreign")


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `config` with `value` at a dotted key, with missing parents."""
    config = copy.deepcopy(config)
    node, (*parents, last) = config, key.split(".")
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value
    return config


def plant(run: RunDir, key: str, value: Any) -> None:
    """Write `value` at a dotted key of the run's config.yaml, without checks."""
    path = run.path / "config.yaml"
    path.write_text(yaml.safe_dump(put(yaml.safe_load(path.read_text()), key, value)))


def gadgets(canary: Path) -> dict[str, dict[str, Any]]:
    """Return nodes that create the file `canary` if built, by their means."""
    touch = f"open({str(canary)!r}, 'w').close()"
    payload = canary.with_name("payload.pkl")
    # opcodes of a pickle that calls open(canary, "w")
    payload.write_bytes(b"cbuiltins\nopen\n(V" + str(canary).encode() + b"\nVw\ntR.")
    module = canary.with_name("planted_module.py")
    module.write_text(f"{touch}\nclass Net: ...\n")
    called: dict[str, dict[str, Any]] = {
        "os.system": {"command": f"touch {canary}"},
        "subprocess.Popen": {"args": ["touch", str(canary)]},
        "builtins.eval": {"_args_": [touch]},
        "builtins.open": {"file": str(canary), "mode": "w"},
        "torch.load": {"f": str(payload), "weights_only": False},
        "torch.nn.functional.torch.hub.load": {"repo_or_dir": str(canary.parent), "model": "Net", "source": "local"},
        "lightning.pytorch.callbacks.ModelCheckpoint": {"dirpath": str(canary)},
        "lathe.launch.elastic.call_job": {"job": f"runpy:run_path({module})", "cfg": {}},
        "lathe.files.write_atomically": {"path": str(canary), "text": "x"},
        "hydra.utils.instantiate": {"config": {"_target_": "os.getcwd"}},
        "functools.partial": {"_args_": ["os.system"]},
        "planted_module.Net": {},
    }
    return {name: {"_target_": name, **options} for name, options in called.items()}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
# Contents of a config.yaml other than names: functions of the run's text, by what they are.
TEXTS: dict[str, Callable[[str], str]] = {
    "bomb of aliases": lambda text: BOMB + text,
    "merge key": lambda text: text + "extra:\n  <<: {a: 1}\n",
    "object": lambda text: "x: !!python/object/apply:os.system ['touch canary']\n" + text,
    "key twice": lambda text: text + "seed: 1\n",
    "deep lists": lambda text: text + "x: " + "[" * 500 + "]" * 500 + "\n",
    "many values": lambda text: text + "x: [" + "1," * 21_000 + "]\n",
    "long word": lambda text: text + "x: " + "a" * 1_100_000 + "\n",
    "key that is a number": lambda text: text + "1: 2\n",
    "two documents": lambda text: text + "---\na: 1\n",
    "list": lambda text: "- 1\n",
    "secret": lambda text: text + "x: ${oc.env:LATHE_TEST_SECRET}\n",
    "name of a folder": lambda text: text.replace("name: train", "name: ../../outside"),
}
# Keys at which a component belongs, and keys apart from the groups at which none does.
HERE = (
    *("model.net", "task.loss", "optimizer.kind", "scheduler", "trainer", "strategy", "data.source"),
    *("callbacks.extra", "logger.extra", "compression.distill.teacher.net"),
)
NOWHERE = (
    *("seed", "extra", "trainer.plugins", "optimizer.lr", "precision.name", "launch", "paths.data_dir", "hydra.job"),
    *("compression.distill.teacher.weights", "logger.csv.extra", "trusted"),
)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
