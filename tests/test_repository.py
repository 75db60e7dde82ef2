"""The whole repository: lint, types, floors, comments in YAML, and every configuration that ships."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.runs import ROOT, config

from lathe.config.stages import check_compression, methods
from lathe.errors import UserError
from lathe.export import TARGETS, get
from lathe.runs.build import make
from lathe.runs.methods import make_methods

CONFIGS = ROOT / "configs"
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "local")
OTHER_SCRIPTS = {"target": "export"}  # groups that training does not have
CHOICES = [
    f"{group}={path.stem}" for group in GROUPS if group not in OTHER_SCRIPTS for path in sorted((CONFIGS / group).glob("*.yaml"))
]
YAML_FILES = sorted(str(path.relative_to(ROOT)) for path in CONFIGS.rglob("*.yaml") if "local" not in path.parts)
MAX_LINES = 300
# Places that exist on a developer's machine only; in pieces, so that this file does not name them.
MACHINE_PATHS = re.compile(
    r"(?<![\w.}])/(?:" + "|".join(("wor" + "k/", "tmp/" + "venv", "opt/" + "pypi", "opt/" + "wheels")) + ")"
)


def repository_files() -> list[Path]:
    """What git tracks or would track; without git, everything but hidden folders and what .gitignore names at the root."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        ignored = {"logs", "data", "build", "dist", "__pycache__", "wandb", "mlruns"}
        paths = [path for path in ROOT.rglob("*") if not ignored & set(path.relative_to(ROOT).parts)]
        paths = [path for path in paths if not any(part.endswith("_cache") or part == ".git" for part in path.parts)]
    return [path for path in paths if path.is_file()]


