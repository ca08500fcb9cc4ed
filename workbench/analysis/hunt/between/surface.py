"""Differences that no run shows: signatures, fields and bases that a subclass or a plug-in relies on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILES = ["v1/core/**/*.py", "v1/request.py", "v1/outputs.py", "v1/kv_cache_interface.py", "v1/engine/__init__.py"]
FILES += ["v1/structured_output/__init__.py", "config/scheduler.py", "config/cache.py", "config/speculative.py"]
"""The files of vLLM that its schedulers are made of."""


@dataclass
class Surface:
    """The differences of two sources.

    Attributes:
        removed: Names that only A has.
        added: Names that only B has.
        moved: Names that B has in another file, with the two files.
        changed: Names with what they are in A and in B.
        hooks: Names that a class under test overrides, and that are among the removed, moved or changed ones.
    """

    removed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    moved: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)


def compare(a: Path, b: Path, hooks: Sequence[str] = ()) -> Surface:
    """The differences of two packages.

    Args:
        a: The folder of the package of A.
        b: The same of B.
        hooks: Methods that a class overrides, as "Class.method".
    """
    one, other = _read(a), _read(b)
    made = Surface()
    for key, what in one.items():
        if key not in other:
            places = [file for file, name in other if name == key[1]]
            if places:
                made.moved[key[1]] = key[0], places[0]
            else:
                made.removed[key[1]] = what
        elif other[key] != what:
            made.changed[key[1]] = what, other[key]
    names = {name for _, name in one}
    made.added = {name: what for (_, name), what in other.items() if name not in names}
    touched = {*made.removed, *made.moved, *made.changed}
    made.hooks = [name for name in hooks if f"{name}()" in touched]
    return made


def _read(package: Path) -> dict[tuple[str, str], str]:
    """{(file, name): signature, type or bases} of a package; of a folder without vLLM's files, all of it."""
    files = [path for pattern in FILES for path in sorted(package.glob(pattern))] or sorted(package.rglob("*.py"))
    return {
        (path.relative_to(package).as_posix(), name): what for path in files for name, what in _names(_parsed(path), "")
    }


def _parsed(path: Path) -> ast.AST:
    """The syntax tree of a file. A file that this Python cannot read has no names, such as a template."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _names(node: ast.AST, within: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"class {within}{child.name}", ", ".join(map(ast.unparse, child.bases))
            yield from _names(child, f"{within}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            yield f"{within}{child.name}()", f"({ast.unparse(child.args)}){returns}"
        elif isinstance(child, ast.AnnAssign) and within and isinstance(child.target, ast.Name):
            default = f" = {ast.unparse(child.value)}" if child.value else ""
            yield f"{within}{child.target.id}", f"{ast.unparse(child.annotation)}{default}"
