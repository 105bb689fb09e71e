"""Notebooks executed without a Jupyter kernel, which would be a large dependency for one page.

The code cells run in order in one namespace, as a kernel runs them. The value of a cell's last expression is shown as a
notebook would show it, so that a representation that fails, fails the test.
"""

import ast
import json
import sys
from pathlib import Path


def run_notebook(path: Path) -> list[str]:
    """Run every code cell; gives what each cell showed, its HTML where the value has some."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            shown.append(_run_cell("".join(cell["source"]), f"cell {number}", names))
    return shown


def _run_cell(source: str, name: str, names: dict[str, object]) -> str:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is None or not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    as_html = getattr(value, "_repr_html_", None)
    return "" if value is None else as_html() if as_html else repr(value)


if __name__ == "__main__":
    print(json.dumps(run_notebook(Path(sys.argv[1]))))
