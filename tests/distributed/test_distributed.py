"""Messages between the ranks of a job, and lost ranks, in one process."""

import gc
import hashlib
import json
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.distributed import group as groups
from workbench.engine.distributed import job as jobs
from workbench.engine.distributed import link as links
from workbench.engine.distributed.job import ShardedEngine
from workbench.engine.distributed.link import EXIT_STATUS, Kind, Link, Message
from workbench.engine.distributed.lockstep import Agreement, LockstepEngine, dummy_batch
from workbench.engine.distributed.ranks import LeadingRunner
from workbench.engine.distributed.wire import decode, encode
from workbench.engine.packed_batch import pack
from workbench.engine.speculation.custom import CustomProposer
from workbench.models.sharding import check_heads_divide, shard
from workbench.trace.kv_groups import KVCacheGroup

# -- a packed batch as bytes ---------------------------------------------------------------------------------

ARRAYS = ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seqused_k", "block_table", "logits_rows")


@st.composite
def packed_batches(draw):
    """Chunks and decodes over distinct blocks."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    segments, first_free = [], 1
    for _ in range(draw(st.integers(1, 6))):
        start, num_tokens = draw(st.integers(0, 40)), draw(st.integers(1, 30))
        num_blocks = -(-(start + num_tokens) // block_size) + draw(st.integers(0, 2))
        blocks = draw(st.permutations(range(first_free, first_free + num_blocks)))
        first_free += num_blocks
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens))
        segments.append((blocks, start, num_tokens, tokens, draw(st.booleans()), "r"))
    return pack(segments, block_size)


@settings(max_examples=40, deadline=None)
@given(packed_batches())
def test_a_packed_batch_arrives_as_it_was_sent(packed):
    data = encode(packed)
    arrived = decode(data)
    for name in ARRAYS:
        sent, got = getattr(packed, name), getattr(arrived, name)
        assert got.dtype == sent.dtype and np.array_equal(got, sent), name
    assert arrived.block_size == packed.block_size
    assert len(data) == 16 + 16 * packed.num_seqs + 4 * packed.num_tokens + 4 * packed.table_lengths.sum()


def test_a_batch_for_another_pool_is_rejected():
    packed = pack([([1, 9], 2, 3, [5, 6, 7], True, "a")], 4)
    with pytest.raises(ValueError, match="leave the pool"):
        decode(encode(packed), num_blocks=9)


@pytest.mark.parametrize("wanted", [-1, 4, 2**31 - 1])
def test_rows_that_a_sequence_does_not_have_are_rejected(wanted):
    numbers = np.frombuffer(encode(pack([([1], 0, 3, [7, 8, 9], 1, "r")], 4)), np.int32).copy()
    numbers[6] = wanted
    with pytest.raises(ValueError, match="wants logits of more rows than it has"):
        decode(numbers.tobytes())


@settings(max_examples=examples(100), deadline=None)
@given(packed_batches(), st.data())
def test_damaged_bytes_are_rejected_or_harmless(packed, data):
    damaged = bytearray(encode(packed))
    where = data.draw(st.integers(0, len(damaged) - 1))
    damaged[where] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([0, 1, 4]))
    try:
        decode(bytes(damaged[: len(damaged) - cut]), num_blocks=1000)
    except ValueError:
        return
    assert cut == 0  # the damaged numbers may be a valid batch, a part of a batch never is


# -- heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 query heads and 3 KV heads.*2 ranks.*use 1 or 3"),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, 16, "use 1 or 2 or 4 or 8"),
        ({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 1}}, 2, "8 query heads and 1 KV heads"),
        ({"num_attention_heads": 12}, 5, "12 query heads, which 5 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_rejected_by_number(config, size, words):
    with pytest.raises(ValueError, match=words):
        check_heads_divide("m", config, size)


def test_heads_that_divide_are_not():
    check_heads_divide("m", {"num_attention_heads": 9, "num_key_value_heads": 3}, 3)
    check_heads_divide("m", {}, 4)


def test_an_architecture_that_mlx_lm_does_not_split_is_rejected():
    model = tiny_loaded_model("gpt2")
    with pytest.raises(ValueError, match="mlx-lm does not split 'gpt2'"):
        shard(model.name, model.model, mx.distributed.init())


# -- variables of the launcher -------------------------------------------------------------------------------


def test_the_launcher_is_recognised_by_its_variables(tmp_path):
    hosts = tmp_path / "hosts"
    ring = {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}
    hosts.write_text(json.dumps([["10.0.0.7:5000", "10.0.1.7:5001"], ["10.0.0.8:5000"]]))
    assert groups.is_launched(ring) and groups.leader_host(ring) == "10.0.0.7"
    hosts.write_text("\n")  # as mlx.launch -n 1 writes it
    assert not groups.is_launched(ring) and not groups.is_launched({})
    jaccl = {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.9:4000"}
    assert groups.is_launched(jaccl) and groups.leader_host(jaccl) == "10.0.0.9"
    assert groups.leader_host({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.5"}) == "10.0.0.5"
    with pytest.raises(OSError, match="WORKBENCH_LEADER_HOST"):
        groups.leader_host({"MLX_RANK": "1"})
    assert groups.leader_host({"WORKBENCH_LEADER_HOST": "h"}) == "h"


# -- the link ------------------------------------------------------------------------------------------------


class Left(Exception):
    """Raised instead of ending the process."""


class Ranks:
    """Rank 0 and its followers over socket pairs, in this process."""

    def __init__(self, size=3, silence_limit=60.0):
        self.left = {}
        ends = {rank: socket.socketpair() for rank in range(1, size)}
        peers = {0: {rank: pair[0] for rank, pair in ends.items()}, **{r: {0: p[1]} for r, p in ends.items()}}
        self.sockets = peers
        self.links = {
            rank: Link(rank, size, sockets, silence_limit=silence_limit, leave=self.leave(rank))
            for rank, sockets in peers.items()
        }

    def leave(self, rank):
        def leave(status):
            self.left.setdefault(rank, status)
            raise Left

        return leave

    def wait_until_left(self, *ranks):
        wait_until(lambda: set(ranks) <= self.left.keys())


def wait_until(holds):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(links, "CAUSE_SECONDS", 0.05)
    monkeypatch.setattr(links, "FAREWELL_SECONDS", 0.1)
    # Threads that end the process raise an exception here.
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    made = []

    def make(**options):
        made.append(Ranks(**options))
        return made[-1]

    yield make
    for job in made:
        for link in job.links.values():
            link.close()


def test_messages_arrive_in_order_and_with_their_sender(ranks):
    job = ranks()
    for index in range(50):
        job.links[0].broadcast(Kind.STEP, bytes([index]) * (index * 1000))
    for rank in (1, 2):
        for index in range(50):
            assert job.links[rank].receive() == Message(Kind.STEP, bytes([index]) * (index * 1000), 0)
        job.links[rank].send(0, Kind.READY, b"%d" % rank)
    assert sorted(job.links[0].receive() for _ in range(2)) == [(Kind.READY, b"1", 1), (Kind.READY, b"2", 2)]


def test_a_job_that_is_done_ends_without_a_message(ranks, capsys):
    job = ranks()
    job.links[0].broadcast(Kind.CLOSE)
    job.links[0].close()
    for rank in (1, 2):
        assert [job.links[rank].receive().kind for _ in range(2)] == [Kind.CLOSE, Kind.STOP]
        job.links[rank].close()
    assert job.left == {} and capsys.readouterr().err == ""


def test_a_rank_that_has_said_farewell_is_not_lost_but_another_still_is(ranks, capsys):
    job = ranks()
    job.links[2].close()
    job.links[1].send(0, Kind.READY)
    assert job.links[0].receive() == Message(Kind.READY, b"", 1)
    wait_until(lambda: not job.links[0]._readers[1].is_alive())
    assert job.left == {} and job.links[0]._problems == {}
    job.sockets[1][0].shutdown(socket.SHUT_RDWR)
    job.wait_until_left(0)
    assert "rank 1 is gone" in capsys.readouterr().err


def test_a_connection_that_closes_ends_every_rank_and_names_the_lost_one(ranks, capsys):
    job = ranks()
    job.links[0].doing = "in forward pass 7"
    job.sockets[2][0].shutdown(socket.SHUT_RDWR)
    job.wait_until_left(0, 1)
    assert job.left[0] == job.left[1] == EXIT_STATUS
    said = capsys.readouterr().err
    gone = "rank 2 is gone: its connection closed without a farewell (in forward pass 7)"
    assert f"rank 0 of 3 ends the job: {gone}" in said and f"rank 1 of 3 ends the job: {gone}" in said


def test_a_rank_that_fails_because_of_a_lost_rank_is_not_blamed(ranks, capsys, monkeypatch):
    monkeypatch.setattr(links, "CAUSE_SECONDS", 1.0)
    job = ranks()
    job.links[1].send(0, Kind.FAILED, b"RuntimeError: connection to a peer was lost")  # because rank 2 is gone
    wait_until(lambda: job.links[0]._problems)
    job.sockets[2][0].shutdown(socket.SHUT_RDWR)
    job.wait_until_left(0, 1)
    assert "rank 0 of 3 ends the job: rank 2 is gone" in capsys.readouterr().err


def test_an_orderly_end_does_not_hide_a_lost_rank(ranks, capsys, monkeypatch):
    monkeypatch.setattr(links, "CAUSE_SECONDS", 60.0)
    job = ranks()
    job.sockets[2][0].shutdown(socket.SHUT_RDWR)
    wait_until(lambda: job.links[0]._problems)
    with pytest.raises(Left):
        job.links[0].close()
    job.wait_until_left(0, 1)
    assert job.left[0] == EXIT_STATUS and "rank 0 of 3 ends the job: rank 2 is gone" in capsys.readouterr().err


def test_a_rank_that_fails_is_named_with_its_reason(ranks, capsys):
    job = ranks()
    with pytest.raises(Left):
        job.links[0].fail("MemoryError: planted")
    job.wait_until_left(0, 1, 2)
    assert "rank 2 of 3 ends the job: rank 0 failed: MemoryError: planted (starting)" in capsys.readouterr().err


def test_the_ranks_of_a_job_that_is_done_skip_the_last_garbage_collection(ranks, monkeypatch):
    job = ranks(size=2)
    monkeypatch.setattr(jobs, "is_launched", lambda: True)
    monkeypatch.setattr(jobs, "join_group", lambda: SimpleNamespace(rank=lambda: 1))
    monkeypatch.setattr(jobs, "leader_host", lambda: "127.0.0.1")
    monkeypatch.setattr(jobs, "open_link", lambda group, host: job.links[1])
    monkeypatch.setattr(jobs, "follow", lambda link, load: None)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        assert jobs.run_job("some model", lead=None) == 0
        assert gc.get_freeze_count() > 10_000
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # Ctrl-C is rank 0's
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGINT, interrupt)


def test_silence_ends_the_job(ranks, capsys, monkeypatch):
    monkeypatch.setattr(Link, "_beat", lambda self: None)
    job = ranks(size=2, silence_limit=0.2)
    job.wait_until_left(0, 1)
    assert "ends the job: rank 1 is lost: not heard of for" in capsys.readouterr().err


def test_beats_are_heard(ranks):
    job = ranks(size=2, silence_limit=4.0)
    for _ in range(2):
        before = [job.links[0]._heard[1], job.links[1]._heard[0]]
        wait_until(lambda before=before: job.links[0]._heard[1] > before[0] and job.links[1]._heard[0] > before[1])


@pytest.mark.parametrize("header", [struct.pack("<BI", 99, 0), struct.pack("<BI", Kind.STEP, links.MAX_PAYLOAD + 1)])
def test_a_malformed_message_ends_the_job(ranks, capsys, header):
    job = ranks(size=2)
    job.sockets[1][0].sendall(header)
    job.wait_until_left(0)
    assert "rank 1 is gone: " in capsys.readouterr().err


def test_connections_without_the_secret_are_closed(monkeypatch):
    monkeypatch.setattr(links, "JOIN_SECONDS", 10.0)
    monkeypatch.setattr(links, "INTRODUCTION_SECONDS", 0.2)
    secret = hashlib.blake2b(b"secret", digest_size=links.TOKEN_BYTES).digest()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect(shown, rank):
            connection = socket.create_connection(server.getsockname())
            connection.sendall(shown + struct.pack("<I", rank))
            return connection

        strangers = [connect(bytes(links.TOKEN_BYTES), 1), connect(secret, 7), connect(secret, 0)]
        silent = socket.create_connection(server.getsockname())
        silent.close()
        strangers.append(socket.create_connection(server.getsockname()))  # sends nothing and stays
        ranks = [connect(secret, rank) for rank in (2, 1)]
        peers = links._accept(server, 3, secret)
        assert sorted(peers) == [1, 2]
        for stranger in strangers:
            assert stranger.recv(1) == b""
        for connection in (*peers.values(), *ranks, *strangers):
            connection.close()


# -- rank 0 without others -----------------------------------------------------------------------------------


class OneOther:
    """A link with one other rank, whose answers the test chooses."""

    size = 2
    doing = ""

    def __init__(self, **wrong):
        self.wrong = wrong
        self.sent = []

    def fail(self, reason):
        raise AssertionError(reason)

    def broadcast(self, kind, payload=b""):
        self.sent.append((kind, payload))

    def receive(self):
        from workbench.engine.distributed.ranks import _facts

        return Message(Kind.READY, json.dumps({**_facts(self.runner.loaded, self.runner), **self.wrong}).encode(), 1)


CONFIG = EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=32, max_model_len=64)


@pytest.fixture
def leading(monkeypatch):
    """Makes the engine of rank 0 with a link that has no connections."""

    def remember(self, model):
        self._link.runner = self
        return check(self, model)

    check = LeadingRunner._check_that_ranks_agree
    monkeypatch.setattr(LeadingRunner, "_check_that_ranks_agree", remember)

    def make(config=CONFIG, **wrong):
        return ShardedEngine(tiny_loaded_model("llama"), OneOther(**wrong), config)

    return make


@pytest.mark.parametrize("wrong", [{"KV heads": [1, 1, 1]}, {"versions": {"mlx": "0.1"}}, {"model": ["other"]}])
def test_ranks_that_differ_do_not_start(leading, wrong):
    with pytest.raises(ValueError, match=f"ranks disagree on {next(iter(wrong))}: .* on rank 0, .* on rank 1"):
        leading(**wrong)


def test_ranks_that_wait_for_each_other_end_the_job(leading, monkeypatch):
    monkeypatch.setattr("workbench.engine.distributed.ranks.READY_SECONDS", 0.1)
    failed = threading.Event()
    monkeypatch.setattr(OneOther, "fail", lambda self, reason: failed.set())
    monkeypatch.setattr(OneOther, "receive", lambda self: failed.wait(20) and Message(Kind.READY, b"{}", 1))
    with pytest.raises(ValueError, match="ranks disagree"):
        leading()
    assert failed.is_set()


def test_every_pass_of_rank_0_is_sent_to_the_others(leading):
    with leading() as engine:
        link = engine.runner._link
        engine.add_request([5, 9, 12, 7, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.run(progress=False)
    kinds = [kind for kind, _ in link.sent]
    assert kinds == [Kind.OPEN, *[Kind.STEP] * len(engine.trace), Kind.CLOSE]
    assert EngineConfig.from_dict(json.loads(link.sent[0][1])) == engine.config
    assert [decode(data).num_tokens for kind, data in link.sent if kind is Kind.STEP] == [5, 1, 1, 1]


def test_drafts_are_sent_with_the_rows_whose_logits_are_wanted(leading):
    with leading(CONFIG.replace(num_speculative_tokens=3)) as engine:
        link = engine.runner._link
        engine._step.speculator.proposer = CustomProposer(lambda tokens, count: [1] * count, 260)
        forward, rows = engine.runner.forward, []
        engine.runner.forward = lambda packed: rows.append(packed.logits_rows.tolist()) or forward(packed)
        engine.add_request([5, 9, 12, 7, 5, 9], SamplingParams(max_tokens=8, ignore_eos=True))
        engine.run(progress=False)
    assert [decode(data).logits_rows.tolist() for kind, data in link.sent if kind is Kind.STEP] == rows
    assert max(map(len, rows)) == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"async_scheduling": True}, "async_scheduling=True does not work with several ranks"),
        (
            {"num_speculative_tokens": 2, "speculative": {"method": "draft_model", "num_layers": 1}},
            "draft_model.*ranks",
        ),
    ],
)
def test_steps_ahead_over_several_ranks_are_refused_by_name(leading, config, message):
    with pytest.raises(ValueError, match=message):
        leading(CONFIG.replace(**config))
    with pytest.raises(ValueError, match="does not work with engines in lockstep"):
        LockstepEngine(tiny_loaded_model("llama"), None, None, CONFIG.replace(**config))


def test_a_grammar_is_ready_before_its_request_is_part_of_an_agreement(monkeypatch):
    waited = []
    grammar = SimpleNamespace(wait=lambda: waited.append("for it"))
    monkeypatch.setattr(Engine, "_compile", lambda self, sampling, num_tokens: grammar)
    engine = object.__new__(LockstepEngine)  # nothing else of an engine decides this
    assert engine._compile(SamplingParams(), 3) is grammar and waited == ["for it"]


# -- the dummy step ------------------------------------------------------------------------------------------


def test_a_rank_without_work_runs_as_many_tokens_as_the_busiest_rank():
    assert Agreement((0, 7, 3), (False, True, False)).num_dummy_tokens == 7
    assert Agreement((0, 0), (False, False)).num_dummy_tokens == 0


def test_a_dummy_batch_has_a_table_for_each_kv_cache_group():
    groups = [KVCacheGroup(block_size=4), KVCacheGroup("sliding_window", 2, 8), KVCacheGroup("mamba", 4)]
    tables = dummy_batch(5, groups).by_group
    assert [group.block_table.shape for group in tables] == [(1, 2), (1, 3), (1, 2)]
    assert [len(group.slot_mapping) for group in tables] == [5, 5, 0]
    assert dummy_batch(5, groups[:1]).by_group == ()


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_a_dummy_step_leaves_every_block_but_the_null_block_as_it_was(num_tokens):
    with Engine(tiny_loaded_model("llama"), CONFIG) as engine:
        engine.add_request(list(range(3, 20)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.run(progress=False)
        arrays = engine.runner.kv_cache.arrays

        def digests():
            return [np.array(array)[1:].tobytes() for array in arrays]

        before = digests()
        logits, _ = engine._thread.call(lambda: engine.runner.forward(dummy_batch(num_tokens, engine.runner.groups)))
        assert digests() == before and logits.values.shape[0] == 0
        # A request after it gets the same tokens.
        engine.add_request(list(range(3, 20)), SamplingParams(max_tokens=2, ignore_eos=True))
        [again] = engine.run(progress=False)
        assert again.token_ids == engine.outputs["r0"].token_ids
