"""The profile of a step: additive parts, operations by module, counted memory, a self-contained page."""

import json
from pathlib import Path

import pytest
import torch
from support.runs import SMALL, new_run, request
from torch import nn
from torch.profiler import profile as torch_profile

from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.profile import marked, module_times, profile

CONVOLVED = ("model=resnet20", "model.net.depth=8", "model.net.width=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a net of convolutions, with accumulated and clipped gradients."""
    words = ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1.0", "trainer.max_epochs=1")
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL[3:], *words, *CONVOLVED)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


def test_a_step_is_divided_and_written_down(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    report = profile(request(RunDir(run), "profile", "warmup=1", "steps=2"))
    assert {path: path.read_bytes() for path in before} == before
    training, inference = report["training"], report["inference"]
    parts = dict(training["parts"])
    assert set(parts) == {"data", "loop", "forward", "loss", "backward", "optimizer", "step"}
    assert set(inference["parts"]) == {"data", "forward", "step"}
    calls = {one["name"]: one["calls"] for one in training["operators"]}
    assert calls["aten::convolution_backward"] == 2 * 9  # two batches a step; convolutions
    assert {one["name"]: one["calls"] for one in inference["operators"]}["aten::mkldnn_convolution"] == 9
    assert sum(one["share"] for one in training["operators"]) == pytest.approx(1, abs=0.1)
    kinds = {one["name"]: (one["kind"], one["forward"] > 0, one["backward"] > 0) for one in training["modules"]}
    assert kinds["conv"] == ("Conv2d", True, True)
    assert {one["name"] for one in inference["modules"]} == set(kinds)
    assert all(one["backward"] == 0 for one in inference["modules"])
    folder = run / "profile"
    assert json.loads((folder / "profile.json").read_text()) == json.loads(json.dumps(report))
    assert sorted(path.name for path in folder.iterdir()) == [
        "inference.trace.json",
        "profile.html",
        "profile.json",
        "training.trace.json",
    ]
    events = json.loads((folder / "training.trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "module: conv" for event in events) == 2 * 2
    assert "peak memory of an inference batch: " in capsys.readouterr().out
    memory = training["memory"]
    count = sum(value.numel() for value in torch.load(run / "checkpoints" / "best.ckpt")["state_dict"].values())
    assert memory["parameters"] == pytest.approx(4 * count, rel=0.02)  # a batch counter is an integer
    assert memory["gradients"] == memory["optimizer"]  # SGD's momentum
    held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert memory["peak"] > held + memory["activations"] / 2 > held
    assert max(size for _, size in memory["timeline"]) == memory["peak"]


def test_a_modules_time_is_its_own_and_backward_goes_to_its_forward() -> None:
    net = nn.Sequential(nn.Linear(4, 256), nn.Sequential(nn.Linear(256, 256), nn.ReLU()))
    x = torch.randn(64, 4)
    with marked(net), torch_profile(acc_events=True) as done:
        net(x).sum().backward()
    found = {one.name: one for one in module_times(done.events(), net, False, 1)}
    assert set(found) == {"the net", "0", "1", "1.0", "1.1"}
    assert found["1.0"].backward > found["1.1"].backward > 0
    assert found["1"].backward == found["the net"].backward == 0  # neither has operations itself
    assert found["1.0"].forward > found["1"].forward
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
