"""The marks that painters in Python paint, as data: each equals a value that follows from the records alone."""

import math
from copy import copy
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from runs_to_draw import RUNS, run, steps_of
from test_marks_in_answers import fleet_run, parts_of
from test_marks_of_steps import tokens

from workbench import Trace, TraceMeta, simulate
from workbench.viz.figures import latency_columns, token_columns
from workbench.viz.layout.fleet import BINS, fleet_rows
from workbench.viz.layout.norms import norm_marks
from workbench.viz.layout.pool import TAIL, block_table_rows, pool_spans
from workbench.viz.layout.timeline import timeline_marks

__all__ = ["fleet_run"]
EVENTS = {"finish": "finished", "admit": "admitted", "resume": "resumed", "preempt": "preempted", "abort": "aborted"}


@pytest.mark.parametrize("name", RUNS)
def test_the_cells_of_block_tables(name):
    facts = run(name)[1]
    for step in steps_of(facts):
        record = facts.records[step]
        rows = iter(block_table_rows(record))
        for chunk in record.chunks:
            for group, table in enumerate(record.block_tables_by_group[chunk.request_id]):
                row = next(rows)
                added = [chunk.new_block_ids, *(change.new_block_ids for change in chunk.other_groups)]
                new = len(added[group]) if group < len(added) else 0
                size, num_kv = facts.groups[group].block_size, chunk.start - chunk.ahead + chunk.num_tokens
                known = group == facts.shown_group and facts.groups[group].is_attention
                expected = []
                for logical, block in enumerate(table):
                    used = min(size, max(0, num_kv - logical * size)) / size if known else 1.0
                    expected.append((logical, logical, block, used, logical >= len(table) - new))
                assert row.cells(max(len(table), 1)) == expected
        assert next(rows, None) is None


@pytest.mark.parametrize("num_blocks", [9, 10, 11, 12, 40])
def test_a_cut_table_keeps_its_beginning_and_its_end(num_blocks):
    requests = [{"id": "a", "prompt": {"len": 16 * num_blocks}, "max_tokens": 1}]
    record = simulate({"config": {"num_blocks": 99, "max_num_batched_tokens": 999}, "requests": requests})[0]
    table = record.block_tables["a"]
    (row,) = block_table_rows(record)
    cells = [cell[:3] for cell in row.cells(11)]
    if num_blocks <= 11:
        assert cells == [(n, n, block) for n, block in enumerate(table)]
    else:
        end = range(num_blocks - TAIL, num_blocks)
        assert cells == [(0, 0, table[0]), (1, 1, table[1])] + [(3 + i, n, table[n]) for i, n in enumerate(end)]


@pytest.mark.parametrize("name", RUNS)
def test_the_spans_of_the_pool_are_its_blocks(name):
    trace, facts = run(name)
    columns = 32
    while columns**2 < facts.num_blocks and columns < 512:
        columns *= 2
    for step in steps_of(facts, 6):
        moment = facts[step]
        focus = list(moment.tables)[1:7]
        kinds = {0: ("reserved", -1)}
        for block in range(1, facts.num_blocks):
            owner = moment.holders.get(block, [""])[0]
            kinds[block] = ("focus", focus.index(owner)) if owner in focus else (moment.pool_state(block), -1)
        spans = pool_spans(trace.pool_state(step), focus)
        found = [(b, s.kind, s.slot) for s in spans for b in range(s.first, s.last + 1)]
        assert found == [(block, *kinds[block]) for block in range(facts.num_blocks)]
        assert all((span.row, span.column) == divmod(span.first, columns) for span in spans)
        neighbours = pairwise(spans)
        assert all(one.row != two.row or (one.kind, one.slot) != (two.kind, two.slot) for one, two in neighbours)


@pytest.mark.parametrize("name", RUNS)
def test_the_marks_of_a_timeline(name):
    records = run(name)[1].records
    numbers = [record.step for record in records]
    stalls = {numbers[0]: "first", numbers[-1]: "last", numbers[-1] + 1: "not here", numbers[0] - 1: "nor here"}
    for at in (numbers[0], numbers[-1], numbers[-1] + 1, None):
        marks = timeline_marks(records, at, stalls)
        assert marks.framed == (numbers.index(at) if at in numbers else None)
        assert marks.stalls == [(numbers[0], "first"), (numbers[-1], "last")]
        assert marks.span == (numbers[0], numbers[-1] + 1)
    heights = [tokens(record)[1] for record in records]
    budget = max(1, *heights, *(record.token_budget for record in records))
    assert marks.top == (budget if 4 * max(heights) >= budget else max(1, *heights))
    unused = [max(0, record.token_budget - height) for record, height in zip(records, heights, strict=True)]
    assert marks.slack == [min(slack, marks.top - height) for slack, height in zip(unused, heights, strict=True)]
    happened = [(record.step, kind) for kind, ids in EVENTS.items() for record in records if getattr(record, ids)]
    assert marks.events == happened
    assert marks.place(numbers[0]) == 0 and marks.place(numbers[-1] + 1) == 1
    assert timeline_marks([]) is None


