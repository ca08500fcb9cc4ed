"""KV cache events: the cache that they describe, what was needed again, and a subscription over ZMQ."""

import json
import random
import threading
from collections import Counter, OrderedDict

import msgspec
import pytest

from workbench.apps.cli import main
from workbench.trace import TraceError
from workbench.trace.formats.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    collect,
    decode_batch,
    is_kv_events,
    read_kv_events,
)
from workbench.trace.formats.kv_events.recording import KVEventHeader
from workbench.trace.formats.kv_events.subscriber import END, record_kv_events


class LRU:
    """A prefix cache of so many blocks; it writes the events that vLLM would."""

    def __init__(self, num_blocks):
        self.num_blocks, self.blocks, self.num_misses = num_blocks, OrderedDict(), 0

    def use(self, block):
        if block in self.blocks:
            self.blocks.move_to_end(block)
            return []
        self.num_misses += 1
        events = []
        if len(self.blocks) == self.num_blocks:
            events.append(
                {"type": "BlockRemoved", "block_hashes": [self.blocks.popitem(last=False)[0]], "medium": "GPU"}
            )
        self.blocks[block] = True
        stored = {
            "type": "BlockStored",
            "block_hashes": [block],
            "token_ids": [1, 2],
            "block_size": 16,
            "medium": "GPU",
        }
        return [*events, stored | {"parent_block_hash": None, "lora_id": None, "group_idx": 0, "lora_name": None}]


def batches_of(cache, uses):
    payloads = [msgspec.msgpack.encode([float(at), cache.use(block), 0]) for at, block in enumerate(uses)]
    return [decode_batch(seq, payload) for seq, payload in enumerate(payloads)]


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_saves_what_it_says(seed):
    """The reference: the same uses with a larger cache."""
    rng = random.Random(seed)
    uses = [min(int(rng.paretovariate(0.6)), 200) for _ in range(2000)]
    cache = LRU(40)
    events = collect("lru", batches_of(cache, uses))
    (history,) = events.histories()
    assert events.cached_blocks() == Counter(list(cache.blocks))
    assert history.num_cached == history.peak_cached == 40 and history.num_stored == cache.num_misses
    assert len(history.returns) == cache.num_misses - len(set(uses))
    for more in (1, 5, 20, 60, 200):
        larger = LRU(40 + more)
        for block in uses:
            larger.use(block)
        saved = (cache.num_misses - larger.num_misses) * 16
        assert history.num_saved(more) == saved
    enough = history.blocks_to_save(1.0)
    whole = LRU(40 + enough)
    for block in uses:
        whole.use(block)
    assert whole.num_misses == len(set(uses))
    almost = LRU(40 + enough - 1)
    for block in uses:
        almost.use(block)
    assert almost.num_misses > len(set(uses))


def test_copies_clearing_ranks_and_blocks_from_before(tmp_path):
    stored = BlockStored(block_hashes=[1, "ab"], block_size=16)
    batches = [
        KVEventBatch(5, 0.0, [stored, BlockStored(block_hashes=[1], block_size=16), BlockRemoved(block_hashes=[99])]),
        KVEventBatch(6, 1.0, [BlockRemoved(block_hashes=[1])]),
        KVEventBatch(5, 1.5, [BlockStored(block_hashes=[7], block_size=16, medium="CPU", group_idx=1)], rank=1),
        KVEventBatch(9, 3.0, [AllBlocksCleared(), BlockStored(block_hashes=[1], block_size=16)]),
    ]
    events = collect("test", [*batches, batches[0]])
    assert len(events.batches) == 4 and events.num_lost == 2 and events.seconds == 3
    first, second = events.histories()
    assert (first.rank, first.medium, first.num_unknown, first.num_cleared, first.num_cached) == (0, "GPU", 1, 1, 1)
    assert (second.rank, second.medium, second.group, second.num_cached) == (1, "CPU", 1, 1)
    assert not first.returns, "a copy of block 1 was still cached when the other one was removed"
    assert events.cached_blocks(0) == {1: 1} and "2 batches were lost" in repr(events)


