"""Plants single-line changes in vLLM's scheduler by rule, and measures which of them `hunt --between` names.

    python scripts/planted_changes.py draw ENVIRONMENT --out planted.json      # once, before anything is measured
    python scripts/planted_changes.py measure ENVIRONMENT planted.json --seconds 60 --out results.json

``draw --without OTHER.json`` leaves out the functions that other draws have changed, while there are others.
ENVIRONMENT is what `workbench hunt --between` takes: an environment or a folder with vLLM. The rule: a function of
FILES that random workloads reach gets one change, and one more for every 80 of its lines; a change is one that
``scripts/hunt_mutants.py`` makes, on a line that they reach and that holds the whole changed node. They are drawn with
a fixed seed. A change that leaves the schedules of 1,000 random workloads equal is the same scheduler as far as anybody
can tell; it is counted and passed over. The kinds that fit a change are written into the file by hand before it is
measured.

A change is named if `hunt --between` reports a difference whose deciding lines have the line of the change, and its
kind if that is one of those that were written down. Consequences of a difference of blocks alone are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from hunt_mutants import _Replace, changes

from workbench.analysis.hunt.between.place import Source
from workbench.analysis.hunt.between.search import Comparison
from workbench.analysis.hunt.between.sides import Asked, Place, place_of
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload

CORE = "vllm/v1/core/"
FILES = (
    "sched/scheduler.py",
    "sched/async_scheduler.py",
    "sched/request_queue.py",
    "sched/utils.py",
    "kv_cache_manager.py",
    "kv_cache_coordinator.py",
    "single_type_kv_cache_manager.py",
    "block_pool.py",
)
NUM_CHANGES = 30
LINES_PER_CHANGE = 80
SEED = 20261128
NUM_REACHING = 200
"""Workloads that tell which lines are reached."""
NUM_WORKLOADS = 1000
"""Workloads that tell a change from none."""


class Planted(NamedTuple):
    """A change of one line.

    Attributes:
        file: The file.
        function: Qualified name of the function.
        line: The line.
        kind: Of `scripts/hunt_mutants.py`.
        before: The line before.
        after: The line afterwards.
    """

    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str


def every_change(file: str, lines: list[str]) -> Iterator[Planted]:
    """Every change of a file that stays on its line."""
    tree = ast.parse("\n".join(lines))
    for owner in tree.body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
            if isinstance(node, ast.FunctionDef):
                name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
                for place in range(len(list(changes(node)))):
                    if (made := _made(file, name, lines, node, place)) is not None:
                        yield made


def _made(file: str, name: str, lines: list[str], function: ast.FunctionDef, place: int) -> Planted | None:
    kind, node, field, value = list(changes(changed := copy.deepcopy(function)))[place]
    if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
        return None
    first, last, number = node.col_offset, node.end_col_offset, node.lineno  # type: ignore[attr-defined]
    if not field:
        _Replace(node, value).visit(changed)
        text = ast.unparse(value)
    else:
        owner, _, index = field.partition(".")
        if index:
            getattr(node, owner)[int(index)] = value
        else:
            setattr(node, field, value)
        text = ast.unparse(ast.fix_missing_locations(node))
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp)):
        text = f"({text})"
    line = lines[number - 1]
    after = line.encode()[:first].decode() + text + line.encode()[last:].decode()
    if "\n" in text or after == line:
        return None
    return Planted(file, name, number, kind, line.strip(), after.strip())


def text_with(lines: list[str], planted: Planted) -> list[str]:
    """The lines of a file with a change."""
    before = lines[planted.line - 1]
    return [
        *lines[: planted.line - 1],
        before[: len(before) - len(before.lstrip())] + planted.after,
        *lines[planted.line :],
    ]


def draw(environment: str, python: str, seed: int, number: int, used: set[tuple[str, str]]) -> dict[str, Any]:
    """The changes that are to be measured, in functions that have none yet as far as there are enough."""
    side = _asked(place_of(environment), python)
    source = Source(side.roots)
    rng = random.Random(seed)
    choices = [rng.randbytes(WORKLOAD_BYTES).hex() for _ in range(NUM_WORKLOADS)]
    reached: set[tuple[str, int]] = set()
    for each in choices[:NUM_REACHING]:
        told = side.ask({"workload": make_workload(bytes.fromhex(each), side.features), "follow": True})
        reached |= {(file, line) for lines in told["ran"] for file, _, line in lines}
    original = side.ask({"choices": choices, "features": side.features, "without": []})
    candidates: dict[tuple[str, str], list[Planted]] = {}
    for name in FILES:
        for each in every_change(CORE + name, source.lines(CORE + name)):
            if (each.file, each.line) in reached:
                candidates.setdefault((each.file, each.function), []).append(each)
    slots = [key for key in candidates for _ in range(1 + len(source.functions(key[0])[key[1]][1]) // LINES_PER_CHANGE)]
    rng.shuffle(slots)
    slots.sort(key=lambda key: key in used)
    chosen: list[Planted] = []
    unchanged: list[Planted] = []
    for key in slots:
        first, lines = source.functions(key[0])[key[1]]
        rest = candidates[key]
        while rest and len(chosen) < number:
            each = rest.pop(rng.randrange(len(rest)))
            indent = len(source.lines(key[0])[each.line - 1]) - len(source.lines(key[0])[each.line - 1].lstrip())
            text = list(lines)
            margin = len(source.lines(key[0])[first - 1]) - len(source.lines(key[0])[first - 1].lstrip())
            text[each.line - first] = " " * (indent - margin) + each.after
            graft = {"file": each.file, "function": each.function, "text": "\n".join(text)}
            got = side.ask({"choices": choices, "features": side.features, "without": [], "grafts": [graft]})
            if got != original:
                chosen.append(each)
                print(f"{len(chosen)}: {each}", file=sys.stderr, flush=True)
                break
            unchanged.append(each)
    version = side.version
    side.close()
    return {
        "version": version,
        "seed": seed,
        "changes": [{**each._asdict(), "fits": []} for each in chosen],
        "without_effect": [each._asdict() for each in unchanged],
    }


def measure(environment: str, python: str, planted: dict[str, Any], seconds: float, out: Path) -> None:
    """Run `--between` on each change, and save what it names."""
    base = place_of(environment)
    results: list[dict[str, Any]] = json.loads(out.read_text())["results"] if out.exists() else []
    for each in planted["changes"][len(results) :]:
        facts = {name: value for name, value in each.items() if name != "fits"}
        with tempfile.TemporaryDirectory() as folder:
            one = _asked(base, python)
            lines = Source(one.roots).lines(each["file"])
            changed = Path(folder) / Path(each["file"]).name
            changed.write_text("\n".join(text_with(lines, Planted(**facts))) + "\n", encoding="utf-8")
            place = Place(str(changed), "vllm", base.python, base.packages, file=changed)
            other = _asked(place, python)
            began = time.process_time()
            comparison = Comparison(one, other, seconds, None, 0, _Until(seconds))
            comparison.run()
            one.close()
            other.close()
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
        found = []
        for apart in comparison.found:
            has = any(
                line.file == each["file"] and line.number == each["line"]
                for line in (*apart.decided.lines_a, *apart.decided.lines_b)
            )
            found.append(
                {
                    "kind": apart.difference.kind,
                    "message": apart.difference.message,
                    "requests": len(apart.workload["requests"]),
                    "num_seen": apart.num_seen,
                    "num_workloads": apart.num_workloads,
                    "seconds": apart.seconds,
                    "by_trial": apart.decided.by_trial,
                    "place": apart.decided.place,
                    "names_the_line": has,
                    "leads_to": dict(apart.leads_to),
                }
            )
        named = [one for one in found if one["names_the_line"]]
        kind = any(one["kind"] in each["fits"] for one in named)
        later = any(set(one["leads_to"]) & set(each["fits"]) for one in named)
        result = {**facts, "workloads": comparison.num_workloads, "different": comparison.num_different}
        result |= {
            "seconds": round(comparison.elapsed, 1),
            "cpu_seconds_of_the_parent": round(time.process_time() - began, 1),
        }
        result |= {"names_the_place": bool(named), "names_the_kind": kind, "found": found}
        result |= {"names_what_it_leads_to": later}
        results.append(result)
        print(f"{len(results)}: place {bool(named)}, kind {kind}, {[one['kind'] for one in found]}", flush=True)
        counts = Counter((result["names_the_place"], result["names_the_kind"]) for result in results)
        facts = {"version": planted["version"], "seconds_each": seconds, "named": counts[True, True]}
        out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")


class _Until:
    """Ends a comparison that has found something, or whose time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, comparison: Comparison) -> None:
        """Called after each batch."""
        if comparison.found and comparison.elapsed > self.seconds / 3:
            comparison.seconds = 0.0


def _asked(place: Place, python: str) -> Asked:
    place.python = place.python or python
    return Asked(place, as_vllm=True)


def main() -> None:
    """Draw or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("draw", "measure"):
        action = actions.add_parser(name)
        action.add_argument("environment")
        if name == "draw":
            action.add_argument("--seed", type=int, default=SEED)
            action.add_argument("--changes", type=int, default=NUM_CHANGES)
            action.add_argument("--without", type=Path, nargs="*", default=[], help="changes of other draws")
        else:
            action.add_argument("planted", type=Path)
            action.add_argument("--seconds", type=float, default=60.0)
        action.add_argument("--python", default="", help="the interpreter of an environment with torch")
        action.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.action == "draw":
        others = [each for path in options.without for each in json.loads(path.read_text())["changes"]]
        used = {(each["file"], each["function"]) for each in others}
        drawn = draw(options.environment, options.python, options.seed, options.changes, used)
        options.out.write_text(json.dumps(drawn, indent=1) + "\n", encoding="utf-8")
    else:
        planted = json.loads(options.planted.read_text())
        measure(options.environment, options.python, planted, options.seconds, options.out)


if __name__ == "__main__":
    main()
