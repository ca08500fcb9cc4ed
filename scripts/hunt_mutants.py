"""The share of mutants of scheduler/ that the hunt finds, and the time it takes.

A mutant is a function of scheduler/ with one change that this script makes: another operator, a bound that is off by
one, a statement that is dropped, or a list or arguments that are swapped. Every function that the workloads reach gets
as many as ``--per-function``, drawn with a fixed seed among the changes of its reached lines. A mutant whose schedules
equal the original's in 1,000 random workloads, block ids included, is the same scheduler as far as anybody can tell.
Each of the others is hunted in a process for up to ``--seconds`` of processor time, until the first broken law.

    python scripts/hunt_mutants.py [--jobs 2] [--files queues.py,...] [--out mutants.json]
    python scripts/hunt_mutants.py --again mutants.json --out mutants.json    # those that were not found, by new laws
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.search import Search, _Interesting
from workbench.analysis.hunt.target import MAX_STEPS, Target, find_target, time_limit
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "workbench" / "scheduler"
NUM_WORKLOADS = 1000
SECONDS = 60.0
SEED = 20261124
POLICIES = ("ShortestRemainingFirst", "DecodeFirst", "Deadline")
NOT_SCHEDULING = ("checked.py",)
"""The laws' own view of a scheduler."""

OTHER = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""The operator that takes the place of each."""


class Mutant(NamedTuple):
    """A change of one function.

    Attributes:
        file: Name of the file in scheduler/.
        function: Qualified name of the function.
        line: Line of the change.
        kind: "operator", "bound", "dropped" or "swapped".
        before: The changed code before.
        after: The same afterwards.
        index: Number of the change in the file.
    """

    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    index: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}, `{self.before}` -> `{self.after}`"


Change = tuple[str, ast.AST, str, Any]
"""Kind, node, name of the field that changes (with an index in a list), and its other value."""


def changes(function: ast.FunctionDef) -> Iterator[Change]:
    """Every change of a function's body; messages of errors and types are left alone."""
    for statement in function.body:
        yield from _changes(statement)


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return
    match node:
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                yield "operator", node, f"ops.{place}", OTHER[type(operator)]()
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            if type(node.op) in OTHER:
                yield "operator", node, "op", OTHER[type(node.op)]()
        case ast.UnaryOp(op=ast.Not()):
            yield "operator", node, "", node.operand
        case ast.Constant(value=bool()):
            yield "swapped", node, "value", not node.value
        case ast.Constant(value=int()):
            yield "bound", node, "value", node.value + 1
        case ast.Name(id="min" | "max"):
            yield "bound", node, "id", "max" if node.id == "min" else "min"
        case ast.Slice(lower=ast.expr(), upper=None):
            yield "swapped", node, "", ast.Slice(None, node.lower, node.step)
        case ast.Slice(lower=None, upper=ast.expr()):
            yield "swapped", node, "", ast.Slice(node.upper, None, node.step)
        case ast.Attribute(attr="append" | "appendleft" | "popleft" | "pop_head"):
            other = {"append": "appendleft", "appendleft": "append", "popleft": "pop", "pop_head": "pop"}
            yield "swapped", node, "attr", other[node.attr]
        case ast.Call(func=ast.Name(id="reversed"), args=[one]):
            yield "swapped", node, "", one
        case ast.Call(args=[_, _, *_]) | ast.List(elts=[_, _, *_]) | ast.Tuple(elts=[_, _, *_]):
            field = "args" if isinstance(node, ast.Call) else "elts"
            values = getattr(node, field)
            yield "swapped", node, field, [values[1], values[0], *values[2:]]
    is_dropped = isinstance(node, (ast.Continue, ast.Break, ast.AugAssign, ast.Delete))
    is_dropped |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_dropped |= isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    is_dropped |= isinstance(node, ast.Return) and node.value is None
    if is_dropped:
        yield "dropped", node, "", ast.Pass()
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a file with their qualified names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def mutants_of(path: Path) -> Iterator[tuple[Mutant, Callable[[], ast.Module]]]:
    """Every mutant of a file, and a function that makes its tree."""
    text = path.read_text()
    places = [(name, place) for name, node in functions(ast.parse(text)) for place, _ in enumerate(changes(node))]
    for index, (name, place) in enumerate(places):
        before, after, kind, line, _ = _changed(text, name, place)
        yield Mutant(path.name, name, line, kind, before, after, index), lambda n=name, p=place: _changed(text, n, p)[4]


