"""The plots are valid SVG, with every point at its values."""

import xml.etree.ElementTree as ET

import pytest

from lathe.measure.plot import lines, stacks

SVG = "{http://www.w3.org/2000/svg}"


def dots(svg: str) -> dict[str, tuple[float, float]]:
    """Return the position of each dot by its tooltip."""
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
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # the middle value is halfway
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1  # larger values are higher
    assert found["c: 0.5, 1"] == (x1, y0)
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert {"t", "sparsity", "loss", "a<b", "c"} <= set(texts)


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
    assert {"parameters", "activations", "1: ddp", "2: fsdp"} <= {node.text for node in root.iter(f"{SVG}text")}