def test_the_frame_of_a_binned_timeline_is_around_the_bin_of_its_step():
    requests = [{"id": "a", "prompt": {"len": 9}, "max_tokens": 95}]
    records = list(simulate({"requests": requests}))
    for at in range(len(records)):
        assert timeline_marks(records, at, max_bars=30).framed == at // math.ceil(len(records) / 30)


@pytest.mark.parametrize("asked", ["", "r1", "r5"])
def test_the_rows_of_replicas(fleet_run, asked):
    from facts_of_records import Facts

    late = {"replica 0": 0.0, "replica 1": 0.05, "replica 2": 0.4}
    traces = {}
    for (name, wait), trace in zip(late.items(), fleet_run.traces, strict=True):
        traces[name] = copy(trace)
        traces[name].meta = replace(trace.meta, created=100 + wait)
    marks = fleet_rows(traces, asked)
    end = max(late[name] + trace[-1].end for name, trace in traces.items())
    assert marks.end == marks.axis.end == pytest.approx(end), "the axis ends with the run"
    parts = [parts_of(Facts(trace), late[name], marks.end) for name, trace in traces.items()]
    assert marks.most == max(running + waiting for row in parts for running, waiting, *_ in row)
    for row, (name, trace), expected in zip(marks.rows, traces.items(), parts, strict=True):
        assert (row.name, row.num_requests, len(row.parts)) == (name, len(trace.requests), BINS)
        wrong = [i for i, pair in enumerate(zip(row.parts, expected, strict=True)) if pair[0] != pytest.approx(pair[1])]
        assert len(wrong) <= 2, "a start that is rounded may move the edge of a part"
        mine = [record for record in trace if any(chunk.request_id == asked for chunk in record.chunks)]
        way = (late[name] + mine[0].time, late[name] + mine[-1].end) if mine else None
        assert row.way == (pytest.approx(way) if way else None)
    assert any(row.way for row in marks.rows) == bool(asked)
    with pytest.raises(ValueError, match="no step in any"):
        fleet_rows(traces, "nobody")
    with pytest.raises(ValueError, match="nothing to draw"):
        fleet_rows({"idle": Trace(TraceMeta())})


@pytest.mark.parametrize("name", ["plain 1", "timed 3", "spec 16"])
def test_the_columns_of_a_figure(name):
    trace, facts = run(name)
    columns = {key: list(map(int, values)) for key, values in token_columns(trace.metrics()).items()}
    assert columns["step"] == [record.step for record in facts.records]
    totals = [tokens(record) for record in facts.records]
    assert list(zip(columns["decode"], columns["top"], strict=True)) == totals
    assert columns["prefill"] == [total - decode for decode, total in totals]
    points = latency_columns(trace.metrics())
    firsts = {}
    for place, record in enumerate(facts.records):
        for chunk in record.chunks:
            if chunk.sampled is not None:
                firsts.setdefault(chunk.request_id, record.end if facts.timed else place + 1)
    begin = {who: info.arrival_time if facts.timed else info.arrival_step for who, info in trace.requests.items()}
    assert points["request"] == [who for who in trace.requests if who in firsts]
    assert points["first"] == pytest.approx([firsts[who] - begin[who] for who in points["request"]])
    assert points["place"] == list(range(len(points["request"])))


@pytest.mark.parametrize("num_rows", [1, 7, 256, 257, 900])
def test_the_shades_of_norms(num_rows):
    rng = np.random.default_rng(num_rows)
    norms = rng.uniform(2, 9, (num_rows, 3))
    if num_rows > 7:
        norms[3, 1], norms[5, 2] = np.nan, np.inf
    marks = norm_marks(norms)
    clean = np.where(np.isfinite(norms), norms, 0)
    columns = min(num_rows, 256)
    assert (marks.num_rows, marks.shades.shape) == (num_rows, (3, columns))
    assert (marks.least, marks.most) == (clean.min(), clean.max())
    for column in range(columns):
        first, last = column * num_rows // columns, (column + 1) * num_rows // columns
        largest = clean[first:last].max(axis=0)
        expected = 255 * (largest - clean.min()) / (clean.max() - clean.min())
        assert marks.shades[:, column] == pytest.approx(expected, abs=0.51)
    assert not norm_marks(np.full((4, 2), 3.0)).shades.any(), "equal norms have no shade"
