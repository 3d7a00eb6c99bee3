"""Execute a notebook on what the environment names: `python tests/execute_notebook.py NOTEBOOK OUT_FOLDER [PARAMETERS]`.

PARAMETERS is Python code that takes the place of the cell tagged `parameters`. Writes OUT_FOLDER/<name>.ipynb with outputs, and each figure
as <name>-<number>.png.
"""

import base64
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CHECKOUT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 600


def execute(path: Path, out: Path, parameters: str | None) -> None:
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        if parameters is not None and "parameters" in cell.metadata.get("tags", []):
            cell.source = parameters
    NotebookClient(book, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(CHECKOUT)}}).execute()
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, out / path.name)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    for number, figure in enumerate(figures):
        (out / f"{path.stem}-{number}.png").write_bytes(base64.b64decode(figure))


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
