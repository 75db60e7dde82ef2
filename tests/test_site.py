"""The site of mkdocs.yml builds without a broken link or anchor."""

from pathlib import Path

import pytest
from support.runs import ROOT

pytest.importorskip("material", reason="pip install -e '.[docs]'")


@pytest.mark.slow
def test_the_site_builds_with_each_page_in_its_navigation(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(config)
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")]
    assert [page for page in pages if f" {page}\n" not in listed] == []
    assert 'class="mermaid"' in (tmp_path / "running" / "index.html").read_text()
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
