"""Plots as SVG, written by hand: a plotting library is not worth its weight for lines and points."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

LEFT, TOP, BOTTOM, ROW = 64, 40, 52, 16
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito 2008
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # more series than colours take other strokes

Scale = Callable[[float], float]
Point = tuple[float, ...]  # x, y, and where a bar shows them the lowest and the highest y


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[Point]], diagonal: bool = False) -> str:
    """An SVG with one line for each name in `series`, through its points, whose bars stand beside each other. Points
    that are not finite are left out. With `diagonal` the dashed line y = x lies behind them, and x is marked where
    points are."""
    series = {name: [point for point in some if all(map(math.isfinite, point))] for name, some in series.items()}
    points = [(point[0], y) for some in series.values() for point in some for y in point[1:]]
    xs = sorted({x for x, _ in points})
    frame = _Frame([*points, *((x, x) for x in xs if diagonal)], list(series))
    parts = []
    if diagonal and xs:
        ends = [
            f'{at}{i}="{scale(x):.1f}"'
            for i, x in ((1, xs[0]), (2, xs[-1]))
            for at, scale in (("x", frame.x), ("y", frame.y))
        ]
        parts.append(f'<line {" ".join(ends)} stroke="#999" stroke-dasharray="4 4"/>')
    for i, (name, some) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        way = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y, *_ in some)
        stroke = f'stroke="{colour}" stroke-width="1.5"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{way}" fill="none" {stroke}/>')
        for x, y, *bar in some:
            if bar:
                at, (low, high) = frame.x(x) + 3 * i, map(frame.y, bar)
                parts.append(f'<line x1="{at:.1f}" y1="{low:.1f}" x2="{at:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
            parts.append(_dot(frame, x, y, colour, name, radius=2.5))
        top = TOP + ROW * i
        parts.append(f'<line x1="{frame.right + 16}" y1="{top}" x2="{frame.right + 36}" y2="{top}" {stroke}/>')
        parts.append(frame.key(i, name))
    return frame.svg(title, x_name, y_name, parts, xs if diagonal else None)


def scatter(title: str, x_name: str, y_name: str, points: Sequence[tuple[str, float, float, str]]) -> str:
    """An SVG with a dot for each (name, x, y, group): names beside the dots, a colour for each group, which the key
    explains. Points that are not finite are left out."""
    points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
    groups = list(dict.fromkeys(group for _, _, _, group in points))
    frame = _Frame([(x, y) for _, x, y, _ in points], groups)
    parts = [frame.key(i, group, COLOURS[i % len(COLOURS)]) for i, group in enumerate(groups)]
    taken: list[tuple[float, float, float]] = []  # left, right and height of names that are placed already
    for name, x, y, group in sorted(points, key=lambda point: -point[2]):
        parts.append(_dot(frame, x, y, COLOURS[groups.index(group) % len(COLOURS)], name, radius=4))
        width = 6.2 * len(name)
        # A name to the right of its dot, or to the left where the figure ends.
        left = frame.x(x) + 8 if frame.x(x) + 8 + width <= frame.right else frame.x(x) - 8 - width
        at = frame.y(y) + 4
        while any(left < end and start < left + width and abs(at - other) < 11 for start, end, other in taken):
            at += 11
        taken.append((left, left + width, at))
        parts.append(f'<text x="{left:.1f}" y="{at:.1f}" font-size="11">{escape(name)}</text>')
    return frame.svg(title, x_name, y_name, parts)


def stacks(title: str, y_name: str, series: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG with a column for each name in `series`, of one piece for each of its parts; the key has the columns'
    names by number."""
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
            place = f'x="{frame.x(i) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{size:.1f}"'
            pieces.append(f'<rect {place} fill="{COLOURS[kinds.index(kind) % len(COLOURS)]}"/>')
            below += value
    return frame.svg(title, "", y_name, pieces, range(1, len(series) + 1))


