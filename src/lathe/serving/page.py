"""The web page at /: one file without anything from elsewhere, that shows a net an image, a drawing or token ids.
Imports no torch.
"""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

# The page says itself what it may do, so that it stays as safe behind a proxy or saved to a disk; scripts and styles
# run by their hash.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src blob: data:; connect-src 'self'; base-uri "
    "'none'; form-action 'none'"
)


def page(facts: dict[str, Any]) -> str:
    """The page, as HTML, for the net that `facts`, an export's manifest, describes."""
    text = files("lathe.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = POLICY.format(script=_hash(text, "script"), style=_hash(text, "style"))
    data = json.dumps(shown(facts)).replace(
        "<", "\\u003c"
    )  # so that no name of a class or a run can end the element that it stands in
    for mark, content in (
        ("__POLICY__", policy),
        ("__TITLE__", html.escape(f"{facts['run']}: {facts['target']}")),
        ("__FACTS__", data),
    ):
        text = text.replace(mark, content, 1)
    return text


def shown(facts: dict[str, Any]) -> dict[str, Any]:
    """What the page's script needs: the kind of input, its size, and what stands below the title."""
    given, arithmetic = facts["input"], "integers" if facts.get("integers") else "floats"
    about = [f"run {facts['run']}", f"{facts['target']} of {facts['checkpoint']}.ckpt, {arithmetic}"]
    if "vocab_size" in given:
        return {
            "kind": "tokens",
            "vocab_size": given["vocab_size"],
            "longest": given.get("longest"),
            "about": [*about, f"{given['vocab_size']} tokens"],
        }
    preprocess, (channels, height, width) = facts["preprocess"], given["shape"][1:]
    fixed = isinstance(height, int)
    size = [height, width] if fixed else preprocess["size"]
    look = f"{size[0]} x {size[1]} pixels" if fixed else "pixels of any size"
    return {
        "kind": "image",
        "draw": channels == 1,
        "size": size,
        "ink": "white" if preprocess["mean"][0] < 0.5 else "black",  # as in the data: most of an image is its ground
        "about": [
            *about,
            f"{'grey' if channels == 1 else f'{channels} channels'}, {look}",
            f"{len(facts['classes'])} classes",
        ],
    }


def _hash(text: str, name: str) -> str:
    """The source expression of the page's one inline element of that name without attributes."""
    (content,) = re.findall(f"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
