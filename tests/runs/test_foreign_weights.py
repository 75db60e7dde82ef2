"""Runs that start from weights of elsewhere: files of other programs, other names, a net that is partly another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.runs import SMALL, new_run, weights

from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.training.train import train
from lathe.training.weight_loading import load_initial_weights, load_matching, read_weights, rename_weights


@pytest.fixture
def net(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of another net of the same form."""
    torch.manual_seed(5)
    return dict(make_task(new_run(tmp_path, *SMALL), train=False).net.state_dict())


def started(tmp_path: Path, file: Path, *words: str) -> Any:
    cfg = new_run(tmp_path, *SMALL, f"ckpt_path={file}")
    torch.manual_seed(1)
    task = make_task(cfg, train=False)
    for word in words:
        cfg[word.partition("=")[0]] = eval(word.partition("=")[2])
    load_initial_weights(cfg, task)
    return task.net.state_dict()


@pytest.mark.parametrize("form", ["state dict", "under model", "safetensors", "float16"])
def test_a_file_of_another_program_gives_its_weights(tmp_path: Path, net: Any, form: str) -> None:
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
    ("table", "said"),
    [
        ({"b.": "c."}, r"^ckpt_map: no weight's name begins with 'b\.'; the first is a\.x\.$"),
        ({"a.": ""}, r"^ckpt_map: a\.x and x would both be x: give them other names\.$"),
    ],
)
def test_a_prefix_that_does_nothing_or_too_much_is_told(table: dict[str, str | None], said: str) -> None:
    with pytest.raises(UserError, match=said):
        rename_weights({"a.x": torch.zeros(1), "x": torch.zeros(1)}, table, "ckpt_map")


def test_what_fits_is_taken_and_the_rest_is_listed() -> None:
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
    with pytest.raises(UserError, match=r"^ckpt_path=x fits this net nowhere: its first weight is z, .*0\.weight;"):
        load_matching(net, {"z": torch.ones(1)}, "ckpt_path=x")


def test_a_backbone_is_fine_tuned_with_a_head_of_its_own(
    tmp_path: Path, net: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is left as it was made, the rest begins where the file has it."""
    file = tmp_path / "backbone.pth"
    head = [name for name in net if name.startswith("head.")]
    torch.save({f"encoder.{name}": value for name, value in net.items()}, file)
    found = started(tmp_path, file, "ckpt_map={'encoder.': '', 'encoder.head.': None}", "ckpt_strict=False")
    assert head
    for name, value in net.items():
        assert torch.equal(found[name], value) == (name not in head)
    said = capsys.readouterr().out
    assert f"{len(net) - len(head)} of {len(net)} weights are taken." in said
    assert "Not in the file, so as they were made: head.weight, head.bias." in said


def test_a_whole_run_from_a_state_dict(tmp_path: Path, net: Any) -> None:
    torch.save(net, tmp_path / "w.pth")
    cfg = new_run(tmp_path, *SMALL, f"ckpt_path={tmp_path / 'w.pth'}", "trainer.max_steps=1", "optimizer.lr=1e-9")
    train(cfg)
    for name, value in weights(Path(cfg["paths"]["run_dir"])).items():
        torch.testing.assert_close(value, net[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": 1}, "holds no weights: expected names with tensors"),
        ({"a": torch.zeros(1), "b": "x"}, "holds b, which is no tensor: expected a state dict."),
        ([torch.zeros(1)], "holds no weights: expected names with tensors"),
        ({}, "holds no weights: expected names with tensors"),
    ],
)
def test_a_file_without_weights_is_told(tmp_path: Path, content: Any, said: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=rf"^ckpt_path={tmp_path}/w\.pt {said}"):
        read_weights(tmp_path / "w.pt", "ckpt_path")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match=r"^ckpt_path=.*safetensors can't be read as safetensors \(.*\): take"):
        read_weights(tmp_path / "w.safetensors", "ckpt_path")
