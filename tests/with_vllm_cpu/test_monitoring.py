"""A running vLLM without the recorder: its /metrics and its KV events (``make test-vllm-cpu``)."""

import json
import os
import threading
import time
import urllib.request

import pytest

if not os.environ.get("VLLM_CPU_PYTHON"):
    pytest.skip("vllm-cpu is not installed here: make test-vllm-cpu", allow_module_level=True)

from workbench import Trace
from workbench.trace.formats.kv_events import read_kv_events
from workbench.trace.formats.kv_events.subscriber import record_kv_events
from workbench.trace.formats.scrapes import read_scrapes

BLOCK = 32
NUM_BLOCKS = 150
LENGTH = 480
PROMPTS = [[1000 + 7 * i + j % 900 for j in range(LENGTH)] for i in range(16)]
"""Twice as many blocks as the cache has, so a prompt is gone when it comes again; at once it is a hit."""

OUTPUT = 4
ORDER = [i for _ in range(2) for prompt in range(len(PROMPTS)) for i in (prompt, prompt)]


def complete(port, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == OUTPUT


def scrape(port, path):
    """Append what ``curl`` would, after the line with the time."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply, path.open("a") as file:
        file.write(f"# scraped {time.time()}\n{reply.read().decode()}\n")


@pytest.fixture(scope="module")
def seen(tmp_path_factory, serving, finished):
    """The scrapes, the KV events and the recorder's trace of one server."""
    root = tmp_path_factory.mktemp("monitored")
    endpoint, replay = (f"ipc://{root}/{name}" for name in ("events", "replay"))
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    flags = ["--kv-events-config", json.dumps(config), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    flags += ["--block-size", str(BLOCK)]
    over = threading.Event()
    with serving(root, "smooth", {"enable_prefix_caching": True}, *flags) as (port, folder):
        complete(port, PROMPTS[0][:100])  # before anyone subscribes: the replay has it
        arguments = {"replay_endpoint": replay, "stop": over.is_set}
        listener = threading.Thread(
            target=record_kv_events, args=(endpoint, root / "events.jsonl"), kwargs=arguments, daemon=True
        )
        listener.start()
        scrape(port, root / "metrics.prom")
        for index in ORDER:
            complete(port, PROMPTS[index])
        scrape(port, root / "metrics.prom")
        time.sleep(1)  # the last events arrive
        over.set()
        listener.join(30)
    return read_scrapes(root / "metrics.prom"), read_kv_events(root / "events.jsonl"), Trace.load(finished(folder))


def test_the_counters_hold_what_the_client_sent(seen):
    window = seen[0].whole
    assert window.num_finished == len(ORDER)
    assert window.increase("vllm:prompt_tokens_total") == len(ORDER) * LENGTH
    assert window.increase("vllm:generation_tokens_total") == len(ORDER) * OUTPUT
    assert window.latency("ttft").count == len(ORDER)
    assert 0 < window.latency("ttft").mean < window.latency("e2e").mean


def test_the_hits_of_the_metrics_are_those_of_the_recorder(seen):
    scrapes, _, trace = seen
    hits = scrapes.whole.increase("vllm:prefix_cache_hits_total")
    assert hits == sum(request.num_cached_tokens for request in trace.metrics().requests.values())
    assert hits >= len(ORDER) // 2 * (LENGTH - BLOCK)


def test_the_events_hold_every_block_that_was_computed(seen):
    scrapes, events, _ = seen
    (cache,) = events.histories()
    computed = scrapes.whole.increase("vllm:prefix_cache_queries_total")
    computed -= scrapes.whole.increase("vllm:prefix_cache_hits_total")
    assert not events.num_lost and not cache.num_unknown and cache.block_size == BLOCK
    before = 100 // BLOCK  # of the request before the first scrape
    assert 0 <= computed / BLOCK - (cache.num_stored - before) <= len(ORDER)
    assert cache.peak_cached <= NUM_BLOCKS and cache.num_stored - cache.num_removed == cache.num_cached
    assert sum(each.num_tokens for each in cache.returns) >= len(PROMPTS) * (LENGTH - BLOCK)
    assert f"{cache.num_stored} blocks of {BLOCK} tokens stored" in str(events)
