"""Initial weights from files of other programs, under other names, for a net that partly differs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.training.weight_loading import initialise, load_matching, read_weights, rename_weights


@pytest.fixture
def net(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of another net of the same class."""
    torch.manual_seed(5)
    return dict(make_task(new_run(tmp_path, *SMALL), train=False).net.state_dict())


def started(tmp_path: Path, file: Path, **options: Any) -> Any:
    """The state of a net with the initial weights of `file`."""
    cfg = new_run(tmp_path, *SMALL, f"ckpt_path={file}") | options
    torch.manual_seed(1)
    task = make_task(cfg, train=False)
    initialise(cfg, task)
    return task.net.state_dict()


@pytest.mark.parametrize("form", ["state dict", "under model", "safetensors", "float16"])
def test_files_of_other_programs_are_read(tmp_path: Path, net: Any, form: str) -> None:
    file = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(net, file)
    else:
        given = {name: value.half() for name, value in net.items()} if form == "float16" else net
        torch.save({"model": given, "epoch": 3} if form == "under model" else given, file)
    found = started(tmp_path, file)
    for name, value in net.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3 if form == "float16" else 0)


def test_names_are_replaced_by_their_longest_prefix() -> None:
    given = {name: torch.tensor(float(number)) for number, name in enumerate(("a.b.x", "a.c", "fc.w", "y"))}
    found = rename_weights(given, {"a.": "m.", "a.b.": "n.", "fc.": None}, "ckpt_map")
    assert {name: float(value) for name, value in found.items()} == {"n.x": 0.0, "m.c": 1.0, "y": 3.0}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"b.": "c."}, r"^ckpt_map: no weight's name begins with 'b\.'; the first is a\.x\.$"),
        ({"a.": ""}, r"^ckpt_map: x and another weight would both be x: give"),
    ],
)
def test_a_prefix_without_effect_or_with_a_conflict_is_refused(table: dict[str, str | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rename_weights({"a.x": torch.zeros(1), "x": torch.zeros(1)}, table, "ckpt_map")


def test_matching_weights_are_loaded_and_the_rest_is_listed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    before = net.state_dict()["0.bias"].clone()
    sizes = {"0.weight": (3, 2), "1.weight": (5, 3), "head.bias": (1,), "1.bias": (4,)}
    given = {name: torch.ones(size) for name, size in sizes.items()}
    assert load_matching(net, given, "ckpt_path=x") == [
        "ckpt_path=x: 2 of 4 weights are taken.",
        "Not in the file, so as they were made: 0.bias.",
        "Of another shape, so as they were made: 1.weight ([5, 3] there, [4, 3] here).",
        "In the file alone: head.bias.",
    ]
    assert torch.equal(net.state_dict()["0.weight"], torch.ones(3, 2))
    assert torch.equal(net.state_dict()["0.bias"], before)
    with pytest.raises(UserError, match=r"^ckpt_path=x fits this net nowhere"):
        load_matching(net, {"z": torch.ones(1)}, "ckpt_path=x")


def test_a_backbone_is_fine_tuned_with_a_new_head(tmp_path: Path, net: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "backbone.pth"
    head = [name for name in net if name.startswith("head.")]
    torch.save({f"encoder.{name}": value for name, value in net.items()}, file)
    found = started(tmp_path, file, ckpt_map={"encoder.": "", "encoder.head.": None}, ckpt_strict=False)
    assert head
    for name, value in net.items():
        assert torch.equal(found[name], value) == (name not in head)
    assert f"{len(net) - len(head)} of {len(net)} weights are taken." in capsys.readouterr().out


@pytest.mark.parametrize("content", [{"a": 1}, {"a": torch.zeros(1), "b": "x"}, [torch.zeros(1)]])
def test_a_file_without_a_state_dict_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=rf"^ckpt_path={tmp_path}/w\.pt holds "):
        read_weights(tmp_path / "w.pt", "ckpt_path")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match=r"^ckpt_path=.*safetensors can't be read as safetensors"):
        read_weights(tmp_path / "w.safetensors", "ckpt_path")
