"""target=safetensors: weights and integers are restored exactly; the card and the upload to the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lathe.compression.channels import slices
from lathe.compression.channels.groups import find_groups
from lathe.compression.quantization.net import LayerPlan, integer_weight, quantize, quantized_layers, set_enabled
from lathe.errors import UserError
from lathe.export import get
from lathe.export.targets import weights
from lathe.export.targets.safetensors import restore
from lathe.nets import GPT, MLP

Make = Callable[[], nn.Module]
target = get("safetensors")


def rounding(net: nn.Module, inputs: Tensor, plan: LayerPlan) -> nn.Module:
    quantize(net, inputs[:2], plan)
    set_enabled(net, True)
    return net


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["lathe"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(first: nn.Module, second: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(first.eval()(inputs), second.eval()(inputs))


def test_floats_have_their_plain_names(make_resnet: Make, images: Tensor, tmp_path: Path) -> None:
    net, path = make_resnet(), tmp_path / "model.safetensors"
    target.export(net, images, path)
    _, tensors = content(path)
    assert tensors.keys() == net.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in net.state_dict().items())
    fresh = restore(make_resnet().apply(lambda m: m.reset_parameters() if isinstance(m, nn.Conv2d) else None), path)
    same(fresh, net, images)
    assert not list(tmp_path.glob("config.json"))


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(),
        LayerPlan(weight_bits=3, activation_bits=5),
        LayerPlan(weight_bits=4, activation="none", group_size=9),
    ],
)
def test_integers_come_back_exactly(make_resnet: Make, images: Tensor, tmp_path: Path, plan: LayerPlan) -> None:
    net, path = rounding(make_resnet(), images, plan), tmp_path / "model.safetensors"
    target.export(net, images, path)
    kept, tensors = content(path)
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(net).items() if hasattr(layer, "weight")}
    assert kept["integers"].keys() == layers.keys()
    for name, layer in layers.items():
        integers, scale = integer_weight(layer)
        assert kept["integers"][name] == {"shape": list(integers.shape), "bits": plan.weight_bits}
        assert torch.equal(tensors[f"{name}_scale"], scale)
        if plan.weight_bits == 8:
            assert tensors[name].dtype == torch.int8
            assert torch.equal(tensors[name], integers)
        assert tensors[name].numel() == -(-integers.numel() * plan.weight_bits // 8)
    same(restore(make_resnet(), path), net, images)
    get("weights").export(net, images, tmp_path / "net.pt")
    same(restore(make_resnet(), path), weights.restore(make_resnet(), tmp_path / "net.pt"), images)


def test_removed_channels_are_in_the_header(images: Tensor, tmp_path: Path, make_resnet: Make) -> None:
    net, path = make_resnet(), tmp_path / "model.safetensors"
    groups = find_groups(net, images[:2])
    slices.remove(net, groups, {group.name: list(range(0, group.units, 2)) for group in groups})
    assert sum(p.numel() for p in net.parameters()) < 0.5 * sum(p.numel() for p in make_resnet().parameters())
    target.export(net, images, path)
    assert "channels" in content(path)[0]["structure"]
    same(restore(make_resnet(), path), net, images)


@pytest.mark.parametrize("plan", [None, LayerPlan()])
def test_a_tied_weight_is_written_once(tmp_path: Path, plan: LayerPlan | None) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(vocab_size=64, max_length=8, width=16, depth=1, heads=2).eval()

    ids, path = torch.randint(0, 64, (4, 8)), tmp_path / "model.safetensors"
    net = make(0) if plan is None else rounding(make(0), ids, plan)
    target.export(net, ids, path)
    kept, tensors = content(path)
    assert kept["aliases"]["head.weight"] == "embed.token.weight"
    assert "head.weight" not in tensors
    fresh = restore(make(1), path)
    same(fresh, net, ids)
    assert fresh.head.weight is fresh.embed.token.weight


def exported(folder: Path) -> MLP:
    """A folder as written by scripts/export.py."""
    arguments = {"channels": 1, "image_size": 8, "num_classes": 10, "width": 8, "depth": 1}
    net = MLP(**arguments).eval()
    folder.mkdir(parents=True)
    own = get("safetensors")
    own.config = {"_target_": "lathe.nets.MLP", **arguments}
    own.export(net, torch.zeros(2, 1, 8, 8), folder / "model.safetensors")
    preprocess = {"in_graph": False, "mean": [0.305], "std": [0.376], "size": [8, 8]}
    manifest = {
        "run": "2031-01-01_demo",
        "file": "model.safetensors",
        "integers": False,
        "preprocess": preprocess,
        "input": {"name": "input", "dtype": "float32", "shape": ["batch", 1, 8, 8]},
        "output": {"name": "output", "dtype": "float32", "shape": ["batch", 10]},
    }
    parity = {
        "split": "test",
        "samples": 297,
        "figures": {"trained": {"accuracy": 0.98765}, "file": {"accuracy": 0.98321}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "parity.json").write_text(json.dumps(parity))
    return net


def test_the_card_tells_how_to_use_the_weights(tmp_path: Path) -> None:
    net = exported(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["net"]["width"] == 8
    target.complete(tmp_path / "run")
    card = (tmp_path / "run" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: lathe\n")
    assert "| accuracy | 0.9877 | 0.9832 |" in card
    assert "minus [0.305], divided by [0.376]" in card
    code = (
        card.split("```python\n")[1]
        .split("```")[0]
        .replace('"model.safetensors"', repr(str(tmp_path / "run/model.safetensors")))
    )
    found: dict[str, Any] = {}
    exec(code, found)  # the card's code
    same(found["net"], net, torch.randn(4, 1, 8, 8))


class Hub:
    """A stand-in for huggingface_hub.HfApi."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> None:
        self.calls.append(("upload_folder", options))


def test_only_what_was_exported_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    exported(tmp_path / "run")
    target.publish(tmp_path / "run")
    assert Hub.calls == []
    get("safetensors", push_to_hub="someone/digits").publish(tmp_path / "run")
    (made, repository), (sent, upload) = Hub.calls
    assert (made, sent) == ("create_repo", "upload_folder")
    assert repository == {"repo_id": "someone/digits", "private": True, "exist_ok": True}
    assert (upload["repo_id"], upload["folder_path"]) == ("someone/digits", tmp_path / "run")
    assert upload["allow_patterns"] == ["README.md", "config.json", "manifest.json", "model.safetensors", "parity.json"]


def test_another_net_and_a_torn_file_are_refused(
    make_resnet: Make, make_mlp: Make, images: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    target.export(make_resnet(), images, path)
    with pytest.raises(UserError, match="does not fit MLP"):
        restore(make_mlp(), path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="can't be read as weights"):
        restore(make_resnet(), path)
