"""The recorder's messages: their encoding, and the records that the assembler makes from them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_recordings import DATA, assemble, run_double

from workbench.simulation.simulate import simulate
from workbench.trace import StepRecord, Trace, TraceMeta
from workbench.trace.recorders import __main__ as writer
from workbench.trace.recorders.assembler import Assembler
from workbench.trace.recorders.messages import (
    Admission,
    Arrival,
    End,
    Packet,
    Schedule,
    Update,
    unpack,
)


def test_an_unused_chunk_belongs_to_the_step_in_which_its_request_ends():
    """Asynchronous scheduling: the output of step 0 ends a request that step 1 has scheduled already."""
    assembler = Assembler({"block_size": 4, "num_blocks": 9}, start=5.0)
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(70, 5.0, 5.1, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Schedule(80, 5.2, 5.3, 6, None, [4], [[[2]]]),
        End("a", "stop", True),
        Update(70, 5.5, 5.6, 8),
        Schedule(70, 5.7, 5.8, 8, [], [], []),
        Update(80, 5.9, 6.0, 8),
        Update(70, 6.1, 6.2, 8),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    first, second, third = records
    assert first.chunks[0].sampled == 0 and first.finished == () and first.free_blocks_end == 7
    assert second.chunks[0].sampled is None and second.finished == ("a",) and second.free_blocks_end == 8
    assert second.finish_reasons == {"a": "stop"} and second.running == ("a",)
    assert third.running == ()
    assert first.timings == pytest.approx({"schedule": 0.1, "forward": 0.4, "update": 0.1})
    assert [record.time for record in records] == pytest.approx([0.0, 0.6, 1.0])
    assert [record.end for record in records] == pytest.approx([0.6, 1.0, 1.2])
    assert second.timings == pytest.approx({"schedule": 0.1, "forward": 0.3, "update": 0.1})
    assert [phase.begin for phase in second.phases] == pytest.approx([0.2, 0.6, 0.9])


def test_drafts_that_were_rejected_are_computed_again_and_the_last_token_is_kept():
    assembler = Assembler({"block_size": 16, "num_blocks": 9})
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Update(0, 0.0, 0.0, 7, ["a"], [[11]]),
        # one token and three drafts, one of them accepted
        Schedule(1, 0.0, 0.0, 7, ["a"], [4], [None], [4], drafts={"a": [12, 1, 2]}),
        Update(1, 0.0, 0.0, 7, ["a"], [[12, 13]]),
        Schedule(2, 0.0, 0.0, 7, ["a"], [6], [None], [4], drafts={"a": [3, 4, 5]}),
        Update(2, 0.0, 0.0, 7, ["a"], [[]]),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    assert [(c.start, c.end, c.arm, c.sampled) for r in records for c in r.chunks] == [
        (0, 4, "new_final", 11),
        (4, 8, "decode", 13),
        (6, 10, "decode", None),
    ]
    (verified,) = records[1].chunks
    assert verified.drafts == (12, 1, 2) and verified.accepted == (12, 13) and verified.num_accepted == 1


def test_all_accepted_tokens_count_when_their_ids_are_not_recorded():
    assembler = Assembler({"block_size": 16, "num_blocks": 9})
    trace = Trace(TraceMeta(config={"block_size": 16, "num_blocks": 9}))
    messages = [
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Update(0, 0.1, 0.1, 7, ["a"], [[0]]),
        Schedule(1, 0.1, 0.1, 7, ["a"], [4], [None], [4], drafts={"a": [-1, -1, -1]}),
        Update(1, 0.2, 0.2, 7, ["a"], [[0, 0, 0]]),
        Schedule(2, 0.2, 0.2, 7, ["a"], [7], [None], [3], drafts={"a": [-1, -1]}),
        End("a", "length", True),
        Update(2, 0.4, 0.4, 7, ["a"], [[0, 0]]),
    ]
    for message in messages:
        for line in assembler.take(message):
            trace.append(line) if isinstance(line, StepRecord) else trace.add_request(line)
    metrics = trace.metrics()
    assert metrics.summary.num_output_tokens == metrics.requests["a"].num_output_tokens == 6
    assert metrics.summary.output_throughput == pytest.approx(6 / 0.4)
    assert metrics.requests["a"].token_times == pytest.approx((0.1, 0.2, 0.2, 0.2, 0.4, 0.4))
    assert metrics.speculation.num_accepted == 3 and metrics.speculation.num_drafts == 5


def test_an_asynchronous_step_says_how_many_rejected_drafts_it_counts():
    assembler = Assembler({"block_size": 16, "num_blocks": 9})
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Schedule(1, 0.0, 0.0, 7, ["a"], [4], [None], [3], drafts={"a": [-1, -1]}),
        Update(0, 0.0, 0.0, 7, ["a"], [[11]]),
        Schedule(2, 0.0, 0.0, 7, ["a"], [7], [None], [3], drafts={"a": [-1, -1]}),
        Update(1, 0.0, 0.0, 7, ["a"], [[12]]),  # both drafts are rejected, and step 2 begins behind them
        Update(2, 0.0, 0.0, 7, ["a"], [[13, 14, 15]]),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    chunks = [chunk for record in records for chunk in record.chunks]
    assert [(chunk.start, chunk.ahead, chunk.first_position, chunk.accepted) for chunk in chunks] == [
        (0, 0, 0, (11,)),
        (4, 0, 4, (12,)),
        (7, 2, 5, (13, 14, 15)),
    ]


def test_the_blocks_of_one_kv_cache_group_are_recorded():
    assembler = Assembler({"block_size": 4}, kv_cache_group=1)
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 9, ["a"], [], [], [4], [Admission("a", 0, 4, [7])]),
        Update(0, 0.0, 0.0, 9),
        Schedule(1, 0.0, 0.0, 9, ["a"], [4], [[[5], [8]]]),
        Update(1, 0.0, 0.0, 9),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    assert [chunk.new_block_ids for record in records for chunk in record.chunks] == [(7,), (8,)]


def test_pooling_models_sample_nothing():
    assembler = Assembler({"block_size": 4}, samples=False)
    *_, record = [
        line
        for message in (
            Arrival("a", 4, 1, 0, 0.0, 0.0),
            Schedule(0, 0.0, 0.0, 9, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
            Update(0, 0.0, 0.0, 9),
        )
        for line in assembler.take(message)
    ]
    assert record.chunks[0].sampled is None


def test_a_packet_holds_its_messages_as_they_were_added():
    """Workers in the engine's process append to the lists of a step that is running."""
    blocks, tokens, packet = [5, 7], [3], Packet()
    packet.add([Schedule(0, 0.0, 0.0, 7, ["a"], [], [], tokens, [Admission("a", 0, 3, blocks)])])
    blocks.append(9)
    tokens[0] = 1
    (message,) = unpack(bytearray(packet.take()))
    assert message.num_scheduled_tokens == [3] and message.admissions[0].block_ids == [5, 7]


