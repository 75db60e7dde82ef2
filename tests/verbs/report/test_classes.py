"""Classes in the tables of a report."""

import json
from pathlib import Path

from support.reports import REQUEST
from support.run_directories import write_run

from lathe.verbs.report.assemble import assemble
from lathe.verbs.report.data import page_data
from lathe.verbs.report.factors import titles, value_text


def test_classes_are_told_by_as_few_parts_as_tell_them_apart(tmp_path: Path) -> None:
    """Classes of one name in two packages, and what is no dotted name at all."""
    odd = "x`![i](http://e/x.png)"
    classes = ("a.nets.MLP", "b.nets.MLP", "a.nets.CNN", odd, "c.CNN", "MLP")
    for at, name in enumerate(classes):
        path = write_run(tmp_path, at, 0.8 + at / 100, seed=1) / "config.yaml"
        text = path.read_text()
        path.write_text(text.replace("_target_: lathe.nets.MLP", f"_target_: {json.dumps(name)}"))
    request = {**REQUEST, "runs": str(tmp_path)}
    told = assemble(request)
    assert told.factors == ["model.net._target_"]
    shown = ["MLP", "nets.CNN", "a.nets.MLP", "b.nets.MLP", "c.CNN", odd]
    assert sorted(group.texts["model.net._target_"] for group in told.groups) == sorted(shown)
    page = page_data(told)
    assert {run["factors"]["model.net._target_"] for run in page["runs"]} == {*shown}
    # what a run differs in is told whole, though its class has the name of the usual one
    assert [run["diff"].get("model.net._target_") for run in page["runs"]] == [None, *classes[1:]]
    for asked in ("a.nets.MLP", "model.net._target_=b.nets.MLP", "_target_=a.nets.CNN", "nets.CNN"):
        baseline = assemble({**request, "baseline": asked})
        assert baseline.groups[baseline.baseline].factors["model.net._target_"] in asked + " a.nets.CNN"


def test_a_column_is_titled_by_the_part_and_lists_stand_as_they_are_typed() -> None:
    assert titles(["task.loss._target_", "optimizer.lr"]) == ["loss", "lr"]
    assert len({*titles(["task.loss", "task.loss._target_", "model.net._target_"])}) == 3
    assert value_text(["accuracy", "top5_accuracy"]) == "[accuracy,top5_accuracy]"
    assert value_text([0.9, [1, None]]) == "[0.9,[1,null]]"
