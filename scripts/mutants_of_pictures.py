# ruff: noqa: E501 (tables of one line per panel)
"""Plant faults by rule in the code that draws pictures, and print the test that finds each.

    python scripts/mutants_of_pictures.py [--panel timeline] [--language JavaScript] [--each 4] [--list] [--again]

A rule is a way in which a picture could show something else than the record: an index one off, axes swapped, a
condition dropped, an id or a number of another space, the value of another step. Each rule is applied to every place of
a panel's code where it fits, and a draw with a fixed seed takes the same number of places from every panel. Faults that
change nothing that can be seen are listed with the reason in `EQUIVALENT`. The exit status is 1 if another fault is not
found.

Each fault that is found is written to `mutants_of_pictures.csv` at once, so that a run that was stopped continues where
it ended. A fault is planted again if its line has moved or changed, or if it was not found; with `--again`, each is.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mutants_by_tier import ROOT, copy_checkout

SEED = 20261128
PER_PANEL = 10
"""Number of faults that are drawn from the code of a panel in one language."""

TABLE = Path(__file__).with_suffix(".csv")
"""Panel, language, fault, and the test that found it."""

NO_TEST = "status "
"""Beginning of what is said of tests that ended without one that failed, as on a machine that is too busy."""

Edit = tuple[int, int, str]
"""From and to in a source, and the new text."""


class Panel(NamedTuple):
    """The code that draws a panel in one language; ``files`` below workbench/, with functions after a colon."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def language(self) -> str:
        """The language of the code."""
        return "JavaScript" if self.files[0].split(":")[0].endswith(".js") else "Python"


class Fault(NamedTuple):
    """A planted fault: the text from ``begin`` to ``end`` of a file becomes ``new``."""

    file: str
    begin: int
    end: int
    new: str
    rule: str

    def words(self, source: str) -> str:
        """The place and the change."""
        line, column = source.count("\n", 0, self.begin) + 1, self.begin - source.rfind("\n", 0, self.begin)
        old = " ".join(source[self.begin : self.end].split())
        return f"{self.file}:{line}:{column} [{self.rule}] {old!r} -> {' '.join(self.new.split())!r}"


