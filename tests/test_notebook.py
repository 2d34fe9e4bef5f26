"""docs/quickstart.ipynb runs from top to bottom, and its stored outputs are those of its code."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PATH = Path(__file__).parent.parent / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert any("chance 1.6%" in output.get("text", "") for output in last.outputs)
    assert (tmp_path / "runs" / "first" / "model").is_dir()


def test_the_notebook_is_stored_as_executed_in_order_and_small():
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not any(output.output_type == "error" for output in outputs)
    assert PATH.stat().st_size < 300_000
