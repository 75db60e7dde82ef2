"""TorchServe archives (.mar): the net in another target's format, with a handler without Lathe.

TorchServe is no longer actively maintained, and its maintainers plan no security patches: Lathe recommends
`scripts/serve.py` for serving.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lathe import export as exports
from lathe.compression.quantization.net import quantized_layers
from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.contrib.torchserve_handler import Model
from lathe.errors import UserError, require, uninstalled
from lathe.export import Array, Target, export_target
from lathe.export.bundle import readable, whole
from lathe.files import put, scratch, scratch_prefix

HANDLER = "lathe.contrib.torchserve_handler"
IMPORT = re.compile(r"^(\s*from )(lathe(?:\.\w+)+)(?= import )", re.MULTILINE)
FACTS, SETTINGS = "facts.json", "model-config.yaml"
SECONDS = 600  # time limit of the archiver


@export_target("torchserve")
class TorchServe(Target):
    """The archive. TorchServe and Java are not needed to write or to load it.

    The entries `input`, `preprocess` and `classes` of the manifest go into the archive. Without them it can be loaded,
    but its handler does not know the format of requests, and rejects them. `payload` None is torch_export, one file for
    every machine in a format that is not deprecated; for a quantized net it is onnx, because torch runs an exported
    program's integers as floats.
    """

    suffix, is_program = ".mar", True

    @validated
    def __init__(
        self,
        integers: bool | None = None,
        payload: Literal["torch_export", "onnx", "aot_inductor", "torchscript"] | None = None,
        workers: Count = 1,
        threads: Count | None = None,
        batch_size: Count = 32,
        max_batch_delay: NonNegativeInt = 5,
        response_timeout: Count = 60,
        top_k: Count = 5,
        max_pixels: Count = 2**24,
    ) -> None:
        self.integers, self.payload = integers, payload
        self.limits = {"top_k": top_k, "max_pixels": max_pixels, "threads": threads}  # read by the handler
        self.settings = {
            "minWorkers": workers,
            "maxWorkers": workers,
            "batchSize": batch_size,
            "maxBatchDelay": max_batch_delay,
            "responseTimeout": response_timeout,
            "deviceType": "cpu",
        }

    def available(self) -> str | None:
        return uninstalled("export", "model_archiver")

    def export(self, net: nn.Module, example: Tensor, path: str | Path) -> None:
        quantized = bool(quantized_layers(net))
        kind = self.payload or ("onnx" if quantized else "torch_export")
        key = f"target.torchserve.payload={kind}"
        target = exports.get("onnx_int8" if kind == "onnx" and quantized else kind)
        missing = target.available()
        require(missing is None, f"{key}: {missing}")
        floats = quantized and target.integers is False
        require(not floats, f"{key} holds floats alone, and this net is quantized: choose onnx or aot_inductor.")
        # in the archive's folder, so that an error of a full disk names that place
        with whole(path) as temporary, scratch(temporary.parent) as folder:
            file = f"model{target.suffix}"
            target.export(net, example, folder / file)
            facts = {
                "version": 1,
                "payload": {"kind": kind, "file": file},
                "integers": quantized,
                "torch": torch.__version__,
                **{key: self.facts.get(key) for key in ("input", "preprocess", "classes")},
                **self.limits,
            }
            (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            (folder / SETTINGS).write_text("".join(f"{key}: {value}\n" for key, value in self.settings.items()))
            for name, text in sources().items():
                (folder / name).write_text(text)
            archive(folder, file)
            put(folder / f"model{self.suffix}", temporary)

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
        """Load an archive as a function: its payload runs in this process, with this Lathe's handler.

        `threads` None is the archive's setting.
        """
        path = readable(path)
        folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        try:
            unpack(path, folder)
            forward: Callable[[Array], Array] = Model(folder, threads).run
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, RuntimeError | KeyError | TypeError):  # a torn payload, or one for another machine
                raise UserError(f"{path} can't be loaded, {error}: export the run again, here.") from error
            raise
        weakref.finalize(forward, shutil.rmtree, folder, True)  # not earlier: a payload may read its file later
        return forward


def sources() -> dict[str, str]:
    """Return names and contents of the handler and of Lathe's modules that it imports, renamed to single files."""
    texts: dict[str, str] = {}
    modules = [HANDLER]
    while modules:
        module = modules.pop()
        if file_of(module) in texts:
            continue
        text = (Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text()
        modules += [name for _, name in IMPORT.findall(text)]
        texts[file_of(module)] = IMPORT.sub(lambda match: match[1] + match[2].replace(".", "_"), text)
    return texts


def file_of(module: str) -> str:
    """Return the name of a module's file in an archive."""
    return f"{module.replace('.', '_')}.py"


def archive(folder: Path, file: str) -> None:
    """Pack the files of `folder`, with `file` as the payload, into `folder`/model.mar; OSError for a full disk."""
    # the archiver empties <temporary folder>/<model name>, so it gets a private temporary folder
    scratch = folder / "scratch"
    scratch.mkdir()
    extra = [FACTS, *(name for name in sources() if name != file_of(HANDLER))]
    # names without a folder: the archiver reads commas and brackets in paths as lists and wildcards
    options = {
        "model-name": "model",
        "version": "1.0",
        "serialized-file": file,
        "handler": file_of(HANDLER),
        "extra-files": ",".join(extra),
        "config-file": SETTINGS,
        "archive-format": "zip-store",
        "export-path": ".",
    }
    arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "model_archiver.model_packaging", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch.resolve()), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(  # noqa: S603  # its names are those above
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode or not (folder / "model.mar").is_file():
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UserError(f"torch-model-archiver could not make the archive ({lines[-1][:300]}).")


def unpack(path: Path, folder: Path) -> None:
    """Write only the facts and the payload of an archive into `folder`: its handler is code, and is not run."""
    try:
        with zipfile.ZipFile(path) as archive:
            facts = archive.read(FACTS)
            file = str(json.loads(facts)["payload"]["file"])
            if file != f"model{Path(file).suffix}":
                raise ValueError(f"a payload named {file}")
            with archive.open(file) as source, (folder / file).open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, RecursionError) as error:
        raise UserError(f"{path} can't be read as an archive that Lathe made: export the run again.") from error
    (folder / FACTS).write_bytes(facts)
