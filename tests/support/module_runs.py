"""Runs of the LightningModules of support.modules."""

from pathlib import Path
from typing import Any

from lathe.runs import rundir
from support.own_lightning import QUICK
from support.runs import config

# of each module: its core, if it must be named, and the kind of its samples
MODULES = {
    "Classifier": (None, "image"),
    "Convolutional": (None, "image"),
    "VAE": (None, "image"),
    "GAN": ("generator", "image"),
    "UNet": (None, "image"),
    "Recurrent": (None, "sequence"),
    "LanguageModel": (None, "text"),
    "TextClassifier": (None, "text"),
    "SimCLR": ("encoder", "views"),
    "SelfTaught": ("student", "image"),
    "Alternating": ("body", "image"),
    "Prepared": (None, "image"),
    "Flow": (None, "image"),
    "Diffusion": (None, "image"),
    "Energy": (None, "image"),
    "GraphNet": (None, "graph"),
    "Detector": ("backbone", "boxes"),
    "TabularSeries": (None, "series"),
    "SemiSupervised": (None, "combined"),
    "SeveralSets": (None, "several"),
    "QuasiNewton": (None, "image"),
    "Tied": (None, "text"),
    "FineTuned": ("head", "image"),
    "Scheduled": ("model", "image"),
    "Player": ("values", "stream"),
}
MONITOR = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min")


def cfg_of(folder: Path, name: str, *words: str) -> dict[str, Any]:
    core, kind = MODULES[name]
    node = f"model.net={{_target_: support.modules.{name}}}"
    words = (*QUICK, *MONITOR, "compression.receipt=none", "test=false", node, f"model.core={core or 'null'}", *words)
    cfg = config(*words, f"paths.log_dir={folder}")
    del cfg["sweep"]
    cfg["data"] = {"_target_": "support.modules.Data", "kind": kind}
    rundir.create(folder, cfg, list(words))
    return cfg


def directory(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])
