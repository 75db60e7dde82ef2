"""Code and commands of the pages in docs/ work as printed."""

import re
from pathlib import Path

import pytest
import torch
from support.documented import blocks, commands, mistakes
from support.runs import ROOT

# The pages that the first page lists; a user's pages are not tested.
LISTED = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
PAGES = sorted(ROOT / "docs" / name for name in {"README.md", *LISTED})
WITH_CODE = [page for page in PAGES if "lathe.compression" in page.read_text() or "lathe.measure" in page.read_text()]
CODE = [page for page in WITH_CODE if blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", CODE, ids=lambda page: page.stem)
def test_python_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in order, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        exec(compile(code, f"{page.name}", "exec"), names)


# test_own_parts and test_tutorial run the commands of their pages.
COMMANDS = [
    (page.stem, command) for page in PAGES if page.stem not in ("own_parts", "tutorial") for command in commands(page)
]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(COMMANDS)])
def test_commands_on_the_page_compose(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in re.findall(r"data\.folder=([\w/]+)", command):
        (tmp_path / folder.lstrip("/") / "cat").mkdir(parents=True)
        command = command.replace(f"data.folder={folder}", f"data.folder={folder.lstrip('/')}")
    monkeypatch.chdir(tmp_path)
    assert mistakes(command) == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).is_file()] == [], page.name