JS, PLAY = "viz/js/", "apps/playground/page/"
NUMBERS = "tests/viz/test_numbers_that_were_wrong.py"
BATCHES, STEPS, POOL, WORDS, RUNS, PICTURES, ANSWERS = (
    f"tests/viz/test_marks_{name}.py"
    for name in ("of_batches", "of_steps", "of_the_pool", "of_words", "of_runs", "in_pictures", "in_answers")
)
DATA = "tests/viz/test_marks_as_data.py"
INSIDE, PLAYING = "tests/viz/test_marks_inside_a_step.py", "tests/viz/test_marks_of_the_playground.py"
PARTS, CLOCK = "tests/viz/test_parts_of_recordings.py", "tests/viz/test_one_clock_of_a_run.py"
TIMES = "tests/viz/test_times_of_axes.py"
PANELS = (
    Panel("timeline", (f"{JS}timeline.js",), (f"{STEPS}::test_timeline", STEPS, RUNS)),
    Panel("chunks", (f"{JS}gantt.js", f"{JS}gantt_row.js"), (f"{STEPS}::test_chunks", STEPS)),
    Panel("packed batch", (f"{JS}packed.js",), (f"{BATCHES}::test_packed_batch", BATCHES)),
    Panel("attention mask", (f"{JS}rectangle.js", f"{JS}geometry.js"), (f"{BATCHES}::test_attention_mask", BATCHES, POOL)),
    Panel("work list", (f"{JS}kernel.js", f"{JS}work.js"), (f"{BATCHES}::test_work_list", BATCHES)),
    Panel("KV pool", (f"{JS}pool.js", f"{JS}pool_history.js"), (POOL,)),
    Panel("block tables", (f"{JS}block_tables.js",), (f"{BATCHES}::test_block_tables", BATCHES)),
    Panel("texts", (f"{JS}texts.js",), (f"{WORDS}::test_texts", WORDS)),
    Panel("events", (f"{JS}events.js",), (f"{WORDS}::test_events", WORDS)),
    Panel("metrics", (f"{JS}metrics.js",), (f"{STEPS}::test_metrics", STEPS, WORDS)),
    Panel("compare", (f"{JS}compare.js", f"{JS}token_lanes.js"), (RUNS,)),
    Panel("incident", (f"{JS}incident.js", f"{JS}bins.js"), (RUNS, NUMBERS, PARTS, CLOCK)),
    Panel("numbers of a step", (f"{JS}words.js", f"{JS}phase_strip.js"), (f"{WORDS}::test_phases", WORDS, STEPS, BATCHES, PARTS)),
    Panel("cards", (f"{JS}inspector.js", f"{JS}way.js", f"{JS}explanation.js"), (WORDS, ANSWERS)),
    Panel("end card", (f"{JS}end_card.js",), (f"{WORDS}::test_the_card_at_the_end", NUMBERS, PARTS)),
    Panel("step axis", (f"{JS}step_axis.js", f"{JS}step_panel.js"), (STEPS, TIMES)),
    Panel("store", (f"{JS}store.js", f"{JS}request.js"), (WORDS, POOL, BATCHES, STEPS, NUMBERS, PARTS)),
    Panel("inside a step", (f"{JS}phase_box.js", f"{JS}candidates.js"), (INSIDE,)),
    Panel("attention weights", (f"{JS}weights.js",), (INSIDE,)),
    Panel("playground", (f"{PLAY}numbers.js",), (PLAYING,)),
    Panel("settings", (f"{PLAY}settings.js",), (PLAYING,)),
    Panel("arrivals", (f"{PLAY}arrivals.js",), (PLAYING,)),
    Panel("packed batch", ("viz/svg.py:packed_batch _ribbons _sequences _new_rows _describe", "viz/layout/packed_batch.py"), (PICTURES,)),
    Panel("attention mask", ("viz/svg.py:mask _span", "viz/layout/mask.py"), ("tests/viz/test_viz_static.py", PICTURES)),
    Panel("block tables", ("viz/svg.py:block_tables", "viz/layout/pool.py:block_table_rows filled cells"), (PICTURES, DATA)),
    Panel("timeline", ("viz/svg.py:timeline step_ticks", "viz/layout/timeline.py"), (PICTURES, "tests/viz/test_viz_static.py", DATA)),
    Panel("KV pool", ("viz/svg.py:pool", "viz/layout/pool.py:pool_image pool_columns pool_spans"), (PICTURES, DATA)),
    Panel("tables of a notebook", ("viz/reprs.py:step_html _chunks_table _span events_table trace_html _requests_table",), (PICTURES,)),
    Panel("Bokeh figure", ("viz/figures.py:metrics_figure token_columns latency_columns",), (f"{PICTURES}::test_bokeh_figure",)),
    Panel("fleet page", ("viz/layout/fleet.py", "viz/fleet_rows.py:fleet_svg fleet_svgs _drawn _area", "viz/fleet_page.py:fleet_html _now _row _lengths _most"), (ANSWERS, NUMBERS, DATA)),
    Panel("sentences", ("trace/readings/narrate.py",), (ANSWERS, "tests/ground/test_short_repr.py")),
    Panel("columns of live views", ("viz/layout/columns.py:_append append _append_chunks _latencies_of _num_table_changes _table_changes", "viz/layout/pool_changes.py"), (BATCHES, POOL, WORDS, STEPS)),
    Panel("inside a step", ("viz/phases.py", "viz/visible_step.py", "viz/layout/norms.py"), (INSIDE, "tests/viz/test_viz_control.py", DATA)),
    Panel("attention weights", ("viz/attention_weights.py:weights_facts _token_ids",), (INSIDE,)),
    Panel("comparison", ("viz/layout/comparison.py:comparison_facts verdict _most_blocks",), (ANSWERS,)),
    Panel("duel", ("viz/duel.py",), ("tests/viz/test_viz_duel.py",)),
    Panel("Pareto plot", ("viz/pareto.py:_paint _panel", "viz/layout/pareto.py", "viz/layout/axis.py"), ("tests/viz/test_marks_of_sweeps.py", "tests/viz/test_viz_static.py")),
    Panel("causes", ("viz/layout/explanation.py:explanation_facts _parts", "viz/layout/incident.py"), (ANSWERS, PICTURES)),
)  # fmt: skip

