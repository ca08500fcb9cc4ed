"""The marks of a recorded kernel's page, as browsers compute them, against the events of the recording."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import Case, build
from msl_runs import skip_without_compiler
from pages_in_deno import DENO

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.msl.recorded import (
    BARRIER_PASSED,
    BARRIER_WAIT,
    FAULT,
    ITEMSIZE,
    READS,
    RETURN,
    SIMD_FUNCTION,
    SIMDGROUP_BARRIER,
    WATCH,
    WRITES,
    decoded,
)

skip_without_compiler()
if not DENO.exists():
    pytest.skip("deno is not installed, so the views' code cannot be run without a browser", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "support" / "kernel_run_in_deno.js"
DIVERGED = """
const uint i = thread_index_in_threadgroup;
threadgroup float shared[70];
float m = x[i];
if (i % 3 == 0) {
  shared[i] = m * 2;
} else {
  shared[i] = m;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint j = 0; j < i % 4; j++) m += shared[j];
m = simd_sum(m);
atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed);
if (i > 0) y[i] = int(m);
"""
RACE = """
const uint i = thread_index_in_threadgroup;
threadgroup float shared[70];
shared[i] = x[i];
y[i] = int(shared[69 - i]);
"""


def record(source, threadgroups=1, **options):
    kernel = msl.metal_kernel("k", ["x"], ["y"], source)
    x = mx.arange(140).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(140,)], "output_dtypes": [mx.int32], "threadgroup": (70, 1, 1)}
    return kernel.record(**launch, grid=(70, 1, 1), init_value=0, threadgroups=threadgroups, **options)


def attention(sequences=((9, 30), (1, 20))):
    runs = []

    def maker(**text):
        kernel = msl.metal_kernel(**text)

        def launch(**arguments):
            runs.append(kernel.record(**arguments, threadgroups=2, watch=["row.maximum"]))
            return runs[-1].outputs

        return launch

    batch = build(Case(sequences, 4, 2, 32, 8, "float16"))
    PagedVarlenKernels(maker).attend(*batch.inputs, batch.options)
    return runs[0]


RUNS = {
    "diverged": lambda: record(DIVERGED, watch=["m"]),
    "descending": lambda: record(DIVERGED, order=1),
    "race": lambda: record(RACE),
    "attention": attention,
}


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    return RUNS[request.param]()


@pytest.fixture
def ask(run, tmp_path):
    """A function that asks the page's code, with names of its functions and their arguments."""
    (tmp_path / "packet").write_bytes(run.packet())

    def ask(*questions):
        command = [str(DENO), "run", "--no-check", "--quiet", f"--allow-read={tmp_path}", str(SCRIPT)]
        done = subprocess.run(
            [*command, str(tmp_path / "packet")],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


def moments(run):
    return sorted({int(at) for at in np.linspace(0, len(run.instructions) - 1, 60)})


def events_until(run, now):
    """Events up to a moment, in the order of instructions, of its threadgroup and since the last barrier."""
    order = run.instructions.order[: run.instructions.starts[now + 1]]
    group = run.events["group"][order[-1]]
    order = order[run.events["group"][order] == group]
    passed = np.flatnonzero(run.events["kind"][order] == BARRIER_PASSED)
    return order, order[passed[-1] :] if len(passed) else order


# -- instructions ---------------------------------------------------------------------------------------------------


def test_instructions_hold_every_event_once_and_keep_each_lanes_order(run):
    order = run.instructions.order
    assert sorted(order.tolist()) == list(range(len(run.events)))
    for thread in set(run.events["thread"].tolist()):
        alone = ~np.isin(run.events["kind"], (SIMD_FUNCTION, SIMDGROUP_BARRIER, BARRIER_PASSED))
        own = [e for e in order.tolist() if run.events["thread"][e] == thread and alone[e]]
        assert own == sorted(own)


def test_the_lanes_of_an_instruction_are_at_one_place_of_one_simdgroup(run):
    instructions = run.instructions
    for number in range(len(instructions)):
        events = run.events[instructions.events(number)]
        assert len(set(events["site"].tolist())) == len(set(events["kind"].tolist())) == 1
        lanes = events["thread"] % 32
        assert len(set((events["thread"] // 32).tolist())) == 1 and len(set(lanes.tolist())) == len(lanes)
        if events["kind"][0] in (SIMD_FUNCTION, SIMDGROUP_BARRIER):
            assert instructions.active[number] == events["detail"][0]
        elif events["kind"][0] != BARRIER_PASSED:
            assert instructions.active[number] == sum(1 << int(lane) for lane in lanes)
            assert instructions.active[number] & ~instructions.existing[number] == 0


def test_a_branch_is_two_instructions_and_a_loop_one_for_each_turn():
    run = record(DIVERGED)
    by_line = Counter()
    for number in range(len(run.instructions)):
        event = int(run.instructions.events(number)[0])
        if run.events["thread"][event] < 32 and run.events["kind"][event] in (*READS, *WRITES):
            by_line[run.place(event).line] += 1
            if run.place(event).line in (6, 8):
                thirds = sum(1 << lane for lane in range(0, 32, 3))
                expected = thirds if run.place(event).line == 6 else 0xFFFFFFFF & ~thirds
                assert run.instructions.active[number] == expected
    assert by_line[4] == by_line[6] == by_line[8] == 1 and by_line[11] == 3


def test_lanes_meet_again_behind_a_branch():
    """The lanes that a branch leaves out wait for the others, so that all of them do what follows together."""
    source = (
        "const uint i = thread_index_in_threadgroup;\nint m = 0;\nif (i % 3 == 0) {\nm = int(x[i] * 2);\n}\ny[i] = m;"
    )
    run = record(source)
    lanes = {}
    for number in range(len(run.instructions)):
        event = int(run.instructions.events(number)[0])
        if run.events["thread"][event] < 32:
            lanes.setdefault(run.place(event).line, []).append(int(run.instructions.active[number]))
    thirds = sum(1 << lane for lane in range(0, 32, 3))
    assert lanes[4] == [thirds] and lanes[6] == [0xFFFFFFFF]


def test_the_lanes_of_the_last_simdgroup_are_those_that_exist():
    """70 threads: the third simdgroup has 6 lanes. Lanes that return early are diverged from then on."""
    run = record("const uint i = thread_index_in_threadgroup;\nif (i % 2 == 1) return;\ny[i] = int(x[i]);")
    for number in range(len(run.instructions)):
        event = int(run.instructions.events(number)[0])
        simdgroup = int(run.events["thread"][event]) // 32
        assert run.instructions.existing[number] == (0xFFFFFFFF if simdgroup < 2 else 0b111111)
        if run.place(event).line == 3:
            assert run.instructions.active[number] == (0x55555555 if simdgroup < 2 else 0b010101)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint32", "int32"])
def test_elements_of_every_type(name, tmp_path):
    """All bit patterns of 16 bits, and a few of the others."""
    size = ITEMSIZE[name]
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.uint8) if size == 2 else np.arange(4096).astype(np.uint8)
    (tmp_path / "bits").write_bytes(bits.tobytes())
    code = (
        f'import {{ elements }} from "{SCRIPT.parents[2]}/workbench/viz/js/kernel_run_file.js";'
        f'const bytes = Deno.readFileSync("{tmp_path}/bits");'
        f'console.log(elements(new DataView(bytes.buffer), 0, bytes.length, "{name}").join(" "))'
    )
    done = subprocess.run(
        [str(DENO), "eval", "--no-check", code], capture_output=True, text=True, timeout=120, check=True
    )
    found = np.array([float(word.replace("Infinity", "inf")) for word in done.stdout.split()])
    with np.errstate(invalid="ignore"):  # NaNs of half precision that signal
        expected = decoded(bits, name).astype(float)
    np.testing.assert_array_equal(found, expected)


# -- marks ----------------------------------------------------------------------------------------------------------


def test_lanes(run, ask):
    names = {0: "load", 1: "store", 2: "atomic", 3: "atomic", 4: "atomic", WATCH: "compute", BARRIER_WAIT: "waits"}
    names |= {RETURN: "returned", FAULT: "fault"}
    chosen = moments(run)
    for now, marks in zip(chosen, ask(*(["laneMarks", now] for now in chosen))):
        present = run.events[run.instructions.events(now)]
        kind, simdgroup = int(present["kind"][0]), int(present["thread"][0]) // 32
        _, since = events_until(run, now)
        latest = {}
        for event in since.tolist():
            if run.events["kind"][event] in (BARRIER_WAIT, RETURN):
                latest[int(run.events["thread"][event])] = names[int(run.events["kind"][event])]
        acting = {int(thread) for thread in present["thread"]}
        assert [mark["thread"] for mark in marks] == list(range(len(marks)))
        for mark in marks:
            thread = mark["thread"]
            assert (mark["simdgroup"], mark["lane"]) == divmod(thread, 32)
            if kind == BARRIER_PASSED:
                expected = "passed"
            elif kind in (SIMD_FUNCTION, SIMDGROUP_BARRIER) and thread // 32 == simdgroup:
                expected = "simd" if int(present["detail"][0]) >> thread % 32 & 1 else latest.get(thread, "diverged")
            elif kind not in (SIMD_FUNCTION, SIMDGROUP_BARRIER) and thread in acting:
                expected = names[kind]
            else:
                expected = latest.get(thread) or ("diverged" if thread // 32 == simdgroup else "elsewhere")
            assert mark["action"] == expected, (now, mark)


def test_cells(run, ask):
    chosen = [(now, array) for now in moments(run)[::6] for array in range(len(run.arrays))]
    for (now, array), cells in zip(chosen, ask(*(["cellMarks", now, array] for now, array in chosen))):
        expected, present = {}, set(run.instructions.events(now).tolist())
        for event in events_until(run, now)[1].tolist():
            found = run.events[event]
            if found["array"] != array:
                continue
            size = run.arrays[array].itemsize
            for element in range(found["offset"] // size, (found["offset"] + max(size, found["bytes"])) // size):
                cell = expected.setdefault(int(element), {"reads": 0, "writes": 0, "now": ""})
                cell["reads"] += int(found["kind"] in READS)
                cell["writes"] += int(found["kind"] in WRITES)
                if event in present:
                    cell["now"] = "write" if found["kind"] in WRITES else "read"
        assert dict(map(tuple, cells)) == expected


def test_the_history_of_a_cell(run, ask):
    array = next(i for i, a in enumerate(run.arrays) if a.role == "threadgroup")
    size = run.arrays[array].itemsize
    elements = sorted({int(o) // size for o in run.events["offset"][run.events["array"] == array]})[::9]
    answers = ask(*(["ends", array, element, element + 1] for element in elements))
    assert any(found["firstRead"] or found["firstWrite"] for found in answers)
    for element, found in zip(elements, answers):
        order = [
            event
            for event in run.instructions.order.tolist()
            if run.events["array"][event] == array
            and run.events["offset"][event] < (element + 1) * size
            and run.events["offset"][event] + max(size, run.events["bytes"][event]) > element * size
        ]
        for access, kinds in (("Read", READS), ("Write", WRITES)):
            own = [event for event in order if run.events["kind"][event] in kinds]
            # An atomic update reads and writes; the page counts it as a write.
            own = [event for event in own if access == "Write" or run.events["kind"][event] not in WRITES]
            assert found[f"{access.lower()}s"] == len(own)
            for end, event in (("first", own[:1]), ("last", own[-1:])):
                entry = found[f"{end}{access}"]
                assert (entry and entry["event"]) == (event[0] if event else None)
                if entry:
                    assert entry["thread"] == run.events["thread"][event[0]]
                    assert (entry["file"], entry["line"]) == (run.place(event[0]).file, run.place(event[0]).line)


def test_the_value_of_a_cell_is_that_of_its_latest_access(run, ask):
    asked, expected = [], []
    for now in moments(run)[::7]:
        order = events_until(run, now)[0]
        for array in range(len(run.arrays)):
            size = run.arrays[array].itemsize
            own = [event for event in order.tolist() if run.events["array"][event] == array]
            elements = sorted({int(run.events["offset"][event]) // size for event in own})[::11]
            for element in [*elements, 10**6]:
                begins = [int(run.events["offset"][event]) // size for event in own]
                lengths = [max(1, int(run.events["bytes"][event]) // size) for event in own]
                hits = [e for e, begin, n in zip(own, begins, lengths) if begin <= element < begin + n]
                asked.append(["latestAccess", now, array, element])
                expected.append(hits[-1] if hits else None)
    for question, event, found in zip(asked, expected, ask(*asked)):
        assert (found and found["event"]) == event, question
        if found and found["value"] is not None:
            values = run.values(event)
            first = int(run.events["offset"][event]) // run.arrays[question[2]].itemsize
            assert float(found["value"]) == float(values[question[3] - first])


def test_watched_values(run, ask):
    if WATCH not in run.events["kind"]:
        return
    for now, marks in zip(moments(run)[::5], ask(*(["watchedMarks", now] for now in moments(run)[::5]))):
        expected = {}
        for event in events_until(run, now)[0].tolist():
            if run.events["kind"][event] == WATCH:
                values = [float(value) if np.isfinite(value) else str(value) for value in run.values(event)]
                values = [value.replace("inf", "Infinity") if isinstance(value, str) else value for value in values]
                expected.setdefault(run.names[run.events["name"][event]], {})[int(run.events["thread"][event])] = values
        found = {mark["name"]: {t: v for t, v in enumerate(mark["values"]) if v is not None} for mark in marks}
        assert found == expected


def test_values_and_meetings_are_those_of_the_recording(run, ask):
    accesses = np.flatnonzero((run.events["has_value"] == 1) & np.isin(run.events["kind"], (*READS, *WRITES)))[::97]
    for event, values in zip(accesses.tolist(), ask(*(["values", int(event)] for event in accesses))):
        assert [float(value) for value in values] == run.values(event).tolist()
    meetings = np.flatnonzero(run.events["kind"] == SIMD_FUNCTION)[::41]
    for event, lanes in zip(meetings.tolist(), ask(*(["meeting", int(event)] for event in meetings))):
        meeting = run.meeting(event)
        given = np.ascontiguousarray(meeting.inputs).view(np.float32).reshape(32, -1)
        assert np.array_equal(np.array([lane["inputs"] for lane in lanes], np.float32), given)
        assert [lane["source"] for lane in lanes] == meeting.sources.tolist()


def test_ways_of_stepping(run, ask):
    """Each way stops at the next instruction that fits, and at the end if there is none."""
    first = run.instructions.order[run.instructions.starts[:-1]]
    place, simdgroup = run.events["place"][first], run.events["thread"][first] // 32
    group, kind = run.events["group"][first], run.events["kind"][first]
    same_line = lambda i, now: place[i] == place[now] and simdgroup[i] == simdgroup[now]  # noqa: E731
    ways = {
        "instruction": lambda i, now: True,
        "line": lambda i, now: not same_line(i, now),
        "again": same_line,
        "simdgroup": lambda i, now: simdgroup[i] == simdgroup[now] and group[i] == group[now],
        "barrier": lambda i, now: kind[i] == BARRIER_PASSED or (i > 0 and group[i] != group[i - 1]),
        "threadgroup": lambda i, now: i == 0 or group[i] != group[i - 1],
    }
    asked = [(now, way, d) for now in moments(run)[::4] for way in ways for d in (1, -1)]
    for (now, way, direction), found in zip(asked, ask(*(["nextStop", *question, 99] for question in asked))):
        candidates = range(now + 1, len(first)) if direction > 0 else range(now - 1, -1, -1)
        end = len(first) - 1 if direction > 0 else 0
        assert found == next((i for i in candidates if ways[way](i, now)), end), (now, way, direction)


LOOPS = """
const uint i = thread_index_in_threadgroup;
threadgroup float shared[70];
float m = 0;
for (int turn = 0; turn < 3; turn++) {
  m += x[i + turn];
  for (int inner = 0; inner < 2; inner++) {
    m += x[(i + inner) % 70];
  }
  shared[i] = m;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int turn = 0; turn < 5; turn++) {
  m += shared[(i + turn) % 70];
  m -= x[turn];
}
y[i] = int(m);
"""
"""Three turns, in each an inner loop, and five turns; the compiler unrolls them, and keeps their lines."""


@pytest.fixture
def ask_about(tmp_path):
    """A function that asks the page's code about a recording."""

    def ask_(run, *questions):
        (tmp_path / "packet").write_bytes(run.packet())
        command = [str(DENO), "run", "--no-check", "--quiet", f"--allow-read={tmp_path}", str(SCRIPT)]
        given = json.dumps(questions)
        done = subprocess.run(
            [*command, str(tmp_path / "packet")], input=given, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask_


def test_tiles_are_the_turns_of_the_outermost_loops(ask_about):
    run = record(LOOPS)
    (marks,) = ask_about(run, ["turns"])
    first = run.instructions.order[run.instructions.starts[:-1]]
    for simdgroup in range(3):
        own = [i for i, e in enumerate(first.tolist()) if run.events["thread"][e] // 32 == simdgroup]
        lines = [run.place(int(first[i])).line for i in own if marks[i]]
        assert lines == [6] * 3 + [14] * 5, "line 8 is the inner loop's"
    at, stops = own[0], []
    while not stops or stops[-1] < own[-1]:
        stops += ask_about(run, ["nextStop", stops[-1] if stops else at, "tile", 1])
        if stops[-1] == len(first) - 1:
            break
    assert [run.place(int(first[i])).line for i in stops[:7]] == [6] * 2 + [14] * 5


def test_a_tile_of_attention_is_one_of_keys(ask_about):
    run = attention(((9, 150),))
    (marks,) = ask_about(run, ["turns"])
    first = run.instructions.order[run.instructions.starts[:-1]].tolist()
    keys = next(i for i, array in enumerate(run.arrays) if array.name == "k_cache")
    size, row = run.arrays[keys].itemsize, 2 * 32  # heads times head_dim
    own = [i for i, event in enumerate(first) if run.events["group"][event] == 0 and run.events["thread"][event] < 32]
    turns, blocks = -1, {}
    for i in own:
        turns += marks[i]
        loaded = run.events[run.instructions.events(i)]
        found = loaded["offset"][loaded["array"] == keys] // size // row // 8
        blocks.setdefault(turns, set()).update(found.tolist())
    tiles = [read for _, read in sorted(blocks.items()) if read]
    assert len(tiles) == 5 and all(len(read) == 4 for read in tiles[:-1]), "tiles of 32 keys are 4 blocks of 8"
    assert sum(map(len, tiles)) == len(set().union(*tiles)) == 19


def test_the_grid_has_a_mark_for_each_recorded_threadgroup(ask_about):
    kernel = msl.metal_kernel(
        "k", ["x"], ["y"], "uint3 p = thread_position_in_grid;\nif (p.y + p.z == 0) y[p.x] = x[p.x];"
    )
    x = mx.arange(80).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(80,)], "output_dtypes": [mx.float32], "init_value": 0}
    chosen = [(0, 0, 0), (4, 0, 0), (2, 1, 1)]
    sizes = {"grid": (80, 2, 3), "threadgroup": (16, 1, 1)}
    run = kernel.record(**launch, **sizes, threadgroups=chosen)
    assert run.fault is None
    (counts,) = ask_about(run, ["gridCounts"])
    assert counts == [5, 2, 3]
    for now in moments(run)[::7]:
        event = int(run.instructions.events(now)[0])
        (marks,) = ask_about(run, ["gridMarks", now])
        assert [tuple(mark["at"]) for mark in marks] == [tuple(at) for at in run.threadgroups]
        assert sorted(map(tuple, run.threadgroups)) == sorted(chosen)
        assert [mark["now"] for mark in marks] == [i == run.events["group"][event] for i in range(3)]
    (rows,) = ask_about(run, ["gridRows", counts, marks, 500])
    assert [(row["y"], row["z"]) for row in rows["rows"]] == [(y, z) for z in range(3) for y in range(2)]
    for group, (x_, y, z) in enumerate(run.threadgroups):
        row = next(row for row in rows["rows"] if (row["y"], row["z"]) == (y, z))
        at = (x_ + 0.5) * rows["cell"], row["top"] + rows["height"] / 2
        assert ask_about(run, ["groupAt", rows, marks, *at]) == [group]
        assert ask_about(run, ["groupAt", rows, marks, at[0] + 2 * rows["cell"], at[1]]) == [None]
    large = [{"at": [7, 60, 1], "group": 0, "now": True}]
    (rows,) = ask_about(run, ["gridRows", [1000, 90, 2], large, 500])
    assert [(row["y"], row["z"]) for row in rows["rows"]] == [(60, 1)] and rows["left"] == 179


def test_lines_of_the_kernel_step_over_the_functions_that_it_calls(run, ask):
    first = run.instructions.order[run.instructions.starts[:-1]].tolist()
    lines = [(*run.callers(event), run.place(event))[0] for event in first]
    simdgroups = [int(run.events["thread"][event]) // 32 for event in first]
    if run.kernel == "paged_varlen":
        assert any(run.callers(event) for event in first)
    for now in moments(run)[:-1:4]:
        later = range(now + 1, len(first))
        expected = next(
            (i for i in later if (lines[i], simdgroups[i]) != (lines[now], simdgroups[now])), len(first) - 1
        )
        assert ask(["nextStop", now, "line", 1, 0]) == [expected]


def test_events_per_line(run, ask):
    file = f"{run.kernel}.source"
    (counts,) = ask(["eventsPerLine", file])
    assert dict(map(tuple, counts)) == dict(
        Counter(run.place(event).line for event in range(len(run.events)) if run.place(event).file == file)
    )
