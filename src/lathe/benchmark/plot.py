"""Two plots as SVG, written by hand: a plotting library is not worth its weight for them."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 270, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito 2008

Point = tuple[float, float, float, float]  # x, y, lowest y, highest y


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Lines through points with bars from the lowest to the highest value, beside the dashed line y = x."""
    points = [point for some in series.values() for point in some] or [(1.0, 1.0, 1.0, 1.0)]
    right, top = max(p[0] for p in points), max(max(p[3] for p in points), max(p[0] for p in points)) * 1.05
    x, y = _scale(1.0, max(right, 1.0 + 1e-9), LEFT, WIDTH - RIGHT), _scale(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<line x1="{x(1):.1f}" y1="{y(1):.1f}" x2="{x(right):.1f}" y2="{y(right):.1f}" stroke="#999" '
        'stroke-dasharray="4 4"/>'
    ]
    for i, (name, some) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        way = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in some)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for p in some:
            at = x(p[0]) + 3 * i  # beside each other where they would hide each other
            parts.append(f'<line x1="{at:.1f}" y1="{y(p[2]):.1f}" x2="{at:.1f}" y2="{y(p[3]):.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{at:.1f}" cy="{y(p[1]):.1f}" r="3.5" fill="{colour}"/>')
        parts.append(_key(i, name, colour))
    ticks = [(x(value), f"{value:g}") for value in sorted({p[0] for p in points})]
    return _frame(title, x_name, y_name, parts, ticks, [(y(value), f"{value:g}") for value in _round_values(top)])


def stacks(title: str, y_name: str, series: Mapping[str, Mapping[str, float]]) -> str:
    """A column for each name, of one piece for each of its parts."""
    top = max((sum(parts.values()) for parts in series.values()), default=1.0) * 1.05 or 1.0
    y = _scale(0.0, top, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(series))
    kinds = list(dict.fromkeys(kind for parts in series.values() for kind in parts))
    pieces, names = [], []
    for i, (name, parts) in enumerate(series.items()):
        left, below = LEFT + i * room, 0.0
        for kind, value in parts.items():
            high = y(below) - y(below + value)
            pieces.append(
                f'<rect x="{left + 0.15 * room:.1f}" y="{y(below + value):.1f}" width="{0.7 * room:.1f}" '
                f'height="{high:.1f}" fill="{COLOURS[kinds.index(kind) % len(COLOURS)]}"/>'
            )
            below += value
        names.append((left + room / 2, str(i + 1)))
        pieces.append(
            f'<text x="{WIDTH - RIGHT + 20}" y="{TOP + 18 * (len(kinds) + 1 + i)}">{i + 1}: {escape(name)}</text>'
        )
    pieces += [_key(i, kind, COLOURS[i % len(COLOURS)]) for i, kind in enumerate(kinds)]
    return _frame(title, "", y_name, pieces, names, [(y(value), f"{value:g}") for value in _round_values(top)])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _round_values(top: float) -> list[float]:
    """Some round values from 0 to `top`."""
    size = 10.0 ** (len(str(int(top))) - 1) if top >= 1 else 10.0**-3
    step = next(size * m for m in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 100, 1000) if top / (size * m) <= 8)
    return [step * i for i in range(int(top / step) + 1)]


def _key(i: int, name: str, colour: str) -> str:
    y = TOP + 18 * i
    left = WIDTH - RIGHT + 20
    square = f'<rect x="{left}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
    return f'{square}<text x="{left + 16}" y="{y}">{escape(name)}</text>'


def _frame(
    title: str,
    x_name: str,
    y_name: str,
    inside: Sequence[str],
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
) -> str:
    bottom, right, middle = HEIGHT - BOTTOM, WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) // 2
    marks = [f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(word)}</text>' for at, word in x_ticks]
    for at, word in y_ticks:
        marks.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(word)}</text>')
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
                'font-size="12">',
                '<rect width="100%" height="100%" fill="white"/>',
                f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
                *marks,
                *inside,
                f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="black"/>',
                f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}" stroke="black"/>',
                f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
                f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
                f'{middle})">{escape(y_name)}</text>',
                "</svg>",
            ]
        )
        + "\n"
    )
