"""Where a step goes: parts that add up, modules that own their operations, memory that is counted, a page by itself."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT, SMALL, config, new_run
from torch import nn
from torch.profiler import profile as torch_profile

from lathe import trust
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.profile.command import profile
from lathe.verbs.profile.memory import thinned, write_snapshot
from lathe.verbs.profile.modules import marked, module_times
from lathe.verbs.profile.page import page_of
from lathe.verbs.profile.parts import medians

CONVOLVED = ("model=resnet20", "model.net.depth=8", "model.net.width=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a net of convolutions, with accumulated and clipped gradients."""
    words = ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1.0", "trainer.max_epochs=1")
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL[3:], *words, *CONVOLVED)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


def ask(run: Path, *asked: str) -> dict[str, Any]:
    """What the launch hands to the job."""
    request = config(f"run={run}", "warmup=1", "steps=2", *asked, name="profile")
    cfg = RunDir(run).config
    cfg["paths"]["run_dir"] = str(run)
    cfg["trainer"] |= request["trainer"]
    cfg["strategy"] = request["strategy"]
    return {**cfg, "request": request}


def state_of(run: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.parent.name != "profile"}


def test_a_step_is_divided_and_written_down(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(run)
    report = profile(ask(run))
    assert state_of(run) == before
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
    printed = capsys.readouterr().out
    assert re.search(r"a training step: [\d.]+ ms, the median of 2: data [\d.]+ ms \(\d+%\), ", printed)
    assert "peak memory of an inference batch: " in printed


def test_memory_is_what_lies_there(run: Path) -> None:
    memory = profile(ask(run))["training"]["memory"]
    count = sum(value.numel() for value in torch.load(run / "checkpoints" / "best.ckpt")["state_dict"].values())
    assert memory["parameters"] == pytest.approx(4 * count, rel=0.02)  # a counter of batches is a whole number
    assert memory["gradients"] == memory["optimizer"]  # SGD's momentum
    held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert memory["peak"] > held + memory["activations"] / 2 > held
    assert max(size for _, size in memory["timeline"]) == memory["peak"]


def test_a_compiled_net_is_one_part_and_tells_it(tmp_path: Path) -> None:
    words = ("compile=default", "compile.backend=eager", "trainer.max_epochs=1", "test=false")
    cfg = new_run(tmp_path, *SMALL, *words)
    train(cfg)
    report = profile(ask(Path(cfg["paths"]["run_dir"])))
    assert set(report["training"]["parts"]) == {"data", "forward and loss", "backward", "optimizer", "step"}
    assert (report["training"]["modules"], report["training"]["memory"], report["inference"]["memory"]) == ([], {}, {})
    assert report["notes"][0].startswith("The net is compiled")
    torch.compiler.reset()


def test_a_module_as_it_is_and_what_a_run_leaves_out_are_told(tmp_path: Path) -> None:
    own = ("model=lightning", "model.net={_target_: support.own_lightning.LitNet, width: 16}", "test=false")
    own = (*own, "callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min", "callbacks.throughput=null")
    small = [word for word in SMALL if not word.startswith(("model", "optimizer", "scheduler"))]
    cfg = new_run(tmp_path / "own", *small, *own)
    train(cfg)
    trust.allow({"trusted": ["support"]})
    report = profile(ask(Path(cfg["paths"]["run_dir"])))
    assert report["inference"] == {}
    assert report["notes"] == [
        "A LightningModule as it is says neither what it takes nor what it answers: training alone."
    ]
    assert "forward and loss" in report["training"]["parts"]
    cfg = new_run(tmp_path / "small", *SMALL, "compression=prune", "compression.receipt=none", "test=false")
    train(cfg)
    report = profile(ask(Path(cfg["paths"]["run_dir"])))
    assert report["notes"] == ["A step without what compression=prune does in it, of the net as it is now."]


def test_a_folder_that_takes_nothing_is_told_before_the_work(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("lathe.verbs.profile.command.DryRun", None)
    with pytest.raises(PermissionError) as caught:
        profile(ask(run))
    assert caught.value.filename == str(run / "profile")


def test_several_devices_are_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"^trainer\.devices=2: one device is looked at; leave it at 1\.$"):
        profile(ask(run, "trainer.devices=2"))


def test_a_modules_time_is_its_own_and_backward_goes_to_its_forward() -> None:
    net = nn.Sequential(nn.Linear(4, 256), nn.Sequential(nn.Linear(256, 256), nn.ReLU()))
    x = torch.randn(64, 4)
    with marked(net), torch_profile(acc_events=True) as done:
        net(x).sum().backward()
    found = {one.name: one for one in module_times(done.events(), net, False, 1)}
    assert set(found) == {"the net", "0", "1", "1.0", "1.1"}
    assert found["1.0"].backward > found["1.1"].backward > 0
    assert found["1"].backward == found["the net"].backward == 0  # neither has an operation of its own
    assert found["1.0"].forward > found["1"].forward
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_the_middle_step_counts_and_the_peak_stays_when_it_is_thinned() -> None:
    middle = {"backward": 0.001, "data": 0.003, "forward": 0.002}
    found = medians([{"data": 0.001, "forward": 0.004}, {"data": 9.0, "forward": 0.002}, middle])
    assert found == pytest.approx({"data": 3.0, "forward": 2.0, "backward": 1.0, "step": 6.0})
    assert list(found) == ["data", "forward", "backward", "step"]
    assert thinned([1, 5, 2, 9, 3], most=2) == [(1, 5), (3, 9)]
    assert thinned([4, 7], most=400) == [(0, 4), (1, 7)]


def test_the_page_asks_for_nothing_and_shows_names_as_text(run: Path) -> None:
    report = profile(ask(run))
    report["run"] = "<script>alert(1)</script>"
    report["training"]["modules"][0]["name"] = '"><img src=x onerror=alert(1)>'
    page = page_of(report)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import", page.replace("&quot;&gt;&lt;img src=x", ""))
    assert page.count("<svg") == 2 + 2  # shares and memory, of each


def test_pythons_own_profile_is_found_behind_the_script() -> None:
    """A script's folder comes first where Python looks for modules."""
    code = "import cProfile, profile; print(profile.run.__module__, hasattr(profile, 'hydra'), cProfile.run.__name__)"
    path = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=path)
    assert (done.stdout, done.returncode) == ("profile False run\n", 0), done.stderr


def test_the_allocators_record_is_written_whole_and_recording_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's allocator does is torch's; here its two functions are played."""
    ended: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: ended.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"record"))
    name = write_snapshot(tmp_path)
    assert (tmp_path / name).read_bytes() == b"record"

    def fills(path: str) -> None:
        Path(path).write_bytes(b"rec")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fills)
    with pytest.raises(OSError, match=name):
        write_snapshot(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"record"
    assert ended == [{"enabled": None}] * 2
