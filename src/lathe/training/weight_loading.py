"""Initial weights of a run: those of `ckpt_path`, of other programs, or pretrained ones of timm."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn

from lathe.compression.structure import apply_structure, structure_of
from lathe.config.compression_plan import methods
from lathe.errors import UserError, refuse, require, uninstalled
from lathe.files import sha256
from lathe.nets.init import describe_loaded
from lathe.runs.checkpoints import plain_tensor, read_checkpoint, read_plain, restore
from lathe.runs.rundir import open_run
from lathe.tasks import Task

WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys of the weights in files of other programs


def initialise(cfg: dict[str, Any], task: Task) -> Path | None:
    """Load the weights that a new run begins with, from `ckpt_path` or `model.pretrained`.

    Returns the checkpoint from which the Trainer must restore everything, as ckpt_mode=trainer asks for; of that only
    the structure is loaded here.
    """
    if cfg["ckpt_path"] is None:
        if cfg["model"].get("pretrained"):
            _print(*load_pretrained(task.net, cfg["model"]))
        return None
    path, only_weights = checkpoint_path(cfg), cfg["ckpt_mode"] == "weights"
    if path.is_dir() and not (path / "meta.pt").is_file():
        path = open_run(path, "ckpt_path").checkpoint("best" if only_weights else "last")
    if not only_weights:
        state = read_checkpoint(path, "ckpt_path")
        require("optimizer_states" in state, f"ckpt_path={path} holds only weights: use ckpt_mode=weights.")
        require(
            "ema" not in state or "ema" in cfg["callbacks"],
            f"ckpt_path={path} holds averaged weights; ckpt_mode=trainer needs raw ones: add callbacks=[default,ema].",
        )
        early = [name for name, node in methods(cfg.get("compression") or {}).items() if node["kind"] == "quantization"]
        require(
            not early or "structure" in state,
            f"ckpt_mode=trainer takes the optimizer of a net without compression={','.join(early)}. Use "
            "ckpt_mode=weights.",
        )
        apply_structure(task.core, state.get("structure", {}))
        return path
    state = read_weights(path, "ckpt_path")
    if cfg.get("ckpt_map"):
        state["state_dict"] = rename_weights(state["state_dict"], cfg["ckpt_map"], "ckpt_map")
    if cfg.get("ckpt_strict", True):
        restore(task.net, state, f"ckpt_path={path}")
    else:
        apply_structure(task.core, state.get("structure", {}))
        _print(*load_matching(task.net, state["state_dict"], f"ckpt_path={path}"))
    if "global_step" in state:
        _print(
            f"ckpt_path={path}: a new run from these weights (of step {int(state['global_step'])}), with a new "
            "optimizer and schedule. resume=<run directory> continues a run, ckpt_mode=trainer takes all of its state."
        )
    warn_lost_compression(cfg, task.net, f"ckpt_path={path}")
    return None


@rank_zero_only
def _print(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def checkpoint_path(cfg: dict[str, Any]) -> Path:
    """Return `ckpt_path` on this machine; a URL is downloaded into `paths.data_dir`, once for all runs."""
    source, digest = str(cfg["ckpt_path"]), str(cfg.get("ckpt_sha256") or "").lower()
    if not digest and not source.startswith(("http://", "https://")):
        return Path(source)
    from filelock import FileLock

    from lathe.data.published import check, download

    if not source.startswith(("http://", "https://")):
        require(Path(source).is_file(), f"ckpt_sha256 is that of a file, and ckpt_path={source} is none: leave it out.")
        check(Path(source), digest)
        return Path(source)
    folder = Path(cfg["paths"]["data_dir"]) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest[:16]}_{Path(urlsplit(source).path).name or 'weights'}"
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.is_file():
            download(source, path, digest, "or fetch it by hand, and give its path as ckpt_path")
    return path


def warn_lost_compression(cfg: dict[str, Any], net: nn.Module, key: str) -> None:
    """Warn if training would undo the compression of the initial net, which comes from `key`."""
    from lathe.compression.pruning.masks import zero_share

    kinds = {node["kind"] for node in methods(cfg.get("compression") or {}).values()}
    zeros = math.ceil(zero_share(net) * 1e4) / 1e4  # rounded up, so that masks of this share keep every zero
    if zeros > 0.05 and "masks" not in kinds:
        rank_zero_warn(
            f"{key}: {zeros} of the weights are pruned to zero, and this training fills them again; to keep them, add "
            "prune to compression, with compression.prune.schedule=one_shot compression.prune.start=0 "
            f"compression.prune.sparsity={zeros}."
        )
    if "quantization" in structure_of(net) and not kinds & {"quantization", "after"}:
        rank_zero_warn(
            f"{key} is a quantized net: it trains with rounding on and fixed ranges; add qat to compression, or start "
            "from the run that it was made from."
        )


def read_weights(path: Path, key: str) -> dict[str, Any]:
    """Read a checkpoint of Lathe or Lightning, or, as `state_dict` only, the weights of another program.

    These are a .safetensors file, or a state dict that torch saved, at the top or under a name such as model.
    """
    if path.suffix == ".safetensors":
        require(path.is_file(), f"{key}={path}: there is no such file.")
        missing = uninstalled("export", "safetensors")
        require(missing is None, f"{key}={path}: {missing}")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return {"state_dict": dict(load_file(path))}
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{key}={path} can't be read as safetensors ({error}): take another.") from error
    if not path.is_file():
        return read_checkpoint(path, key)  # a sharded folder, or missing
    state = read_plain(path, key)
    if isinstance(state, dict) and "global_step" in state:
        return read_checkpoint(path, key)
    weights: dict[Any, Any] = state if isinstance(state, dict) else {}
    weights = next((weights[name] for name in WRAPPERS if isinstance(weights.get(name), dict)), weights)
    tensors = {name: value for name, value in weights.items() if isinstance(name, str) and plain_tensor(value)}
    require(bool(tensors), f"{key}={path} holds no weights: expected names with tensors, as net.state_dict() has them.")
    others = sorted(str(name) for name in weights.keys() - tensors.keys())
    require(not others, f"{key}={path} holds {', '.join(others[:3])}, not a tensor: expected a state dict.")
    return {"state_dict": tensors}


def rename_weights(weights: Mapping[str, Tensor], table: Mapping[str, str | None], key: str) -> dict[str, Tensor]:
    """Replace in each name its longest prefix in `table`, and leave out weights whose prefix maps to null."""
    renamed: dict[str, Tensor] = {}
    prefixes = {name: max((part for part in table if name.startswith(part)), key=len, default=None) for name in weights}
    for name, prefix in prefixes.items():
        start = "" if prefix is None else table[prefix]
        if start is None:
            continue
        new = start + name.removeprefix(prefix or "")
        require(new not in renamed, f"{key}: {name} and another weight would both be {new}: give them other names.")
        renamed[new] = weights[name]
    first, used = next(iter(weights), "nothing"), set(prefixes.values())
    refuse(f"{key}: no weight's name begins with {part!r}; the first is {first}." for part in table if part not in used)
    return renamed


def load_matching(net: nn.Module, weights: Mapping[str, Tensor], key: str) -> list[str]:
    """Load the weights whose name and shape the net has; return lines that say which those are."""
    own = net.state_dict()
    matching = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
    if not matching:
        first, own_first = next(iter(weights), "nothing"), next(iter(own), "nothing")
        raise UserError(
            f"{key} fits this net nowhere: its first weight is {first}, the net's {own_first}; ckpt_map renames."
        )
    with torch.no_grad():
        net.load_state_dict({**own, **matching})
    shapes = [
        f"{name} ({list(weights[name].shape)} there, {list(own[name].shape)} here)"
        for name in weights
        if name in own and name not in matching
    ]
    absent, extra = [name for name in own if name not in weights], [name for name in weights if name not in own]
    return describe_loaded(f"{key}: {len(matching)} of {len(own)} weights are taken.", absent, shapes, extra)


def load_pretrained(net: nn.Module, model: Mapping[str, Any]) -> list[str]:
    """Load the weights of `model.pretrained` into a timm net: a file, or for true those that timm publishes.

    Returns lines that say which weights were loaded.
    """
    from lathe.nets.timm_nets import is_timm, take_timm_weights  # few runs need timm

    source, digest, channels = model["pretrained"], model.get("sha256"), model["net"].get("in_channels", 3)
    key = f"model.pretrained={'true' if source is True else source}"
    require(
        is_timm(net),
        f"{key} is for model=timm, and {type(net).__name__} is none of timm's nets: use ckpt_path=<file> "
        "ckpt_strict=false.",
    )
    if source is True:
        return take_timm_weights(net, None, channels, key)
    path = Path(source)
    require(path.is_file(), f"{key}: there is no such file.")
    if digest is not None:
        actual = sha256(path)
        require(actual == digest.lower(), f"{key}: the file's SHA-256 is {actual}, and model.sha256 says {digest}.")
    return take_timm_weights(net, read_weights(path, "model.pretrained")["state_dict"], channels, key)