def _changed(text: str, name: str, place: int) -> tuple[str, str, str, int, ast.Module]:
    tree = ast.parse(text)
    function = next(node for its, node in functions(tree) if its == name)
    kind, node, field, value = list(changes(function))[place]
    line = getattr(node, "lineno", getattr(value, "lineno", function.lineno))
    before = ast.unparse(node)
    if not field:
        _Replace(node, value).visit(function)
        after = ast.unparse(value)
    elif "." in field:
        name, _, number = field.partition(".")
        getattr(node, name)[int(number)] = value
        after = ast.unparse(node)
    else:
        setattr(node, field, value)
        after = ast.unparse(node)
    short = [" ".join(part.split())[:100] for part in (before, after)]
    return short[0], short[1], kind, line, ast.fix_missing_locations(tree)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def plant(mutant: Mutant, tree: ast.Module) -> None:
    """Give the living function the code of the mutant."""
    path = str(FOLDER / mutant.file)
    (made,) = [each for each in _codes(compile(tree, path, "exec")) if each.co_qualname == mutant.function]
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            its = function.__code__
            if its.co_filename == path and its.co_qualname == mutant.function:
                if its.co_freevars != made.co_freevars:  # a call of super() that is gone
                    made = made.replace(co_freevars=its.co_freevars)
                function.__code__ = made


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            if not constant.co_flags & 2:  # the body of a class
                yield from _codes(constant)


# -- lines that run ----------------------------------------------------------------------------------------------


def lines_run(folder: Path, call: Callable[[], object]) -> set[tuple[str, int]]:
    """Call something, and return the path and the number of each line of a folder that it ran."""
    lines: set[tuple[str, int]] = set()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line(frame, event, _) if frame.f_code.co_filename.startswith(str(folder)) else None

    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


# -- schedules ---------------------------------------------------------------------------------------------------


REFUSED = -1
"""A configuration that is not accepted has no schedule."""


class Schedule:
    """Watches a run and keeps what it decides."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def added(self, request: Any) -> None:
        """Called when a request arrives."""

    def scheduled(self, run: Run, batch: Any) -> None:
        """Keep the chunks with their block tables, the queues, and who was preempted."""
        chunks = [
            (each.request_id, each.start, each.num_tokens, each.drafts, each.samples, str(each.request.block_tables))
            for each in batch.chunks
        ]
        self.steps.append((chunks, batch.running, batch.waiting, batch.preempted, batch.free_blocks))

    def updated(self, run: Run, plan: Any, latest: Any, ended: Any) -> None:
        """Keep the ends."""
        self.steps.append((sorted(ended.items()), latest.free_blocks_end))

    def proposed(self, drafts: Any) -> None:
        """Called when the scheduler has been given the drafts of the next step."""


def schedule(target: Target, workload: dict[str, Any]) -> int:
    """A number that stands for the schedule of a workload; REFUSED without one."""
    watch = Schedule()
    try:
        scheduler = target.make(workload["config"])
    except ValueError:
        return REFUSED
    except Exception as problem:
        return hash(type(problem).__name__)
    try:
        with time_limit():
            end = Run(scheduler, workload, watch).drive(MAX_STEPS)
    except Exception as problem:
        end = type(problem).__name__
    return hash((end, repr(watch.steps)))


def workloads(target: Target) -> list[dict[str, Any]]:
    """The random workloads that tell mutants from the original."""
    rng = random.Random(SEED)
    return [make_workload(rng.randbytes(WORKLOAD_BYTES), target.features) for _ in range(NUM_WORKLOADS)]


class _First(BaseException):
    """Ends a search at its first fault; Hypothesis lets it through."""


class FirstFault(Search):
    """A search that stops when it has seen a fault, with a limit of processor time."""

    @property
    def elapsed(self) -> float:
        """Processor time since the start."""
        return time.process_time() - self._began

    def _try(self, workload: dict[str, Any]) -> _Interesting | None:
        if (problem := super()._try(workload)) is not None:
            raise _First(problem)
        return None


TARGETS = {"": find_target("workbench")}
TARGETS |= {name: find_target("workbench", f"workbench.scheduler.policies:{name}") for name in POLICIES}
WORKLOADS: list[dict[str, Any]] = []
ORIGINAL: dict[str, list[int]] = {}
LINES: dict[int, int] = {}
"""Lines of scheduler/ that the first workloads reach, by their number."""


def policies_of(mutant: Mutant) -> list[str]:
    """The policies under which a mutant is looked at; "" stands for vLLM's rules."""
    return list(POLICIES) if mutant.file in ("policy.py", "policies.py") else [""]


def examine(given: tuple[Mutant, ast.Module, float]) -> dict[str, Any]:
    """Plant a mutant in this process, compare its schedules, and hunt it."""
    mutant, tree, seconds = given
    plant(mutant, tree)
    result: dict[str, Any] = {**mutant._asdict(), "differs_after": None, "found": None}
    names = policies_of(mutant)
    for place, workload in enumerate(WORKLOADS):
        made = [(schedule(TARGETS[name], workload), ORIGINAL[name][place]) for name in names]
        if any(mine == REFUSED != its for mine, its in made):
            return result | {"refuses": True}
        if any(mine != its for mine, its in made):
            result["differs_after"] = place + 1
            break
    else:
        return result
    began, tried = time.process_time(), 0
    for name in names:
        search = FirstFault(TARGETS[name], seconds / len(names), seed=SEED)
        try:
            search.run()
        except _First as first:
            fault = first.args[0].fault
            result["found"] = {"law": fault.law, "place": fault.place, "message": fault.message}
        tried += search.num_workloads
        if result["found"]:
            break
    return result | {"workloads": tried, "cpu_seconds": round(time.process_time() - began, 2)}


