"""The whole repository: lint, types, floors, comments in YAML, and every configuration that ships."""

import ast
import fcntl
import functools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import ROOT

CONFIGS = ROOT / "configs"
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "local")
OTHER_SCRIPTS = {"target": "export"}  # groups that training does not have
CHOICES = [
    f"{group}={path.stem}"
    for group in GROUPS
    if group not in OTHER_SCRIPTS
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]
YAML_FILES = sorted(str(path.relative_to(ROOT)) for path in CONFIGS.rglob("*.yaml") if "local" not in path.parts)
MAX_LINES = 300
# Places that exist on a developer's machine only; in pieces, so that this file does not name them.
MACHINE_PATHS = re.compile(
    r"(?<![\w.}])/(?:" + "|".join(("wor" + "k/", "tmp/" + "venv", "opt/" + "pypi", "opt/" + "wheels")) + ")"
)


def repository_files() -> list[Path]:
    """What git tracks or would track; without git, everything but hidden folders and what .gitignore names at the
    root.
    """
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
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


@functools.cache
def statements(path: Path) -> list[ast.stmt]:
    """What a source imports and raises, anywhere in it."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise)]


def test_types_hold() -> None:
    """What mypy has read of the packages is kept for all checkouts, of which one uses it at a time."""
    kept = Path(os.environ["XDG_STATE_HOME"], "mypy")
    kept.mkdir(parents=True, exist_ok=True)
    with open(kept / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(kept))


def test_what_mypy_skips_is_used_nowhere() -> None:
    """Of a package that is used here, mypy reads what it needs; what it skips would be of no type."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    (skipped,) = [part["module"] for part in overrides if part.get("follow_imports") == "skip"]
    sources = [
        path for path in repository_files() if path.suffix == ".py" and "tests" not in path.relative_to(ROOT).parts
    ]
    nodes = [node for path in sources for node in statements(path)]
    used = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    used |= {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    for path in sources:  # and what is reached through a package, as torch.library.custom_op is
        reached = re.findall(r"\b(torch|nn|mlflow|optuna|wandb)((?:\.\w+)+)", path.read_text(encoding="utf-8"))
        used |= {f"{'torch.nn' if package == 'nn' else package}{rest}" for package, rest in reached}
    assert "lightning.pytorch.Trainer" in used
    found = {module: name for name in used for module in skipped if f"{name}.".startswith(module[:-1])}
    assert found == {}


def test_floors_import_only_floors_below() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def test_launch_imports_no_torch() -> None:
    heavy = "{'torch', 'lightning', 'numpy'}"
    run(
        sys.executable,
        "-c",
        f"import sys, lathe.launch.start; late = {heavy} & set(sys.modules); assert not late, late",
    )


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", "ignore")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_no_source_file_is_longer_than_300_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert "src/lathe/verbs/train.py" in lengths


def test_what_tests_share_lies_in_support() -> None:
    """Beside the tests lie tests alone: a helper module is found by its subject, in tests/support."""
    names = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")]
    loose = [
        name
        for name in names
        if name.parts[0] != "support" and not (name.stem == "conftest" or name.stem.startswith("test_"))
    ]
    assert loose == []


def keys_without_comment(text: str) -> list[str]:
    """Keys that hold a value and have a comment neither on their line nor on the line above. `_target_` and `_partial_`
    say themselves, and a `defaults` list is commented where it is the map, in train.yaml."""
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
            if (
                key.value not in ("_target_", "_partial_", "defaults")
                and " #" not in lines[line]
                and not above.startswith("#")
            ):
                missing.append(key.value)

    visit(yaml.compose(text, Loader=yaml.SafeLoader))
    return missing


def test_keys_without_comment_are_found() -> None:
    text = "# the file\na: 1\nb: 2\nc:\n  d: x # why\n  e: 'no # comment'\n  _target_: y\n"
    assert keys_without_comment(text) == ["b"]  # a quoted # counts as a comment: good enough for these files


@pytest.mark.parametrize("name", YAML_FILES)
def test_no_line_of_a_configuration_is_longer_than_120_columns(name: str) -> None:
    assert [line for line in (ROOT / name).read_text().splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("name", YAML_FILES)
def test_every_key_has_a_comment(name: str) -> None:
    assert keys_without_comment((ROOT / name).read_text()) == []


def test_the_map_names_every_group_with_a_comment() -> None:
    text = (CONFIGS / "train.yaml").read_text()
    named = re.findall(r"^  - (?:optional )?(\w+): [\w.-]+ +# \w", text, flags=re.MULTILINE)
    assert sorted(named) == sorted([*(group for group in GROUPS if group not in OTHER_SCRIPTS), "local"])


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
    extras = [
        Requirement(line)
        for name in ("compress", "export", "wandb")
        for line in parser["options.extras_require"][name].split("\n")
        if line
    ]
    pinned = [item for item in extras if item.name in pins]
    assert {"onnx", "onnxscript", "onnxruntime", "torch-pruning", "wandb"} <= {item.name for item in pinned}
    assert [str(item) for item in pinned if pins[item.name] not in item.specifier] == []
    assert "torchvision" not in pins


def test_the_ends_of_the_ranges_are_what_the_workflow_tries() -> None:
    import configparser

    import yaml
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert (settings["mypy"]["python_version"], settings["ruff"]["target-version"]) == ("3.11", "py311")
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    (torch,) = [
        Requirement(line) for line in parser["options"]["install_requires"].split("\n") if line.startswith("torch>")
    ]
    pythons = SpecifierSet(parser["options"]["python_requires"])
    tried = [item["torch"] for item in matrix["include"]]
    assert [version in torch.specifier for version in (*tried, "2.10.0", "2.16.0")] == [True, True, False, False]
    assert [version in pythons for version in (*matrix["python"], "3.10", "3.14")] == [True, True, False, False]


def test_every_message_on_the_page_of_errors_is_one_that_the_code_has() -> None:
    """A heading quotes a message with … for what varies; its pieces stand in one sentence of the sources."""
    script = runpy.run_path(str(ROOT / "scripts" / "schema.py"))
    page = (ROOT / "docs" / "errors.md").read_text()
    assert page.count("\n### `") > 300
    assert script["unsaid"](page) == []
    assert script["unsaid"]("### `optimizer.lr=… is a lucky number`\n") == ["optimizer.lr=… is a lucky number"]


def test_the_page_of_errors_lists_every_refusal() -> None:
    """Whatever is raised with words of its own: the pieces of its sentence stand on the page."""
    page = " ".join((ROOT / "docs" / "errors.md").read_text().partition("## Every message")[2].split())
    pieces = {
        " ".join(piece.value.split())
        for path in (ROOT / "src" / "lathe").rglob("*.py")
        for node in statements(path)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        for piece in ast.walk(argument)
        if isinstance(piece, ast.Constant)
        and isinstance(piece.value, str)
        and len(re.findall(r"[A-Za-z]{2,}", piece.value)) > 4
    }
    assert len(pieces) > 400
    assert sorted(piece for piece in pieces if piece not in page) == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        links = [
            link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", path.read_text()) if not link.startswith("http")
        ]
        assert [link for link in links if not (path.parent / link).is_file()] == [], path.name
