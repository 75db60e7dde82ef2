"""The web page at /: one self-contained file that tries a net on an image, a drawing or token ids. Imports no torch."""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

# In the page itself, so that it holds behind a proxy or in a saved file too; scripts and styles are allowed by hash.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src blob: data:; connect-src 'self'; base-uri "
    "'none'; form-action 'none'"
)


def page(facts: dict[str, Any]) -> str:
    """Return the page's HTML for the net of an export's manifest."""
    text = files("lathe.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = POLICY.format(script=_hash(text, "script"), style=_hash(text, "style"))
    data = json.dumps(shown(facts)).replace("<", "\\u003c")  # no class or run name can close the element
    for mark, content in (
        ("__POLICY__", policy),
        ("__TITLE__", html.escape(f"{facts['run']}: {facts['target']}")),
        ("__FACTS__", data),
    ):
        text = text.replace(mark, content, 1)
    return text


def shown(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the page's script: the kind and size of the input, and the lines below the title."""
    arithmetic = "integers" if facts.get("integers") else "floats"
    about = [f"run {facts['run']}", f"{facts['target']} of {facts['checkpoint']}.ckpt, {arithmetic}"]
    if "inputs" in facts:
        lines = [f"{entry['name']}: {entry['dtype']} {entry['shape']}" for entry in facts["inputs"]]
        sizes: list[dict[str, Any]] = facts["inputs"]
        body = {entry["name"]: _zeros([1 if isinstance(n, str) else n for n in entry["shape"]]) for entry in sizes}
        return {"kind": "arrays", "body": json.dumps(body), "schema": lines, "about": about}
    given = facts["input"]
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
        "ink": "white" if preprocess["mean"][0] < 0.5 else "black",  # as in the data: most of an image is background
        "about": [
            *about,
            f"{'grey' if channels == 1 else f'{channels} channels'}, {look}",
            f"{len(facts['classes'])} classes",
        ],
    }


def _zeros(shape: list[int]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _hash(text: str, name: str) -> str:
    """Return the CSP source expression of the page's only inline element of that name without attributes."""
    (content,) = re.findall(f"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
