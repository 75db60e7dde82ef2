"""A foreign config.yaml builds only what is on the allow-list: gadgets at every key, through every command."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import in_process
from support.hostile_runs import CANARY, HERE, NOWHERE, SECRET, TEXTS, gadgets, plant, put

from lathe.errors import UserError
from lathe.runs.run_discovery import find_same
from lathe.runs.rundir import RunDir, open_run
from lathe.trust.allowlist import findings, kind_at

Refusal = Callable[[RunDir], str]


def test_every_gadget_is_refused_at_every_key(foreign: RunDir, refusal: Refusal) -> None:
    for name, node in gadgets(Path(CANARY).absolute()).items():
        for key in (*HERE, *NOWHERE):
            assert list(findings(put({}, key, node), [], {})), (name, key)
        (foreign.path / "config.yaml").write_text(yaml.safe_dump({"name": "x", "model": {"net": node}}))
        words = refusal(foreign)
        assert name in words
        assert "model.net" in words


def test_keys_that_take_no_component(foreign: RunDir, refusal: Refusal) -> None:
    node = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    for key in NOWHERE:
        for value, place in ((node, key), ([node], f"{key}[0]"), ({"deep": [{"er": node}]}, f"{key}.deep[0].er")):
            found = [item.key for item in findings(put({}, key, value), ["torch.nn"], {}) if item.why]
            # below a group of named parts, and in a teacher's net, some part belongs
            assert (place in found) == (kind_at(place) is None), place
    plant(foreign, "seed", node)
    assert "names `torch.nn.Linear` at seed, where no part belongs" in refusal(foreign)


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_yaml_that_lathe_does_not_write_is_refused(foreign: RunDir, text: str, refusal: Refusal) -> None:
    path = foreign.path / "config.yaml"
    path.write_text(TEXTS[text](path.read_text()))
    refusal(foreign)
    assert not foreign.readable
    assert find_same(foreign.path.parent.parent, {"name": foreign.path.parent.name}) is None


OTHER_WAYS: dict[str, tuple[str, Any]] = {
    "a method": ("model.net", {"_target_": "torch.nn.Linear.__init__"}),
    "an escape sequence": ("model.net", {"_target_": "torch.nn.Linear\x1b[31m"}),
    "no name": ("model.net", {"_target_": None}),
    "a component of another kind": ("callbacks.x", {"_target_": "lathe.nets.MLP"}),
    "an option of Hydra": ("model.net", {"_target_": "lathe.nets.MLP", "_mode_": "x"}),
    "positional arguments": ("optimizer", {"_target_": "lathe.optim.build_optimizer", "_args_": ["x"]}),
    "a getter of a function": ("optimizer.kind", {"_target_": "hydra.utils.get_method", "path": "os.system"}),
    "a getter of a node": ("optimizer.kind", {"_target_": "hydra.utils.get_class", "path": {"_target_": "os.getcwd"}}),
    "a function as an init": ("model.init", ["zero_gamma", "shutil.rmtree"]),
    "a server of a stranger's": ("logger.mlflow", {"_target_": "lathe.loggers.mlflow", "tracking_uri": "http://x:9"}),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_in_are_refused(foreign: RunDir, way: str, refusal: Refusal) -> None:
    plant(foreign, *OTHER_WAYS[way])
    refusal(foreign)


VERBS = {
    "evaluate": ["run={run}"],
    "predict": ["run={run}", "input=missing.npy", "output=out.csv"],
    "export": ["run={run}", "target=weights"],
    "receipt": ["run={run}"],
    "compress": ["run={run}", "compression=ptq_static"],
    "profile": ["run={run}"],
    "reproduce": ["run={run}", "code=current"],
    "serve": ["run={run}"],
    "benchmark": ["suite=inference", "run={run}"],
    "resume": ["resume={run}"],
    "ckpt_path": ["ckpt_path={run}"],
    "teacher": ["compression=distill", "compression.distill.teacher={run}"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_command_builds_what_a_foreign_run_names(
    verb: str, foreign: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = gadgets(Path(CANARY).absolute())
    plant(foreign, "data.source", planted["builtins.open"])  # a part that every verb would build, first
    plant(foreign, "model.net", planted["subprocess.Popen"])
    if verb == "resume":
        (foreign.path / "result.json").unlink()
    script = "train.py" if verb in ("resume", "ckpt_path", "teacher") else f"scripts/{verb}.py"
    small = ["model=mlp", "trainer.accelerator=cpu", "trainer.max_epochs=1"] if verb in ("ckpt_path", "teacher") else []
    words = [word.format(run=foreign.path) for word in VERBS[verb]]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")
    capfd.readouterr()
    assert in_process(script, *small, *words) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(errors) == 1, errors
    assert errors[0].startswith("Error: ")
    assert "which a saved configuration may not build" in errors[0]
    assert not Path(CANARY).exists()
    assert [path.name for path in Path("logs").glob("*/*")] == []  # no run directory is left
    assert SECRET not in errors[0]


def test_a_comparison_reads_and_builds_nothing(foreign: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    other = foreign.path.with_name("other")
    shutil.copytree(foreign.path, other)
    planted = gadgets(Path(CANARY).absolute())
    plant(foreign, "data.source", planted["builtins.open"])
    plant(foreign, "model.net", planted["subprocess.Popen"])
    assert in_process("scripts/runs.py", f"compare=[{foreign.path},{other}]") == 0
    told = capfd.readouterr()
    assert not told.err
    assert "subprocess.Popen" in told.out
    assert SECRET not in told.out
    assert not Path(CANARY).exists()


PARTIAL = {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.01}
PLANNED = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True}


def test_a_lightning_module_may_be_given_its_optimizer_and_schedule() -> None:
    """As other templates write it, `_partial_`; at other keys an optimizer is still none of the parts that belong."""
    net = {"_target_": "lathe.nets.MLP", "optimizer": PARTIAL, "schedules": [PLANNED], "loss": {"optimizer": PARTIAL}}
    assert not list(findings({"model": {"net": net}}, [], {}))
    for kind in ("EMA", "Checkpoint"):
        part = {"_target_": f"lathe.callbacks.{kind}"}
        assert list(findings({"model": {"net": {**net, "x": part}}}, [], {}))
    for place in ({"model": {"net": PARTIAL}}, {"model": {"x": PARTIAL}}, {"task": {"x": PARTIAL}}):
        (found,) = findings(place, [], {})
        assert found.why


def test_overrides_of_a_foreign_run_only_choose_and_set(foreign: RunDir) -> None:
    path = foreign.path / "overrides.yaml"
    for text in ("- hydra.searchpath=[pkg://antigravity]\n", "- seed=${oc.env:HOME}\n", "!!python/name:os.system x\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"its overrides\.yaml (holds|can't be read)"):
            open_run(foreign.path, "run").overrides  # noqa: B018
    path.write_text("- seed=3\n- model=mlp\n")
    assert foreign.overrides == ["seed=3", "model=mlp"]
