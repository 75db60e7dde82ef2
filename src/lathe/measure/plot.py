"""Plots as SVG files in the light and dark colours of style.css, without a plotting library."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape

from lathe.html_page import style_sheet

LEFT, TOP, BOTTOM, ROW = 68, 48, 54, 18
DOTS = 40  # most points of a line that are drawn as dots
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # stroke styles, for more series than colours
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif"

Scale = Callable[[float], float]
Point = tuple[float, ...]  # x, y, and the lowest and highest y of an error bar


def _colours() -> dict[str, tuple[str, str]]:
    """Return the light and the dark value of each colour in the style sheet."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style_sheet())
    return {name: (light, dark) for name, light, dark in pairs}


INK = {name: light for name, (light, _) in _colours().items()}
COLOURS = tuple(light for name, light in INK.items() if name.startswith("series-"))


@cache
def _dark_style() -> str:
    """Return CSS that replaces the colours of a plot if the viewer prefers a dark scheme."""
    names = ("card", "text", "quiet", "line", "grid", "accent")
    pairs = [pair for name, pair in _colours().items() if name in names or name.startswith("series-")]
    rules = [f'[{key}="{light}"]{{{key}:{dark}}}' for light, dark in pairs for key in ("fill", "stroke")]
    return f"<style>:root{{color-scheme:light dark}}@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[Point]],
    diagonal: tuple[float, float] | None = None,
    ticks: Sequence[float] | None = None,
    marks: Mapping[str, float] | None = None,
    log_x: bool = False,
) -> str:
    """Return an SVG with a line per series, a dashed line y = x between `diagonal` and vertical `marks`."""
    marks = marks or {}
    series = {name: [point for point in line if all(map(math.isfinite, point))] for name, line in series.items()}
    points = [(point[0], y) for line in series.values() for point in line for y in point[1:]]
    some_y = points[0][1] if points else 0.0
    points += [(x, some_y) for x in marks.values()] + [(x, x) for x in diagonal or ()]
    frame = _Frame(points, list(series), log_x)
    parts = []
    if diagonal is not None:
        low, high = diagonal
        parts.append(_line(frame.x(low), frame.y(low), frame.x(high), frame.y(high), INK["quiet"], "4 4"))
    for i, (name, line) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        way = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y, *_ in line)
        stroke = f'stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{way}" fill="none" stroke-linejoin="round" {stroke}/>')
        for x, y, *bar in line:
            if bar:
                at, (low, high) = frame.x(x) + 3 * i, map(frame.y, bar)
                parts.append(_line(at, low, at, high, colour))
            if len(line) <= DOTS:
                parts.append(_dot(frame, x, y, colour, name, radius=3))
        top = TOP + ROW * i
        parts.append(f'<line x1="{frame.right + 16}" y1="{top}" x2="{frame.right + 36}" y2="{top}" {stroke}/>')
        parts.append(frame.key(i, name))
    for name, x in marks.items():
        at = frame.x(x)
        side, end = (-6, "end") if at > (LEFT + frame.right) / 2 else (6, "start")
        parts.append(_line(at, frame.bottom, at, TOP - 6, INK["accent"], "5 3"))
        style = f'text-anchor="{end}" font-weight="600" fill="{INK["accent"]}"'
        parts.append(f'<text x="{at + side:.1f}" y="{TOP + 4}" {style}>{escape(name)}</text>')
    return frame.svg(title, x_name, y_name, parts, ticks)


