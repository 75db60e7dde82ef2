"""Names that the user trusts: `trusted`, the command itself, packages under src/; and the allow-list."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from support.choices import ALL, OURS
from support.commands import forget
from support.hostile_runs import plant
from support.runs import SMALL, runs

from lathe import trust
from lathe.config.schema import definitions
from lathe.errors import UserError
from lathe.runs.rundir import RunDir, open_run
from lathe.trust.allowlist import (
    CALLBACKS,
    KINDS,
    LAYERS,
    LOGGERS,
    METRICS,
    SCHEDULERS,
    findings,
    is_allowed,
)
from lathe.trust.safe_yaml import as_yaml, read_yaml

Refusal = Callable[[RunDir], str]
OPTIMIZERS = " ".join(name.removeprefix("torch.optim.") for name in definitions() if name.startswith("torch.optim."))
Cli = Callable[..., tuple[int, str]]


def test_trusted_names_hold_for_what_they_name(foreign: RunDir, refusal: Refusal) -> None:
    Path("theirs.py").write_text(
        "import os, torch\nfrom torch.nn import Linear as Again\nclass Net(torch.nn.Linear): ...\n"
        "class Other: ...\ndef build(): return Net(1, 1)\nvalue = 3\n"
    )
    plant(foreign, "model.net", {"_target_": "theirs.Net"})
    assert "add trusted=[theirs.Net]" in refusal(foreign)

    def with_trust(*trusted: str) -> RunDir:
        trust.allow({"trusted": list(trusted)})
        return open_run(foreign.path, "run")

    for trusted in ("theirs", "theirs.Net"):
        assert with_trust(trusted).config["model"]["net"] == {"_target_": "theirs.Net"}
    for trusted in ("their", "theirs.Ne", "theirs.build"):
        with pytest.raises(UserError, match="a saved configuration may not build"):
            with_trust(trusted)
    for name, why in {
        "Other": "it is not a Module",
        "os.system": "it is not a class or function of a module",
        "value": "",
        "Again": "",
    }.items():
        plant(foreign, "model.net", {"_target_": f"theirs.{name}"})
        with pytest.raises(UserError, match=f"takes a torch module, and .*{why}: it is not built"):
            _ = with_trust("theirs").config
    plant(foreign, "model.net", {"_target_": "theirs.build"})
    assert with_trust("theirs").config["model"]["net"]["_target_"] == "theirs.build"
    plant(foreign, "trusted", ["theirs"])  # what the saved file trusts counts for nothing
    with pytest.raises(UserError, match="a saved configuration may not build"):
        with_trust()


def test_what_the_command_itself_names_may_stand_at_the_same_key(foreign: RunDir) -> None:
    node = {"_target_": "theirs.Net"}
    plant(foreign, "model.net", node)
    trust.allow({"trusted": [], "model": {"net": node}})
    assert open_run(foreign.path, "run").known_config["model"]["net"] == node
    trust.allow({"trusted": [], "callbacks": {"net": node}})
    with pytest.raises(UserError, match="a saved configuration may not build"):
        open_run(foreign.path, "run")


def test_a_run_that_this_user_trained_needs_no_trust(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package in site-packages, by each command; and config.yaml stays signed where Lathe rewrites it."""
    site = tmp_path / "site-packages"
    (site / "installed").mkdir(parents=True)
    (site / "installed" / "__init__.py").write_text("from lathe.nets import MLP\nclass Net(MLP): ...\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("LATHE_TRUSTED", raising=False)
    net = "model.net._target_=installed.Net"
    assert cli(*SMALL, net, "trainer.max_epochs=1") == (0, "")
    (path,) = runs(tmp_path / "logs")
    evaluate = ("run=logs/latest", "trainer.accelerator=cpu")

    def later() -> list[str]:
        called = [cli(*evaluate, script="scripts/evaluate.py"), cli("resume=logs/latest")]
        return [sentence for code, sentence in called if code]

    assert cli("resume=logs/latest", "trainer.max_epochs=2")[0] == 0
    assert cli("runs=logs", "tag=[good]", script="scripts/runs.py")[0] == 0
    assert (RunDir(path).config["trainer"]["max_epochs"], RunDir(path).config["tags"]) == (2, ["good"])
    assert cli("runs=logs", "archive=moved", script="scripts/runs.py")[0] == 0
    (path,) = runs(tmp_path / "moved")
    assert RunDir(path).config["tags"] == ["good"]
    path = path.rename(tmp_path / "logs" / "latest")
    signed = (path / "config.yaml").read_bytes()

    refusal = "names `installed.Net` at model.net, which a saved configuration may not build"
    (path / "config.yaml").write_bytes(signed.replace(b"max_epochs: 2", b"max_epochs: 3"))
    assert [refusal in sentence for sentence in later()] == [True] * 2
    assert cli("runs=logs/latest", "tag=[mine]", script="scripts/runs.py")[0] == 0
    assert len(later()) == 2  # a tag signs only what was signed before
    (path / "config.yaml").write_bytes(signed)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))  # of another user, or on another machine
    assert [refusal in sentence for sentence in later()] == [True] * 2
    assert cli("resume=logs/latest", "trusted=[installed]", "trainer.max_epochs=3")[0] == 0
    assert later() == []


