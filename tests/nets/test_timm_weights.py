"""Pretrained weights of timm's nets: loaded, adapted or refused; not read for a finished run."""

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.runs import new_run, weights
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.nets import timm_net
from lathe.runs.inference import open_run_net
from lathe.runs.rundir import open_run
from lathe.training.train import train
from lathe.training.weight_loading import load_pretrained

pytestmark = pytest.mark.usefixtures("timm")
FINE_TUNED = (
    "model=timm",
    "model.name=resnet10t",
    "data.batch_size=64",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=3",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "test=false",
)


def saved(folder: Path, name: str, suffix: str = ".pth", **options: Any) -> Path:
    timm: Any = import_module("timm")
    torch.manual_seed(3)
    path = folder / f"{name}{suffix}"
    state = timm.create_model(name, **options).state_dict()
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def state_of(path: Path) -> dict[str, Tensor]:
    return dict(torch.load(path, weights_only=True))


def take(net: nn.Module, path: Path | bool, channels: int = 3, **more: Any) -> list[str]:
    given = path if isinstance(path, bool) else str(path)
    return load_pretrained(net, {"pretrained": given, "net": {"in_channels": channels}, **more})


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_the_same_net_is_taken_whole(timm: Any, tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, "resnet10t", suffix, num_classes=4, in_chans=1)
    net = timm_net("resnet10t", in_channels=1, num_classes=4, image_size=32)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert take(net, path, 1, sha256=digest.upper()) == [f"model.pretrained={path}: 86 of 86 weights are taken."]
    torch.manual_seed(3)
    own = timm.create_model("resnet10t", num_classes=4, in_chans=1)
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in net.state_dict().items())


def test_channels_are_fitted_and_a_head_of_other_classes_is_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path, "resnet10t", num_classes=7)
    net = timm_net("resnet10t", in_channels=1, num_classes=4, image_size=32)
    before = net.fc.weight.clone()
    assert take(net, path, 1) == [
        f"model.pretrained={path}: 84 of 86 weights are taken.",
        "Of another shape, so as they were made: fc.bias ([7] there, [4] here), fc.weight ([7, 512] there, [4, 512] "
        "here).",
    ]
    there = state_of(path)
    assert torch.equal(net.fc.weight, before)
    assert torch.allclose(net.conv1[0].weight, there["conv1.0.weight"].sum(1, keepdim=True))  # for grey images
    assert torch.equal(net.layer4[0].conv2.weight, there["layer4.0.conv2.weight"])


def test_positions_are_resampled_to_the_images_size(tmp_path: Path) -> None:
    path = saved(tmp_path, "vit_tiny_patch16_224", img_size=64)
    net = timm_net("vit_tiny_patch16_224", num_classes=1000, image_size=32)
    assert take(net, path) == [f"model.pretrained={path}: 152 of 152 weights are taken."]
    there = state_of(path)["pos_embed"]
    assert (there.shape[1], net.pos_embed.shape[1]) == (17, 5)
    assert torch.equal(net.pos_embed[:, 0], there[:, 0])
    small = there[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    small = nn.functional.interpolate(small, (2, 2), mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    assert torch.allclose(net.pos_embed[:, 1:], small, atol=1e-6)


def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, "resnet10t")
    wide = tmp_path / "wide.pth"
    torch.save({**state_of(path), "layer1.0.conv1.weight": torch.ones(64, 32, 3, 3)}, wide)
    cases: list[tuple[str, Path, dict[str, str], str]] = [
        ("resnet14t", path, {}, "does not fit resnet14t: it has no layer1.0.conv3.weight"),
        ("resnet10t", wide, {}, "layer1.0.conv1.weight is"),
        ("resnet10t", path, {"sha256": "0" * 64}, "the file's SHA-256 is"),
    ]
    for name, file, more, words in cases:
        net = timm_net(name, num_classes=4, image_size=32)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        with pytest.raises(UserError, match=words):
            take(net, file, **more)
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_published_weights_are_taken_or_named_where_they_cannot_be_had(
    timm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(UserError, match="the network is down"):
        take(timm_net("resnet10t", num_classes=4, image_size=32), True)
    state = timm.create_model("resnet10t").state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(state))
    net = timm_net("resnet10t", num_classes=4, image_size=32)
    assert take(net, True)[0] == "model.pretrained=true: 84 of 86 weights are taken."
    assert torch.equal(net.layer1[0].conv1.weight, state["layer1.0.conv1.weight"])


def test_a_finished_run_needs_the_file_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "resnet10t")
    cfg = new_run(tmp_path / "logs", *FINE_TUNED, f"model.pretrained={path}", "freeze=[conv1.*,layer*]", "seed=2")
    train(cfg)
    said = capsys.readouterr().out
    assert f"model.pretrained={path}: 84 of 86 weights are taken." in said
    found, there = weights(Path(cfg["paths"]["run_dir"])), state_of(path)
    assert torch.equal(found["layer2.0.conv1.weight"], there["layer2.0.conv1.weight"])
    path.unlink()
    run = open_run(cfg["paths"]["run_dir"], "run")
    net = open_run_net(run.path, "run", "last")[0].net
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())
    train({**run.config, "trainer": {**run.config["trainer"], "max_epochs": 2}})  # resumes from last.ckpt
    again = weights(run.path)
    assert torch.equal(again["layer2.0.conv1.weight"], there["layer2.0.conv1.weight"])
    assert not torch.equal(again["fc.weight"], found["fc.weight"])
    assert "weights are taken" not in capsys.readouterr().out
