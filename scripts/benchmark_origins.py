"""The origin of each result that a page shows: script, date, machine, load and arms, and whether its code has changed.

A result measures the files that its script imports, directly or not. If one of them has a later commit than the result,
the result is older than the code. A result without a date is as old as its last commit, whose day is shown.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from benchmark_tables import Result, loaded, table

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
NOT_RECORDED, OLDER, CURRENT = "date not recorded", "**code has changed since**", "of this code"
_STRING = re.compile(r"[\"'](workbench(?:\.\w+)+)[:\"']")


def origins(page: str | None = None) -> str:
    """A table of the results that were loaded so far.

    Args:
        page: The text of a page, whose marks of older results are kept: every commit may make results older, and a page
            need not follow each of them. None to find out.
    """
    rows = []
    for name, result in sorted(loaded.items()):
        script = script_of(name)
        machine = machine_of(result)
        arms = ", ".join(f"`{arm}`" for arm in arms_of(result))
        date, state = _dated(name, machine, script) if page is None else _kept(name, page)
        load = result.get("load_average_at_start", machine.get("load_average", "not recorded"))
        where = f"{machine.get('cores', '?')} cores, {machine['processor']}" if machine else "not recorded"
        others = machine.get("other_processes", {}).get("largest", "not recorded")
        rows.append([f"`{name}`", f"`{script.name}`", date, where, str(load), str(others), arms or "one", state])
    head = ["result", "script", "date", "machine", "load average", "other processes, cores", "arms", "state"]
    return table(head, rows)


def script_of(name: str) -> Path:
    """The script of a result: the one with the longest name that the result's begins with."""
    scripts = {path.stem.removeprefix("bench_"): path for path in BENCHMARKS.glob("bench_*.py")}
    return scripts[max((stem for stem in scripts if name.startswith(stem)), key=len)]


def machine_of(result: Result) -> Result:
    """The machine of a result; that of the model measured last if each has its own."""
    if "machine" in result:
        return result["machine"]
    machines = [one["machine"] for one in result.get("models", {}).values() if "machine" in one]
    return max(machines, key=lambda machine: machine.get("date", ""), default={})


def arms_of(result: Result) -> list[str]:
    """Names of what was compared."""
    if isinstance(result.get("arms"), dict):
        return list(result["arms"])
    models = list(result.get("models", {}).values())
    starts = [*models[0]["starts"]] if models and "starts" in models[0] else []
    return starts or (["workbench", "llama.cpp"] if models else [])


def _dated(name: str, machine: Result, script: Path) -> tuple[str, str]:
    """The date of a result, and whether the code has changed since."""
    changed = last_changes()
    if not changed:
        return machine.get("date", NOT_RECORDED), "unknown: no history"
    committed = changed.get(f"benchmarks/results/{name}.json")
    if "date" in machine:
        date, measured = machine["date"], datetime.fromisoformat(machine["date"]).timestamp()
    elif committed is not None:
        date, measured = f"committed {datetime.fromtimestamp(committed, UTC):%Y-%m-%d}", committed
    else:
        date, measured = NOT_RECORDED, float("inf")
    newest = max((changed.get(str(file.relative_to(ROOT)), 0.0) for file in imported_files(script)), default=0.0)
    return date, OLDER if newest > measured else CURRENT


def _kept(name: str, page: str) -> tuple[str, str]:
    """The date and the state that a page has of a result."""
    line = next((line for line in page.splitlines() if line.startswith(f"| `{name}` | `bench_")), "")
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    return (cells[2], cells[-1]) if line else (NOT_RECORDED, CURRENT)


@cache
def last_changes() -> dict[str, float]:
    """Seconds since 1970 of the last commit of each file, by its path in the repository; empty without a history."""
    log = ["git", "log", "--format=@%ct", "--name-only", "--no-renames"]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True)
    changes: dict[str, float] = {}
    time = 0.0
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            time = float(line[1:])
        elif line:
            changes.setdefault(line, time)
    return changes


def imported_files(script: Path) -> set[Path]:
    """A script and the files of this repository that it imports, directly or not, at any place of their code."""
    found: set[Path] = set()
    waiting = [script]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imports(file)
    return found


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    source = file.read_text()
    if file == ROOT / "workbench" / "__init__.py":
        return ()  # it names everything, and imports what is asked for: see `_home`
    files = (_file(name, file) for name in (*_imported_names(ast.parse(source)), *_STRING.findall(source)))
    return tuple(file for file in files if file is not None)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (
                _home(alias.name) if node.module == "workbench" else f"{node.module}.{alias.name}"
                for alias in node.names
            )


@cache
def _homes() -> dict[str, str]:
    tree = ast.parse((ROOT / "workbench" / "__init__.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def _home(name: str) -> str:
    """The place of a name that is imported from ``workbench`` itself."""
    return _homes().get(name, f"workbench.{name}")


def _file(name: str, importer: Path) -> Path | None:
    """The file of a module of this repository, or of the module that has the name; None for others."""
    roots: Sequence[Path] = (ROOT,) if name.startswith("workbench") else (importer.parent, BENCHMARKS)
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        for root in roots:
            place = root.joinpath(*parts[:length]) if length else root / "-"
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    return file
    return None
