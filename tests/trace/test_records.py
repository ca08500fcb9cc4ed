"""One record: its derived fields, its frozen mappings, and the methods that other rooms attach."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import pickle
import pydoc
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from runs_to_draw import run
from trace_helpers import one_trace, traces

import workbench
from workbench import Engine
from workbench.analysis.misses import MissTable
from workbench.analysis.tuning import Tuning
from workbench.base.on_demand import ASKED_FOR, ATTACHED, AttachedMethod
from workbench.engine.outputs import Outputs
from workbench.trace import (
    Chunk,
    Event,
    KernelLaunch,
    Keyframe,
    RequestInfo,
    StepRecord,
    Supplement,
    Trace,
    TraceError,
    TraceMeta,
    WorkItem,
    records,
)
from workbench.trace.readings.metrics import Summary, TraceMetrics
from workbench.trace.readings.metrics_by_request import MetricsByRequest
from workbench.trace.readings.pool_state import PoolState
from workbench.trace.reasons import Reason


def test_a_record_by_hand():
    record = StepRecord(
        4,
        chunks=(
            Chunk("d", 5, 1, False, "decode", 77, "complete", (9,)),
            Chunk("p", 2, 3, True, "intermediate", None, "token_budget", (3, 1), num_cached_tokens=2),
        ),
        arrived=("p",),
        aborted=("x",),
        admitted=("p",),
        preempted=("v",),
        preempt_reasons={"v": Reason("kv_blocks")},
        finished=("d",),
        finish_reasons={"d": "length"},
        waiting=("v", "w"),
        waiting_reason=Reason("seats", "max_num_seqs", 1),
        passed_over={"v": Reason("policy")},
    )
    record.attach_block_tables(2, [[4, 6, 9], [3, 1, 8]])
    assert record.num_tokens == 4
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (1, 3)
    assert record.num_kv_computed == {"d": 6, "p": 5}
    assert record.cu_seqlens_q == [0, 1, 4]
    assert record.seqused_k == [6, 5]
    assert record.block_tables == {"d": [4, 6, 9], "p": [3, 1, 8]}
    assert record.positions.tolist() == [5, 2, 3, 4]
    assert record.slot_mapping.tolist() == [9 * 2 + 1, 1 * 2, 1 * 2 + 1, 8 * 2]
    assert record.not_scheduled == {"v": Reason("policy"), "w": Reason("seats", "max_num_seqs", 1)}
    assert record.events == (
        Event(4, "arrive", "p"),
        Event(4, "abort", "x"),
        Event(4, "preempt", "v", "the KV blocks ran out"),
        Event(4, "admit", "p", "2 tokens found in the prefix cache"),
        Event(4, "finish", "d", "length"),
    )
    assert record.chunk("p").end == 5
    assert record.chunk("d").is_decode
    with pytest.raises(KeyError, match="not scheduled in step 4: left out by the policy"):
        record.chunk("v")
    with pytest.raises(KeyError, match="no request 'nobody' runs or waits in step 4"):
        record.chunk("nobody")


def test_an_empty_step():
    record = StepRecord(0)
    record.attach_block_tables(16, [])
    assert record.num_tokens == 0
    assert record.cu_seqlens_q == [0]
    assert record.slot_mapping.shape == record.positions.shape == (0,)
    assert record.mask().shape == (0, 0)
    assert record.block_tables == {}


@settings(max_examples=25, deadline=None)
@given(traces())
def test_the_mask_is_the_definition(trace):
    for record in trace:
        sequence_of_row = [seq for seq, chunk in enumerate(record.chunks) for _ in range(chunk.num_tokens)]
        columns = [(seq, key) for seq, chunk in enumerate(record.chunks) for key in range(chunk.end)]
        expected = [
            [seq == owner and key <= position for owner, key in columns]
            for seq, position in zip(sequence_of_row, record.positions)
        ]
        np.testing.assert_array_equal(record.mask(), np.array(expected, bool).reshape(record.mask().shape))
        for seq, row_slot, position in zip(sequence_of_row, record.slot_mapping, record.positions):
            table = record.block_table(seq)
            assert row_slot == table[position // record.block_size] * record.block_size + position % record.block_size


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("name", ["plain 1", "window_only 6", "window_only 22", "hybrid_window 30", "hybrid_mamba 27"])
def test_a_row_sees_as_far_back_as_the_window_of_the_group_that_is_shown(name, launched):
    """The windows of a launch are those of the model, which its groups have too."""
    trace, _ = run(name)
    groups = trace.meta.config.get("kv_cache_groups") or [{"kind": "full_attention"}]
    shown = next(group for group in groups if group["kind"] != "mamba")
    window = shown.get("sliding_window", 10**6)
    hidden = 0
    for record in trace:
        if launched:
            whole = KernelLaunch("cpu", windows=(shown.get("sliding_window", -1),))
            record = replace(record, kernel=whole)
        mask, row, column = record.mask(), 0, 0
        for chunk in record.chunks:
            start = chunk.start - chunk.ahead
            for position in range(start, start + chunk.num_tokens):
                own = {column + key for key in range(start + chunk.num_tokens) if 0 <= position - key < window}
                assert set(np.flatnonzero(mask[row])) == own
                hidden += position + 1 - len(own)
                row += 1
            column += start + chunk.num_tokens
    assert (hidden > 0) == (shown["kind"] == "sliding_window")


@pytest.mark.parametrize("name", ["plain 1", "window_only 6", "hybrid_window 30", "hybrid_mamba 27", "spec_hybrid 51"])
def test_the_mask_of_each_group_has_its_window(name):
    trace, _ = run(name)
    groups, hidden = trace.meta.config.get("kv_cache_groups") or [{"kind": "full_attention"}], set()
    for record in trace:
        rows = [(seq, at) for seq, c in enumerate(record.chunks) for at in range(c.start - c.ahead, c.num_kv)]
        columns = [(seq, key) for seq, c in enumerate(record.chunks) for key in range(c.num_kv)]
        for index, group in enumerate(groups):
            if group["kind"] == "mamba":
                with pytest.raises(ValueError, match=f"group {index} holds recurrent state, .* of attention: "):
                    record.mask(group=index)
                continue
            window = group.get("sliding_window", 10**6)
            expected = [[seq == own and 0 <= at - key < window for seq, key in columns] for own, at in rows]
            mask = record.mask(group=index)
            np.testing.assert_array_equal(mask, np.array(expected, bool).reshape(mask.shape))
            if any(at >= window for _, at in rows):
                hidden.add(index)
    assert hidden == {index for index, group in enumerate(groups) if "sliding_window" in group}
    for index in (-1, len(groups)):
        with pytest.raises(ValueError, match=f"group must be from 0 to {len(groups) - 1}, got {index}"):
            trace[0].mask(group=index)


def test_a_table_that_grows_later_keeps_its_length():
    table = [1, 2]
    record = StepRecord(0, chunks=(Chunk("a", 0, 8, False, "new_final", 3, "complete", (1, 2)),))
    record.attach_block_tables(4, [table])
    table.append(5)
    assert record.block_table(0) == [1, 2]


def test_records_do_not_change():
    record = StepRecord(0)
    with pytest.raises(AttributeError):
        record.step = 1
    with pytest.raises(AttributeError):
        Chunk("a", 0, 1, False, "decode", 3, "complete").start = 2
    record = one_trace()[3]
    for array in (record.positions, record.slot_mapping):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


MAPPINGS = [
    (StepRecord(0), "timings"),
    (StepRecord(0), "phase_starts"),
    (StepRecord(0), "passed_over"),
    (StepRecord(0), "finish_reasons"),
    (StepRecord(0), "preempt_reasons"),
    (StepRecord(0), "unscheduled_block_ids"),
    (StepRecord(0), "unscheduled_changes"),
    (KernelLaunch("cpu"), "details"),
    (RequestInfo("a", 1), "sampling"),
    (TraceMeta(), "config"),
    (TraceMeta(), "model"),
    (TraceMeta(), "versions"),
    (Keyframe(0), "block_tables"),
    (Keyframe(0), "num_kv_computed"),
    (Keyframe(0), "other_tables"),
    (Keyframe(0), "last_tokens"),
    (Supplement(0, "late"), "facts"),
]


def test_every_mapping_of_a_record_is_among_these():
    for kind in (StepRecord, KernelLaunch, RequestInfo, TraceMeta, Keyframe, Supplement, Chunk, WorkItem):
        names = {name for name, hint in get_type_hints(kind).items() if get_origin(hint) in (dict, list, Mapping)}
        assert names == {name for record, name in MAPPINGS if type(record) is kind}


@pytest.mark.parametrize(("record", "name"), MAPPINGS, ids=[f"{type(r).__name__}.{name}" for r, name in MAPPINGS])
@pytest.mark.parametrize("values", [{}, {"a": 0.5}], ids=["empty", "full"])
def test_a_record_shares_no_mapping_with_its_maker(record, name, values):
    mine = dict(values)
    made = msgspec.structs.replace(record, **{name: mine})
    mine["b"] = (1,)
    assert getattr(made, name) == values
    for change in (lambda found: found.update(b=2), lambda found: found.pop("a"), lambda found: found.clear()):
        with pytest.raises(TypeError, match="never change"):
            change(getattr(made, name))
    assert made == msgspec.structs.replace(record, **{name: values})


def test_a_frozen_mapping_is_a_dict_for_everybody_else():
    made = StepRecord(0, finish_reasons={"a": "stop"})
    assert json.dumps(made.finish_reasons) == '{"a": "stop"}'
    assert msgspec.json.encode(made) == b'{"kind":"step","step":0,"finish_reasons":{"a":"stop"}}'
    assert msgspec.json.encode(StepRecord(0, finish_reasons={})) == b'{"kind":"step","step":0}'
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    with pytest.raises(TypeError, match="never change"):
        pickle.loads(pickle.dumps(made)).finish_reasons["b"] = "stop"
    for mine in (dict(made.finish_reasons), copy.copy(made.finish_reasons), copy.deepcopy(made.finish_reasons)):
        mine["b"] = "length"


def test_a_record_outside_a_trace_says_so():
    record = StepRecord(0, chunks=(Chunk("a", 0, 8, False, "new_final", 3, "complete", (1, 2)),))
    assert not record.has_block_tables
    with pytest.raises(AttributeError, match="not part of a Trace"):
        _ = record.block_tables


def test_an_absurd_mask_is_refused(monkeypatch):
    record = one_trace()[3]
    cells = record.mask().size
    monkeypatch.setattr(records, "MAX_MASK_CELLS", cells - 1)
    with pytest.raises(ValueError, match=f"would have {cells} cells, allowed are {cells - 1}"):
        record.mask()


def test_records_survive_pickle_free_copies():
    """A copy by msgspec (what a worker process would get) is equal field by field."""
    for record in one_trace():
        assert msgspec.json.decode(msgspec.json.encode(record), type=StepRecord) == record


def steps_as_html(shown):
    return f"<p>{len(shown)} steps</p>"


def test_without_the_views_a_notebook_shows_text(monkeypatch):
    for name in ("Trace._repr_html_", "StepRecord._repr_html_", "Trace.watch", "Trace.to_html"):
        monkeypatch.setitem(ATTACHED, name, "workbench.no_such_module:it")
    trace = one_trace()
    assert trace._repr_html_() is None
    assert trace[0]._repr_html_() is None
    for name in ("watch", "to_html"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            getattr(trace, name)()
    monkeypatch.setitem(ATTACHED, "Trace._repr_html_", f"{__name__}:steps_as_html")
    assert trace._repr_html_() == "<p>25 steps</p>"


def test_attached_methods_look_like_others():
    trace = one_trace()
    assert {"watch", "to_html"} <= set(dir(trace)) & set(dir(Trace))
    assert list(inspect.signature(trace.to_html).parameters) == ["path", "other", "opens_at"]
    assert inspect.getdoc(Trace.watch).startswith("Show a trace")
    assert "panels" in pydoc.render_doc(trace.watch)


def test_every_attached_function_is_there_and_has_its_type():
    """The table of homes and the types in methods.py name the same functions."""
    typed = dict(declared_methods())
    for name, home in ATTACHED.items():
        module, function = home.split(":")
        assert callable(getattr(importlib.import_module(module), function))
        kind, method = name.split(".")
        owners = (
            Engine,
            Outputs,
            Trace,
            TraceMetrics,
            MetricsByRequest,
            Summary,
            MissTable,
            PoolState,
            StepRecord,
            Tuning,
        )
        owner = next(cls for cls in owners if cls.__name__ == kind)
        assert callable(getattr(owner, method))
        if not method.startswith("_"):
            assert isinstance(vars(owner)[method], AttachedMethod)
            assert typed.pop(name) == f"{module}.{function}"
    assert not typed
    for home in ASKED_FOR.values():
        module, function = home.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def declared_methods():
    """Each method of workbench/methods.py, with the function that its type is taken from."""
    tree = ast.parse((Path(workbench.__file__).parent / "methods.py").read_text())
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
        elif isinstance(node, ast.ClassDef):
            for line in [line for line in node.body if isinstance(line, ast.Assign)]:
                value = line.value.args[0] if isinstance(line.value, ast.Call) else line.value
                alias, _, function = ast.unparse(value).partition(".")
                if function.startswith(f"{node.name}."):  # its own method, with another type
                    continue
                yield f"{node.name}.{line.targets[0].id}", f"{aliases[alias]}.{function}"


def test_a_plain_script_can_write_a_page(tmp_path):
    script = """
