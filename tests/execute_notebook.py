"""``python tests/execute_notebook.py NOTEBOOK``: run its cells in the working folder; the first that fails ends it. Prints what
the cells show, and ``<picture>`` for each picture.

In IPython's shell, which reads cells as a notebook does, without a kernel: sockets between two processes made one run in ten wait
for minutes. In a process of its own, so that no test finds what a notebook imports or sets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


def main(path: str) -> int:
    shell = InteractiveShell.instance()
    for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        with capture_output() as shown:
            result = shell.run_cell("".join(cell["source"]), store_history=True)
        sys.stdout.write(shown.stdout)
        sys.stderr.write(shown.stderr)
        for output in shown.outputs:
            sys.stdout.write("<picture>\n" if "image/png" in output.data else output.data.get("text/plain", "") + "\n")
        if result.result is not None and "image/png" in shell.display_formatter.format(result.result)[0]:  # its text is out
            sys.stdout.write("<picture>\n")
        if not result.success:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