def chosen(files: list[str], per_function: int) -> tuple[list[tuple[Mutant, ast.Module]], list[str]]:
    """The mutants, and the functions that no workload reaches."""
    reached: set[tuple[str, int]] = set()
    for name in TARGETS:
        for number, workload in enumerate(WORKLOADS[:: 1 if not name else 10], 1):
            reached |= lines_run(FOLDER, lambda n=name, w=workload: schedule(TARGETS[n], w))
            if not name and number in (10, 30, 100, 300, 1000):
                LINES[number] = len(reached)
    rng, made, never = random.Random(SEED), [], []
    for path in sorted(FOLDER.glob("*.py")):
        if path.name in NOT_SCHEDULING or (files and path.name not in files):
            continue
        by_function: dict[str, list[tuple[Mutant, Any]]] = {}
        for mutant, tree in mutants_of(path):
            by_function.setdefault(mutant.function, []).append((mutant, tree))
        for function, its in by_function.items():
            its = [each for each in its if (str(path), each[0].line) in reached]
            if not its:
                never.append(f"{path.name} {function}")
            made += [(mutant, tree()) for mutant, tree in rng.sample(its, min(per_function, len(its)))]
    return made, never


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts, and the latest result of each mutant."""
    latest = {identity(each): each for each in results}.values()
    differ = [each for each in latest if each["differs_after"] is not None]
    return {
        "num_mutants": len(latest),
        "num_that_differ": len(differ),
        "num_found": sum(each["found"] is not None for each in differ),
        "mutants": sorted(latest, key=lambda each: (each["file"], each["line"])),
    }


def identity(mutant: Mapping[str, Any]) -> tuple[Any, ...]:
    """A change without its line, which other changes of the file move."""
    return tuple(mutant[name] for name in ("file", "function", "kind", "before", "after"))


def main() -> None:
    """Make the mutants, and hunt each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--per-function", type=int, default=1)
    parser.add_argument("--files", default="", help="names of files in scheduler/, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--every", type=int, default=1, help="take every n-th mutant")
    parser.add_argument("--again", type=Path, help="an earlier result: hunt those that were not found")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    logging.disable()  # a policy that fails says so in every step
    WORKLOADS.extend(workloads(TARGETS[""]))
    results = []
    if arguments.again:
        earlier = json.loads(arguments.again.read_text())
        results = [each for each in earlier["mutants"] if each["found"] or each["differs_after"] is None]
        left = {identity(each): each["line"] for each in earlier["mutants"] if each not in results}
        made = [each for name in sorted({file for file, *_ in left}) for each in mutants_of(FOLDER / name)]
        nearest: dict[tuple[Any, ...], tuple[Mutant, Any]] = {}  # a function may have the same change twice
        for mutant, tree in sorted(made, key=lambda one: -abs(one[0].line - left.get(identity(one[0]._asdict()), 0))):
            nearest[identity(mutant._asdict())] = (mutant, tree)
        listed = [(mutant, tree()) for key, (mutant, tree) in nearest.items() if key in left]
        never = earlier["not_reached"]
    else:
        listed, never = chosen([name for name in arguments.files.split(",") if name], arguments.per_function)
    for name, target in TARGETS.items():
        ORIGINAL[name] = [schedule(target, workload) for workload in WORKLOADS]
    with multiprocessing.get_context("fork").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        given = [(mutant, tree, arguments.seconds) for mutant, tree in listed[:: arguments.every]]
        for result in pool.imap_unordered(examine, given, chunksize=1):
            results.append(result)
            said = (
                "refuses"
                if result.get("refuses")
                else "same schedules"
                if result["differs_after"] is None
                else "NOT FOUND"
            )
            if found := result["found"]:
                said = f"{found['law']} after {result['workloads']}, {result['cpu_seconds']} s: {found['place']}"
            print(Mutant(*[result[name] for name in Mutant._fields]), "->", said, flush=True)
            told = summary(results) | {"not_reached": never, "lines_reached": LINES or earlier["lines_reached"]}
            if arguments.out:  # after each, so that a run that is stopped leaves what it has
                arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    print("{num_mutants} mutants, {num_that_differ} differ, {num_found} are found".format(**summary(results)))
    print(Counter(each["found"]["law"] for each in results if each["found"]))


if __name__ == "__main__":
    main()
