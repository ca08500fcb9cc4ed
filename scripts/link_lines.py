"""Point the links of the documentation into the code at the lines they mean.

A link such as ``[`Scheduler.update`](../workbench/scheduler/scheduler.py#L300)`` names a class, a function or a method
and the file that defines it. Run after a change of the code:

    python scripts/link_lines.py            # rewrite the line numbers
    python scripts/link_lines.py --check    # name the links that are wrong, and exit with 1
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`([\w.]+)`\]\(((?:\.\./)+workbench/[\w/]+\.py)#L(\d+)\)")


@cache
def definitions(path: Path) -> dict[str, int]:
    """Line of every class, function and method of a file, by its dotted name."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[prefix + node.name] = node.lineno
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text()).body, "")
    return found


def linked(page: Path) -> tuple[str, list[str]]:
    """A page with its links put right, and the links that were wrong."""
    wrong: list[str] = []

    def put_right(link: re.Match[str]) -> str:
        name, file, line = link.groups()
        path = (page.parent / file).resolve()
        right = definitions(path).get(name) if path.exists() else None
        if right is None:
            wrong.append(f"{page.name}: {file} does not define {name}")
            return link.group()
        if right != int(line):
            wrong.append(f"{page.name}: {name} is at line {right} of {file}, not {line}")
        return f"[`{name}`]({file}#L{right})"

    return LINK.sub(put_right, page.read_text()), wrong


def main() -> int:
    """Rewrite or check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    failed = False
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text, wrong = linked(page)
        if options.check:
            failed |= bool(wrong)
            print(*wrong, sep="\n", end="\n" if wrong else "")
        elif text != page.read_text():
            page.write_text(text)
        if not options.check and any("does not define" in problem for problem in wrong):
            failed = True
            print(*[problem for problem in wrong if "does not define" in problem], sep="\n", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