def test_messages_gather_in_the_pipe_unless_it_fills(monkeypatch):
    slept = []
    monkeypatch.setattr(writer.time, "sleep", slept.append)
    packet, (receiver, sender) = Packet(), os.pipe()
    with os.fdopen(receiver, "rb"):
        with os.fdopen(sender, "wb", buffering=0) as pipe:
            messages = writer.read_messages(receiver)
            for length in (3, 3, writer.GATHER_BYTES):  # the last one is too long to wait for more
                packet.add([End("a", "x" * length, False)])
                pipe.write(packet.take())
                next(messages)
        assert list(messages) == []
    assert slept == [writer.GATHER_SECONDS] * 2


def test_a_long_queue_is_recorded_up_to_its_limit(in_process, monkeypatch):
    monkeypatch.setenv("WORKBENCH_TRACE_MAX_WAITING", "2")
    workload = DATA / "vllm" / "workloads" / "c2_starvation_5long_thr51.json"
    scheduler = run_double(workload, max_num_seqs=1)
    longest = simulate(workload, config={"max_num_seqs": 1})
    assert max(len(record.waiting) for record in longest) > 2
    for record, expected in zip(assemble(scheduler.recorder.writer.received), longest):
        assert record.waiting == expected.waiting[:2]


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
any_message = st.one_of(
    st.builds(Arrival, st.text(max_size=9), st.just(3), st.just(4), st.just(0), st.floats(0, 9), st.just(0.0), tokens),
    st.builds(End, st.text(max_size=9), st.sampled_from(["stop", "length"]), st.booleans()),
    st.builds(Update, st.integers(0, 9), st.floats(0, 9), st.floats(0, 9), st.integers(0, 9)),
    st.builds(
        Schedule,
        st.integers(0, 9),
        st.floats(0, 9),
        st.floats(0, 9),
        st.integers(0, 9),
        st.none() | st.lists(st.text(max_size=9), max_size=4),
        tokens,
        st.lists(st.none() | st.lists(tokens, max_size=2), max_size=3),
        tokens,
        st.lists(st.builds(Admission, st.text(max_size=9), st.just(0), st.just(3), tokens), max_size=3),
    ),
)


@given(
    st.lists(st.lists(st.lists(any_message, max_size=4), max_size=3), max_size=4),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_messages_arrive_as_they_were_sent_however_the_pipe_cuts_them(packets, cuts):
    stream, packet = bytearray(), Packet()
    for lists in packets:
        for sent in lists:
            packet.add(sent)
        stream += packet.take()
    buffer, received = bytearray(), []
    for length in [*cuts, len(stream)]:
        buffer += stream[:length]
        del stream[:length]
        received += unpack(buffer)
    assert received == [message for lists in packets for sent in lists for message in sent]
    assert not buffer
