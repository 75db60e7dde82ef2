"""The plots are SVG that a parser reads, with every point where its values say."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from lathe.measure.plot import beside, lines, round_values, scatter, stacks

SVG = "{http://www.w3.org/2000/svg}"


def dots(svg: str) -> dict[str, tuple[float, float]]:
    """Place of each dot, by what is shown under the pointer."""
    found = {}
    for circle in ET.fromstring(svg).iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        if title is not None and title.text is not None:
            found[title.text] = (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
    return found


def test_lines_go_through_their_points() -> None:
    svg = lines(
        "t", "sparsity", "loss", {"a<b": [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0)], "c": [(0.5, 1.0), (1.0, float("nan"))]}
    )
    root = ET.fromstring(svg)
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    found = dots(svg)
    assert set(found) == {"a<b: 0, 1", "a<b: 0.5, 2", "a<b: 1, 3", "c: 0.5, 1"}
    (x0, y0), (x1, y1), (x2, y2) = (found[f"a<b: {at}"] for at in ("0, 1", "0.5, 2", "1, 3"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # the middle is in the middle
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1  # up is more
    assert found["c: 0.5, 1"] == (x1, y0)
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert {"t", "sparsity", "loss", "a<b", "c"} <= set(texts)


def test_scatter_names_points_and_groups_and_no_name_hides_another() -> None:
    svg = scatter(
        "t",
        "ms",
        "accuracy",
        [("dense", 2.0, 0.9, "float"), ("int8", 1.0, 0.9, "int8"), ("same", 1.0, 0.9, "int8")],
        ("float", "int8"),
    )
    assert dots(svg).keys() == {"dense: 2, 0.9", "int8: 1, 0.9", "same: 1, 0.9"}
    places = {node.text: (node.attrib["x"], node.attrib["y"]) for node in ET.fromstring(svg).iter(f"{SVG}text")}
    assert places["int8"] != places["same"]
    assert "float" in places
    colours = {circle.attrib["fill"] for circle in ET.fromstring(svg).iter(f"{SVG}circle")}
    assert len(colours) == 2


def test_a_group_has_its_colour_in_every_plot() -> None:
    def colour(svg: str, name: str) -> str:
        circles = list(ET.fromstring(svg).iter(f"{SVG}circle"))
        return next(circle.attrib["fill"] for circle in circles if name in "".join(circle.itertext()))

    groups = ("this net", "dense")
    both = scatter("t", "ms", "y", [("a", 1.0, 0.1, "dense"), ("b", 2.0, 0.2, "this net")], groups)
    other = scatter("t", "MB", "y", [("b", 2.0, 0.2, "this net"), ("a", 1.0, 0.3, "dense")], groups)
    alone = scatter("t", "MB", "y", [("a", 1.0, 0.3, "dense")], groups)
    assert colour(both, "a:") == colour(other, "a:") == colour(alone, "a:") != colour(both, "b:")


def boxes(svg: str, names: Sequence[str]) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of each text among `names`, and of each dot."""
    found = []
    for node in ET.fromstring(svg).iter(f"{SVG}text"):
        if node.text in names:
            left, base = float(node.attrib["x"]), float(node.attrib["y"])
            found.append((left, base - 8, left + 5.5 * len(str(node.text)), base + 2))
    return found


def test_names_of_close_points_do_not_overlap() -> None:
    names = [f"backend_{i}" for i in range(9)]
    svg = scatter("t", "ms", "y", [(name, 1 + i / 50, 0.9, "g") for i, name in enumerate(names)], ("g",), log_x=True)
    found = boxes(svg, names)
    assert len(found) == 9
    for i, (left, top, right, bottom) in enumerate(found):
        for start, high, end, low in found[:i]:
            assert right <= start or end <= left or bottom <= high or low <= top


def test_logarithmic_axes_have_round_labels_and_equal_ratios() -> None:
    svg = lines(
        "t", "rate", "loss", {"a": [(1e-4, 1.0), (1e-2, 2.0), (1.0, 3.0)]}, marks={"best <1>": 0.01}, log_x=True
    )
    first, middle, last = (dots(svg)[f"a: {x:g}, {y}"][0] for x, y in ((1e-4, 1), (1e-2, 2), (1.0, 3)))
    assert middle - first == pytest.approx(last - middle, abs=0.2)
    assert marked(svg) == ["0.0001", "0.001", "0.01", "0.1", "1"]
    upright = [line for line in ET.fromstring(svg).iter(f"{SVG}line") if line.get("stroke-dasharray") == "5 3"]
    assert [float(line.attrib["x1"]) for line in upright] == [middle]
    assert "best <1>" in {node.text for node in ET.fromstring(svg).iter(f"{SVG}text")}