BESIDE_MARKS = {
    "constructor", "wheel", "drawLegend", "clicked", "needs", "changesPicture", "pointer", "toggleSort", "ask", "dropped",
    "tokenUnder", "resized", "setHeight", "layoutLabels", "hasRoomAtRight", "marginOf", "drawCellGrid", "drawGrid", "cancel",
    "__repr__", "_repr_html_", "_layout", "misses", "update", "placeCursor", "refuse", "drawNew", "close", "replay",
}  # fmt: skip
"""Functions that mark nothing: sizes, legends, and answers to a person's hand."""

PAIRS = (
    ("logical", "block"), ("q0", "start"), ("q1", "end"), ("start", "end"), ("num_running", "num_waiting"),
    ("prefill_tokens", "decode_tokens"), ("num_prefill_tokens", "num_decode_tokens"), ("free_blocks", "cached_blocks"),
    ("OWNED", "CACHED"), ("kv_start", "kv_end"), ("q_start", "kv_start"), ("q_start", "q_end"), ("drafts", "accepted"),
    ("cached", "recomputed"), ("num_prompt_tokens", "max_tokens"), ("clockStart", "clockEnd"), ("time", "end"),
    ("seq", "index"), ("owner", "references"), ("first", "last"), ("from", "to"), ("columns", "rows"), ("running", "waiting"),
    ("admitted", "resumed"), ("free_blocks", "free_blocks_end"), ("decode", "prefill"), ("num_tokens", "num_rows"),
    ("group", "index"), ("step", "number"), ("begin", "seconds"), ("ttft", "itl"), ("ttft_a", "ttft_b"), ("chunk", "step"),
    ("num_cached_tokens", "num_recomputed_tokens"), ("num_kv", "num_tokens"), ("first_position", "num_tokens"),
)  # fmt: skip
"""Ids and numbers that are easily taken for each other; the rule goes both ways."""

SWAPS: dict[str, list[str]] = defaultdict(list)
for _one, _other in PAIRS:
    SWAPS[_one].append(_other)
    SWAPS[_other].append(_one)


# -- Python ------------------------------------------------------------------------------------------------------------


