"""Notebooks run unchanged from the first cell to the last."""

from pathlib import Path

import pytest
from support.runs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_without_outputs() -> None:
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.get("outputs") for cell in notebook.cells), f"{path.name} holds outputs: clear them"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # from jupyter's client and zmq
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    assert shown
    print([output["data"]["text/plain"] for output in shown])