def scatter(
    title: str,
    x_name: str,
    y_name: str,
    points: Sequence[tuple[str, float, float, str]],
    groups: Sequence[str],
    log_x: bool = False,
) -> str:
    """Return an SVG with a numbered dot for each finite (name, x, y, group), coloured by group; the key lists names."""
    points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
    names = list(dict.fromkeys(name for name, *_ in points))
    key = [*((group, COLOURS[i % len(COLOURS)]) for i, group in enumerate(groups))]
    key += [(f"{i}: {name}", "none") for i, name in enumerate(names, 1)]
    frame = _Frame([(x, y) for _, x, y, _ in points], [name for name, _ in key], log_x)
    parts = [frame.key(i, name, colour) for i, (name, colour) in enumerate(key)]
    for name, x, y, group in points:
        parts.append(_dot(frame, x, y, COLOURS[groups.index(group) % len(COLOURS)], name, radius=4.5))
        position = f'x="{frame.x(x) + 7:.1f}" y="{frame.y(y) + 4:.1f}" font-size="11" fill="{INK["text"]}"'
        parts.append(f"<text {position}>{names.index(name) + 1}</text>")
    return frame.svg(title, x_name, y_name, parts)


def stacks(title: str, y_name: str, series: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG with one stacked column per series; the key lists the columns by number."""
    kinds = list(dict.fromkeys(kind for parts in series.values() for kind in parts))
    names = [f"{i}: {name}" for i, name in enumerate(series, 1)]
    tallest = max((sum(parts.values()) for parts in series.values()), default=0.0)
    frame = _Frame([(0.5, 0.0), (len(series) + 0.5, tallest)], [*kinds, *names])
    pieces = [frame.key(i, kind, COLOURS[i % len(COLOURS)]) for i, kind in enumerate(kinds)]
    pieces += [frame.key(len(kinds) + i, name) for i, name in enumerate(names)]
    width = 0.7 * (frame.x(1.0) - frame.x(0.0))
    for i, parts in enumerate(series.values(), 1):
        below = 0.0
        for kind, value in parts.items():
            top, size = frame.y(below + value), frame.y(below) - frame.y(below + value)
            box = f'x="{frame.x(i) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{size:.1f}"'
            pieces.append(f'<rect {box} fill="{COLOURS[kinds.index(kind) % len(COLOURS)]}"/>')
            below += value
    return frame.svg(title, "", y_name, pieces, range(1, len(series) + 1))


def shares(parts: Mapping[str, float], unit: str) -> str:
    """Return an SVG with one bar divided by the shares of `parts`; the pointer shows name and value."""
    total, left, pieces = sum(parts.values()) or 1.0, 0.0, []
    for i, (name, value) in enumerate(parts.items()):
        size = 800 * value / total
        tooltip = escape(f"{name}: {value:.3f} {unit}")
        box = f'x="{left:.1f}" y="0" width="{size:.1f}" height="28"'
        pieces.append(f'<rect {box} fill="{COLOURS[i % len(COLOURS)]}"><title>{tooltip}</title></rect>')
        left += size
    head = '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="shares" width="800" height="28"'
    return f'{head} viewBox="0 0 800 28">{_dark_style()}{"".join(pieces)}</svg>'


def beside(plots: Sequence[str]) -> str:
    """Return plots next to each other in one SVG."""
    sizes = [[int(plot.split(f'{side}="', 1)[1].split('"', 1)[0]) for side in ("width", "height")] for plot in plots]
    parts, left = [], 0
    for plot, (width, _) in zip(plots, sizes, strict=True):
        parts.append(plot.replace("<svg ", f'<svg x="{left}" ', 1))
        left += width
    height = max((height for _, height in sizes), default=0)
    box = f'width="{left}" height="{height}" viewBox="0 0 {left} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{"".join(parts)}</svg>\n'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _dot(frame: "_Frame", x: float, y: float, colour: str, name: str, radius: float) -> str:
    tooltip = escape(f"{name}: {x:.5g}, {y:.5g}")  # shown under the pointer
    position = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius:g}"'
    return f'<circle {position} fill="{colour}"><title>{tooltip}</title></circle>'


class _Frame:
    """Axes around points, with a key of `names` at the right."""

    def __init__(self, points: Sequence[tuple[float, float]], names: Sequence[str], log_x: bool = False) -> None:
        points = points or [(1.0, 0.0)]
        longest = max((len(name) for name in names), default=0)
        self.height = max(420, TOP + BOTTOM + ROW * len(names))
        self.right = LEFT + 500
        self.width = self.right + 60 + round(6.6 * longest)
        self.bottom = self.height - BOTTOM
        xs = [point[0] for point in points]
        self.x_range = _range([math.log10(x) for x in xs], False) if log_x else _range(xs)
        self.y_range, self.log_x = _range([point[1] for point in points]), log_x
        x = _scale(self.x_range, LEFT, self.right)
        self.x: Scale = (lambda value: x(math.log10(value))) if log_x else x
        self.y = _scale(self.y_range, self.bottom, TOP)

    def key(self, i: int, name: str, colour: str = "none") -> str:
        """Return line `i` of the key, with a dot of this colour."""
        top = TOP + ROW * i
        dot = f'<circle cx="{self.right + 26}" cy="{top}" r="4.5" fill="{colour}"/>'
        return f'{dot}<text x="{self.right + 42}" y="{top + 4}" fill="{INK["text"]}">{escape(name)}</text>'

    def svg(
        self, title: str, x_name: str, y_name: str, inside: Sequence[str], ticks: Sequence[float] | None = None
    ) -> str:
        """Return the whole figure; `ticks` are the labelled values of x, None for round ones."""
        middle, quiet = (TOP + self.bottom) // 2, f'fill="{INK["quiet"]}"'
        marks = []
        if ticks is None:
            ticks = log_values(*self.x_range) if self.log_x else round_values(*self.x_range)
        for value in ticks:
            at = self.x(value)
            marks.append(_line(at, self.bottom, at, self.bottom + 4, INK["quiet"]))
            marks.append(f'<text x="{at:.1f}" y="{self.bottom + 18}" text-anchor="middle" {quiet}>{value:g}</text>')
        for value in round_values(*self.y_range):
            at = self.y(value)
            marks.append(_line(LEFT, at, self.right, at, INK["grid"]))
            marks.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" {quiet}>{value:g}</text>')
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        centre, turned = (LEFT + self.right) / 2, f'transform="rotate(-90 14 {middle})"'
        strong = f'font-size="14" font-weight="600" fill="{INK["text"]}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} font-family="{FONT}" font-size="12">',
            _dark_style(),
            f'<rect width="100%" height="100%" fill="{INK["card"]}"/>',
            f'<text x="{LEFT}" y="22" {strong}>{escape(title)}</text>',
            *marks,
            *inside,
            _line(LEFT, self.bottom, self.right, self.bottom, INK["quiet"]),
            f'<text x="{centre:.0f}" y="{self.height - 14}" text-anchor="middle" {quiet}>{escape(x_name)}</text>',
            f'<text x="14" y="{middle}" text-anchor="middle" {quiet} {turned}>{escape(y_name)}</text>',
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _range(values: Sequence[float], zero: bool = True) -> tuple[float, float]:
    """Return a non-empty range around `values` with a margin; with `zero`, none below a lowest value 0."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room if low or not zero else 0.0, high + room


def _scale(values: tuple[float, float], start: float, end: float) -> Scale:
    low, high = values
    return lambda value: start + (value - low) / (high - low) * (end - start)


def round_values(low: float, high: float) -> list[float]:
    """Return four to ten round values between `low` and a higher `high`."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * m for m in (0.1, 0.2, 0.25, 0.5, 1, 2) if (high - low) / (size * m) <= 8)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_values(low: float, high: float) -> list[float]:
    """Return round values between 10 ** `low` and 10 ** `high`: powers of ten if they are enough."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5)):
        values = [float(f"{factor}e{exponent}") for exponent in exponents for factor in factors]
        values = [value for value in values if 10**low <= value <= 10**high]
        if len(values) >= 3:
            return values
    return round_values(10**low, 10**high)