import sys
from workbench import Trace, simulate
trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 2}]})
assert not any(name.startswith("workbench.viz") for name in sys.modules)
trace.to_html(sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", script, tmp_path / "run.html"], check=True, timeout=300)
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


def test_the_views_draw_what_is_shown():
    trace = one_trace()
    for shown in (trace, trace[3], trace.metrics(), trace.pool_state(3)):
        assert shown._repr_html_().lstrip().startswith("<")
    assert isinstance(trace, Trace)


def test_a_step_that_ends_before_it_begins_is_refused():
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 10}))
    trace.append(StepRecord(0, time=2.0, end=2.5))
    with pytest.raises(TraceError, match=r"step 1 begins at 3.0 s and ends before that, at 2.75 s"):
        trace.append(StepRecord(1, time=3.0, end=2.75))


def test_a_repr_is_made_of_any_value():
    """An array is equal to no default, and says so for each number or not at all."""
    for tokens in (np.arange(5), np.zeros(0), float("nan"), [[1] * 100] * 100):
        shown = repr(RequestInfo("r", 3, prompt_token_ids=tokens))
        assert shown.startswith("RequestInfo(request_id='r', num_prompt_tokens=3, prompt_token_ids=")
        assert len(shown) < 400
    assert repr(RequestInfo("r", 3)) == "RequestInfo(request_id='r', num_prompt_tokens=3)"
