"""Recordings of launches, against an interpreter that does without the emulator (`kernel_replay`)."""

import gzip
import math

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import Case, as_float64, build, error_over_tolerance
from kernel_replay import Differs, as_loaded, as_stored, bytes_of, meet_again, replay
from msl_runs import THREAD, ramp, skip_without_compiler
from reference import reference_attention
from test_msl_faults import FAULTS
from tiers import examples

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.msl.recorded import (
    BARRIER_PASSED,
    BARRIER_WAIT,
    FAULT,
    KIND_NAMES,
    LOAD,
    NO_ARRAY,
    SIMD_FUNCTION,
    STORE,
    WATCH,
)
from workbench.kernels.msl.recording_file import encode

skip_without_compiler()

REVERSE = """threadgroup float shared[64];
shared[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
float m = shared[63 - i];
m += simd_sum(x[i]);
y[i] = m;"""


def record(source, *, inputs=None, threads=64, threadgroup=64, shape=None, dtype=mx.float32, **options):
    """The recording of a source over inputs x, z ... and the output y."""
    inputs = [ramp()] if inputs is None else inputs
    names = ["x", "z", "w"][: len(inputs)]
    header, atomic = options.pop("header", ""), options.pop("atomic_outputs", False)
    kernel = msl.metal_kernel("k", names, ["y"], THREAD + source, header, atomic_outputs=atomic)
    return kernel.record(
        inputs=inputs,
        output_shapes=[shape or (threads,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        **options,
    )


def events_of(run, kind):
    return np.flatnonzero(run.events["kind"] == kind)


def test_events_have_thread_array_index_value_and_line():
    run = record(REVERSE)
    loads = [i for i in events_of(run, LOAD) if run.arrays[run.events["array"][i]].name == "shared"]
    assert len(loads) == 64
    for event in loads:
        thread = int(run.events["thread"][event])
        assert run.events["offset"][event] == 4 * (63 - thread)
        assert run.values(event).tolist() == [64.0 - thread]
        assert (run.place(event).file, run.place(event).line) == ("k.source", 5)
    assert np.array_equal(np.array(run.outputs[0]), np.arange(64, 0, -1) + np.repeat([528.0, 1552.0], 32))
    assert len(events_of(run, BARRIER_WAIT)) == 64 and len(events_of(run, BARRIER_PASSED)) == 1


def test_an_event_in_a_helper_knows_its_callers():
    header = """
METAL_FUNC float inner(const device float* p, uint at) {
  return p[at];
}
METAL_FUNC float outer(const device float* p, uint at) {
  return 2 * inner(p, at);
}
"""
    run = record("y[i] = outer(x, i)\n+ inner(x, i);", header=header)
    found = {}
    for event in events_of(run, LOAD):
        lines = tuple((place.file, place.line) for place in (*run.callers(event), run.place(event)))
        found[lines] = found.get(lines, 0) + 1
    # The compiler may load once for both calls.
    direct = (("k.source", 3), ("k.header", 3))
    through = (("k.source", 2), ("k.header", 6), ("k.header", 3))
    assert set(found) <= {direct, through} and through in found and found[through] == 64


def test_a_launch_gives_the_same_result_when_it_is_recorded():
    options = {"inputs": [ramp(256)], "threads": 256, "threadgroup": 64, "shape": (256,)}
    source = REVERSE.replace("63 - i", "63 - i % 64").replace("shared[i]", "shared[i % 64]")
    for order in (0, 1):
        whole = record(source, threadgroups=4, order=order, **options)
        part = record(source, threadgroups=[(2, 0, 0)], order=order, **options)
        assert np.array_equal(np.array(whole.outputs[0]), np.array(part.outputs[0]))
        assert part.threadgroups == ((2, 0, 0),)
        assert [t[0] for t in whole.threadgroups] == ([3, 2, 1, 0] if order else [0, 1, 2, 3])
        own = whole.events[whole.events["group"] == whole.threadgroups.index((2, 0, 0))]
        for name in ("kind", "thread", "offset", "value", "site"):
            if name != "value" or not order:
                assert np.array_equal(own[own["kind"] < 8][name], part.events[part.events["kind"] < 8][name]), name


def test_watched_variables_are_recorded_at_every_assignment():
    run = record(REVERSE, watch=["m"])
    watched = events_of(run, WATCH)
    assert len(watched) == 128 and {run.names[run.events["name"][i]] for i in watched} == {"m"}
    of_thread_3 = [run.values(i)[0] for i in watched if run.events["thread"][i] == 3]
    assert of_thread_3 == [61.0, 61.0 + 528.0]
    assert [run.place(i).line for i in watched if run.events["thread"][i] == 3] == [5, 6]
    assert np.array_equal(np.array(run.outputs[0]), np.array(record(REVERSE).outputs[0]))


@pytest.mark.parametrize(
    "statement, values",
    [
        ("if (i == 3) m = 7.0f; else m = 9.0f;", 1),
        ("if (i == 3)\n  m *= 2.0f;\nelse\n  m -= 1.0f;", 2),
        ("for (int j = 0; j < 3; j++)\n  m += 1.0f;", 4),
        ("const bool same = m == 2.0f;\nif (same) m = 1.0f;  // a comment", 1),
    ],
)
def test_watching_changes_no_statement(statement, values):
    """Only assignments that fill a line are watched, and the statements around them stay as they are."""
    source = f"float m = x[i];\n{statement}\ny[i] = m;"
    plain, watched = record(source), record(source, watch=["m"])
    assert np.array_equal(np.array(plain.outputs[0]), np.array(watched.outputs[0]))
    own = [i for i in events_of(watched, WATCH) if watched.events["thread"][i] == 5]
    assert len(own) == values


def test_a_kernel_may_watch_an_expression():
    run = record("float2 pair = float2(x[i], 1.0f);\nWATCH(pair);\nWATCH(i + 1);\ny[i] = pair.x;")
    first = [i for i in events_of(run, WATCH) if run.events["thread"][i] == 2]
    assert [run.values(i).tolist() for i in first] == [[3.0, 1.0], [3]]
    assert [run.names[run.events["name"][i]] for i in first] == ["pair", "i + 1"]


def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path):
    """One byte of the unpacked file changed: never an error of another kind, and never an event out of range."""
    run = record(REVERSE, watch=["m"])
    unpacked = bytearray(gzip.decompress(encode(run)))
    rng, refused = np.random.default_rng(0), 0
    for at in rng.integers(0, len(unpacked), 300).tolist():
        damaged = bytearray(unpacked)
        damaged[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "a.run").write_bytes(gzip.compress(bytes(damaged), 1))
        try:
            read = msl.KernelRun.load(tmp_path / "a.run")
        except ValueError as problem:
            assert "a.run" in str(problem)
            refused += 1
            continue
        for event in range(0, len(read.events), 50):
            read.place(event), read.values(event)
    assert refused > 20


@pytest.mark.parametrize("name", ["3m", "m;", "", "q"])
def test_what_cannot_be_watched_is_named(name):
    with pytest.raises(ValueError, match=f"watch has {name!r}"):
        record(REVERSE, watch=[name])


@pytest.mark.parametrize(
    "asked, message",
    [
        (0, "threadgroups is 0"),
        ([], "threadgroups is empty"),
        ([4], "threadgroups has 4: the grid has 4 threadgroups"),
        ([-1], "threadgroups has -1"),
        ([(0, 1, 0)], r"threadgroups has \(0, 1, 0\)"),
        ([(0, 0, 0, 0)], r"threadgroups has \(0, 0, 0, 0\)"),
    ],
)
def test_threadgroups_outside_the_grid_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        record("y[i] = x[i];", inputs=[ramp(256)], threads=256, threadgroups=asked)


def test_more_threadgroups_than_an_event_can_name_are_refused():
    with pytest.raises(ValueError, match="threadgroups chooses 65536: at most 65535 are recorded"):
        record("y[i] = x[0];", threads=70_000, threadgroup=1, threadgroups=65_536)


def test_a_full_recording_says_what_it_left_out():
    whole, cut = record(REVERSE), record(REVERSE, max_bytes=8000)
    assert 0 < len(cut.events) < len(whole.events)
    assert len(cut.events) + cut.num_left_out == len(whole.events)
    assert np.array_equal(np.array(cut.outputs[0]), np.array(whole.outputs[0]))
    assert np.array_equal(cut.events["offset"][:100], whole.events["offset"][:100])
    assert f"{cut.num_left_out} later events had no room" in repr(cut)
    fault = record(REVERSE.replace("63 - i", "64 - i"), max_bytes=4000)
    assert fault.num_left_out and fault.fault.kind == "array out of bounds" and fault.fault.event is not None


def test_nothing_is_recorded_without_being_asked():
    """A launch has no events, and takes no more checked accesses and switches than before it was recorded."""
    kernel = msl.metal_kernel("k", ["x"], ["y"], THREAD + REVERSE)
    launch = {
        "inputs": [ramp()], "output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
    }  # fmt: skip
    kernel(**launch, statistics=True)
    before = kernel.last_statistics
    kernel.record(**launch)
    kernel(**launch, statistics=True)
    assert (kernel.last_statistics.accesses, kernel.last_statistics.fiber_switches) == (
        before.accesses,
        before.fiber_switches,
    )


def test_files_hold_all_of_a_recording(tmp_path):
    run = record(REVERSE, watch=["m"])
    run.save(tmp_path / "a.run")
    read = msl.KernelRun.load(tmp_path / "a.run")
    assert np.array_equal(read.events, run.events) and np.array_equal(read.payload, run.payload)
    for name in ("kernel", "texts", "grid", "threadgroup", "arrays", "threadgroups", "places", "names", "fault"):
        assert getattr(read, name) == getattr(run, name), name
    fault = record(REVERSE.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", ""))
    fault.save(tmp_path / "b.run")
    assert msl.KernelRun.load(tmp_path / "b.run").fault == fault.fault


def test_other_files_are_refused(tmp_path):
    run = record(REVERSE)
    run.save(tmp_path / "a.run")
    data = (tmp_path / "a.run").read_bytes()
    for name, content, message in (
        ("text", b"hello", "is not a recording of a kernel"),
        ("cut", data[: len(data) // 2], "is (not a recording|damaged)"),
        ("empty", b"", "is not a recording"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} {message}"):
            msl.KernelRun.load(tmp_path / name)


def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch):
    run = record(REVERSE)
    monkeypatch.setattr("workbench.kernels.msl.recording_file.VERSION", 2)
    run.save(tmp_path / "newer.run")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has version 2 of the format, and this Workbench reads version 1"):
        msl.KernelRun.load(tmp_path / "newer.run")


# -- the replay ----------------------------------------------------------------------------------------------------


def check_replay(run, inputs):
    """The recorded threadgroups' part of the outputs, from inputs, loads and stores."""
    outputs = replay(run, inputs)
    arrays = [array for array in run.arrays if array.role == "output"]
    for array, output in zip(arrays, run.outputs):
        data, written = outputs[array.name]
        assert np.array_equal(bytes_of(output)[written], data[written]), array.name
    assert any(written.any() for _, written in outputs.values())


def test_a_copy_of_many_bytes_is_recorded_in_parts():
    header = "struct Row {\n  float values[24];\n};\n"
    source = "__builtin_memcpy((device Row*)(y + 24 * i), (const device Row*)(x + 24 * i), sizeof(Row));"
    x = ramp(64 * 24)
    run = record(source, inputs=[x], header=header, shape=(64 * 24,))
    check_replay(run, {"x": x})
    stored = run.events[events_of(run, STORE)]
    assert sorted(stored["offset"].tolist()) == [16 * part for part in range(64 * 6)]


def test_the_replay_finds_what_cannot_have_happened():
    """The control: a changed value, a changed order and a lost barrier."""
    x = ramp()
    run = record(REVERSE)
    check_replay(run, {"x": x})
    for change in ("input", "shared", "meeting", "barrier"):
        broken = record(REVERSE)
        events = broken.events
        if change == "meeting":
            broken.payload = broken.payload.copy()
            broken.payload[:4] = 0xFF
        elif change == "barrier":
            events["kind"][events_of(broken, BARRIER_WAIT)[5]] = WATCH
        else:
            wanted = "x" if change == "input" else "shared"
            at = next(i for i in events_of(broken, LOAD) if broken.arrays[events["array"][i]].name == wanted)
            events["value"][at][0] ^= 1
        with pytest.raises(Differs):
            replay(broken, {"x": x})


REDUCING = ("sum", "max", "min", "product", "prefix_inclusive_sum", "prefix_exclusive_sum", "prefix_inclusive_product",
            "prefix_exclusive_product")  # fmt: skip
BITWISE, VOTING = ("and", "or", "xor"), ("simd_ballot({})", "simd_any({})", "simd_all({})")


def random_meetings(seed):
    """A kernel of simd functions over a type, with its input."""
    rng = np.random.default_rng(seed)
    name, dtype = [
        ("float", mx.float32),
        ("half", mx.float16),
        ("int", mx.int32),
        ("uint", mx.uint32),
        ("bfloat", mx.bfloat16),
    ][seed % 5]
    names = REDUCING + BITWISE * (name in ("int", "uint"))
    lines = [f"{name} m = x[i];"]
    for _ in range(5):
        call = f"simd_{names[rng.integers(len(names))]}(x[i])"
        lines.append(f"m = {name}({call});")
        vote = VOTING[rng.integers(3)].format(f"x[i] > {name}({rng.integers(1, 3)})")
        lines.append(f"m += {name}({'ulong' if 'ballot' in vote else ''}({vote}) != 0);")
    lines.append(
        f"m += {name}(simd_is_first()) + simd_broadcast_first(x[i]) + {name}(ulong(simd_active_threads_mask()) & 3);"
    )
    lines += [f"m += simd_shuffle_xor(x[i], ushort({rng.integers(1, 4)}));", "y[i] = m;"]
    values = rng.integers(0, 4, 64) if seed % 2 else np.where(rng.random(64) < 0.8, 1, 2)
    return "\n".join(lines), mx.array(values).astype(dtype), dtype


@pytest.mark.parametrize("seed", range(examples(20)))
def test_every_simd_function_is_computed_again(seed):
    source, x, dtype = random_meetings(seed)
    threads = 64 if seed % 3 else 56  # the last simdgroup may have fewer lanes
    run = record(source, inputs=[x], threads=threads, threadgroup=threads, dtype=dtype)
    assert run.fault is None, run.fault
    check_replay(run, {"x": x})
    meetings, run.payload = events_of(run, SIMD_FUNCTION), run.payload.copy()
    assert len({run.meeting(int(event)).name for event in meetings}) > 5
    for event in meetings:
        meeting = run.meeting(int(event))
        lane = next(lane for lane in range(32) if meeting.lanes >> lane & 1)
        changed = meeting.results[lane].copy()
        meeting.results[lane] ^= 0x11
        with pytest.raises(Differs, match=meeting.name):
            meet_again(run, int(event))
        meeting.results[lane] = changed
        meet_again(run, int(event))


def test_a_simd_function_that_the_replay_does_not_know_is_not_passed_over():
    run = record(REVERSE)
    run.names = tuple("simd_something" if name == "simd_sum" else name for name in run.names)
    with pytest.raises(Differs, match="simd_something is not known here"):
        replay(run, {"x": ramp()})


class Recorder:
    """Stands for `metal_kernel`: every launch is recorded in whole or in part."""

    def __init__(self, threadgroups=1):
        self.runs = []
        self.threadgroups = threadgroups

    def __call__(self, **text):
        kernel = msl.metal_kernel(**text)

        def launch(*, grid, threadgroup, **arguments):
            total = math.prod(-(-g // t) for g, t in zip(grid, threadgroup))
            chosen = self.threadgroups(total) if callable(self.threadgroups) else self.threadgroups
            run = kernel.record(grid=grid, threadgroup=threadgroup, threadgroups=chosen, **arguments)
            assert run.fault is None, run.fault
            self.runs.append((run, dict(zip(text["input_names"], arguments["inputs"]))))
            return [mx.array(output) for output in run.outputs]  # the caller writes into some of them

        return launch


def random_case(seed):
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(4, 4), (4, 2), (3, 1), (8, 2)][rng.integers(4)]
    sequences = tuple(
        (int(q), int(q + rng.integers(0, 90)))
        for q in np.where(rng.random(rng.integers(1, 4)) < 0.5, 1, rng.integers(2, 40))
    )
    return Case(
        sequences,
        heads,
        kv_heads,
        int(rng.choice([32, 64])),
        int(rng.choice([8, 16])),
        str(rng.choice(["float32", "float16", "bfloat16"])),
        left=int(rng.choice([-1, 20])),
        softcap=float(rng.choice([0.0, 5.0])),
        sinks=bool(rng.random() < 0.3),
        kv_split=[None, 32][rng.integers(2)],
        seed=seed,
    )


@pytest.mark.repeats(step=47)
@pytest.mark.parametrize("seed", range(100))
def test_attention_follows_from_recorded_loads(seed):
    """Both kernels on random batches: the replayed memory, and attention in float64 from the loaded elements."""
    case, batch = random_case(seed), build(random_case(seed))
    rng = np.random.default_rng(seed)
    for kernel in ("attend", "attend_v1"):
        recorder = Recorder(lambda total: sorted(set(rng.integers(0, total, 2).tolist())))
        arguments = {"kv_split": case.kv_split} if kernel == "attend" else {}
        getattr(PagedVarlenKernels(recorder), kernel)(*batch.inputs, batch.options, **arguments)
        for run, inputs in recorder.runs:
            check_replay(run, inputs)
            if run.kernel in ("paged_varlen", "paged_varlen_v1"):
                check_attention(run, batch)


def check_attention(run, batch):
    """The stores of a threadgroup are attention over its loads."""
    stored = as_stored(run, "out")
    with np.errstate(invalid="ignore"):
        expected = reference_attention(
            as_loaded(run, "q"),
            as_loaded(run, "k_cache"),
            as_loaded(run, "v_cache"),
            cu_seqlens_q=batch.metadata.cu_seqlens_q,
            seqused_k=batch.metadata.seqused_k,
            block_table=batch.metadata.block_table,
            softmax_scale=batch.scale,
            left=batch.case.left,
            softcap=batch.case.softcap,
            sinks=None if batch.sinks is None else as_float64(batch.sinks),
        )
    own = np.isfinite(stored)
    assert own.any()
    assert np.isfinite(expected[own]).all(), "something was stored that does not follow from the loads"
    assert error_over_tolerance(stored[own], expected[own], batch.case.dtype) <= 8


# -- faults --------------------------------------------------------------------------------------------------------

AT_THE_END = ("output not written",)
"""Faults that belong to no event."""


@pytest.mark.repeats(step=8)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_the_last_event_at_its_thread_and_line(name, order):
    kind, _, faulty, _, options = FAULTS[name]
    options = {"order": order, **options, "threadgroups": 1}
    threads = options.get("threads", 64), options.get("threadgroup", 64)
    options["threadgroups"] = -(-threads[0] // threads[1])
    options.pop("statistics", None)
    run = record(faulty.replace("@", ""), **options)
    assert run.outputs is None and run.fault.kind == kind == run.error.kind
    marked = [number for number, line in enumerate(faulty.split("\n"), start=2) if line.startswith("@")]
    if kind in AT_THE_END:
        assert run.fault.event is None
        return
    event = run.fault.event
    assert event == len(run.events) - 1 == events_of(run, FAULT)[-1]
    assert run.names[run.events["name"][event]] == kind
    if run.error.thread_position_in_grid:
        group = run.threadgroups[run.events["group"][event]]
        assert group == run.error.threadgroup_position_in_grid
        position = group[0] * run.threadgroup[0] + int(run.events["thread"][event])
        assert position == run.error.thread_position_in_grid[0]
    if marked:
        assert run.place(event).line == run.fault.line and run.fault.line in marked
    if kind.endswith("race"):
        assert run.fault.earlier is not None and run.fault.earlier < event
        earlier, own = run.events[run.fault.earlier], run.events[event - 1]
        assert earlier["array"] == own["array"] != NO_ARRAY
        assert int(earlier["thread"]) == run.error.other_thread
        assert run.place(run.fault.earlier).line == run.fault.earlier_line > 0
        assert STORE in (earlier["kind"], own["kind"]) or "atomic" in name or "atomic" in KIND_NAMES[earlier["kind"]]


def test_a_store_at_fault_has_no_value():
    run = record("threadgroup float b[64];\nb[i % 63] = x[i];\ny[i] = 1.0f;")
    stores = events_of(run, STORE)
    assert run.events["thread"][stores[-1]] == 63 and not run.events["has_value"][stores[-1]]
    assert run.events["has_value"][stores[:-1]].all()