def run(*command: str) -> None:
    """Runs a tool in the repository's root; its output is the failure's message."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", ".")


def test_everything_is_formatted() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", "--quiet", ".")


def test_types_hold() -> None:
    run(sys.executable, "-m", "mypy", "--no-error-summary")


def test_floors_import_only_floors_below() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def test_launch_imports_no_torch() -> None:
    heavy = "{'torch', 'lightning', 'numpy'}"
    run(sys.executable, "-c", f"import sys, lathe.launch.start; late = {heavy} & set(sys.modules); assert not late, late")


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", "ignore")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_no_source_file_is_longer_than_300_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in repository_files() if path.suffix == ".py"
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert "src/lathe/verbs/train.py" in lengths


def test_what_tests_share_lies_in_support() -> None:
    """Beside the tests lie tests alone: a helper module is found by its subject, in tests/support."""
    names = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")]
    loose = [
        name for name in names if name.parts[0] != "support" and not (name.stem == "conftest" or name.stem.startswith("test_"))
    ]
    assert loose == []


def keys_without_comment(text: str) -> list[str]:
    """Keys that hold a value and have a comment neither on their line nor on the line above. `_target_` and `_partial_` say themselves,
    and a `defaults` list is commented where it is the map, in train.yaml."""
    lines, missing = text.splitlines(), []

    def visit(node: Any) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if isinstance(value, yaml.MappingNode) and value.value:
                visit(value)
                continue
            line = key.start_mark.line
            above = lines[line - 1].strip() if line else ""
            if key.value not in ("_target_", "_partial_", "defaults") and " #" not in lines[line] and not above.startswith("#"):
                missing.append(key.value)

    visit(yaml.compose(text, Loader=yaml.SafeLoader))
    return missing


def test_keys_without_comment_are_found() -> None:
    text = "# the file\na: 1\nb: 2\nc:\n  d: x # why\n  e: 'no # comment'\n  _target_: y\n"
    assert keys_without_comment(text) == ["b"]  # a quoted # counts as a comment: good enough for these files


@pytest.mark.parametrize("name", YAML_FILES)
def test_every_key_has_a_comment(name: str) -> None:
    assert keys_without_comment((ROOT / name).read_text()) == []


def test_the_map_names_every_group_with_a_comment() -> None:
    text = (CONFIGS / "train.yaml").read_text()
    named = re.findall(r"^  - (?:optional )?(\w+): [\w.-]+ +# \w", text, flags=re.MULTILINE)
    assert sorted(named) == sorted([*(group for group in GROUPS if group not in OTHER_SCRIPTS), "local"])


NEEDS_MORE = {
    "strategy=dp": "strategy=dp drives several GPUs from one process and none is visible",
    "strategy=model_split": "strategy.devices=null takes every GPU of this machine and none is visible",
    "strategy=horovod": "strategy=horovod (needs Horovod: build it with|is started by horovodrun)",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_its_parts_can_be_built(choice: str) -> None:
    """Everything that needs neither data nor a device. Nets are built on the meta device: shapes without memory."""
    group, name = choice.split("=")
    words = "vocab_size" in (CONFIGS / group / f"{name}.yaml").read_text()
    cfg = config(choice, *{"model": ["data=synthetic_tokens"], "data": ["model=gpt_nano"]}.get(group, [])[:words])
    if group in ("experiment", "debug"):
        assert cfg["name"] == (name if group == "experiment" else "debug")
    data = cfg["data"]
    with torch.device("meta"):
        net = make(cfg["model"]["net"], "model.net")
        images = "channels" in data
        shape = (2, data["channels"], data["image_size"], data["image_size"]) if images else (2, data["length"])
        logits = net(torch.empty(shape) if images else torch.empty(shape, dtype=torch.int64))
    assert logits.shape == ((2, data["num_classes"]) if images else (*shape, data["vocab_size"]))
    optimizer = make(cfg["optimizer"], "optimizer")(net)
    assert sum(len(part["params"]) for part in optimizer.param_groups) == len(list(net.parameters()))
    scheduler = make(cfg["scheduler"], "scheduler")(optimizer, 1000)
    assert all(0 <= lr <= cfg["optimizer"]["lr"] for lr in scheduler.get_last_lr())
    module = make(data, "data")
    facts = [key for key in ("num_classes", "vocab_size", "length", "batch_size", "max_tokens") if key in data]
    assert {key: getattr(module, key) for key in facts} == {key: data[key] for key in facts}
    assert len(facts) > 1
    for key, node in cfg["callbacks"].items():
        auto = {name: value for name, value in (("monitor", "val/loss"), ("mode", "min")) if node.get(name) == "auto"}
        make({**node, **auto}, f"callbacks.{key}")
    check_compression(cfg)
    if cfg["compression"].get("distill", {}).get("teacher", "ema") is None:
        with pytest.raises(UserError, match=r"^compression\.distill\.teacher"):
            make_methods(cfg)
    else:
        assert len(make_methods(cfg)) == len(methods(cfg["compression"]))
    strategy = {key: value for key, value in cfg["strategy"].items() if key not in ("processes", "precisions", "compressions")}
    if choice in NEEDS_MORE and (choice == "strategy=horovod" or not torch.cuda.is_available()):
        with pytest.raises(UserError, match=NEEDS_MORE[choice]):
            make(strategy, "strategy")
    else:
        make(strategy, "strategy")
    trainer = make({**cfg["trainer"], "_partial_": True}, "trainer")
    assert trainer.keywords["max_epochs"] == cfg["trainer"]["max_epochs"]


@pytest.mark.parametrize("name", ["benchmark suite=memory", "make_shards", "prepare_tokens input=x", "support"])
def test_scripts_that_make_things_compose(name: str) -> None:
    script, *asked = name.split()
    assert config(*asked, name=script)["output"] is not Ellipsis


def test_every_target_has_a_choice_whose_options_it_takes() -> None:
    assert sorted(path.stem for path in (CONFIGS / "target").glob("*.yaml")) == sorted(TARGETS)
    for name in TARGETS:
        takes = inspect.signature(get(name).export).parameters
        options = config(f"target={name}", "run=logs/latest", name="export")["target"][name]
        assert set(options) - {"integers"} <= set(takes), name


@pytest.mark.parametrize("name", ["evaluate", "predict", "compress", "receipt", "sensitivity", "export", "serve"])
def test_the_other_verbs_compose(name: str) -> None:
    asked = ["run=logs/latest", *(["input=a.npy", "output=b.csv"] if name == "predict" else [])]
    cfg = config(*asked, name=name)
    assert (cfg["run"], cfg.get("checkpoint", "best"), cfg["trainer"]["devices"]) == ("logs/latest", "best", 1)


def test_pins_lie_within_the_ranges() -> None:
    """requirements.txt pins what setup.cfg allows, and names every package that setup.cfg needs."""
    import configparser

    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] not in "#-"]
    pins = {pin.name: str(pin.specifier).removeprefix("==") for pin in map(Requirement, lines)}
    assert lines[0] == f"torch=={pins['torch']}"
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    ranges = [Requirement(line) for line in parser["options"]["install_requires"].split("\n") if line]
    assert [str(item) for item in ranges if item.name not in pins or pins[item.name] not in item.specifier] == []
    extras = [Requirement(line) for name in ("compress", "export", "wandb")
              for line in parser["options.extras_require"][name].split("\n") if line]  # fmt: skip
    pinned = [item for item in extras if item.name in pins]
    assert {"onnx", "onnxscript", "onnxruntime", "torch-pruning", "wandb"} <= {item.name for item in pinned}
    assert [str(item) for item in pinned if pins[item.name] not in item.specifier] == []
    assert "torchvision" not in pins


def test_the_ends_of_the_ranges_are_what_the_workflow_tries() -> None:
    import configparser
    import tomllib

    import yaml
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert (settings["mypy"]["python_version"], settings["ruff"]["target-version"]) == ("3.11", "py311")
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    (torch,) = [Requirement(line) for line in parser["options"]["install_requires"].split("\n") if line.startswith("torch>")]
    pythons = SpecifierSet(parser["options"]["python_requires"])
    tried = [item["torch"] for item in matrix["include"]]
    assert [version in torch.specifier for version in (*tried, "2.10.0", "2.16.0")] == [True, True, False, False]
    assert [version in pythons for version in (*matrix["python"], "3.10", "3.14")] == [True, True, False, False]


def test_every_message_on_the_page_of_errors_is_one_that_the_code_has() -> None:
    """A heading quotes a message with … for what varies; each piece between must stand in the sources."""
    texts = []
    for path in (ROOT / "src" / "lathe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert len(headings) > 50
    stale = [(heading, piece) for heading in headings for piece in heading.split("…") if not any(piece in text for text in texts)]
    assert stale == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", path.read_text()) if not link.startswith("http")]
        assert [link for link in links if not (path.parent / link).is_file()] == [], path.name