def python_edits(source: str, names: set[str]) -> Iterator[tuple[str, Edit]]:
    """Rules applied to the functions of a Python source; with no names, to all of them."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def place(node: ast.AST) -> tuple[int, int]:
        spots = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        begin, end = (len(source.encode()[: starts[line - 1] + column].decode()) for line, column in spots)
        return begin, end

    def code(node: ast.AST) -> str:
        begin, end = place(node)
        return source[begin:end]

    def of(node: ast.AST, known: set[str]) -> Iterator[tuple[str, Edit]]:
        is_index = isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Constant, ast.UnaryOp))
        if is_index and not isinstance(getattr(node.slice, "value", 0), str):
            yield "index", (*place(node.slice), f"{code(node.slice)} + 1")
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and code(node.right) == "1":
            yield "index", (*place(node), code(node.left))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
            if other:
                yield "index", (*place(node), f"{code(node.left)} {other} {code(node.comparators[0])}")
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("_rect", "text", "range")
            and len(node.args) > 1
        ):
            first, second = node.args[:2]
            yield "axes", (place(first)[0], place(second)[1], f"{code(second)}, {code(first)}")
            if len(node.args) > 3 and getattr(node.func, "id", "") == "_rect":
                third, fourth = node.args[2:4]
                yield "axes", (place(third)[0], place(fourth)[1], f"{code(fourth)}, {code(third)}")
        if isinstance(node, (ast.If, ast.IfExp)):
            yield "condition", (*place(node.test), "True")
            yield "condition", (*place(node.test), "False")
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "condition", (*place(test), "True")
        if isinstance(node, ast.BoolOp):
            for kept in node.values[:2]:
                is_named = isinstance(kept, ast.NamedExpr)
                yield "condition", (*place(node), f"({code(kept)})" if is_named else code(kept))
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load) and name in SWAPS:
            end = place(node)[1]
            for other_name in SWAPS[name]:
                if isinstance(node, ast.Attribute) or other_name in known:
                    yield "space", (end - len(name), end, other_name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SWAPS:
            for other_name in SWAPS[node.value]:
                yield "space", (*place(node), repr(other_name))
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load) and name in ("step", "at"):
            yield "step", (*place(node), f"({code(node)} + 1)")
        if isinstance(node, ast.Call) and code(node.func) in ("record.block_table", "trace.pool_state"):
            yield "step", (*place(node.args[0]), f"max(0, {code(node.args[0])} - 1)")

    def visit(node: ast.AST, inside: bool, known: set[str]) -> Iterator[tuple[str, Edit]]:
        if isinstance(node, ast.FunctionDef):
            inside = inside or (node.name in names if names else node.name not in BESIDE_MARKS)
            known = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            known |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        if inside:
            yield from of(node, known)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside, known)

    yield from visit(tree, False, set())


# -- JavaScript ----------------------------------------------------------------------------------------------------------


def masked(source: str) -> str:
    """The source with a space for each character of comments, and with a "·" for those of texts."""
    result, stack, at = list(source), [], 0
    while at < len(source):
        rest = source[at : at + 2]
        if stack and stack[-1] == "`":
            if rest == "${":
                stack.append("{")
                at += 2
                continue
            if source[at] == "`":
                stack.pop()
            else:
                result[at] = "·"
                if source[at] == "\\":
                    at += 1
            at += 1
            continue
        if rest in ("//", "/*"):
            end = source.index("\n" if rest == "//" else "*/", at) + (0 if rest == "//" else 2)
            for spot in range(at, end):
                result[spot] = "\n" if source[spot] == "\n" else " "
            at = end
            continue
        if source[at] in "\"'":
            end = at + 1
            while source[end] != source[at]:
                end += 2 if source[end] == "\\" else 1
            for spot in range(at + 1, end):
                result[spot] = "·"
            at = end + 1
            continue
        if source[at] == "`":
            stack.append("`")
        elif source[at] == "{" and stack:
            stack.append("{")
        elif source[at] == "}" and stack:
            stack.pop()
        at += 1
    return "".join(result)


def arguments(code: str, opening: int) -> list[tuple[int, int]]:
    """From and to of each argument of a call whose bracket opens at ``opening``."""
    depth, begin, found = 0, opening + 1, []
    for at in range(opening, len(code)):
        if code[at] in "([{":
            depth += 1
        elif code[at] in ")]}":
            depth -= 1
            if depth == 0:
                return [*found, (begin, at)]
        elif code[at] == "," and depth == 1:
            found.append((begin, at))
            begin = at + 1
    return found


def functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Name, from and to of the functions and methods of a module, as deno's formatter indents them."""
    lines, at, name, begin, indent = code.splitlines(keepends=True), 0, "", 0, ""
    for line in lines:
        start = re.match(r"^(  |)(?:export )?(?:async )?(?:static )?(?:function |get |const )?(\w+)(?: = )?\(", line)
        if start and not name and not line.lstrip().startswith(("if", "for", "return", "while")):
            name, begin, indent = start[2], at, start[1]
            if line.rstrip().endswith(";"):
                yield name, begin, at + len(line)
                name = ""
        elif name and re.match(rf"^{indent}[}})\]]+[;,)]*$", line.rstrip()) and not line.rstrip().endswith("{"):
            yield name, begin, at + len(line)
            name = ""
        at += len(line)


CALLS = {
    r"\.fillRect\(": ((0, 1), (2, 3)),
    r"\.strokeRect\(": ((0, 1),),
    r"(?<![\w.])text\(": ((2, 3),),
    r"(?<![\w.])hatch\(": ((1, 2), (3, 4)),
    r"(?<![\w.])dashes\(": ((1, 2),),
    r"(?<![\w.])dot\(": ((1, 2),),
    r"(?<![\w.])requestLabel\(": ((3, 4),),
    r"(?<![\w.])formatRange\(": ((0, 1),),
    r"\.(?:lineTo|moveTo)\(": ((0, 1),),
}
"""Calls with places, and the arguments of them that are an x and a y, or a width and a height."""


def javascript_edits(source: str, names: set[str]) -> Iterator[tuple[str, Edit]]:
    """Rules applied to the functions of a JavaScript module; with no names, to all that mark something."""
    whole = masked(source)
    for name, begin, end in functions(whole):
        if name in names or (not names and name not in BESIDE_MARKS):
            body = whole[begin:end]
            for rule, (first, last, new) in _javascript_rules(body, source[begin:end]):
                yield rule, (begin + first, begin + last, new)


