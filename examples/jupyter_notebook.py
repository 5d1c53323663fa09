"""Runs a notebook in sandboxes: with ipykernel in the sandbox, and with the forwarding kernel. Writes both results.

python examples/jupyter_notebook.py [DIRECTORY]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from own_daemon import own_daemon

from executor_client.cli import main as executor

CELLS = (
    "import os, platform\nprint(platform.node(), os.getcwd())",
    "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()",
    "sum(range(10))",
)


def run(kernel: str, target: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in CELLS])
    NotebookClient(notebook, kernel_name=kernel, timeout=60).execute()
    nbformat.write(notebook, target)
    kinds = [", ".join(output.output_type for output in cell.outputs) for cell in notebook.cells]
    print(f"{target}: {'; '.join(kinds)}; the last value is {notebook.cells[-1].outputs[0].data['text/plain']}")


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    os.environ["JUPYTER_DATA_DIR"] = str(directory / "jupyter")  # leaves your own kernelspecs as they are
    executor(["jupyter", "install"])
    executor(["jupyter", "install", "--name", "forwarding", "--forwarding"])
    for kernel in ("sandbox", "forwarding"):
        run(kernel, directory / f"{kernel}.ipynb")


if __name__ == "__main__":
    with own_daemon("local"):
        main()
