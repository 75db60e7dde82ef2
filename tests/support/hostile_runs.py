"""A corpus of hostile run directories: a run as Lathe writes it, changed by functions that each attack one file of
it.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lathe.runs.build import make_task
from lathe.runs.rundir import RunDir
from lathe.verbs.finalise import write_weights
from support.runs import SMALL, new_run

SECRET = "hunter2-of-the-environment"
CANARY = "canary"


def harmless(log_dir: Path, *overrides: str) -> RunDir:
    """A complete run directory whose weights were never trained."""
    cfg = new_run(log_dir, *SMALL, *overrides)
    run = RunDir(cfg["paths"]["run_dir"])
    run.best.parent.mkdir()
    write_weights(run.best, make_task(cfg, train=False).net, {"epoch": 0, "global_step": 1})
    shutil.copy(run.best, run.last)
    (run.path / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    run.finish({"steps": 1, "seconds": 1.0, "objective": 0.5, "val/loss": 1.0})
    return run


def copied(run: RunDir, folder: Path) -> RunDir:
    """A copy of a run directory below `folder`."""
    shutil.copytree(run.path, folder / "foreign")
    return RunDir(folder / "foreign")


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `config` with `value` at a dotted key, whose parts are made where there are none."""
    config = copy.deepcopy(config)
    node, (*parents, last) = config, key.split(".")
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value
    return config


def plant(run: RunDir, key: str, value: Any) -> None:
    """Writes `value` at a dotted key of the run's config.yaml, as a stranger would: past all checks."""
    path = run.path / "config.yaml"
    path.write_text(yaml.safe_dump(put(yaml.safe_load(path.read_text()), key, value)))


def gadgets(canary: Path) -> dict[str, dict[str, Any]]:
    """Nodes that leave the file `canary` if anything builds them, by what they use."""
    touch = f"open({str(canary)!r}, 'w').close()"
    payload = canary.with_name("payload.pkl")
    # opcodes of a pickle that calls open(canary, "w")
    payload.write_bytes(b"cbuiltins\nopen\n(V" + str(canary).encode() + b"\nVw\ntR.")
    module = canary.with_name("planted_module.py")
    module.write_text(f"{touch}\nclass Net: ...\n")
    called: dict[str, dict[str, Any]] = {
        "os.system": {"command": f"touch {canary}"},
        "posix.system": {"command": f"touch {canary}"},
        "subprocess.Popen": {"args": ["touch", str(canary)]},
        "subprocess.run": {"args": ["touch", str(canary)]},
        "builtins.eval": {"_args_": [touch]},
        "builtins.exec": {"_args_": [touch]},
        "builtins.open": {"file": str(canary), "mode": "w"},
        "io.open": {"file": str(canary), "mode": "w"},
        "pathlib.Path.touch": {"self": str(canary)},
        "runpy.run_path": {"path_name": str(module)},
        "code.interact": {"local": {}},
        "timeit.timeit": {"stmt": touch, "number": 1},
        "logging.FileHandler": {"filename": str(canary)},
        "shutil.copy": {"src": str(module), "dst": str(canary)},
        "setuptools._distutils.spawn.spawn": {"cmd": ["touch", str(canary)]},
        "setuptools.archive_util.unpack_archive": {"filename": str(payload), "extract_dir": str(canary)},
        "joblib.load": {"filename": str(payload)},
        "pandas.read_pickle": {"filepath_or_buffer": str(payload)},
        "numpy.load": {"file": str(payload), "allow_pickle": True},
        "numpy.savetxt": {"fname": str(canary), "X": [1]},
        "pickle.load": {"file": str(payload)},
        "torch.load": {"f": str(payload), "weights_only": False},
        "torch.save": {"obj": 1, "f": str(canary)},
        "torch.hub.load": {"repo_or_dir": str(canary.parent), "model": "Net", "source": "local"},
        "torch.utils.cpp_extension.load": {"name": "x", "sources": [str(module)]},
        "torch.nn.Module.load_state_dict": {},
        "torch.nn.functional.torch.hub.load": {"repo_or_dir": str(canary.parent), "model": "Net", "source": "local"},
        "torch.nn.modules.module.warnings.sys.modules.get": {},
        "lightning.pytorch.callbacks.LambdaCallback": {},
        "lightning.pytorch.callbacks.ModelCheckpoint": {"dirpath": str(canary)},
        "lightning.pytorch.cli.LightningCLI": {},
        "lathe.launch.elastic.call_job": {"job": f"runpy:run_path({module})", "cfg": {}},
        "lathe.launch.elastic.importlib.import_module": {"name": "planted_module"},
        "lathe.files.write_atomically": {"path": str(canary), "text": "x"},
        "lathe.runs.nodes.hydra.utils.instantiate": {"config": {}},
        "lathe.data.unpickle.pickle.load": {},
        "lathe.legacy.torchscript.load": {"path": str(payload)},
        "hydra.utils.instantiate": {"config": {"_target_": "os.getcwd"}},
        "hydra.utils.call": {"config": {"_target_": "os.getcwd"}},
        "hydra._internal.utils._locate": {"path": "planted_module.Net"},
        "functools.partial": {"_args_": ["os.system"]},
        "operator.attrgetter": {"_args_": ["system"]},
        "importlib.import_module": {"name": "planted_module"},
        "planted_module.Net": {},
        "pydoc.locate": {"path": "planted_module.Net"},
        "ctypes.CDLL": {"name": str(payload)},
        "webbrowser.open": {"url": "http://127.0.0.1:9/"},
        "urllib.request.urlopen": {"url": "http://127.0.0.1:9/"},
        "os.putenv": {},
        "sys.setrecursionlimit": {"_args_": [10]},
    }
    return {name: {"_target_": name, **options} for name, options in called.items()}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