def test_older_events_are_arrays():
    events = [["BlockStored", [b"\x01\xff", 5], None, [1, 2], 16, None], ["BlockRemoved", [5]], ["AllBlocksCleared"]]
    batch = decode_batch(3, msgspec.msgpack.encode([1.5, events]))
    assert batch.events == [
        BlockStored(block_hashes=["01ff", 5], token_ids=[1, 2], block_size=16),
        BlockRemoved(block_hashes=[5]),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1, [{"type": "Other"}]]), b"\x93\x01"])
def test_a_payload_of_something_else(payload):
    with pytest.raises(TraceError, match="batch 4 holds no KV events"):
        decode_batch(4, payload)


def publish(context, payloads, replayed, ports, done):
    """The part of vLLM's publisher: it answers one request for earlier batches, then publishes the others."""
    import zmq

    publisher, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    ports += [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, replay)]
    publisher.recv()  # the subscription
    client, _, start = replay.recv_multipart()
    assert int.from_bytes(start, "big") == 0
    for seq in range(replayed):
        replay.send_multipart((client, b"", b"kv", seq.to_bytes(8, "big"), payloads[seq]))
    replay.send_multipart((client, b"", b"", END, b""))
    for seq in range(replayed - 2, len(payloads)):  # two of them a second time
        publisher.send_multipart((b"kv", seq.to_bytes(8, "big"), payloads[seq]))
    done.wait(20)
    publisher.close(0)
    replay.close(0)


def test_a_subscription_begins_with_the_earlier_batches(tmp_path, capsys):
    zmq = pytest.importorskip("zmq")
    rng = random.Random(0)
    cache = LRU(8)
    payloads = [msgspec.msgpack.encode([i / 10, cache.use(rng.randrange(20)), 0]) for i in range(60)]
    path, ports, done = tmp_path / "events.jsonl", [], threading.Event()
    with zmq.Context() as context:
        thread = threading.Thread(target=publish, args=(context, payloads, 25, ports, done))
        thread.start()
        while len(ports) < 2:
            pass
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        count = [0]

        def stop():
            count[0] += 1
            return len(path.read_bytes().splitlines()) == 61 or count[0] > 200

        events = record_kv_events(endpoint, path, replay_endpoint=replay, topic="kv", stop=stop)
        done.set()
        thread.join(20)
    assert [batch.seq for batch in events.batches] == list(range(60)) and events.num_lost == 0
    assert is_kv_events(path) and read_kv_events(path).batches == events.batches
    assert events.cached_blocks() == Counter(list(cache.blocks))
    assert b"token_ids" not in path.read_bytes(), "tokens are the users' texts"
    assert main(["trace", "info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "60 batches of KV events of events.jsonl" in said and "cannot answer: why a request was slow" in said
    assert "stored again after their removal" in said and "more blocks for 50%" in said


def test_the_command(tmp_path, capsys):
    pytest.importorskip("zmq")
    out = tmp_path / "events.jsonl"
    assert main(["trace", "kv-events", "tcp://127.0.0.1:1", str(out), "--seconds", "0.1"]) == 0
    assert "0 batches of KV events" in capsys.readouterr().out and is_kv_events(out)
    assert main(["trace", "kv-events", "nowhere", str(out)]) == 2
    assert "endpoint 'nowhere' must be an address such as" in capsys.readouterr().err
    assert main(["trace", "kv-events", "tcp://127.0.0.1:1", str(tmp_path / "events.txt")]) == 2
    assert main(["trace", "kv-events", "tcp://127.0.0.1:1", str(out), "--seconds", "0"]) == 2


def test_a_damaged_recording(tmp_path):
    path = tmp_path / "events.jsonl"
    header = msgspec.json.encode(KVEventHeader()).decode()
    path.write_text(f'{header}\n{{"seq": 1, "ts": 2.0, "events": []}}\n{{"seq": 2, "ts"')
    assert len(read_kv_events(path).batches) == 1, "a line that is still written is left out"
    path.write_text(f"{header}\n{{}}\n")
    with pytest.raises(TraceError, match="line 2: no batch of KV events"):
        read_kv_events(path)
    path.write_text(json.dumps({"kind": "kv_events", "version": 2}) + "\n")
    with pytest.raises(TraceError, match="of version 1"):
        read_kv_events(path)
    path.write_text("")
    with pytest.raises(TraceError, match="is empty"):
        read_kv_events(path)
