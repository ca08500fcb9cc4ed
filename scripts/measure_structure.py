"""Measure the code that one step runs through, and the links between the files.

Makes the table of docs/architecture.md:

- files and lines entered in one step: every Python function of the package that one call of ``Engine.step()`` runs, on
  whichever thread, counted whole (signature, docstring, body). In the step a prompt arrives and is admitted, a request
  decodes, and another ends; the model runs on the CPU. ``kernels/``, ``models/`` and ``viz/`` are left out, and so is
  the handover to the engine's thread.
- lines of code among them that name an optional feature, by FEATURE_WORDS, comments left out. In this step every
  feature is off.
- calls from ``Engine.step()`` to ``Scheduler.schedule()``, without those that hand work to the engine's thread.
- lines of code that schedule by vLLM's rules: without blank lines, comments and docstrings, and without policies and
  the limits on concurrent partial prefills, which vLLM does not have.
- modules and lines of the package that importing the scheduler loads.
- circles: groups of files that import each other in a loop, at run time or for types alone.
- places of six or more lines that occur twice: maximal runs of equal lines of code in two places of the package,
  imports and lines without letters left out.
- rooms whose code, comments and docstrings left out, has a word for drafts or for KV cache groups.

    python scripts/measure_structure.py --verbose  # of this checkout, with names
    python scripts/measure_structure.py --write    # write the table
    python scripts/measure_structure.py --check    # fail if the table is not current, or a limit exceeded
    PYTHONPATH=OTHER python scripts/measure_structure.py --root OTHER
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MIN_REPEATED_LINES = 6
LEFT_OUT = ("kernels", "models", "viz")
"""Rooms that are not needed to follow a step."""
NOT_VLLMS_RULES = {"policies", "policy", "partial_prefills", "second_tier"}
HOP = {"call", "submit"}
"""Functions that hand work to the engine's thread."""
HANDOVER = "thread.py"
"""The file of these functions, which is not counted."""
MAX_FILES, MAX_LINES = 16, 1150
"""Limits on the files and lines entered in one step."""
MAX_FEATURE_LINES = 60
"""Limit on the lines of code of a step that name an optional feature."""
FEATURE_WORDS = {
    "drafts": r"draft|specul|placeholder|verif|padd|lookahead|ahead\b",
    "asynchronous steps": r"async|in_flight|placeholder|stale|steps_ahead",
    "KV cache groups": r"group|by_group|removed|fresh|rests_inside",
    "recurrent states": r"_states|has_states|kept\b|state_bound",
    "grammars": r"grammar|mask|refused|overtak|obstacle",
    "adapters": r"adapter",
    "partial prefills": r"partial_prefill|\blimits\b|long_prompt",
    "requests that starve": r"frugal|starving|as_vllm",
    "eviction and the second tier": r"eviction|tier|loads",
    "log-probabilities of prompts": r"prompt_logprob|num_prompt_rows",
    "looking at a step": r"stops_at_layers|shadow|top_tokens|supplement|taps|watched",
    "policies": r"policy",
}
"""The words of each feature that a plain step does not need."""
OPTIONAL_MODULES = (
    *(f"workbench.scheduler.{name}" for name in ("cache_groups", "sliding_window", "recurrent_state", "eviction")),
    *(f"workbench.scheduler.{name}" for name in ("partial_prefills", "second_tier", "state_boundaries", "draft_rows")),
    *(f"workbench.scheduler.{name}" for name in ("obstacles", "in_flight", "flight", "outputs", "starvation")),
    *(f"workbench.scheduler.{name}" for name in ("policies", "fairness", "checked")),
    *(f"workbench.engine.{name}" for name in ("async_step", "grammar", "keeping", "prompt_logprobs", "shadow")),
    *("workbench.engine.speculation", "workbench.engine.forward.stopping", "workbench.engine.replay"),
)
"""Modules of these features, and packages: a plain step runs if importing any of them raises. `scheduler.policy` is
not among them, because the head of every trace says which policy is in force, nor is `models.adapters`: adapters change
the layers of a model when it is loaded."""
MAX_MODULES, MAX_MODULE_LINES = 20, 4500
"""Limits on the modules that importing the scheduler loads, and on their lines."""
DRAFT_WORDS = ("draft", "speculat")
GROUP_WORDS = ("cache_group", "cachegroup", "kv_group", "by_group", "of_group")
PAGE = "docs/architecture.md"
HEADING = "## How much a reader meets"

Table = dict[str, int]
"""A number for each row of the table."""


