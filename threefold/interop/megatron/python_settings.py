"""Settings in the Python of Megatron Bridge: a recipe, a script that changes one, or lines of either.

`import_text.py` calls `read_python`. Nothing is executed: plain values, lists, dtypes, and calls with plain arguments
are read from the syntax tree, and what is something else is handed back by name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from threefold.interop.megatron.field_names import Settings
from threefold.interop.megatron.settings_writer import LARGEST_BITS

_ROOTS = ("cfg", "config", "recipe", "conf")  # names that a script gives to Bridge's configuration
_FLEX = "apply_flex_dispatcher_backend"
_ENVIRONMENT = "env_vars"


@dataclass
class PythonSettings:
    """What the statements of a text say, in their order."""

    settings: Settings = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # functions that are called or defined: a recipe may be among them
    variables: dict[str, str] = field(default_factory=dict)  # of the environment
    unread: list[str] = field(default_factory=list)  # settings whose value is no plain one


class _UnreadError(Exception):
    """A value that only running the script would tell."""


def read_python(text: str) -> PythonSettings | None:
    """None where the text is no Python, or sets nothing of a configuration."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = PythonSettings()
    for node in _statements(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(found, target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _assign(found, node.target, node.value)
        elif isinstance(node, ast.FunctionDef):
            found.calls.append(node.name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            _call(found, node.value)
    return found if found.settings or found.unread or found.variables else None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements in the order of the text, with those of functions and branches."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
            yield from _statements(node)


def _path(node: ast.expr) -> list[str] | None:
    """`cfg.model.x` as its names, without the first."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return names[::-1] if isinstance(node, ast.Name) and node.id in _ROOTS else None


def _assign(found: PythonSettings, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Subscript):  # cfg.env_vars["NAME"] = ..., os.environ["NAME"] = ...
        _assign_variable(found, target, value)
        return
    path = _path(target)
    if path is None:
        return
    if not path:
        if isinstance(value, ast.Call):
            found.calls.append(_name(value.func))
        return
    _set(found, ".".join(path), value)


def _assign_variable(found: PythonSettings, target: ast.Subscript, value: ast.expr) -> None:
    home = ast.unparse(target.value)
    if home.endswith((_ENVIRONMENT, "environ")) and isinstance(target.slice, ast.Constant):
        found.variables[str(target.slice.value)] = str(value.value) if isinstance(value, ast.Constant) else ""


def _set(found: PythonSettings, path: str, value: ast.expr) -> None:
    if path == _ENVIRONMENT and isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        plain = [(k, v) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)]
        found.variables |= {str(key.value): str(item.value) for key, item in plain}
        return
    if isinstance(value, ast.Call):
        _set_call(found, path, value)
        return
    try:
        found.settings[path] = _plain(value)
    except _UnreadError:
        found.unread.append(path)


def _set_call(found: PythonSettings, path: str, call: ast.Call) -> None:
    """`cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)` as fields of a group, a precision as its name."""
    if path == "mixed_precision":
        first = call.args[0] if call.args else None
        found.settings[path] = str(first.value) if isinstance(first, ast.Constant) else _name(call.func)
    elif "." not in path:
        for word in call.keywords:
            if word.arg is not None:
                _set(found, f"{path}.{word.arg}", word.value)
        if call.args or any(word.arg is None for word in call.keywords):
            found.unread.append(path)
        found.calls.append(_name(call.func))
    else:
        found.unread.append(path)


def _call(found: PythonSettings, call: ast.Call) -> None:
    name = _name(call.func)
    if name == _FLEX:
        given = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "moe_flex_dispatcher_backend")]
        backend = given[0].value if given and isinstance(given[0], ast.Constant) else None
        found.settings["model.moe_token_dispatcher_type"] = "flex" if backend else "alltoall"
        found.settings["model.moe_flex_dispatcher_backend"] = backend


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _plain(node: ast.expr) -> Any:
    """A constant, a list of them, or the name of a dtype or of a member of an enumeration."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
        if isinstance(node.value, int) and node.value.bit_length() > LARGEST_BITS:
            raise _UnreadError
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_plain(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _plain(node.operand)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in _ROOTS:
        return f"torch.{node.attr}" if node.value.id == "torch" else node.attr
    raise _UnreadError