def _javascript_rules(body: str, text: str) -> Iterator[tuple[str, Edit]]:
    head = body.index("\n") if "{\n" in body else 0  # the line of a function's name has its parameters
    code = " " * head + body[head:]
    for found in re.finditer(r"(?<=[\w)\]])\[(\w+)\]", code):
        yield "index", (*found.span(1), f"{found[1]} + 1")
    for found in re.finditer(r" (<=|>=|<|>) ", code):
        other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}[found[1]]
        yield "index", (*found.span(1), other)
    for found in re.finditer(r" [+-] 1(?![\w.])", code):
        yield "index", (*found.span(), "")
    for call, pairs in CALLS.items():
        for found in re.finditer(call, code):
            places = arguments(code, found.end() - 1)
            for one, other in pairs:
                if other < len(places):
                    (a, b), (c, d) = places[one], places[other]
                    if text[a:b].strip() != text[c:d].strip():
                        yield "axes", (a, d, f"{text[c:d]}{text[b:c]}{text[a:b]}")
    for one, other in (("dx", "dy"), ("width", "height"), ("x", "y")):
        for word, twin in ((one, other), (other, one)):
            if not re.search(rf"(?<![\w.]){twin}\b", code):
                continue
            for found in re.finditer(rf"(?<=\* ){word}\b|(?<=/ ){word}\b", code):
                yield "axes", (*found.span(), twin)
    for found in re.finditer(r"\bif \(", code):
        ((a, b), *_) = arguments(code, found.end() - 1)
        yield "condition", (a, b, "true")
        yield "condition", (a, b, "false")
    for found in re.finditer(r" \? ", code):
        yield "condition", (*found.span(), " && false ? ")
    for found in re.finditer(r" && ", code):
        yield "condition", (*found.span(), " || ")
    for found in re.finditer(r" \|\| ", code):
        yield "condition", (*found.span(), " && ")
    for found in re.finditer(r"\.filter\(", code):
        ((a, b), *_) = arguments(code, found.end() - 1)
        yield "condition", (a, b, "() => true")
    for word, others in SWAPS.items():
        for found in re.finditer(rf"(?<=\.){word}\b(?!\()|(?<![\w.`]){word}\b(?![\w(:]| =>)", code):
            line = code[code.rfind("\n", 0, found.start()) + 1 : found.start()]
            if re.match(r"\s*(const|let|for) [^=]*$", line) or re.match(r" (=|of) ", code[found.end() :]):
                continue  # a declaration
            for other in others:
                if code[found.start() - 1] == "." or re.search(rf"(?<![\w.]){other}\b", code):
                    yield "space", (*found.span(), other)
        for found in re.finditer(rf'"(?:\w+\.)?({word})"', text[head:]):
            for other in others:
                yield "space", (head + found.start(1), head + found.end(1), other)
    for found in re.finditer(r"\bcursor\.step\b(?! =[^=])", code):
        yield "step", (*found.span(), f"Math.max(0, {found[0]} - 1)")
    for found in re.finditer(r"(?<=, )step(?=\))|(?<=\()step(?=[,)])(?! =>)", code):
        if not re.match(r"[,)][^\n]*(?:=>| \{\n)", code[found.end() :]):
            yield "step", (*found.span(), "Math.max(0, step - 1)")


# -- drawing and running --------------------------------------------------------------------------------------------------


def source_of(file: str) -> str:
    """The text of a file below workbench/."""
    return (ROOT / "workbench" / file).read_text(encoding="utf-8")


PARSE = """const sources = JSON.parse(await new Response(Deno.stdin.readable).text());
const parses = (source) => {
  try {
    new Function(source.replace(/^import [^;]*;$/gm, "").replace(/^export (default )?/gm, ""));
    return true;
  } catch {
    return false;
  }
};
console.log(JSON.stringify(sources.map(parses)));"""


