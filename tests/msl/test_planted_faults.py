"""Lost barriers, indices one off, stale reads, planted by rule: a recording has each at its event, thread and line.

The first wrong access is found from the order of the events alone, by rules of a few lines: an element beyond its
array, threadgroup memory that nobody has written, two threads at one byte between two barriers.
"""

import re
import traceback
from collections import Counter, defaultdict
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from kernel_answers import RIGHT
from msl_runs import skip_without_compiler
from tiers import examples

from workbench import msl
from workbench.apps.course.puzzle_list import PUZZLES
from workbench.kernels.msl.recorded import BARRIER_PASSED, FAULT, NO_ARRAY, READS, SIMDGROUP_BARRIER, WRITES

skip_without_compiler()

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def planted(source):
    """The faults that the rules make in a kernel's body, as (rule, body)."""
    for found in re.finditer(re.escape(BARRIER), source):
        rest = source[found.end() :]
        yield "lost barrier", source[: found.start()] + rest
        yield "weaker barrier", source[: found.start()] + BARRIER.replace("threadgroup", "simdgroup", 1) + rest
    for found in re.finditer(r"(?<!float )(?<![\w\]])\w+((?:\[[^\[\]]*\])+)", source):
        index = found.start(1), found.end(1)
        if re.search(r"threadgroup \w+ $", source[: found.start()]):
            continue  # a declaration
        for change in ("+ 1", "- 1"):
            inner = source[index[0] + 1 : index[1] - 1].replace("][", "] [")
            *outer, last = inner.split("] [")
            new = "".join(f"[{each}]" for each in [*outer, f"int({last}) {change}"])
            yield "one off", source[: index[0]] + new + source[index[1] :]
    lines = source.split("\n")
    for at, line in enumerate(lines[:-1]):
        if BARRIER in lines[at + 1] and "=" in line:
            yield "stale read", "\n".join([*lines[:at], lines[at + 1], line, *lines[at + 2 :]])


