"""Notebooks run unchanged from the first cell to the last, and show outputs."""

from pathlib import Path

import pytest
from support.runs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_notebooks_show_what_they_print() -> None:
    """After a change: run them again with `jupyter execute --inplace notebooks/*.ipynb`."""
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert any(cell.get("outputs") for cell in cells), path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # from jupyter's client and zmq
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(output.output_type == "execute_result" for output in outputs)
