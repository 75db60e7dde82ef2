"""Weights for the Hugging Face hub: model.safetensors, config.json and a model card.

The net's Python code runs them. The content is that of `lathe.export.targets.weights` (integers, structure and names),
without a pickle.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import UserError, uninstalled
from lathe.export import Target, export_target, first_line
from lathe.export.bundle import readable, whole
from lathe.export.targets.weights import content_of, fill

VERSION = 1
KEY = "lathe"  # of the header's metadata
SCALE = "_scale"  # suffix of a scale's name, after the name of its integer weight
UPLOADED = ["README.md", "config.json", "manifest.json", "model.safetensors", "parity.json"]
Repository = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="<user>/<name>")]


@export_target("safetensors")
class Safetensors(Target):
    """The net's weights, config.json with the node that builds the net, and README.md, the model card.

    Tensors have their plain names. A quantized layer's weight is int8 (or uint8 with packed bits if it has fewer than
    8), and `<name>_scale` is its scale, of each output channel or group. The header's metadata hold the rest as JSON
    under "lathe": `{"version", "structure", "integers": {name: {"shape", "bits"}}, "aliases"}`.
    """

    suffix, computes, takes_cores = ".safetensors", False, True

    @validated
    def __init__(self, integers: bool | None = None, push_to_hub: Repository | None = None) -> None:
        self.integers, self.push_to_hub = integers, push_to_hub

    def available(self) -> str | None:
        packages = ("safetensors",) if self.push_to_hub is None else ("safetensors", "huggingface_hub")
        return uninstalled("export", *packages)

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        import safetensors.torch

        content = content_of(net)
        tensors: dict[str, Tensor] = dict(content["state"])
        header: dict[str, Any] = {"version": VERSION, "structure": content["structure"], "integers": {}}
        for name, stored in content["integers"].items():
            assert name + SCALE not in tensors
            tensors |= {name: stored["data"], name + SCALE: stored["scale"]}
            header["integers"][name] = {"shape": stored["shape"], "bits": stored["bits"]}
        header["aliases"] = content["aliases"]
        with whole(path) as temporary:
            # serialize in memory first: the package's error for a full disk has no errno
            temporary.write_bytes(safetensors.torch.save(tensors, {"format": "pt", KEY: json.dumps(header)}))
        if self.config is not None:
            content = {"library": KEY, "version": VERSION, "net": dict(self.config)}
            with whole(Path(path).with_name("config.json")) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n")

    def restore(self, net: nn.Module, path: str | Path) -> nn.Module:
        return restore(net, path)

    def complete(self, folder: Path) -> None:
        """Write README.md, the model card, from manifest.json, parity.json and config.json in `folder`."""
        (folder / "README.md").write_text(model_card(folder))

    def publish(self, folder: Path) -> None:
        """Upload an export to the hub, with the token of `hf auth login` or HF_TOKEN; a new repository is private."""
        if self.push_to_hub is None:
            return
        from huggingface_hub import HfApi

        api, name = HfApi(), self.push_to_hub
        try:
            api.create_repo(name, private=True, exist_ok=True)
            arguments: dict[str, Any] = {"repo_id": name, "folder_path": folder, "allow_patterns": UPLOADED}
            api.upload_folder(**arguments, commit_message="Export of Lathe")
        except Exception as error:  # of the package, of its HTTP client and of the operating system
            message = f"{folder} was exported but not uploaded ({first_line(error)}): check `hf auth login`, then run"
            raise UserError(f"target.safetensors.push_to_hub={name}: {message}: hf upload {name} {folder}") from error


def restore(net: nn.Module, path: str | Path) -> nn.Module:
    """Give `net`, as its configuration builds it, a file's structure and weights, in place; return it."""
    from safetensors import safe_open

    path = readable(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
        assert header["version"] == VERSION
        content = {"structure": dict(header["structure"]), "aliases": dict(header["aliases"]), "state": tensors}
        content["integers"] = {
            name: {**entry, "data": tensors.pop(name), "scale": tensors.pop(name + SCALE)}
            for name, entry in header["integers"].items()
        }
    except Exception as error:  # a torn file can raise anything
        raise UserError(f"{path} can't be read as weights of target=safetensors: export the run again.") from error
    return fill(net, content, path)


def model_card(folder: Path) -> str:
    """Return the text of README.md for the export in `folder`."""

    def describe(entries: Any) -> str:
        several = entries if isinstance(entries, list) else [entries]
        parts = (f"{each['name']}, {each['dtype']} `[{', '.join(map(str, each['shape']))}]`" for each in several)
        return "; ".join(parts)

    names = ("manifest", "parity", "config")
    manifest, parity, config = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    node = dict(config["net"])
    module, _, name = str(node.pop("_target_")).rpartition(".")
    arguments = ", ".join(f"{key}={value!r}" for key, value in node.items() if not key.startswith("_"))
    core, preprocess = manifest.get("core"), manifest["preprocess"]
    inputs, outputs = ("inputs", "outputs") if "inputs" in manifest else ("input", "output")
    takes, gives = (describe(manifest[key]) for key in (inputs, outputs))
    net = f"{name}({arguments})" + (f'.get_submodule("{core}")' if core else "")
    if preprocess is not None:
        mean, std = preprocess["mean"], preprocess["std"]
        takes += f": pixels on a scale from 0 to 1, minus {mean}, divided by {std}, for each channel"
    metrics = parity["figures"] or {"trained": {}, "file": {}}  # empty without held-out data
    trained = metrics["trained"] if metrics["file"] else {}
    rows = [f"| {key} | {value:.4f} | {metrics['file'][key]:.4f} |" for key, value in trained.items()]
    head = f"| {parity['split']}, n = {parity['samples']} | as trained | this file |\n|---|---|---|\n"
    table = head + "\n".join(rows) + "\n\n" if rows else ""
    kind = ", as integers with their scales" if manifest["integers"] else ""
    return f"""---
library_name: lathe
tags: [pytorch, lathe]
---

# {name}, {manifest["run"]}

Weights of a `{module}.{name}` that was trained with Lathe{kind}.

{table}Input: {takes}. Output: {gives}.

```python
from {module} import {name}
from lathe.export.targets.safetensors import restore

net = restore({net}, "{manifest["file"]}").eval()
```
"""
