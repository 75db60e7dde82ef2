"""HTML pages in the report's style: self-contained files, light and dark, without scripts or requests."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def style_sheet() -> str:
    """Return the style sheet that all pages share."""
    return files("lathe").joinpath("style.css").read_text(encoding="utf-8")


def page(title: str, facts: Sequence[str], notes: Sequence[str], sections: Sequence[str]) -> str:
    """Return a page: a title, short `facts`, `notes` that a reader should heed, and sections of HTML."""
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    warned = f'<ul class="marks">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{style_sheet()}</style></head><body>'
        f'<header class="wide"><h1>{escape(title)}</h1><p class="facts">{spans}</p>{warned}</header>'
        f'<main class="wide">{"".join(sections)}</main><footer></footer></body></html>\n'
    )


def section(title: str, caption: str, *parts: str) -> str:
    """Return a section: a heading, its caption and parts of HTML."""
    head = f'<div class="head"><h2>{escape(title)}</h2><p class="says">{escape(caption)}</p></div>'
    return f"<section>{head}{''.join(parts)}</section>"


def figure(drawing: str, caption: str) -> str:
    """Return a card of an SVG or a table, with its caption."""
    return f'<figure class="card">{drawing}<figcaption class="says">{escape(caption)}</figcaption></figure>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1, keys: bool = False) -> str:
    """Return a card of a table: the first `texts` columns are text, the others numbers.

    With `keys`, each row begins with its colour of the plots.
    """
    kinds = ["" if i < texts else ' class="number"' for i in range(len(head))]
    top = "".join(
        f'<th{kind}><span class="head-text">{escape(name)}</span></th>' for kind, name in zip(kinds, head, strict=True)
    )
    lines = []
    for at, row in enumerate(rows):
        cells = [escape(cell) for cell in row]
        if keys:
            cells[0] = f'<i class="key" style="background: var(--series-{at % 8 + 1})"></i>{cells[0]}'
        lines.append("".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, cells, strict=True)))
    inside = (
        f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )
    return f'<div class="card flush">{inside}</div>'