@pytest.mark.parametrize("trusted", ["timm", [1], ["os; system"]])
def test_what_trusted_takes(trusted: Any) -> None:
    with pytest.raises(UserError, match=r"^trusted=.*expected"):
        trust.allow({"trusted": trusted})


def test_packages_under_src_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lathe.trust import allowlist

    (tmp_path / "src" / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "mine" / "__init__.py").write_text("import os\n")
    (tmp_path / "src" / "mine" / "nets.py").write_text("import torch, shutil\nclass Net(torch.nn.Linear): ...\n")
    (tmp_path / "src" / "mine" / "deep" / "part.py").write_text("")
    (tmp_path / "elsewhere.py").write_text("")
    (tmp_path / "src" / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "src" / "torch").mkdir()
    (tmp_path / "src" / "torch" / "mine.py").write_text("")
    monkeypatch.setattr(allowlist, "SOURCE", tmp_path / "src")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    forget("mine")
    assert [allowlist.is_user_code(name) for name in ("mine.nets.Net", "mine.Net", "mine.deep.part.f")] == [True] * 3
    refused = "mine mine.nets.Net.build mine.os.system linked.f elsewhere.f torch.mine.f os.system lathe.nets.X"
    assert [name for name in refused.split() if allowlist.is_user_code(name)] == []
    assert allowlist.wrong_kind("mine.nets.Net", "module", False) is None
    assert allowlist.wrong_kind("mine.nets.shutil", "module", False) is not None
    assert allowlist.wrong_kind("mine.os", "module", False) is not None
    assert allowlist.wrong_kind("mine.nets.Net", "callback", False) == "it is not a Callback"
    forget("mine")


def test_all_choices_of_configs_may_be_built_again() -> None:
    """Every choice of every group, as a run that takes it saves it."""
    for choice in OURS:
        group, content = choice.partition("=")[0], yaml.safe_load(ALL[choice])
        if group in ("target", "hydra") or "_target_" not in ALL[choice]:
            continue
        tree = {group: content}
        if group in ("debug", "experiment"):
            tree = {key: content.get(key) for key in ("callbacks", "model", "data") if key in content}
        assert list(findings(tree, [], {})) == [], choice


@pytest.mark.parametrize(
    ("kind", "place", "names"),
    [
        ("module", "torch.nn", LAYERS),
        ("module", "torchmetrics", METRICS),
        ("optimizer", "torch.optim", OPTIMIZERS.replace("ReduceLROnPlateau", "")),
        ("scheduler", "torch.optim.lr_scheduler", SCHEDULERS),
        ("callback", "lightning.pytorch.callbacks", CALLBACKS),
        ("logger", "lightning.pytorch.loggers", LOGGERS),
    ],
)
def test_listed_classes_are_of_their_kind_and_take_no_code(kind: str, place: str, names: str) -> None:
    (base,) = [getattr(importlib.import_module(module), name) for module, name in KINDS[kind][1]]
    module = importlib.import_module(place)
    code = {"path", "dirpath", "file", "filename", "url", "command", "cmd", "fn", "func", "lr_lambda", "device_ids"}
    for name in names.split():
        assert is_allowed(f"{place}.{name}", kind)
        found = getattr(module, name, None)
        if found is None:
            continue  # a layer of a newer or older torch
        assert issubclass(found, base), name
        assert not code & set(inspect.signature(found.__init__).parameters), name


def test_written_yaml_is_omegaconfs_and_is_read_again(tmp_path: Path) -> None:
    words = [
        "yes",
        "~",
        "1e-3",
        "1_000",
        "0x1f",
        "1:20",
        "2026-01-01",
        "",
        " a ",
        "#c",
        "x: y",
        "- x",
        "a\nb\n",
        "é 漢",
    ]
    numbers = [1, 1.5, 1e-05, True, None, {}]
    content = {"words": words, "numbers": numbers, "long": "a word " * 60, "two words": {"a": {}}}
    assert as_yaml(content) == OmegaConf.to_yaml(OmegaConf.create(content))
    again = {**content, "same list": words, "pair": (1, 2), "beyond": "漢 \U0001f600"}
    (tmp_path / "config.yaml").write_text(as_yaml(again), encoding="utf-8")
    assert read_yaml(tmp_path / "config.yaml", "it") == {**again, "pair": [1, 2]}
