"""Hook of mkdocs.yml: pages of the repository's root in the site, and links that lead out of docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Files, config: Any) -> Files:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the root's pages to their copies, and others out of docs/ to the repository, if it is known."""
    if page.file.src_uri in ROOT_PAGES:
        return re.sub(r"\]\(docs/", "](", markdown)

    def outside(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        if path.partition("#")[0] in ROOT_PAGES:
            return f"[{text}]({path})"
        return f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text

    up = re.escape("../" * (page.file.src_uri.count("/") + 1))
    return re.sub(rf"\[([^\]]*)\]\({up}([^)]+)\)", outside, markdown)
