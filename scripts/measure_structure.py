"""Measure the code that one step runs through, and the links between the files.

Prints the table of docs/architecture.md:

- files and lines entered in one step: every Python function of the package that one call of ``Engine.step()`` runs, on
  whichever thread, counted whole (signature, docstring, body). In the step a prompt arrives and is admitted, a request
  decodes, and another ends. ``attention/``, ``models/`` and ``viz/`` are left out.
- calls from ``Engine.step()`` to ``Scheduler.schedule()``, without those that hand work to the engine's thread.
- lines of code that schedule by vLLM's rules: without blank lines, comments and docstrings, and without policies and
  the limits on concurrent partial prefills, which vLLM does not have.
- circles: groups of files that import each other in a loop at run time; type-only imports do not count.
- places of six or more lines that occur twice: maximal runs of equal lines of code in two places of the package,
  imports and lines without letters left out.

    python scripts/measure_structure.py            # of this checkout
    PYTHONPATH=OTHER python scripts/measure_structure.py --root OTHER
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MIN_REPEATED_LINES = 6
LEFT_OUT = ("attention", "models", "viz")
"""Rooms that are not needed to follow a step."""
NOT_VLLMS_RULES = {"policies", "policy", "partial_prefills"}
HOP = {"call", "submit"}
"""Functions that hand work to the engine's thread."""


def step_path(root: Path) -> tuple[dict[str, set[int]], list[str]]:
    """Lines of the functions entered in one step, by file, and the calls from step() to schedule()."""
    from workbench import Engine, EngineConfig

    entered: set[CodeType] = set()
    way: list[str] = []

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(root / "workbench")):
            return
        entered.add(code)
        if code.co_name == "schedule" and not way:
            while frame is not None:
                if frame.f_code.co_filename.startswith(str(root / "workbench")):
                    way.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back

    with Engine("smollm2", EngineConfig(max_num_batched_tokens=64, num_blocks=64)) as engine:
        engine.add_request("The capital of France is", max_tokens=8)
        engine.add_request("The opposite of hot is", max_tokens=2)
        engine.step()
        engine.before_step(lambda: sys.setprofile(profile))
        engine.add_request("Once upon a time there was a", max_tokens=8)
        sys.setprofile(profile)
        engine.step()
        sys.setprofile(None)
        engine.before_step(lambda: sys.setprofile(None))
        engine.step()
    lines: dict[str, set[int]] = defaultdict(set)
    for code in entered:
        if code.co_name == "<module>":
            continue
        file = str(Path(code.co_filename).relative_to(root))
        if file.split("/")[1] in LEFT_OUT:
            continue
        source, first = inspect.getsourcelines(code)
        lines[file].update(range(first, first + len(source)))
    way.append("engine.py:step")  # on the caller's thread
    way.reverse()
    return lines, [call for call in way if not _is_hop(call)]


def _is_hop(call: str) -> bool:
    file, _, name = call.partition(":")
    return file in ("thread.py", "engine_thread.py") and name in HOP | {"_work_through", "work_through"}


def lines_of_code(path: Path) -> set[int]:
    """Line numbers of code, without blank lines, comments and docstrings."""
    source = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def import_graph(root: Path) -> dict[str, set[str]]:
    """The modules of the package and their imports from it, without type-only imports."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("workbench/**/*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = {target for target in _imports(ast.parse(path.read_text()).body, names) if target != name}
    return graph


def _imports(body: list[ast.stmt], known: dict[str, Path]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in (whole if whole in known else node.module,) if name in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        for part in ("body", "orelse", "finalbody"):
            yield from _imports(getattr(node, part, []), known)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other; ``__init__`` files, which only re-export names, are left out."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for target in graph[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        reach[start] = seen
    groups = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def repeated_places(root: Path) -> list[tuple[str, int, str, int, int]]:
    """Pairs of places (file, line, file, line, length) that share a maximal run of at least six lines of code."""
    files: list[tuple[str, list[tuple[int, str]]]] = []
    for path in sorted(root.glob("workbench/**/*.py")):
        code, text = lines_of_code(path), path.read_text().splitlines()
        kept = [(number, text[number - 1].strip()) for number in sorted(code)]
        kept = [(n, line) for n, line in kept if re.search(r"\w", line) and not re.match(r"(from|import) ", line)]
        files.append((str(path.relative_to(root)), kept))
    windows: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for index, (_, kept) in enumerate(files):
        for at in range(len(kept) - MIN_REPEATED_LINES + 1):
            windows[tuple(line for _, line in kept[at : at + MIN_REPEATED_LINES])].append((index, at))
    pairs = []
    for places in windows.values():
        for i, (file_a, a) in enumerate(places):
            for file_b, b in places[i + 1 :]:
                lines_a, lines_b = files[file_a][1], files[file_b][1]
                if a and b and lines_a[a - 1][1] == lines_b[b - 1][1]:
                    continue  # the middle of a longer run
                length = MIN_REPEATED_LINES
                while a + length < len(lines_a) and b + length < len(lines_b):
                    if lines_a[a + length][1] != lines_b[b + length][1]:
                        break
                    length += 1
                pairs.append((files[file_a][0], lines_a[a][0], files[file_b][0], lines_b[b][0], length))
    return pairs


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    parser.add_argument("--rules", type=Path, nargs="+", help="files that schedule, if there is no scheduler/")
    parser.add_argument("--verbose", action="store_true", help="name files, calls, circles and places")
    options = parser.parse_args()
    root = options.root.resolve()
    sys.path.insert(0, str(root))
    entered, way = step_path(root)
    room = root / "workbench" / "scheduler"
    rules = options.rules or [path for path in room.glob("*.py") if path.stem not in NOT_VLLMS_RULES]
    loops, twice = circles(import_graph(root)), repeated_places(root)
    print(f"files entered in one step:                {len(entered)}")
    print(f"lines entered in one step:                {sum(map(len, entered.values()))}")
    print(f"calls from step() to schedule():          {len(way) - 1}")
    print(f"lines of code that schedule as vLLM does: {sum(len(lines_of_code(path)) for path in rules)}")
    print(f"circles between files:                    {len(loops)}")
    print(f"places of six or more lines twice:        {len(twice)}")
    if options.verbose:
        for file, lines in sorted(entered.items()):
            print(f"  {len(lines):4d} {file}")
        print("  " + " -> ".join(way))
        for loop in loops:
            print("  circle: " + ", ".join(loop))
        for a, line_a, b, line_b, length in twice:
            print(f"  twice: {a}:{line_a} {b}:{line_b} ({length} lines)")
        for path in rules:
            print(f"  {len(lines_of_code(path)):4d} {path.name}")


if __name__ == "__main__":
    main()
