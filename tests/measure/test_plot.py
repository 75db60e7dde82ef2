"""The plots are SVG that a parser reads, with every point where its values say."""

import xml.etree.ElementTree as ET

import pytest

from lathe.measure.plot import lines, round_values, scatter

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
        "t", "ms", "accuracy", [("dense", 2.0, 0.9, "float"), ("int8", 1.0, 0.9, "int8"), ("same", 1.0, 0.9, "int8")]
    )
    assert dots(svg).keys() == {"dense: 2, 0.9", "int8: 1, 0.9", "same: 1, 0.9"}
    places = {node.text: (node.attrib["x"], node.attrib["y"]) for node in ET.fromstring(svg).iter(f"{SVG}text")}
    assert places["int8"] != places["same"]
    assert "float" in places
    colours = {circle.attrib["fill"] for circle in ET.fromstring(svg).iter(f"{SVG}circle")}
    assert len(colours) == 2


@pytest.mark.parametrize("make", [lambda: lines("t", "x", "y", {}), lambda: scatter("t", "x", "y", [])])
def test_nothing_to_show_is_an_empty_figure(make) -> None:
    assert ET.fromstring(make()).tag == f"{SVG}svg"


def test_one_point_has_room_around_it() -> None:
    assert dots(scatter("t", "x", "y", [("a", 0.0, 5.0, "g")])).keys() == {"a: 0, 5"}


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-0.05, 1.05), (3.0, 3.0001), (0.001, 9000.0), (-5.0, -4.0), (1e6, 2e6)]
)
def test_round_values_lie_inside_and_are_enough(low: float, high: float) -> None:
    values = round_values(low, high)
    assert 4 <= len(values) <= 10
    assert all(low <= value <= high for value in values)
