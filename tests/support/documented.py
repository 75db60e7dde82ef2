"""Commands as printed in the docs."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from suites.cases import typed

from lathe.config.help import names_of
from lathe.config.override_parsing import translate
from lathe.config.validate import check, check_compression
from support.runs import ROOT, config

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[str]:
    """Return each command once, from code blocks and inline code, except those with `...`."""
    lines = [line for block in blocks(page, "", "bash") for line in block.replace("\\\n", " ").splitlines()]
    typed = [re.split(r"\s#(?:\s|$)|\s{2,}", line.strip())[0] for line in lines]
    typed += re.findall(r"`((?:[A-Z_]+=\S+ )*python [^`]*)`", page.read_text())
    command = r"(?:[A-Z_]+=\S+ )*(python (?:train|scripts/\w+)\.py\b[^|&>…]*?)[ &]*"
    found = (re.fullmatch(command, line) for line in typed)
    return [command for command in dict.fromkeys(match[1] for match in found if match) if "..." not in command]


def mistakes(command: str) -> list[str]:
    """Return the mistakes in a command, or in a sweep's first job; Hydra's errors are raised."""
    script, *words = shlex.split(re.sub(r"<[^>]*>", "some", command))[1:]
    assert (ROOT / script).is_file(), script
    verb = Path(script).stem
    if verb == "benchmark":
        words = typed(words)
    if not (ROOT / "configs" / f"{verb}.yaml").exists() or any(word.startswith("--") for word in words):
        return []
    cfg = config(*translate(list(_first(words)), names_of(ROOT / "configs", verb)), name=verb)
    if verb == "train":
        check_compression(cfg)
    return check(cfg, verb)


def _first(words: Iterable[str]) -> Iterable[str]:
    for word in words:
        if word != "-m":
            yield re.sub(r"^([\w.]+=)([^\[{,]+),.*$", r"\1\2", word)