def step_path(root: Path) -> tuple[dict[str, dict[str, set[int]]], list[str]]:
    """Lines of the functions entered in one step, by file and function, and the calls from step() to schedule()."""
    from workbench import Engine, EngineConfig

    entered: set[CodeType] = set()
    way: list[str] = []

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(root / "workbench")):
            return
        entered.add(code)
        if code.co_qualname == "Scheduler.schedule" and not way:
            while frame is not None:
                if frame.f_code.co_filename.startswith(str(root / "workbench")):
                    way.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back

    with Engine("smollm2", EngineConfig(max_num_batched_tokens=64, num_blocks=64), wait_for_compiled=True) as engine:
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
    lines: dict[str, dict[str, set[int]]] = defaultdict(dict)
    for code in entered:
        if code.co_name == "<module>":
            continue
        file = str(Path(code.co_filename).relative_to(root))
        if file.split("/")[1] in LEFT_OUT or file.endswith(f"engine/{HANDOVER}"):
            continue
        source, first = inspect.getsourcelines(code)
        lines[file].setdefault(code.co_qualname, set()).update(range(first, first + len(source)))
    way.append("engine.py:step")  # on the caller's thread
    way.reverse()
    return lines, [call for call in way if not _is_hop(call)]


def _is_hop(call: str) -> bool:
    file, _, name = call.partition(":")
    return file in ("thread.py", "engine_thread.py") and name in HOP | {"_work_through", "work_through"}


