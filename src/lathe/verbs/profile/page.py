"""The HTML page of a profile: time by part, operator and module, and memory."""

from collections.abc import Mapping
from typing import Any

from lathe.html_page import figure, page, section, table
from lathe.measure.plot import lines, shares

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


def page_of(report: Mapping[str, Any]) -> str:
    """Return the page of profile.json."""
    facts = [
        str(report["run"]),
        f"{report['checkpoint']}.ckpt",
        f"{report['device']}, {report['threads']} CPU threads",
        f"precision {report['precision']}",
        f"torch {report['torch']}",
        f"the step of median time of {report['steps']}",
    ]
    sections = [found for key, name in PARTS.items() if report[key] for found in _sections(name, report[key])]
    return page("Profile: time and memory of a step", facts, report["notes"], sections)


def _sections(name: str, part: Mapping[str, Any]) -> list[str]:
    times = dict(part["parts"])
    step = times.pop("step")
    batch = f" of {part['batch']} samples" if "batch" in part else ""
    rows = [(key, HELP[key], f"{time:.3f}", f"{time / step:.1%}") for key, time in times.items()]
    bar = figure(shares(times, "ms"), "Each colour is a part of the table below, as wide as its share of the time.")
    found = [
        section(
            f"{name}{batch}: {step:.3f} ms",
            f"Trace for ui.perfetto.dev: {part['trace']}",
            bar,
            table(("part", "contents", "ms", "share"), rows, texts=2, keys=True),
        )
    ]
    operators = [(o["name"], f"{o['calls']:g}", f"{o['ms']:.3f}", f"{o['share']:.1%}") for o in part["operators"]]
    says = "Time of each, without the operators that it calls."
    found.append(section(f"Operators of {name.lower()}", says, table(("operator", "calls", "ms", "share"), operators)))
    if part["modules"]:
        modules = [
            (m["name"], m["kind"], f"{m['forward']:.3f}", f"{m['backward']:.3f}", f"{m['forward'] + m['backward']:.3f}")
            for m in part["modules"]
        ]
        head = ("module", "class", "forward, ms", "backward, ms", "both, ms")
        says = "Time of each, without the modules in it, while the profiler records."
        found.append(section(f"Modules of {name.lower()}", says, table(head, modules, texts=2)))
    if part["memory"]:
        found.append(_memory(name, part["memory"]))
    return found


def _memory(name: str, memory: Mapping[str, Any]) -> str:
    what = {
        "peak": "the most at a moment",
        "parameters": "parameters and buffers",
        "gradients": "gradients",
        "optimizer": "the optimizer's state",
        "activations": "what the forward pass keeps for the backward pass, at most",
    }
    rows = [(text, f"{memory[key] / 2**20:.2f}") for key, text in what.items() if key in memory]
    parts = [table(("tensors", "MiB"), rows)]
    says = [f"The peak is at {memory['at']}."] if memory.get("at") else []
    if "snapshot" in memory:
        says.append(f"The allocator's record, for pytorch.org/memory_viz: {memory['snapshot']}.")
    if "timeline" in memory:
        points = [(float(index), size / 2**20) for index, size in memory["timeline"]]
        drawn = lines("Tensors in memory", "operation", "MiB", {"tensors": points})
        parts.append(figure(drawn, "Memory of all tensors after each operation, in the order of their calls."))
    return section(f"Memory of {name.lower()}", " ".join(says), f'<div class="row">{"".join(parts)}</div>')
