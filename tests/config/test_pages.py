"""docs/reference has every key that a table knows. That its files are current, test_as_json.py says."""

import re

from support.runs import ROOT

from lathe.config.schema.check import CLASSES
from lathe.config.schema.optim import OPTIMIZERS
from lathe.config.schema.rule import Rule
from lathe.config.schema.verbs import TRAIN, TRAINING, VERBS

REFERENCE = ROOT / "docs" / "reference"
UNCONFIGURED = {"hydra.utils.get_class", "lathe.tasks.Weighted"}  # explained beside what they are a part of


def test_every_class_has_a_table_with_its_arguments() -> None:
    text = "".join(path.read_text() for path in sorted(REFERENCE.glob("*.md")))
    tables = dict(re.findall(r"^`([\w.]+)`\n\n((?:\|.*\n)*)", text, flags=re.MULTILINE))
    known = {**CLASSES, **OPTIMIZERS}
    assert set(known) - set(tables) - UNCONFIGURED == set()
    for name in set(known) - UNCONFIGURED:
        assert re.findall(r"^\| `(\w+)`", tables[name], flags=re.MULTILINE) == list(known[name])


def test_every_command_has_a_table_with_its_keys() -> None:
    text = (REFERENCE / "commands.md").read_text()
    for verb, tree in VERBS.items():
        body = text.partition(f"## {'train.py' if verb == 'train' else f'scripts/{verb}.py'}\n")[2].partition("\n## ")[
            0
        ]
        named = re.findall(r"^\| `([\w.]+)`", body, flags=re.MULTILINE)
        own = [key for key, place in tree.items() if isinstance(place, Rule)]
        if verb in TRAINING and verb != "train":
            assert "Every key of train.py, and:" in body
            own = [key for key in own if key not in TRAIN] + [f"find.{key}" for key in tree["find"].keys]
        assert set(own) <= set(named), verb
    assert "`images.folder`" in text
    assert "`compression.receipt`" in text


def test_rows_are_whole_and_links_lead_somewhere() -> None:
    for path in sorted(REFERENCE.glob("*.md")):
        for line in path.read_text().splitlines():
            assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) == 5, line
            for link in re.findall(r"\]\(([^)#]+)\)", line):
                assert (REFERENCE / link).is_file(), link


def test_a_choice_is_described_and_a_heading_is_what_is_typed() -> None:
    pages = {path.stem: path.read_text() for path in REFERENCE.glob("*.md")}
    for name, text in pages.items():
        assert re.findall(r"^- `[^`]+`: *$", text, flags=re.MULTILINE) == [], name
        prose = re.sub(r"`[^`]*`|<!--.*?-->", "", text)
        assert "<" not in prose, name
    assert {"## `callbacks.ema`", "## `callbacks.checkpoint`"} <= set(pages["callbacks"].splitlines())
    assert "## `model=resnet18,resnet50`" in pages["model"].splitlines()
    assert "### `optimizer=radam`" in pages["optimizer"].splitlines()