def parse(sources: list[str]) -> list[bool]:
    """Whether JavaScript modules have no mistake in their syntax."""
    command = [Path(sys.executable).parent / "deno", "eval", PARSE]
    done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def all_faults(panel: Panel) -> list[Fault]:
    """Every fault that the rules make in the code of a panel and that does not break its syntax."""
    found = []
    for entry in panel.files:
        file, _, names = entry.partition(":")
        source, edits = source_of(file), python_edits if file.endswith(".py") else javascript_edits
        found += [Fault(file, *edit, rule) for rule, edit in edits(source, set(names.split()))]
    kept = {fault for fault in found if source_of(fault.file)[fault.begin : fault.end] != fault.new}
    faults = sorted(kept)
    if panel.language == "Python":
        return faults
    texts = [source_of(fault.file) for fault in faults]
    parsed = parse([text[: fault.begin] + fault.new + text[fault.end :] for fault, text in zip(faults, texts)])
    return [fault for fault, parses in zip(faults, parsed) if parses]


def drawn_faults(panel: Panel) -> list[Fault]:
    """A draw from the faults of a panel, with each rule about as often as the others."""
    rng = random.Random(f"{SEED} {panel.name} {panel.language}")
    by_rule: dict[str, list[Fault]] = defaultdict(list)
    for fault in all_faults(panel):
        by_rule[fault.rule].append(fault)
    for rule in sorted(by_rule):
        rng.shuffle(by_rule[rule])
    chosen: list[Fault] = []
    while len(chosen) < PER_PANEL and any(by_rule.values()):
        for rule in sorted(by_rule):
            if by_rule[rule] and len(chosen) < PER_PANEL:
                chosen.append(by_rule[rule].pop())
    return chosen


