"""Code and commands of the pages under docs/ work as they are printed there."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from support.runs import ROOT, config

from lathe.config.stages import check_compression

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = r"^```{}\n(.*?)^```$"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(BLOCK.format(language), page.read_text(), flags=re.MULTILINE | re.DOTALL)


WITH_CODE = [page for page in PAGES if "lathe.compression" in page.read_text() or "lathe.measure" in page.read_text()]
CODE = [page for page in WITH_CODE if blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", CODE, ids=lambda page: page.stem)
def test_python_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after the other, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        exec(compile(code, f"{page.name}", "exec"), names)


def commands(page: Path) -> list[str]:
    lines = [line.split(" #")[0].strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if "compression" in line and line.startswith("python train.py")]


COMMANDS = [(page.stem, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(COMMANDS)])
def test_commands_on_the_page_compose(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in re.findall(r"data\.folder=(\w+)", command):
        (tmp_path / folder / "cat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(re.sub(r"<[^>]*>", "some", command))[2:] if word != "-m"]
    cfg = config(*[word.split(",")[0] if re.match(r"^\w+=[\w.]+,", word) else word for word in words])
    check_compression(cfg)


def test_the_pages_show_code_and_commands() -> None:
    assert len(CODE) >= 5
    assert len(COMMANDS) >= 20