def record(name, body):
    puzzle = PUZZLES[name]
    case = puzzle.make(np.random.default_rng(0), 0)
    kernel = msl.metal_kernel(name, list(case.inputs), list(case.expected), body, header=puzzle.header)
    groups = int(np.prod([-(-threads // size) for threads, size in zip(case.grid, case.threadgroup)]))
    return kernel.record(
        inputs=[mx.array(array) for array in case.inputs.values()],
        output_shapes=[array.shape for array in case.expected.values()],
        output_dtypes=[mx.array(array.flat[:1]).dtype for array in case.expected.values()],
        grid=case.grid,
        threadgroup=case.threadgroup,
        template=list(case.template.items()),
        threadgroups=groups,
        time_limit=20,
    )


def first_wrong(run):
    """The first wrong access of a recording: its event, what is wrong, and the access before it that it races with."""
    epochs = defaultdict(int)  # barriers that a threadgroup, or a simdgroup of it, has passed
    writer, readers = {}, defaultdict(list)
    for number, event in enumerate(run.events):
        group, thread, kind = int(event["group"]), int(event["thread"]), int(event["kind"])
        if kind == BARRIER_PASSED:
            epochs[group] += 1
        elif kind == SIMDGROUP_BARRIER:
            epochs[group, thread // 32] += 1
        if kind not in (*READS, *WRITES) or event["array"] == NO_ARRAY:
            continue
        array = run.arrays[event["array"]]
        begin, end = int(event["offset"]), int(event["offset"]) + int(event["bytes"])
        if begin < 0 or end > array.num_bytes:
            return number, "beyond its array", None
        if array.role not in ("threadgroup", "output"):
            continue
        now = epochs[group], epochs[group, thread // 32]
        for byte in range(begin, end):
            place = event["array"], byte, group if array.role == "threadgroup" else None
            before = [writer[place]] if place in writer else []
            if not before and kind in READS:
                return number, "never written", None
            before += readers[place] if kind in WRITES else []
            for other, its_group, its_thread, (barriers, own_barriers) in reversed(before):
                near = its_thread // 32 == thread // 32 and its_group == group
                ordered = its_group == group and (barriers < now[0] or (near and own_barriers < now[1]))
                if (its_group, its_thread) != (group, thread) and not ordered:
                    return number, "race", other
            entry = number, group, thread, now
            if kind in WRITES:
                writer[place], readers[place] = entry, []
            else:
                readers[place].append(entry)
    return None


KINDS = {
    "beyond its array": {"out of bounds", "threadgroup out of bounds", "array out of bounds"},
    "never written": {"threadgroup uninitialised", "output read before written"},
    "race": {"threadgroup race", "device race"},
}


def check(name, body):
    """Compare a recording with a fault against its events; "" if the body has no fault, only other numbers."""
    run = record(name, body)
    found, fault = first_wrong(run), run.fault
    if fault is None or fault.event is None:
        assert found is None
        return ""
    line = run.texts[fault.file].split("\n")[fault.line - 1]
    assert fault.event == len(run.events) - 1 and run.events["kind"][-1] == FAULT
    assert run.place(fault.event).line == fault.line
    if fault.kind == "array out of bounds":  # told by the index alone, before there is an access
        assert found is None and int(run.events["thread"][-1]) == thread_outside(fault, line)
        return "beyond its array"
    access, wrong, earlier = found
    assert fault.kind in KINDS[wrong] and fault.event == access + 1
    assert all(run.events[column][access] == run.events[column][-1] for column in ("thread", "group"))
    assert run.place(access).line == fault.line
    array = run.arrays[run.events["array"][access]].name
    assert array in line or "row[" in line  # a pointer to a row of x
    if wrong == "race":
        assert fault.earlier == earlier
        assert array in run.texts[fault.earlier_file].split("\n")[fault.earlier_line - 1]
    return wrong


def thread_outside(fault, line):
    """The first thread whose planted index is the one that is told, which no array of that size has."""
    index, size = map(int, re.search(r"index (-?\d+) is outside .*\[(\d+)\]'", fault.message).groups())
    assert not 0 <= index < size
    planted_index = re.search(r"int\([^()]*\) [+-] 1", line)[0]
    for thread in range(1024):
        lane, simdgroup = thread % 32, thread // 32
        known = {"i": thread, "distance": 1, "place": SimpleNamespace(x=lane, y=simdgroup)}
        known |= {"simdgroup_index_in_threadgroup": simdgroup, "thread_index_in_simdgroup": lane}
        if eval(planted_index, {"__builtins__": {"int": int}}, known) == index:
            return thread
    return None


FAULTS = [(name, rule, body) for name in PUZZLES for rule, body in planted(RIGHT[name])]


def test_planted_faults_are_shown_at_their_events_threads_and_lines():
    """Of 162 changes, 141 are faults; the others change numbers only, such as an index one off within its array."""
    assert Counter(rule for _, rule, _ in FAULTS) == {
        "one off": 144, "lost barrier": 6, "weaker barrier": 6, "stale read": 6
    }  # fmt: skip
    one_off = [fault for fault in FAULTS if fault[1] == "one off"]
    if examples(len(one_off)) < len(one_off):  # one for each kernel, up and down in turns
        of_kernel = {name: [fault for fault in one_off if fault[0] == name] for name in PUZZLES}
        one_off = [faults[5 * number % len(faults)] for number, faults in enumerate(of_kernel.values())]
    chosen = one_off + [fault for fault in FAULTS if fault[1] != "one off"]
    assert {name for name, *_ in chosen} == set(PUZZLES)
    shown, problems = Counter(), []
    for name, rule, body in chosen:
        try:
            shown[check(name, body)] += 1
        except AssertionError as wrong:
            problems.append(f"{rule} in {name}, line {traceback.extract_tb(wrong.__traceback__)[-1].lineno}: {body}")
    assert not problems, "\n".join(problems)
    assert (shown.total(), shown.total() - shown[""]) in ((162, 141), (34, 33)) and set(shown) == {"", *KINDS}