def shares(parts: Mapping[str, float], unit: str, width: int = 800, height: int = 28) -> str:
    """An SVG with one bar of `parts` beside each other, each as wide as its share; the pointer shows name and value."""
    total, left, pieces = sum(parts.values()) or 1.0, 0.0, []
    for i, (name, value) in enumerate(parts.items()):
        size = width * value / total
        words = escape(f"{name}: {value:.3f} {unit}")
        place = f'x="{left:.1f}" y="0" width="{size:.1f}" height="{height}"'
        pieces.append(f'<rect {place} fill="{COLOURS[i % len(COLOURS)]}"><title>{words}</title></rect>')
        left += size
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="shares" {box}>{"".join(pieces)}</svg>'


def beside(plots: Sequence[str]) -> str:
    """Plots beside each other in one SVG."""
    sizes = [[int(plot.split(f'{side}="', 1)[1].split('"', 1)[0]) for side in ("width", "height")] for plot in plots]
    parts, left = [], 0
    for plot, (width, _) in zip(plots, sizes, strict=True):
        parts.append(plot.replace("<svg ", f'<svg x="{left}" ', 1))
        left += width
    height = max((height for _, height in sizes), default=0)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{left}" height="{height}">\n{"".join(parts)}</svg>\n'


def _dot(frame: "_Frame", x: float, y: float, colour: str, name: str, radius: float) -> str:
    words = escape(f"{name}: {x:.5g}, {y:.5g}")  # shown under the pointer
    place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius:g}"'
    return f'<circle {place} fill="{colour}"><title>{words}</title></circle>'


class _Frame:
    """Axes around points, with room at the right for a key of these names."""

    def __init__(self, points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
        points = points or [(0.0, 0.0)]
        longest = max((len(name) for name in names), default=0)
        self.height = max(420, TOP + BOTTOM + ROW * len(names))
        self.right = LEFT + 500
        self.width = self.right + 60 + round(6.6 * longest)
        self.bottom = self.height - BOTTOM
        self.x_range, self.y_range = (_range([point[i] for point in points]) for i in (0, 1))
        self.x = _scale(self.x_range, LEFT, self.right)
        self.y = _scale(self.y_range, self.bottom, TOP)

    def key(self, i: int, name: str, colour: str = "none") -> str:
        """Line `i` of the key, behind a dot of this colour."""
        top = TOP + ROW * i
        dot = f'<circle cx="{self.right + 26}" cy="{top}" r="4" fill="{colour}"/>'
        return f'{dot}<text x="{self.right + 42}" y="{top + 4}">{escape(name)}</text>'

    def svg(
        self, title: str, x_name: str, y_name: str, inside: Sequence[str], ticks: Sequence[float] | None = None
    ) -> str:
        """The whole figure; `ticks` are the marked values of x, None for round ones."""
        middle = (TOP + self.bottom) // 2
        marks = []
        for value in round_values(*self.x_range) if ticks is None else ticks:
            at = self.x(value)
            marks.append(
                f'<line x1="{at:.1f}" y1="{self.bottom}" x2="{at:.1f}" y2="{self.bottom + 4}" stroke="black"/>'
            )
            marks.append(f'<text x="{at:.1f}" y="{self.bottom + 18}" text-anchor="middle">{value:g}</text>')
        for value in round_values(*self.y_range):
            at = self.y(value)
            marks.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{self.right}" y2="{at:.1f}" stroke="#ddd"/>')
            marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
        size = f'width="{self.width}" height="{self.height}"'
        centre, turned = (LEFT + self.right) / 2, f'transform="rotate(-90 14 {middle})"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
            *marks,
            *inside,
            f'<line x1="{LEFT}" y1="{self.bottom}" x2="{self.right}" y2="{self.bottom}" stroke="black"/>',
            f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{self.bottom}" stroke="black"/>',
            f'<text x="{centre:.0f}" y="{self.height - 12}" text-anchor="middle">{escape(x_name)}</text>',
            f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(y_name)}</text>',
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From a little below the lowest, or from 0, to a little above the highest value; never empty."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room if low else 0.0, high + room


def _scale(values: tuple[float, float], start: float, end: float) -> Scale:
    low, high = values
    return lambda value: start + (value - low) / (high - low) * (end - start)


def round_values(low: float, high: float) -> list[float]:
    """Four to ten round values between `low` and a higher `high`."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * m for m in (0.1, 0.2, 0.25, 0.5, 1, 2) if (high - low) / (size * m) <= 8)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
