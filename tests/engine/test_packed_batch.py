"""Packing: what one forward pass is handed, exactly, and what can never be handed to it."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from workbench.engine.packed_batch import PackedBatch, Segment, pack, prepare_unified


def segment(block_ids, num_tokens, start=0, **fields):
    return Segment(block_ids, start, num_tokens, list(range(100, 100 + num_tokens)), **fields)


@pytest.mark.parametrize(
    ("segments", "slots", "cu_seqlens_q", "starts", "seqused_k", "block_table"),
    [
        pytest.param([segment([10, 11], 5)], [40, 41, 42, 43, 44], [0, 5], [0], [5], [[10, 11]], id="prefill"),
        pytest.param(
            [segment([10], 3), segment([20], 2)],
            [40, 41, 42, 80, 81],
            [0, 3, 5],
            [0, 0],
            [3, 2],
            [[10], [20]],
            id="packed",
        ),
        pytest.param([segment([5, 6], 5)], [20, 21, 22, 23, 24], [0, 5], [0], [5], [[5, 6]], id="multiblock"),
        pytest.param([segment([10, 11], 3, 4)], [44, 45, 46], [0, 3], [4], [7], [[10, 11]], id="continuation"),
        pytest.param(
            [segment([5, 6], 3, 2), segment([7, 8, 9], 4, 7)],
            [22, 23, 24, 35, 36, 37, 38],
            [0, 3, 7],
            [2, 7],
            [5, 11],
            [[5, 6, 0], [7, 8, 9]],
            id="inside a block",
        ),
        pytest.param([segment([5, 6], 1, 7)], [27], [0, 1], [7], [8], [[5, 6]], id="decode"),
        pytest.param(
            [segment([5, 6], 1, 7), segment([10, 11], 5)],
            [27, 40, 41, 42, 43, 44],
            [0, 1, 6],
            [7, 0],
            [8, 5],
            [[5, 6], [10, 11]],
            id="mixed",
        ),
        pytest.param(
            [segment([7], 2), segment([8, 9, 3], 1, 8)],
            [28, 29, 12],
            [0, 2, 3],
            [0, 8],
            [2, 9],
            [[7, 0, 0], [8, 9, 3]],
            id="padded table",
        ),
    ],
)
def test_exact_layout(segments, slots, cu_seqlens_q, starts, seqused_k, block_table):
    packed = pack(segments, 4)
    assert packed.slot_mapping.tolist() == slots
    assert packed.cu_seqlens_q.tolist() == cu_seqlens_q
    assert packed.positions[packed.cu_seqlens_q[:-1]].tolist() == starts
    assert packed.seqused_k.tolist() == seqused_k
    assert packed.block_table.tolist() == block_table
    assert packed.logits_rows.tolist() == [end - 1 for end in cu_seqlens_q[1:]]


def test_dtypes_and_sizes():
    packed = pack([segment([5, 6], 1, 7), segment([10, 11], 5)], 4)
    dtypes = {field.name: getattr(packed, field.name).dtype for field in dataclasses.fields(packed)[:7]}
    assert dtypes.pop("slot_mapping") == np.int64
    assert set(dtypes.values()) == {np.dtype(np.int32)}
    assert (packed.num_tokens, packed.num_seqs) == (6, 2)


def test_only_the_last_row_of_a_sampling_chunk_has_logits():
    packed = pack([segment([5], 3, samples=False), segment([6], 1, 2), segment([7], 2)], 4)
    assert packed.logits_rows.tolist() == [3, 5]
    assert pack([segment([5], 3, samples=False)], 4).logits_rows.tolist() == []


def random_segments(rng, num_seqs, block_size):
    """Segments over disjoint permuted blocks."""
    pool = list(range(1, 1 + num_seqs * 12))
    rng.shuffle(pool)
    segments = []
    for index in range(num_seqs):
        start, num_tokens = rng.randrange(0, 5 * block_size), rng.randrange(1, 5 * block_size)
        spare = rng.randrange(0, 2)
        blocks = [pool.pop() for _ in range(-(-(start + num_tokens) // block_size) + spare)]
        tokens = [rng.randrange(1000) for _ in range(num_tokens)]
        segments.append(Segment(blocks, start, num_tokens, tokens, rng.random() < 0.5, f"r{index}"))
    return segments


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), num_seqs=st.integers(1, 7), block_size=st.sampled_from([1, 4, 16]))
def test_equals_the_plain_loop_over_tokens(seed, num_seqs, block_size):
    segments = random_segments(random.Random(seed), num_seqs, block_size)
    packed = pack(segments, block_size, num_blocks=1 + num_seqs * 12)
    positions, slots, tokens, rows, bounds = [], [], [], [], [0]
    for s in segments:
        for i in range(s.num_tokens):
            position = s.start + i
            positions.append(position)
            slots.append(s.block_ids[position // block_size] * block_size + position % block_size)
            tokens.append(s.token_ids[i])
        bounds.append(len(tokens))
        if s.samples:
            rows.append(len(tokens) - 1)
    assert packed.positions.tolist() == positions
    assert packed.slot_mapping.tolist() == slots
    assert packed.token_ids.tolist() == tokens
    assert packed.cu_seqlens_q.tolist() == bounds
    assert packed.logits_rows.tolist() == rows
    assert packed.seqused_k.tolist() == [s.start + s.num_tokens for s in segments]
    for s, row in zip(segments, packed.block_table.tolist()):
        assert row == list(s.block_ids) + [0] * (len(row) - len(s.block_ids))


def chunk(request_id, block_table, token_ids, start, num_tokens, samples=True):
    request = SimpleNamespace(request_id=request_id, block_tables=[block_table], token_ids=token_ids, adapter="")
    return SimpleNamespace(request=request, start=start, num_tokens=num_tokens, samples=samples, num_logits=samples)


def test_a_scheduled_batch_is_packed_in_its_order():
    batch = SimpleNamespace(
        chunks=[
            chunk("prefill", [3, 9], [11, 12, 13, 14, 15, 16], 2, 3, samples=False),
            chunk("decode", [7], [21, 22, 23], 2, 1),
        ]
    )
    packed = prepare_unified(batch, 4, num_blocks=10)
    assert packed.token_ids.tolist() == [13, 14, 15, 23]
    assert packed.positions.tolist() == [2, 3, 4, 2]
    assert packed.slot_mapping.tolist() == [14, 15, 36, 30]
    assert packed.logits_rows.tolist() == [3]
    assert packed.request_ids == ("prefill", "decode")


def same(a, b):
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)[:7])


def test_a_table_that_shrank_in_place_is_read_again():
    """The scheduler gives a table that loses blocks another list."""
    table = [1, 2, 3]
    before = pack([segment(table, 1, 9)], 4)
    table[1:] = [7]
    assert pack([segment(table, 1, 5)], 4, previous=before).block_table.tolist() == [[1, 7]]


def test_reusing_the_previous_step_changes_nothing():
    """Requests grow, leave, join and are preempted; each step is packed with and without the step before."""
    rng = random.Random(3)
    free = list(range(1, 400))
    live: dict[str, tuple[list[int], int]] = {}
    previous, reused = None, 0
    for step in range(60):
        for name in list(live):
            if rng.random() < 0.05:
                free += live.pop(name)[0]
            elif rng.random() < 0.05:
                free += live[name][0]
                live[name] = ([], 0)  # preempted: a new table
        if step % 7 == 0:
            live[f"r{step}"] = ([], 0)
        segments = []
        for name, (table, start) in live.items():
            num_tokens = rng.choice([1, 1, 1, 6])
            while len(table) * 4 < start + num_tokens:
                table.append(free.pop(0))
            segments.append(Segment(table, start, num_tokens, [step] * num_tokens, True, name))
            live[name] = (table, start + num_tokens)
        if not segments:
            continue
        fresh = pack(segments, 4, num_blocks=400)
        packed = pack(segments, 4, num_blocks=400, previous=previous)
        assert same(fresh, packed)
        reused += previous is not None and list(map(id, previous.tables)) == [id(s.block_ids) for s in segments]
        previous = packed
    assert reused > 10


# -- what is refused, naming the sequence ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "segments is empty"),
        ([segment([1], 2), segment([2, 3], 9, request_id="q7")], r"sequence 1 \(request 'q7'\): position 8 .*2 blocks"),
        ([segment([1], 1, 4)], "position 4 lies outside.*allocate 2 blocks"),
        ([segment([1], 0)], r"tokens \[0, 0\).*num_tokens at least 1"),
        ([segment([1], 2, -1)], "start must be at least 0"),
        ([Segment([1], 0, 3, [1, 2])], "2 token ids for 3 scheduled tokens"),
        ([segment([1], 2), segment([64], 2, request_id="b")], r"sequence 1 \(request 'b'\): block ids \[64\] leave"),
        ([segment([-1], 2)], "block ids"),
        ([segment([1], 3), segment([1], 2)], "slot 4 is written twice.*row 0 of sequence 0.*row 3 of sequence 1"),
        ([segment([2, 2], 8)], "slot 8 is written twice"),
    ],
)
def test_segments_that_are_refused(segments, words):
    with pytest.raises(ValueError, match=words):
        pack(segments, 4, num_blocks=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_seqlens_q": [1, 1, 6]}, "start at 0"),
        ({"cu_seqlens_q": [0, 1, 5]}, "end at the 6 packed tokens"),
        ({"cu_seqlens_q": [0, 6]}, "must have 3"),
        ({"cu_seqlens_q": [0, 7, 6]}, r"falls from 7 to 6 at sequence 1 \(request 'b'\)"),
        ({"seqused_k": [8, 4]}, "seqused_k is 4, less than its 5 query tokens"),
        ({"seqused_k": [8, 9]}, "seqused_k is 9, its block table holds 8"),
        ({"slot_mapping": [27, 40, 41, 42, 43]}, "slot_mapping has 5 entries"),
        ({"slot_mapping": [27, 40, 41, 42, 43, 27]}, r"slot 27 is written twice.*\(request 'a'\).*\(request 'b'\)"),
        ({"slot_mapping": [27, 40, 41, 42, 43, 256]}, r"sequence 1 \(request 'b'\): row 5 writes slot 256"),
        ({"slot_mapping": [-1, 40, 41, 42, 43, 44]}, r"sequence 0 \(request 'a'\): row 0 writes slot -1"),
        ({"block_table": [[5, 6], [10, 64]]}, r"sequence 1 \(request 'b'\): block ids"),
        ({"positions": [7]}, "positions has 1 entries"),
        ({"logits_rows": [6]}, "logits_rows"),
    ],
)
def test_a_packed_batch_that_breaks_a_rule_cannot_be_made(changes, words):
    good = pack([segment([5, 6], 1, 7, request_id="a"), segment([10, 11], 5, request_id="b")], 4, num_blocks=64)
    assert isinstance(good, PackedBatch)
    arrays = {name: np.array(value, dtype=getattr(good, name).dtype) for name, value in changes.items()}
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(good, **arrays)


def test_a_decode_batch_of_256_is_packed_without_a_loop_over_tokens():
    """The work per token is in numpy: a hundred times the tokens cost no more Python calls."""
    import sys

    def calls(num_tokens):
        segments = [
            Segment([2 * i + 1, 2 * i + 2], 0, num_tokens, range(num_tokens), True, f"r{i}") for i in range(256)
        ]
        count = 0

        def profile(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            pack(segments, 128)
        finally:
            sys.setprofile(None)
        return count

    assert calls(100) <= 1.05 * calls(1)
