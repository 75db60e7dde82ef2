"""target=weights and safetensors: weights, integers and structure are restored exactly; the card, and the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lathe.compression.channels import removal
from lathe.compression.channels.removal import find_groups
from lathe.compression.quantization import LayerPlan, integer_weight, quantized_layers
from lathe.errors import UserError
from lathe.export import get
from lathe.nets import GPT, MLP

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
BOTH = pytest.mark.parametrize("name", ["weights", "safetensors"])


def gpt(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(vocab_size=64, max_length=8, width=16, depth=1, heads=2).eval()


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a file's header has of Lathe, and its tensors."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["lathe"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(first: nn.Module, second: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(first.eval()(inputs), second.eval()(inputs))


def test_floats_have_their_plain_names(make_resnet: Make, images: Tensor, tmp_path: Path) -> None:
    net, path, target = make_resnet(), tmp_path / "model.safetensors", get("safetensors")
    target.export(net, images, path)
    _, tensors = content(path)
    assert tensors.keys() == net.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in net.state_dict().items())
    fresh = make_resnet().apply(lambda m: m.reset_parameters() if isinstance(m, nn.Conv2d) else None)
    same(target.restore(fresh, path), net, images)


@BOTH
@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(),
        LayerPlan(weight_bits=3, activation_bits=5),
        LayerPlan(weight_bits=4, activation="none", group_size=9),
        LayerPlan(lsq=True, per_channel=False),
    ],
)
def test_a_quantized_net_comes_back_exactly(
    make_resnet: Make, quantized: Quantized, images: Tensor, tmp_path: Path, plan: LayerPlan, name: str
) -> None:
    net, target = quantized(make_resnet(), images, plan), get(name)
    path = tmp_path / f"model{target.suffix}"
    target.export(net, images, path)
    layers = {f"{key}.weight": layer for key, layer in quantized_layers(net).items() if hasattr(layer, "weight")}
    if name == "weights":
        found = torch.load(path, weights_only=True)
        stored = {key: entry["data"] for key, entry in found["integers"].items()}
        assert not any(key in found["state"] for key in stored)
    else:
        kept, tensors = content(path)
        stored = {key: tensors[key] for key in kept["integers"]}
        for key, layer in layers.items():
            assert torch.equal(tensors[f"{key}_scale"], integer_weight(layer)[1])
    assert stored.keys() == layers.keys()
    for key, data in stored.items():
        assert data.numel() == -(-layers[key].weight.numel() * plan.weight_bits // 8)
    fresh = target.restore(make_resnet(), path)
    same(fresh, net, images)
    for key, layer in layers.items():
        restored = fresh.get_submodule(key.removesuffix(".weight"))
        assert torch.equal(integer_weight(restored)[0], integer_weight(layer)[0])


def test_removed_channels_are_in_the_header(images: Tensor, tmp_path: Path, make_resnet: Make) -> None:
    net, path, target = make_resnet(), tmp_path / "model.safetensors", get("safetensors")
    groups = find_groups(net, images[:2])
    removal.remove(net, groups, {group.name: list(range(0, group.units, 2)) for group in groups})
    assert sum(p.numel() for p in net.parameters()) < 0.5 * sum(p.numel() for p in make_resnet().parameters())
    target.export(net, images, path)
    assert "channels" in content(path)[0]["structure"]
    same(target.restore(make_resnet(), path), net, images)


@pytest.mark.parametrize("plan", [None, LayerPlan()])
def test_a_tied_weight_is_written_once(tmp_path: Path, quantized: Quantized, plan: LayerPlan | None) -> None:
    ids, path, target = torch.randint(0, 64, (4, 8)), tmp_path / "model.safetensors", get("safetensors")
    net = gpt(0) if plan is None else quantized(gpt(0), ids, plan)
    target.export(net, ids, path)
    kept, tensors = content(path)
    assert kept["aliases"]["head.weight"] == "embed.token.weight"
    assert "head.weight" not in tensors
    fresh: Any = target.restore(gpt(1), path)
    same(fresh, net, ids)
    assert fresh.head.weight is fresh.embed.token.weight


@pytest.mark.parametrize("excluded", ["head", "embed.token"])
def test_a_weight_that_another_layer_reads_as_floats_is_stored_as_floats(
    tmp_path: Path, quantized: Quantized, excluded: str
) -> None:
    net, ids, path = gpt(0), torch.randint(0, 64, (4, 8)), tmp_path / "net.pt"
    quantized(net, ids, LayerPlan(weight_bits=4), **{excluded: None})
    get("weights").export(net, ids, path)
    found = torch.load(path, weights_only=True)
    assert "embed.token.weight" in found["state"]
    assert "blocks.0.up.weight" in found["integers"]
    same(get("weights").restore(gpt(1), path), net, ids)


@BOTH
def test_another_net_and_a_torn_file_are_refused(
    make_resnet: Make, make_mlp: Make, images: Tensor, tmp_path: Path, name: str
) -> None:
    target = get(name)
    path = tmp_path / f"model{target.suffix}"
    target.export(make_resnet(), images, path)
    with pytest.raises(UserError, match="does not fit MLP"):
        target.restore(make_mlp(), path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="can't be read as weights"):
        target.restore(make_resnet(), path)


def exported(folder: Path) -> MLP:
    """A folder as written by scripts/export.py."""
    arguments = {"channels": 1, "image_size": 8, "num_classes": 10, "width": 8, "depth": 1}
    net = MLP(**arguments).eval()
    folder.mkdir(parents=True)
    own = get("safetensors")
    own.config = {"_target_": "lathe.nets.MLP", **arguments}
    own.export(net, torch.zeros(2, 1, 8, 8), folder / "model.safetensors")
    manifest = {
        "run": "2031-01-01_demo",
        "file": "model.safetensors",
        "integers": False,
        "preprocess": {"in_graph": False, "mean": [0.305], "std": [0.376], "size": [8, 8]},
        "input": {"name": "input", "dtype": "float32", "shape": ["batch", 1, 8, 8]},
        "output": {"name": "output", "dtype": "float32", "shape": ["batch", 10]},
    }
    figures = {"trained": {"accuracy": 0.98765}, "file": {"accuracy": 0.98321}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "parity.json").write_text(json.dumps({"split": "test", "samples": 297, "figures": figures}))
    return net


def test_the_card_tells_how_to_use_the_weights(tmp_path: Path) -> None:
    net = exported(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["net"]["width"] == 8
    get("safetensors").complete(tmp_path / "run")
    card = (tmp_path / "run" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: lathe\n")
    assert "| accuracy | 0.9877 | 0.9832 |" in card
    assert "minus [0.305], divided by [0.376]" in card
    code = card.split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(code.replace('"model.safetensors"', repr(str(tmp_path / "run/model.safetensors"))), found)
    same(found["net"], net, torch.randn(4, 1, 8, 8))


def test_only_what_was_exported_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    exported(tmp_path / "run")
    get("safetensors").publish(tmp_path / "run")
    assert hub.method_calls == []
    get("safetensors", push_to_hub="someone/digits").publish(tmp_path / "run")
    hub.create_repo.assert_called_once_with("someone/digits", private=True, exist_ok=True)
    upload = hub.upload_folder.call_args.kwargs
    assert (upload["repo_id"], upload["folder_path"]) == ("someone/digits", tmp_path / "run")
    assert upload["allow_patterns"] == ["README.md", "config.json", "manifest.json", "model.safetensors", "parity.json"]
