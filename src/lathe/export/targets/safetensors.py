"""Weights for the Hugging Face hub: model.safetensors, config.json and a model card.

The net's Python code runs them. The content is that of `lathe.export.targets.weights` (integers, structure and names),
without a pickle.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import UserError, uninstalled
from lathe.export.files import readable, whole
from lathe.export.targets.onnx_graph import Array
from lathe.export.targets.weights import content_of, fill

suffix = ".safetensors"
computes = False
integers: bool | None = None
VERSION = 1
KEY = "lathe"  # of the header's metadata
SCALE = "_scale"  # suffix of a scale's name, after the name of its integer weight
UPLOADED = ["README.md", "config.json", "manifest.json", "model.safetensors", "parity.json"]


def available() -> str | None:
    """Return None, or the message that says what to install."""
    return uninstalled("export", "safetensors")


def _require(package: str, key: str) -> None:
    sentence = uninstalled("export", package)
    if sentence:
        raise UserError(f"{key}: {sentence}")


@validated
def export(
    net: nn.Module,
    example: Tensor,
    path: str | Path,
    config: Mapping[str, Any] | None = None,
    push_to_hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="<user>/<name>")] | None = None,
) -> None:
    """Write the net's weights, and config.json with `config`, the node that builds the net.

    Tensors have their plain names. A quantized layer's weight is int8 (or uint8 with packed bits if it has fewer than
    8), and `<name>_scale` is its scale, of each output channel or group. The header's metadata hold the rest as JSON
    under "lathe": `{"version", "structure", "integers": {name: {"shape", "bits"}}, "aliases"}`; `restore` reads it.

    `push_to_hub` is only checked here; `publish` uploads the export after its comparison.

    Raises:
        UserError: `push_to_hub` is not a repository's name.
    """
    _require("safetensors", "target=safetensors")
    check_repository(push_to_hub)
    import safetensors.torch

    content = content_of(net)
    tensors: dict[str, Tensor] = dict(content["state"])
    for name, stored in content["integers"].items():
        assert name + SCALE not in tensors
        tensors |= {name: stored["data"], name + SCALE: stored["scale"]}
    kept = {
        "version": VERSION,
        "structure": content["structure"],
        "integers": {
            name: {"shape": stored["shape"], "bits": stored["bits"]} for name, stored in content["integers"].items()
        },
        "aliases": content["aliases"],
    }
    with whole(path) as temporary:
        # serialize in memory first: the package's error for a full disk has no errno
        temporary.write_bytes(safetensors.torch.save(tensors, {"format": "pt", KEY: json.dumps(kept)}))
    if config is not None:
        with whole(Path(path).with_name("config.json")) as temporary:
            temporary.write_text(json.dumps({"library": KEY, "version": VERSION, "net": dict(config)}, indent=2) + "\n")


def restore(net: nn.Module, path: str | Path) -> nn.Module:
    """Give `net`, as its configuration builds it, a file's structure and weights, in place; return it."""
    return fill(net, _read(path), path)


def _read(path: str | Path) -> dict[str, Any]:
    _require("safetensors", f"path={path}")
    from safetensors import safe_open

    path = readable(path, "path")
    try:
        with safe_open(path, framework="pt") as file:
            kept = json.loads(file.metadata()[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
        assert kept["version"] == VERSION
        stored = {
            name: {
                "data": tensors.pop(name),
                "scale": tensors.pop(name + SCALE),
                "shape": entry["shape"],
                "bits": entry["bits"],
            }
            for name, entry in kept["integers"].items()
        }
        return {
            "structure": dict(kept["structure"]),
            "aliases": dict(kept["aliases"]),
            "state": tensors,
            "integers": stored,
        }
    except Exception as error:  # a torn file can raise anything
        raise UserError(f"{path} can't be read as weights of target=safetensors: export the run again.") from error


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """Raise UserError: weights can't compute without a net; use `restore`."""
    raise UserError(
        f"{path} holds weights alone: lathe.export.get('safetensors').restore(net, path) puts them into a net; or "
        "use another target."
    )


def complete(folder: Path) -> None:
    """Write README.md, the model card, from manifest.json, parity.json and config.json in `folder`."""
    manifest, parity, config = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "parity", "config")
    )
    node = dict(config["net"])
    module, _, name = str(node.pop("_target_")).rpartition(".")
    arguments = ", ".join(f"{key}={value!r}" for key, value in node.items() if not key.startswith("_"))
    given, preprocess = manifest["input"], manifest["preprocess"]
    takes = f"{given['dtype']} `[{', '.join(map(str, given['shape']))}]`"
    if preprocess is not None:
        takes += (
            f": pixels on a scale from 0 to 1, minus {preprocess['mean']}, divided by {preprocess['std']}, for each "
            "channel"
        )
    metrics = parity["figures"] or {"trained": {}, "file": {}}  # empty without held-out data
    kind = ", as integers with their scales" if manifest["integers"] else ""
    rows = [f"| {key} | {value:.4f} | {metrics['file'][key]:.4f} |" for key, value in metrics["trained"].items()]
    head = [f"| {parity['split']}, n = {parity['samples']} | as trained | this file |", "|---|---|---|"]
    lines = [
        "---",
        "library_name: lathe",
        "tags: [pytorch, lathe]",
        "---",
        "",
        f"# {name}, {manifest['run']}",
        "",
        f"Weights of a `{module}.{name}` that was trained with Lathe{kind}.",
        "",
        *([*head, *rows, ""] if rows else []),
        f"Input: {takes}. Output: {manifest['output']['dtype']} logits "
        f"`[{', '.join(map(str, manifest['output']['shape']))}]`.",
        "",
        "```python",
        f"from {module} import {name}",
        "from lathe.export.targets.safetensors import restore",
        "",
        f'net = restore({name}({arguments}), "{manifest["file"]}").eval()',
        "```",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def check_repository(push_to_hub: str | None) -> None:
    """Raise UserError if huggingface_hub is missing or `push_to_hub` is not a repository's name or None."""
    if push_to_hub is None:
        return
    _require("huggingface_hub", f"target.safetensors.push_to_hub={push_to_hub}")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(push_to_hub)
    except HFValidationError as error:
        raise UserError(
            f"target.safetensors.push_to_hub={push_to_hub} is no name of a repository: give <user>/<name>."
        ) from error


def publish(folder: Path, push_to_hub: str | None = None) -> None:
    """Upload an export with its final name to the hub, with the token of `hf auth login` or HF_TOKEN.

    A missing repository is created as private.

    Raises:
        UserError: the hub can't be reached, or this user can't write. The export in `folder` is kept.
    """
    if push_to_hub is None:
        return
    check_repository(push_to_hub)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(push_to_hub, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=push_to_hub, folder_path=folder, allow_patterns=UPLOADED, commit_message="Export of Lathe"
        )
    except Exception as error:  # of the package, of its HTTP client and of the operating system
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"target.safetensors.push_to_hub={push_to_hub}: {folder} was exported but not uploaded "
            f"({line[:200].rstrip('.')}): check the "
            f"network and `hf auth login`, then export again or run: hf upload {push_to_hub} {folder}"
        ) from error
