"""What follows from the fields of one record."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from trace_helpers import one_trace, traces

from workbench.trace import Chunk, Event, StepRecord, Trace, records


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
        preempt_reasons={"v": "no blocks"},
        finished=("d",),
        finish_reasons={"d": "length"},
        waiting=("v", "w"),
        waiting_reason="the queue's reason",
        passed_over={"v": "its own"},
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
    assert record.not_scheduled == {"v": "its own", "w": "the queue's reason"}
    assert record.events == (
        Event(4, "arrive", "p"),
        Event(4, "abort", "x"),
        Event(4, "preempt", "v", "no blocks"),
        Event(4, "admit", "p", "2 tokens found in the prefix cache"),
        Event(4, "finish", "d", "length"),
    )
    assert record.chunk("p").end == 5
    assert record.chunk("d").is_decode
    with pytest.raises(KeyError, match="not scheduled in step 4: its own"):
        record.chunk("v")
    with pytest.raises(KeyError, match="not waiting either"):
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


def test_html_falls_back_to_text_without_renderers(monkeypatch):
    from workbench.trace import display

    monkeypatch.setattr(display, "_renderers", {})
    monkeypatch.setattr(display, "RENDERERS_MODULE", "workbench.no_such_module")
    trace = one_trace()
    assert trace._repr_html_() is None
    assert trace[0]._repr_html_() is None
    display.register("trace", lambda shown: f"<p>{len(shown)} steps</p>")
    assert trace._repr_html_() == "<p>25 steps</p>"


def test_the_views_register_their_renderers():
    trace = one_trace()
    for shown in (trace, trace[3], trace.metrics(), trace.pool_state(3)):
        assert shown._repr_html_().lstrip().startswith("<")
    assert isinstance(trace, Trace)
