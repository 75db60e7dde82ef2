"""Plots as SVG, written by hand: a plotting library is not worth its weight for lines and points."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

LEFT, TOP, BOTTOM, ROW = 64, 40, 52, 16
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito 2008
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # more series than colours take other strokes

Scale = Callable[[float], float]


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG with one line for each name in `series`, through its points (x, y). Points that are not finite are left
    out.
    """
    series = {name: _finite(points) for name, points in series.items()}
    points = [point for some in series.values() for point in some]
    frame = _Frame(points, list(series))
    parts = []
    for i, (name, some) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        way = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in some)
        stroke = f'stroke="{colour}" stroke-width="1.5"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{way}" fill="none" {stroke}/>')
        parts += [_dot(frame, x, y, colour, name, radius=2.5) for x, y in some]
        top = TOP + ROW * i
        parts.append(f'<line x1="{frame.right + 16}" y1="{top}" x2="{frame.right + 36}" y2="{top}" {stroke}/>')
        parts.append(f'<text x="{frame.right + 42}" y="{top + 4}">{escape(name)}</text>')
    return frame.svg(title, x_name, y_name, parts)


def scatter(title: str, x_name: str, y_name: str, points: Sequence[tuple[str, float, float, str]]) -> str:
    """An SVG with a dot for each (name, x, y, group): names beside the dots, a colour for each group, which the key
    explains. Points that are not finite are left out."""
    points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
    groups = list(dict.fromkeys(group for _, _, _, group in points))
    frame = _Frame([(x, y) for _, x, y, _ in points], groups)
    parts = []
    for i, group in enumerate(groups):
        top = TOP + ROW * i
        parts.append(f'<circle cx="{frame.right + 26}" cy="{top}" r="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{frame.right + 42}" y="{top + 4}">{escape(group)}</text>')
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


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _dot(frame: "_Frame", x: float, y: float, colour: str, name: str, radius: float) -> str:
    words = escape(f"{name}: {x:.5g}, {y:.5g}")  # shown under the pointer
    return (
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius:g}" '
        f'fill="{colour}"><title>{words}</title></circle>'
    )


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

    def svg(self, title: str, x_name: str, y_name: str, inside: Sequence[str]) -> str:
        middle = (TOP + self.bottom) // 2
        marks = []
        for value in round_values(*self.x_range):
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
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
            *marks,
            *inside,
            f'<line x1="{LEFT}" y1="{self.bottom}" x2="{self.right}" y2="{self.bottom}" stroke="black"/>',
            f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{self.bottom}" stroke="black"/>',
            f'<text x="{(LEFT + self.right) / 2:.0f}" y="{self.height - 12}" '
            f'text-anchor="middle">{escape(x_name)}</text>',
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
            f'{middle})">{escape(y_name)}</text>',
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From a little below the lowest to a little above the highest value; never empty."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _scale(values: tuple[float, float], start: float, end: float) -> Scale:
    low, high = values
    return lambda value: start + (value - low) / (high - low) * (end - start)


def round_values(low: float, high: float) -> list[float]:
    """Four to ten round values between `low` and a higher `high`."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * m for m in (0.1, 0.2, 0.25, 0.5, 1, 2) if (high - low) / (size * m) <= 8)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