def test_every_colour_has_a_dark_one() -> None:
    svg = lines("t", "x", "y", {"a": [(0.0, 1.0), (1.0, 2.0)]}, diagonal=(0.0, 1.0), marks={"m": 0.5})
    style = next(iter(ET.fromstring(svg).iter(f"{SVG}style"))).text or ""
    used = {(key, colour) for key, colour in re.findall(r'(fill|stroke)="(#\w+)"', svg.replace(style, ""))}
    assert used
    assert all(f'[{key}="{colour}"]{{{key}:#' in style for key, colour in used)


def marked(svg: str) -> list[str]:
    """Values beside the axis x."""
    return [str(node.text) for node in ET.fromstring(svg).iter(f"{SVG}text") if node.get("text-anchor") == "middle"][
        :-2
    ]


def test_bars_stand_at_their_points_beside_the_diagonal() -> None:
    svg = lines("t", "n", "gain", {"a": [(1.0, 1.0, 1.0, 1.0), (4.0, 3.0, 2.0, 4.0)]}, diagonal=(1, 4), ticks=[1, 4])
    root = ET.fromstring(svg)
    (way,) = [line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray") == "4 4"]
    (x1, y1), (x2, y2) = dots(svg)["a: 1, 1"], dots(svg)["a: 4, 3"]
    assert [float(way.attrib[at]) for at in ("x1", "y1", "x2")] == [x1, y1, x2]
    assert y1 - float(way.attrib["y2"]) == pytest.approx(1.5 * (y1 - y2), abs=0.2)  # at (4, 4)
    bars = [line for line in root.iter(f"{SVG}line") if line.get("x1") == line.get("x2") == f"{x2:.1f}"]
    low, high = (float(bars[-1].attrib[at]) for at in ("y1", "y2"))
    assert low - y2 == pytest.approx(y2 - high, abs=0.2)
    assert marked(svg) == ["1", "4"]


def test_a_diagonal_without_ticks_has_round_ones() -> None:
    points = [(0.378, 0.5), (0.436, 0.2), (0.491, 0.45), (0.985, 1.0)]
    assert marked(lines("t", "probability", "accuracy", {"val": points}, diagonal=(0.0, 1.0))) == [
        *("0", "0.2", "0.4", "0.6", "0.8", "1")
    ]


def test_columns_stand_on_the_axis_and_are_as_high_as_their_values() -> None:
    svg = stacks("t", "MiB", {"ddp": {"parameters": 1.0, "activations": 3.0}, "fsdp": {"parameters": 2.0}})
    root = ET.fromstring(svg)
    _, *rest = root.iter(f"{SVG}rect")
    pieces = [{key: float(value) for key, value in piece.attrib.items() if key != "fill"} for piece in rest]
    first, second, third = pieces
    assert [piece["height"] / first["height"] for piece in pieces] == pytest.approx([1, 3, 2], rel=0.01)
    assert second["y"] + second["height"] == pytest.approx(first["y"], abs=0.2)
    assert first["y"] + first["height"] == third["y"] + third["height"] == pytest.approx(420 - 54, abs=0.2)  # the axis
    assert first["x"] == second["x"] < third["x"]
    assert marked(svg) == ["1", "2"]
    assert {"parameters", "activations", "1: ddp", "2: fsdp"} <= {node.text for node in root.iter(f"{SVG}text")}


def test_plots_stand_beside_each_other() -> None:
    plot = lines("t", "x", "y", {})
    whole, *parts = list(ET.fromstring(beside([plot, plot])).iter(f"{SVG}svg"))
    assert [part.attrib["x"] for part in parts] == ["0", parts[0].attrib["width"]]
    assert int(whole.attrib["width"]) == 2 * int(parts[0].attrib["width"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: lines("t", "x", "y", {}, diagonal=(0, 1)),
        lambda: scatter("t", "x", "y", [], ()),
        lambda: stacks("t", "y", {}),
    ],
)
def test_nothing_to_show_is_an_empty_figure(make) -> None:
    assert ET.fromstring(make()).tag == f"{SVG}svg"


def test_one_point_has_room_around_it() -> None:
    assert dots(scatter("t", "x", "y", [("a", 0.0, 5.0, "g")], ["g"])).keys() == {"a: 0, 5"}


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-0.05, 1.05), (3.0, 3.0001), (0.001, 9000.0), (-5.0, -4.0), (1e6, 2e6)]
)
def test_round_values_lie_inside_and_are_enough(low: float, high: float) -> None:
    values = round_values(low, high)
    assert 4 <= len(values) <= 10
    assert all(low <= value <= high for value in values)
