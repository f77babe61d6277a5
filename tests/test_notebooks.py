"""Every notebook runs from top to bottom on a log that the product writes, holds no logic of its own, and is kept with its pictures."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: A whole notebook on a machine that is busy otherwise.
_MOST_S = 900


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many pictures each cell of code shows."""
    return [sum("image/png" in out.get("data", {}) for out in cell.outputs) for cell in code_of(notebook)]


def test_there_are_three() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3"]


@pytest.mark.timeout(_MOST_S)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_it_runs_and_shows_what_is_kept(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = nbformat.read(path, 4)
    fresh = nbformat.read(path, 4)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "models", ROOT / "connectors"))))
    NotebookClient(fresh, timeout=_MOST_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert pictures(fresh) == pictures(kept)
    assert sum(pictures(kept)) >= 2
    assert not [out for cell in code_of(fresh) for out in cell.outputs if out.output_type == "stream" and out.name == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_it_holds_no_logic_of_its_own(path: Path) -> None:
    logic = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.While, ast.Try)
    for cell in code_of(nbformat.read(path, 4)):
        found = [type(node).__name__ for node in ast.walk(ast.parse(cell.source)) if isinstance(node, logic)]
        assert not found, f"{found} belongs into the product: {cell.source[:80]}"
