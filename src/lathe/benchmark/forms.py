"""Exported files as forms to time, and a check of any form's outputs against the module."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lathe.errors import UserError
from lathe.export import manifest as manifests
from lathe.export.bundle import open_bundle
from lathe.receipt.forms import Form, Opened
from lathe.runs.export_model import ExportModel

GUARD, LOGITS = 32, 2**24  # samples, and logits at most, of that check
# Largest difference from the module's logits, as a share of their norm. scripts/export.py is stricter.
LOOSE = {"float32": 1e-2, "bfloat16": 0.1, "float16": 0.1, "int8": 0.3}


class Bundled(Form):
    """An export in a folder. `source` is the file's origin, `arithmetic` its number format."""

    def __init__(self, folder: Path, source: str, arithmetic: str) -> None:
        manifest = manifests.read(folder, "targets")
        super().__init__("this", str(manifest["target"]))
        self.folder, self.source, self.arithmetic = folder, source, arithmetic
        self.integers = bool(manifest["integers"])
        self.runs_on = str(manifest.get("compiled_for", {}).get("device", "cpu"))
        self.bytes = int(manifest["files"][manifest["file"]]["bytes"])

    def open(self, x: Tensor, threads: int) -> Opened:
        bundle, inside = open_bundle(self.folder, threads, "targets"), x.numpy()
        return Opened(lambda: bundle(inside), lambda batch: torch.from_numpy(np.asarray(bundle(batch.numpy()))).float())


def arithmetic(form: Form) -> str:
    return form.arithmetic if isinstance(form, Bundled) else "bfloat16" if form.backend.endswith("bf16") else "float32"


def guard(plain: ExportModel, trained: ExportModel, sample: Callable[[int], Tensor]) -> Callable[[Form, Opened], None]:
    """Return a check of a form's logits against `plain`, or for files with integers against `trained`."""
    x = sample(max(1, min(GUARD, LOGITS // plain.logits_of(sample(1)))))
    references = {integers: ready.net(x).float() for integers, ready in ((False, plain), (True, trained))}

    def check(form: Form, opened: Opened) -> None:
        integers = isinstance(form, Bundled) and form.integers
        limit = LOOSE[arithmetic(form)]
        reference, answer = references[integers], opened.forward(x)
        if answer.shape != reference.shape:
            raise UserError(f"wrong: it answers {list(answer.shape)} where the module answers {list(reference.shape)}.")
        far = float((answer - reference).norm() / reference.norm().clamp_min(1e-12))
        if not far <= limit:  # also for nan
            raise UserError(
                f"wrong: its logits lie {far:.2g} of their norm from the module's, more than {limit:g}; "
                "scripts/export.py makes the file anew and compares it."
            )

    return check
