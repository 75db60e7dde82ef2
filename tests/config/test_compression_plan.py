"""Methods of compression and the shares of the run in which they act."""

from typing import Any

from support.runs import config

from lathe.config.compression_plan import methods, windows


def group(*names: str, stages: Any = None) -> dict[str, Any]:
    return {"stages": stages, "receipt": "none", **{name: {"_target_": "a.b"} for name in names}}


def test_a_run_has_no_methods_by_default() -> None:
    assert methods(config()["compression"]) == {}


def test_methods_act_during_the_whole_run() -> None:
    assert windows(group("distill", "prune")) == {"distill": (0.0, 1.0), "prune": (0.0, 1.0)}


def test_stages_share_the_run() -> None:
    assert windows(group("distill", "prune", "qat", stages=[["distill", "prune"], "qat"])) == {
        "distill": (0.0, 0.5),
        "prune": (0.0, 0.5),
        "qat": (0.5, 1.0),
    }
    assert windows(group("distill", "prune", stages=["prune", "distill"]))["distill"] == (0.5, 1.0)