EXACT = "it differs at one exact size in pixels only, where a label or a line just fits"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("viz/js/events.js", "atEnd = cursor.step === cursor.last;", "first"): "the list is filled again if an event of it differs",
    ("viz/js/events.js", "atEnd = cursor.step === cursor.last;", "Math.max(0, cursor.step - 1)"):
        "the list is filled again if an event of it differs",
    ("viz/js/way.js", "(seconds ?? 0) < NO_WAIT_SECONDS", "<="): "it differs at one exact number of seconds only",
    ("viz/js/timeline.js", "if (axis.last <= axis.first) return;", "<"): "an axis has a step",
    ("viz/js/timeline.js", "if (middle >= axis.x0 && middle <= axis.x1 + 1)", "<"): EXACT,
    ("viz/js/gantt_row.js", "if (chunk.decode && chunk.drafts && width > 4) {", ">="): EXACT,
    ("viz/js/packed.js", "if (row >= 12) this.drawBlockTicks(", ">"): "no number of rows makes them 12 pixels high",
    ("viz/js/rectangle.js", "if (dx >= 6 && dy >= 6) this.drawCellGrid(", ">"): EXACT,
    ("viz/js/rectangle.js", "if (chunk.n > 1 && chunk.n * dy > 24) labelRow(", ">="): EXACT,
    ("viz/js/kernel.js", "readable = this.row >= 9;", ">"): "no number of items makes their rows 9 pixels high",
    ("viz/js/pool.js", "(next < 0 || freed[block] < freed[next])", "<="): "no block is 0, and no two are freed at once",
    ("viz/js/block_tables.js", "return this.cell - (this.cell > 8 ? 2 : 1);", ">="): EXACT,
    ("viz/js/block_tables.js", "(longest * 4 > this.width - LEFT - 54 ? 84 : 54)", ">="): EXACT,
    ("viz/js/incident.js", "Math.abs(axis.x(stall.time) - x) <= 4", "<"): EXACT,
    ("viz/js/metrics.js", "for (let step = first; step < axis.last; step += stride) {", "<="): "a bar without steps has no value",
    ("viz/js/step_axis.js", "if (x > this.end(n - 1) + 4) return -1;", ">="): EXACT,
    ("viz/js/step_axis.js", "return this.xOfTime(step < n ? ", "clockStart"): "nobody asks for the time behind the last step",
    ("viz/js/step_axis.js", "const next = step + 1 < n ? ", "<="): "nobody asks for the time behind the last step",
    ("apps/playground/page/arrivals.js", "for (let length = 10; length < this.top; length *= 10) {", "<="):
        "the top is 1.3 times a whole number, and no power of ten is",
    ("apps/playground/page/arrivals.js", "if (distance < least) [best, least] = ", "<="):
        "either of two dots at one place may be taken",
    ("viz/svg.py", "if x >= free_from and x + 6 * len(label) <= free_to:", "x + 6 * len(label) < free_to"): EXACT,
    ("viz/svg.py", "if x >= free_from and x + 6 * len(label) <= free_to:", "x > free_from"): EXACT,
    ("viz/fleet_rows.py", "if x + 18 + 6 * len(word) > width and x > LEFT:", "x + 18 + 6 * len(word) >= width"): EXACT,
    ("viz/layout/packed_batch.py", "if total <= 0:", "False"): "a batch without rows has no picture",
    ("viz/layout/axis.py", "if len(self.ticks) > 1 else self.end", "q1"): "an axis of time has two ticks or more",
    ("viz/js/step_panel.js", "if (grown && this.drawnSteps > 0)", ">="): "the first steps change the scale of every panel",
    ("viz/js/step_panel.js", "|| x > axis.x1 + 1;", ""): EXACT,
    ("viz/js/step_panel.js", "const frame = mayFrame && width >= 5;", ">"): EXACT,
    ("viz/js/store.js", "if (ids.length !== (lengths.at(-1)?.[1] ?? 0)) lengths.push(", "true"):
        "the length of a table is entered again for a step in which it stays",
    ("viz/js/phase_strip.js", "(end) => end <= phase.begin + rounding)", "<"): "no phase ends at that very moment",
    ("viz/js/candidates.js", "share < 0.001", "<="): "no probability is one in a thousand to the last bit",
    ("viz/js/weights.js", "if (signature === this.signature) return;", "false"): "the same words are written again",
    ("viz/js/weights.js", "JSON.stringify([capture?.step, capture?.sequences])", "number"):
        "the rows of two steps with the same sequences have the same names",
    ("viz/js/weights.js", "JSON.stringify([capture?.step, capture?.sequences])", "chunk"):
        "the rows of two steps with the same sequences have the same names",
    ("viz/reprs.py", "if chunk.accepted:", "True"): "a chunk without tokens has no text either",
    ("viz/phases.py", "probabilities is not None and index < len(probabilities)", "index <= len(probabilities)"):
        "behind the last draft there is none to look up",
    ("viz/duel.py", "SIDES[(of_b < of_a)", "of_b <= of_a"): "equal values are a tie",
    ("viz/layout/axis.py", "if high - low < 1e-9", "high - low <= 1e-9 * max(1.0, abs(high))"): "no span is a billionth of its value to the last bit",
    ("viz/js/texts.js", "again = first !== card.first || count < card.count", "<="):
        "a card that nobody points at reads the same with an element for each token and without",
    ("viz/js/compare.js", "if (this.timed || x < LEFT || y > TOP + MIRROR) return null;", "<="): EXACT,
    ("viz/js/end_card.js", "for (let c = 0; c < end; c++) {", "<="): "there is no first token behind the last chunk",
}  # fmt: skip
"""Faults that change nothing that can be seen: file, a part of the line, the new text, and the reason."""


def reason_of(fault: Fault) -> str:
    """Why a fault changes nothing; "" if it changes something."""
    source = source_of(fault.file)
    line = source[source.rfind("\n", 0, fault.begin) + 1 : source.index("\n", fault.end)]
    found = [
        why for (file, part, new), why in EQUIVALENT.items() if (file, new) == (fault.file, fault.new) and part in line
    ]
    return found[0] if found else ""


SERVER = """
import io, json, os, signal, sys
from contextlib import redirect_stdout, redirect_stderr
sys.path.insert(0, "tests/support")
import pytest, numpy
with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
    pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "tests/viz/test_viz_palette.py"])
from runs_to_draw import RUNS, run
for name in RUNS:
    run(name)
print("ready", flush=True)
for line in sys.stdin:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.dup2(writer, 1), os.dup2(writer, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(240)
        for name in list(sys.modules):
            if name.startswith(("workbench.viz", "workbench.trace.readings.narrate", "test_", "conftest", "tests")):
                del sys.modules[name]
        os._exit(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *json.loads(line)]))
    os.close(writer)
    with open(reader, "rb") as output:
        said = output.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, said]), flush=True)
"""
"""Runs tests in forks of a process that has imported all but the code of the views."""