# What a config.yaml may hold besides names: by what it is, the text that is put before or instead of the run's own.
TEXTS: dict[str, Callable[[str], str]] = {
    "bomb of aliases": lambda text: BOMB + text,
    "alias": lambda text: "x: &x 1\ny: *x\n" + text,
    "recursive alias": lambda text: "x: &x [*x]\n" + text,
    "merge key": lambda text: text + "extra:\n  <<: {a: 1}\n",
    "object": lambda text: "x: !!python/object/apply:os.system ['touch canary']\n" + text,
    "name of a module": lambda text: "x: !!python/module:antigravity\n" + text,
    "name of a function": lambda text: "x: !!python/name:os.system\n" + text,
    "path": lambda text: "x: !!python/object/apply:pathlib.Path [a]\n" + text,
    "tag of one's own": lambda text: "x: !mine 1\n" + text,
    "binary": lambda text: "x: !!binary aGk=\n" + text,
    "key twice": lambda text: text + "seed: 1\n",
    "deep lists": lambda text: text + "x: " + "[" * 500 + "]" * 500 + "\n",
    "deep blocks": lambda text: text + "".join("  " * n + f"k{n}:\n" for n in range(300)),
    "many values": lambda text: text + "x: [" + "1," * 21_000 + "]\n",
    "long word": lambda text: text + "x: " + "a" * 1_100_000 + "\n",
    "long number": lambda text: text + "x: " + "9" * 5000 + "\n",
    "key that is a list": lambda text: text + "? [a, b]\n: 1\n",
    "key that is a number": lambda text: text + "1: 2\n",
    "key that is null": lambda text: text + "extra: {null: 2}\n",
    "two documents": lambda text: text + "---\na: 1\n",
    "list": lambda text: "- 1\n",
    "word": lambda text: "word\n",
    "nothing": lambda text: "",
    "bytes": lambda text: text + "x: \ufffe\x07\n",
    "secret": lambda text: text + "x: ${oc.env:LATHE_TEST_SECRET}\n",
    "secret in a word": lambda text: text.replace("name: train", "name: a${oc.env:LATHE_TEST_SECRET}"),
    "interpolation": lambda text: text + "x: ${seed}\n",
    "resolver": lambda text: text + "x: ${oc.create:{a:1}}\n",
    "name of a folder": lambda text: text.replace("name: train", "name: ../../outside"),
    "name with an end": lambda text: text.replace("name: train", 'name: "a\\0b"'),
    "name that is a list": lambda text: text.replace("name: train", "name: [a]"),
    "no name": lambda text: text.replace("name: train", "nam: train"),
}
# Where a node is planted besides the groups: no part belongs there.
NOWHERE = (
    "seed",
    "name",
    "extra",
    "trainer.max_epochs",
    "trainer.callbacks",
    "trainer.logger",
    "trainer.strategy",
    "trainer.plugins",
    "trainer.profiler",
    "optimizer.lr",
    "optimizer.no_decay",
    "scheduler.warmup",
    "strategy.devices",
    "precision",
    "precision.name",
    "compile",
    "compile.backend",
    "launch",
    "launch.nodes",
    "paths",
    "paths.data_dir",
    "request",
    "request.run",
    "hydra",
    "hydra.job",
    "compression",
    "compression.stages",
    "compression.prune.sparsity",
    "compression.distill.teacher",
    "compression.distill.teacher.weights",
    "callbacks",
    "logger",
    "logger.csv.extra",
    "trusted",
    "ckpt_path",
    "objective",
    "target",
    "target.onnx",
    "debug.profiler",
)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
