"""vLLM's own publications are read: KV events of its scheduler over its ZMQ publisher, and its Prometheus metrics."""

import importlib.util
import random
import socket
import threading
from collections import Counter

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from real_vllm import drive, make_scheduler
from vllm.distributed import kv_events as published
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler

from workbench.config import EngineConfig
from workbench.simulation.arrivals import timed_arrival
from workbench.trace.formats import kv_events
from workbench.trace.formats.kv_events.subscriber import record_kv_events
from workbench.trace.formats.scrapes import read_scrapes


def two_ports():
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (first, second)]


def run(num_blocks, folder, arrivals):
    """vLLM's scheduler with its publisher, and a subscription that begins in the middle of the run."""
    ports = two_ports()
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, num_blocks=num_blocks, max_model_len=2000)
    folder.mkdir()
    scheduler = make_scheduler(Scheduler, config)
    pool = scheduler.kv_cache_manager.block_pool
    pool.enable_kv_cache_events = True
    scheduler.kv_event_publisher = published.ZmqEventPublisher(0, f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")
    half = len(arrivals) // 2
    drive(scheduler, config, arrivals[:half])
    ended = threading.Event()
    found = []

    def record():
        idle = [0]

        def stop():
            idle[0] += 1 if ended.is_set() else 0
            return idle[0] > 5

        found.append(record_kv_events(endpoint, folder / "events.jsonl", replay_endpoint=replay, stop=stop))

    thread = threading.Thread(target=record)
    thread.start()
    while not (folder / "events.jsonl").exists() or (folder / "events.jsonl").stat().st_size < 1000:
        threading.Event().wait(0.05)
    drive(scheduler, config, arrivals[half:])
    threading.Event().wait(0.5)
    ended.set()
    thread.join(60)
    scheduler.kv_event_publisher.shutdown()
    cached = Counter()
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        cached[maybe_convert_block_hash(get_block_hash(key))] += len(blocks) if isinstance(blocks, dict) else 1
    return found[0], cached


def workload(seed):
    """Requests that begin with one of a few long prompts, one after the other."""
    rng = random.Random(seed)
    arrivals = []
    for i in range(60):
        shared = rng.randrange(12)
        prompt = [shared + 5] * 160 + [100 + i] * rng.randint(1, 40)
        arrivals.append(timed_arrival(f"r{i}", prompt, 5, 0.0))
    return arrivals


def test_the_cache_of_the_events_is_the_cache_of_vllm(tmp_path):
    events, cached = run(70, tmp_path / "a", workload(1))
    assert events.num_lost == 0 and events.batches[0].seq == 0
    (history,) = events.histories()
    assert history.num_removed > 100 and history.returns and history.num_unknown == 0
    assert events.cached_blocks() == cached
    read = kv_events.read_kv_events(tmp_path / "a" / "events.jsonl")
    assert read.cached_blocks() == cached and read.histories() == events.histories()


def test_more_blocks_save_what_the_events_say(tmp_path):
    """The reference: vLLM's own scheduler with that many more blocks."""
    events, _ = run(70, tmp_path / "a", workload(2))
    (before,) = events.histories()
    for share in (0.5, 1.0):
        more = before.blocks_to_save(share)
        (after,) = run(70 + more, tmp_path / f"more{share}", workload(2))[0].histories()
        saved = sum(each.num_tokens for each in before.returns) - sum(each.num_tokens for each in after.returns)
        assert saved >= 0.8 * before.num_saved(more), (share, more)


def test_every_event_of_vllm_is_read():
    import msgspec

    stored = published.BlockStored([1, b"\xff\x00"], 7, [1, 2], 1, None, "GPU", None, [("a",), None], 2, "full", None)
    removed = published.BlockRemoved([1], "CPU", 1)
    batch = published.KVEventBatch(ts=3.5, events=[stored, removed, published.AllBlocksCleared()], data_parallel_rank=3)
    read = kv_events.decode_batch(9, msgspec.msgpack.encode(batch))
    assert read == kv_events.KVEventBatch(
        9,
        3.5,
        [
            kv_events.BlockStored([1, "ff00"], 7, [1, 2], 1, "GPU", 2),
            kv_events.BlockRemoved([1], "CPU", 1),
            kv_events.AllBlocksCleared(),
        ],
        3,
    )


def test_the_metrics_of_vllm_are_read(tmp_path):
    """vLLM's own Prometheus logger, fed with the statistics of finished requests."""
    from prometheus_client import REGISTRY, generate_latest
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, num_blocks=70, max_model_len=2000)
    scheduler = make_scheduler(Scheduler, config)
    logger = PrometheusStatLogger(scheduler.vllm_config, [0])
    logger.log_engine_initialized()
    texts = []
    rng = random.Random(3)
    values = {"queue": [], "prefill": [], "decode": [], "e2e": [], "ttft": []}
    for at in (10, 20):
        for _ in range(25):
            parts = [rng.expovariate(3) for _ in range(3)]
            stats = IterationStats()
            stats.num_generation_tokens, stats.time_to_first_tokens_iter = 4, [parts[0] + parts[1]]
            stats.finished_requests = [
                FinishedRequestStats(
                    finish_reason=FinishReason.LENGTH,
                    e2e_latency=sum(parts),
                    num_prompt_tokens=30,
                    num_generation_tokens=4,
                    max_tokens_param=4,
                    queued_time=parts[0],
                    prefill_time=parts[1],
                    inference_time=parts[1] + parts[2],
                    decode_time=parts[2],
                )
            ]
            if at == 20:
                for name, value in zip(values, [*parts, sum(parts), parts[0] + parts[1]]):
                    values[name].append(value)
            logger.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=3, kv_cache_usage=0.5), stats)
        texts.append(f"# scraped {at}\n" + generate_latest(REGISTRY).decode())
    path = tmp_path / "metrics.prom"
    path.write_text("".join(texts))
    scrapes = read_scrapes(path)
    (window,) = scrapes.windows
    assert window.num_finished == window.num_steps == 25
    assert window.increase("vllm:generation_tokens_total") == 100
    for name, measured in values.items():
        assert window.latency(name).count == 25
        assert window.latency(name).mean == pytest.approx(sum(measured) / 25), name
    said = repr(scrapes)
    assert "waiting requests at the scrapes: 3.0" in said and "use of KV blocks at the scrapes: 50%" in said
    assert "block size 16" in said
