"""Choice of a report's metric and its direction: what runs have recorded, and a note on each guess."""

import json
from pathlib import Path
from typing import Any

from support.reports import REQUEST
from support.run_directories import write_run
from support.runs import SMALL, new_run

from lathe.training.train import train
from lathe.verbs.report.assemble import Report, assemble

HINGE = "{_target_: torchmetrics.classification.MulticlassHingeLoss, num_classes: 10}"  # higher_is_better is False
GUESSED = "That higher {} is better was guessed from its name, no run says it: direction=min turns it round."


def report(folder: Path, **asked: Any) -> Report:
    return assemble({"runs": str(folder), **REQUEST, **asked})


def rewrite(path: Path, result: dict[str, Any]) -> None:
    (path / "result.json").write_text(json.dumps({"steps": 40, "parameters": 1000, "seconds": 2.0, **result}))


def test_a_run_writes_down_which_way_its_metrics_are_better_and_a_report_reads_it(tmp_path: Path) -> None:
    own = f"+task.metrics=[accuracy,{HINGE}]"
    cfg = new_run(tmp_path, *SMALL, own, "callbacks.checkpoint.monitor=val/hinge_loss")
    result = train(cfg)
    assert result["directions"] == {"loss": "min", "accuracy": "max", "hinge_loss": "min"}
    path = Path(cfg["paths"]["run_dir"])
    text = (path / "result.json").read_text().replace("hinge_loss", "bad_rate")
    (path / "result.json").write_text(text)  # the same under a name that reveals no direction
    told = report(tmp_path)
    assert (told.directions, told.marks) == ({"test/bad_rate": "min"}, [])
    rewrite(path, {"test/bad_rate": 0.5, "monitor": "val/bad_rate"})
    told = report(tmp_path)
    assert (told.directions, told.marks) == ({"test/bad_rate": "max"}, [GUESSED.format("test/bad_rate")])
    assert report(tmp_path, direction="min").marks == []


def test_a_metric_of_which_lower_is_better_has_its_lowest_for_best(tmp_path: Path) -> None:
    for seed, value in ((1, 0.2), (2, 0.3)):
        write_run(
            tmp_path,
            seed,
            0.9,
            seed=seed,
            monitor="val/bad_rate",
            directions={"bad_rate": "min"},
            **{"test/bad_rate": value},
        )
    told = report(tmp_path)
    assert told.groups[0].best("test/bad_rate", told.directions["test/bad_rate"]) == 0.2


def test_runs_that_do_not_agree_on_a_direction_are_told(tmp_path: Path) -> None:
    for seed, way in ((1, "min"), (2, "min"), (3, "max")):
        write_run(tmp_path, seed, 0.9, seed=seed, directions={"accuracy": way})
    told = report(tmp_path)
    assert told.directions == {"test/accuracy": "min"}
    assert told.marks == [
        "The runs do not agree on whether more test/accuracy is better: most say min; direction=max is the other way."
    ]