class Finder:
    """Finds the test that fails with a fault, in a copy of the checkout."""

    def __init__(self, root: Path) -> None:
        copy_checkout(root)
        self._root = root
        command = [sys.executable, "-c", SERVER]
        self._server = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        assert self._server.stdout
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        return line

    def tests_fail(self, tests: Sequence[str]) -> str:
        """The first of these tests that fails; "" if none does."""
        assert self._server.stdin
        self._server.stdin.write(json.dumps(list(tests)) + "\n")
        self._server.stdin.flush()
        status, said = json.loads(self._answer())
        if status == 0:
            return ""
        lines = said.splitlines()
        return next((line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))), f"{NO_TEST}{status}")

    def find(self, fault: Fault, panel: Panel) -> str:
        """The first test that fails with a fault; "" if none does."""
        path, text = self._root / "workbench" / fault.file, source_of(fault.file)
        path.write_text(text[: fault.begin] + fault.new + text[fault.end :], encoding="utf-8")
        try:
            return self.tests_fail(panel.tests)
        finally:
            path.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """End the process."""
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(timeout=60)


class Table:
    """The faults that were found, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, str, str], str] = {}
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                self.rows = {(panel, language, words): test for panel, language, words, test in csv.reader(file)}

    def add(self, key: tuple[str, str, str], test: str) -> None:
        """Write a fault that was found."""
        self.rows[key] = test
        self.write(set(self.rows))

    def write(self, keys: set[tuple[str, str, str]]) -> None:
        """Write these faults in order, and forget all others."""
        self.rows = {key: self.rows[key] for key in sorted(keys & set(self.rows))}
        with self._path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((*key, test) for key, test in self.rows.items())


def run(chosen: Sequence[Panel], each: int, table: Table) -> int:
    """Plant the faults that are not in the table yet, and print a line for each and the sums."""
    counts: dict[Panel, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        finder: Finder | None = None
        for panel in chosen:
            counts[panel], is_checked = Counter(), False
            for fault in drawn_faults(panel)[:each]:
                words, why = fault.words(source_of(fault.file)), reason_of(fault)
                key = panel.name, panel.language, words
                found = "" if why else table.rows.get(key, "")
                if not why and not found:
                    finder = finder or Finder(Path(folder))
                    if not is_checked and (failing := finder.tests_fail(panel.tests)):
                        raise SystemExit(f"{failing} fails without a fault")
                    is_checked = True
                    found = finder.find(fault, panel)
                    if found and not found.startswith(NO_TEST):
                        table.add(key, found)
                verdict = "found" if found else "equivalent" if why else "lost"
                verdict = "undecided" if found.startswith(NO_TEST) else verdict
                counts[panel][verdict] += 1
                print(f"{verdict:10} {panel.name}: {words}  {found or why}", flush=True)
        if finder:
            finder.close()
    print("| panel | language | faults | found | change nothing | not found |\n|---|---|---|---|---|---|")
    for panel, count in [*counts.items(), (None, sum(counts.values(), Counter()))]:
        name, language = (panel.name, panel.language) if panel else ("together", "")
        numbers = f"{count.total()} | {count['found']} | {count['equivalent']} | {count['lost']}"
        print(f"| {name} | {language} | {numbers} |")
    return int(any(count["lost"] for count in counts.values()))


def main() -> int:
    """Plant, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--panel", help="faults of one panel only")
    parser.add_argument("--language", choices=("JavaScript", "Python"), help="faults in one language only")
    parser.add_argument("--each", type=int, default=PER_PANEL, help="the first so many of the faults drawn for a panel")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--again", action="store_true", help="plant those that are in the table, too")
    options = parser.parse_args()
    chosen = [
        panel for panel in PANELS if options.panel in (None, panel.name) and options.language in (None, panel.language)
    ]
    if options.list:
        for panel in chosen:
            for fault in drawn_faults(panel)[: options.each]:
                print(f"{panel.name}: {fault.words(source_of(fault.file))}")
        return 0
    table = Table(TABLE)
    kept = [panel for panel in PANELS if not (options.again and panel in chosen)]
    table.write(
        {
            (panel.name, panel.language, fault.words(source_of(fault.file)))
            for panel in kept
            for fault in drawn_faults(panel)
        }
    )
    return run(chosen, options.each, table)


if __name__ == "__main__":
    sys.exit(main())