@cache
def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def lines_of_code(path: Path) -> set[int]:
    """Line numbers of code, without blank lines, comments and docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in _tokens(path):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def feature_lines(root: Path, entered: dict[str, set[int]]) -> dict[str, dict[int, list[str]]]:
    """By file and line the features that the code of a line names, among the lines entered in a step."""
    found: dict[str, dict[int, list[str]]] = {}
    for file, lines in entered.items():
        text = (root / file).read_text().splitlines()
        for token in _tokens(root / file):
            if token.type == tokenize.COMMENT:
                text[token.start[0] - 1] = text[token.start[0] - 1][: token.start[1]]
        for line in sorted(lines & lines_of_code(root / file)):
            if names := [name for name, words in FEATURE_WORDS.items() if re.search(words, text[line - 1])]:
                found.setdefault(file, {})[line] = names
    return found


def check_features(found: dict[str, dict[int, list[str]]]) -> None:
    """Exit with a message if more lines of a plain step name a feature than are allowed."""
    number = sum(map(len, found.values()))
    if number > MAX_FEATURE_LINES:
        most = max(found, key=lambda file: len(found[file]))
        sys.exit(
            f"{number} lines of code of a plain step name an optional feature, allowed are {MAX_FEATURE_LINES}; {most} "
            "has most of them: see scripts/measure_structure.py --verbose, and make them a link of scheduler/chain.py "
            "or a part of engine/stages.py"
        )


def import_graph(root: Path, *, type_only: bool) -> dict[str, set[str]]:
    """The modules of the package and their imports from it, those for types alone included when asked.

    ``__init__`` files are left out: a name that one re-exports is an import of the module that has it.
    """
    paths = {".".join(path.relative_to(root).with_suffix("").parts): path for path in _sources(root)}
    bodies = {name.removesuffix(".__init__"): _tree(path).body for name, path in paths.items()}
    packages = {name.removesuffix(".__init__") for name in paths if name.endswith(".__init__")}
    homes = {(package, name): home for package in packages for home, name in _imports(bodies[package], True)}
    graph: dict[str, set[str]] = {}
    for module in bodies.keys() - packages:
        graph[module] = set()
        for home, name in _imports(bodies[module], type_only):
            while home in packages and f"{home}.{name}" not in bodies:
                home = homes.get((home, name), "")
            target = f"{home}.{name}" if home in packages else home
            if target in bodies and target not in {*packages, module}:
                graph[module].add(target)
    return graph


def _sources(root: Path) -> list[Path]:
    return sorted(root.glob("workbench/**/*.py"))


def _imports(body: list[ast.stmt], type_only: bool) -> Iterator[tuple[str, str]]:
    """The module and the name of each import; the name of an imported module is ""."""
    for node in body:
        if not type_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        for part in ("body", "orelse", "finalbody"):
            yield from _imports(getattr(node, part, []), type_only)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
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
    for path in _sources(root):
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


def loaded_by_scheduler(root: Path) -> tuple[int, int]:
    """Modules of the package that importing the scheduler loads, and their lines."""
    command = (
        "import sys, workbench.scheduler.scheduler;"
        "ours = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'workbench'];"
        "print(len(ours), sum(open(file).read().count('\\n') for file in ours))"
    )
    printed = subprocess.run([sys.executable, "-c", command], cwd=root, capture_output=True, text=True, check=True)
    modules, lines = printed.stdout.split()
    return int(modules), int(lines)


def rooms_that_name(root: Path, words: tuple[str, ...]) -> dict[str, int]:
    """Rooms whose code has one of the words, and how often."""
    found: dict[str, int] = defaultdict(int)
    for path in _sources(root):
        code, room = lines_of_code(path), path.relative_to(root).parts[1]
        for token in _tokens(path):
            if token.type != tokenize.COMMENT and token.start[0] in code:
                found[room] += any(word in token.string.lower() for word in words)
    return {room: count for room, count in found.items() if count}


def write_table(page: str, table: Table) -> str:
    """The page with the numbers in the last column of its table; a new row has no earlier numbers."""
    head, heading, rest = page.partition(HEADING)
    lines = rest.split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    cells = {line.split("|")[1].strip(): line.split("|")[2:-2] for line in lines[first + 2 : last]}
    earlier = [" - "] * (lines[first].count("|") - 3)
    rows = [f"| {label} |{'|'.join(cells.get(label, earlier))}| {value:,} |" for label, value in table.items()]
    return head + heading + "\n".join([*lines[: first + 2], *rows, *lines[last:]])


def main() -> None:
    """Measure, and print, write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    parser.add_argument("--rules", type=Path, nargs="+", help="files that schedule, if there is no scheduler/")
    parser.add_argument(
        "--verbose", action="store_true", help="name files, functions, calls, circles, places and rooms"
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    parser.add_argument("--check", action="store_true", help=f"fail if {PAGE} is not current, or a limit exceeded")
    options = parser.parse_args()
    root = options.root.resolve()
    sys.path.insert(0, str(root))
    os.environ["WORKBENCH_DEVICE"] = "cpu"
    entered, way = step_path(root)
    of_files = {file: set().union(*functions.values()) for file, functions in sorted(entered.items())}
    of_features = feature_lines(root, of_files)
    if options.check:
        check_features(of_features)
    room = root / "workbench" / "scheduler"
    rules = options.rules or [path for path in room.glob("*.py") if path.stem not in NOT_VLLMS_RULES]
    loops, type_loops = (circles(import_graph(root, type_only=type_only)) for type_only in (False, True))
    twice = repeated_places(root)
    modules, module_lines = loaded_by_scheduler(root)
    drafts, groups = rooms_that_name(root, DRAFT_WORDS), rooms_that_name(root, GROUP_WORDS)
    num_files, num_lines = len(of_files), sum(map(len, of_files.values()))
    table: Table = {
        "files entered in one step": num_files,
        "lines entered in one step, docstrings included": num_lines,
        "lines entered in one step, code alone": sum(
            len(lines & lines_of_code(root / file)) for file, lines in of_files.items()
        ),
        "lines of code of a step that name an optional feature": sum(map(len, of_features.values())),
        "calls from `Engine.step()` to `Scheduler.schedule()`": len(way) - 1,
        "lines of code that schedule by vLLM's rules": sum(len(lines_of_code(path)) for path in rules),
        "modules of the package that importing the scheduler loads": modules,
        "lines of these modules": module_lines,
        "circles between files": len(loops),
        "circles between files, imports for types included": len(type_loops),
        "places of six or more lines that stand twice": len(twice),
        "rooms whose code names drafts": len(drafts),
        "rooms whose code names KV cache groups": len(groups),
    }
    page = root / PAGE
    if options.write:
        page.write_text(write_table(page.read_text(), table))
    for label, value in table.items():
        print(f"{label + ':':60} {value:6,}")
    if options.verbose:
        for file, lines in of_files.items():
            print(f"  {len(lines):4d} {file}")
            for name, of_function in sorted(entered[file].items()):
                print(f"       {len(of_function):4d} {name}")
        print("  " + " -> ".join(way))
        for file, lines_of_features in of_features.items():
            text = (root / file).read_text().splitlines()
            for line, names in lines_of_features.items():
                print(f"  feature: {file}:{line} {', '.join(names)}: {text[line - 1].strip()}")
        for loop in type_loops:
            print("  circle: " + ", ".join(loop) + ("" if loop in loops else " (with imports for types)"))
        for a, line_a, b, line_b, length in twice:
            print(f"  twice: {a}:{line_a} {b}:{line_b} ({length} lines)")
        for path in rules:
            print(f"  {len(lines_of_code(path)):4d} {path.name}")
        for words, rooms in ((DRAFT_WORDS, drafts), (GROUP_WORDS, groups)):
            print(f"  {', '.join(words)}: " + ", ".join(f"{name} ({count})" for name, count in rooms.items()))
    if options.check:
        if num_files > MAX_FILES or num_lines > MAX_LINES:
            sys.exit(
                f"a step enters {num_files} files and {num_lines} lines, allowed are {MAX_FILES} and {MAX_LINES}: "
                "see scripts/measure_structure.py --verbose, and shorten it"
            )
        if type_loops:
            sys.exit(f"these files import each other: {', '.join(type_loops[0])}: move what both need into a third")
        if modules > MAX_MODULES or module_lines > MAX_MODULE_LINES:
            sys.exit(
                f"importing the scheduler loads {modules} modules with {module_lines} lines, allowed are "
                f"{MAX_MODULES} and {MAX_MODULE_LINES}: see loaded_by_scheduler"
            )
        if write_table(page.read_text(), table) != page.read_text():
            sys.exit(f"the table of {PAGE} is not current: run scripts/measure_structure.py --write")


if __name__ == "__main__":
    main()
