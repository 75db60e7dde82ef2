"""The page of where a step goes: one HTML file that needs nothing beside it."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lathe.measure.plot import COLOURS, lines, shares

PARTS = {
    "training": "A training step",
    "inference": "An inference batch",
}
HELP = {
    "data": "fetching and moving a batch, with the loop around it",
    "loop": "between the batch's arrival and the net",
    "forward": "the net's forward pass",
    "loss": "the loss and the sums of metrics",
    "forward and loss": "the forward pass, the loss and the sums of metrics",
    "backward": "gradients",
    "optimizer": "gradients to zero, clipping, the update of weights, and what is done after it",
    "compiled step": "forward, loss, backward, clipping and update as one function",
}
STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;margin:.6em 0}"
    "td,th{border:1px solid #ccc;padding:.15em .5em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "th{font-weight:600}svg{max-width:100%;height:auto}.key{display:inline-block;width:.8em;height:.8em}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(report: Mapping[str, Any]) -> str:
    """The page of what profile.json holds."""
    title = f"Where a step goes: {report['run']}"
    facts = (
        f"{report['checkpoint']}.ckpt on {report['device']}, {report['threads']} CPU threads, precision "
        f"{report['precision']}, torch {report['torch']}; parts of the step of median time of {report['steps']}"
    )
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>"]
    body += [f"<p>{escape(note)}</p>" for note in report["notes"]]
    for key, name in PARTS.items():
        if report[key]:
            body += _section(name, report[key])
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{POLICY}"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _section(name: str, part: Mapping[str, Any]) -> list[str]:
    times = dict(part["parts"])
    step = times.pop("step")
    batch = f" of {part['batch']} samples" if "batch" in part else ""
    found = [f"<h2>{name}{batch}: {step:.3f} ms</h2>", shares(times, "ms")]
    rows = [
        (_key(i, key), f"{time:.3f}", f"{time / step:.1%}", HELP[key]) for i, (key, time) in enumerate(times.items())
    ]
    found.append(_table(("part", "ms", "share", "what it is"), rows, raw=True))
    found.append("<h3>Operators</h3><p>Time of each by itself, without the operators that it calls.</p>")
    operators = [(o["name"], f"{o['calls']:g}", f"{o['ms']:.3f}", f"{o['share']:.1%}") for o in part["operators"]]
    found.append(_table(("operator", "calls", "ms", "share"), operators))
    if part["modules"]:
        found.append("<h3>Modules</h3><p>Time of each without the modules in it, while the profiler records.</p>")
        modules = [
            (m["name"], m["kind"], f"{m['forward']:.3f}", f"{m['backward']:.3f}", f"{m['forward'] + m['backward']:.3f}")
            for m in part["modules"]
        ]
        found.append(_table(("module", "class", "forward ms", "backward ms", "ms"), modules))
    if part["memory"]:
        found += _memory(name, part["memory"])
    return [*found, f"<p>Trace: {escape(part['trace'])}, for Perfetto.</p>"]


def _memory(name: str, memory: Mapping[str, Any]) -> list[str]:
    what = {
        "peak": "the most at a moment",
        "parameters": "parameters and buffers",
        "gradients": "gradients",
        "optimizer": "the optimizer's state",
        "activations": "what the forward pass keeps for the backward pass, at most",
    }
    rows = [(text, f"{memory[key] / 2**20:.2f}") for key, text in what.items() if key in memory]
    found = ["<h3>Memory</h3>", _table(("tensors", "MiB"), rows)]
    if memory.get("at"):
        found.append(f"<p>The peak is at {escape(memory['at'])}.</p>")
    if "timeline" in memory:
        points = [(float(index), size / 2**20) for index, size in memory["timeline"]]
        found.append(lines(f"{name}: tensors in memory", "operation", "MiB", {"tensors": points}))
    if "snapshot" in memory:
        found.append(f"<p>The allocator's record: {escape(memory['snapshot'])}, for pytorch.org/memory_viz.</p>")
    return found


def _key(i: int, name: str) -> str:
    return f'<span class="key" style="background:{COLOURS[i % len(COLOURS)]}"></span> {escape(name)}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], raw: bool = False) -> str:
    """`raw`: the first column is HTML already."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [
        "".join(f"<td>{cell if raw and not i else escape(cell)}</td>" for i, cell in enumerate(row)) for row in rows
    ]
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
