"""The server's metrics, read by the reader of vLLM's: every family that the reader knows has a value."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_helpers import ENGINE, ServerProcess

from workbench.trace.formats.scrapes import LATENCIES, read_scrapes

NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory):
    """Scrapes before and after a few requests, more at once than may run."""
    server = ServerProcess(engine=ENGINE | {"max_num_seqs": 2}, serve={"max_queue": 64})
    texts = []

    def scrape():
        texts.append(f"# scraped {time.time():.3f}\n" + server.ask("GET", "/metrics")[2])
        time.sleep(0.01)

    def complete(i):
        body = {"prompt": [3 + i] * 9, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        status, _, text = server.ask("POST", "/v1/completions", json.dumps(body))
        assert status == 200, text

    scrape()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(complete, range(NUM_REQUESTS)))
    scrape()
    server.end()
    path = tmp_path_factory.mktemp("scrapes") / "metrics.prom"
    path.write_text("".join(texts))
    return read_scrapes(path)


def test_every_latency_has_values(scrapes):
    window = scrapes.whole
    counts = {name: window.latency(name).count for name in LATENCIES}
    assert counts == dict.fromkeys(LATENCIES, NUM_REQUESTS) | {"itl": 4 * NUM_REQUESTS}


def test_the_parts_of_a_request_add_up(scrapes):
    mean = {name: scrapes.whole.latency(name).mean for name in LATENCIES}
    assert mean["queue"] + mean["prefill"] == pytest.approx(mean["ttft"], rel=1e-9)
    assert mean["ttft"] + mean["decode"] == pytest.approx(mean["e2e"], rel=1e-9)
    assert 4 * mean["itl"] == pytest.approx(mean["decode"], rel=1e-9)
    assert mean["queue"] > mean["prefill"] > 0  # most requests wait for one of two places


def test_settings_and_gauges_are_read(scrapes):
    settings = scrapes.settings
    assert {name: settings[name] for name in ("block_size", "num_gpu_blocks", "enable_prefix_caching")} == {
        "block_size": "4", "num_gpu_blocks": "128", "enable_prefix_caching": "True",
    }  # fmt: skip
    assert scrapes.scrapes[-1].values("vllm:num_requests_waiting_by_reason", "reason") == {"capacity": 0, "deferred": 0}
    text = repr(scrapes)
    for words in (
        "block size 4",
        "KV blocks 128",
        "use of KV blocks at the scrapes",
        "waiting requests at the scrapes",
    ):
        assert words in text, text
