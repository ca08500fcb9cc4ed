"""Scrapes of /metrics: differences of counters against the values that went in, and what the report says."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workbench.apps.cli import main
from workbench.trace import TraceError
from workbench.trace.formats.scrapes import LATENCIES, is_scrapes, read_scrapes

COUNTERS = (
    "generation_tokens",
    "prompt_tokens",
    "request_success",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
BUCKETS = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0]


class Server:
    """The metrics of a server with two engines, filled with random values that it remembers."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.registry = CollectorRegistry()
        self.latencies = {
            name: Histogram(metric, "", ["engine"], buckets=BUCKETS, registry=self.registry)
            for name, metric in LATENCIES.items()
        }
        self.counters = {name: Counter(f"vllm:{name}", "", ["engine"], registry=self.registry) for name in COUNTERS}
        self.steps = Histogram("vllm:iteration_tokens_total", "", ["engine"], buckets=[1, 8], registry=self.registry)
        self.gauges = {
            name: Gauge(f"vllm:{name}", "", ["engine"], registry=self.registry)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        labels = {"block_size": "16", "num_gpu_blocks": "400", "enable_prefix_caching": "True"}
        Gauge("vllm:cache_config_info", "", list(labels), registry=self.registry).labels(**labels).set(1)

    def serve(self, count):
        """Requests with random latencies, which are returned."""
        values = {name: [] for name in self.latencies}
        for _ in range(count):
            engine = self.rng.choice("01")
            for name, histogram in self.latencies.items():
                values[name].append(self.rng.expovariate(2))
                histogram.labels(engine).observe(values[name][-1])
            self.counters["request_success"].labels(engine).inc()
            self.counters["generation_tokens"].labels(engine).inc(20)
            self.steps.labels(engine).observe(5)
        return values

    def scrape(self, at):
        return f"# scraped {at}\n" + generate_latest(self.registry).decode()


def test_a_window_has_what_went_in_between(tmp_path):
    server = Server()
    server.serve(50)
    first = server.scrape(100)
    values = server.serve(200)
    middle = server.scrape(110)
    later = server.serve(3)
    path = tmp_path / "metrics.prom"
    path.write_text(first + middle + "# scraped 115\n\n" + server.scrape(120.5))  # it did not answer at 115
    assert is_scrapes(path)
    scrapes = read_scrapes(path)
    assert [scrape.at for scrape in scrapes.scrapes] == [100, 110, 120.5]
    window, last = scrapes.windows
    assert window.num_finished == 200 and window.seconds == 10 and last.num_finished == 3
    assert window.increase("vllm:generation_tokens_total") == 4000 and window.num_steps == 200
    for name, measured in values.items():
        found = window.latency(name)
        assert found.count == 200 and found.mean == pytest.approx(sum(measured) / 200)
        ordered = sorted(measured)
        for bucket, value in zip(found.percentiles, (ordered[99], ordered[197])):
            assert bucket.low < value <= bucket.high
    assert scrapes.whole.latency("ttft").mean == pytest.approx(sum(values["ttft"] + later["ttft"]) / 203)
    assert last.increase("vllm:spec_decode_num_drafts_total") is None


def test_the_report(tmp_path, capsys):
    server = Server(1)
    path = tmp_path / "metrics.prom"
    texts = []
    for at in (0, 5, 10):
        server.serve(40)
        server.counters["prefix_cache_queries"].labels("0").inc(100)
        server.counters["prefix_cache_hits"].labels("0").inc(40)
        for engine, use in (("0", at / 20), ("1", 0.1)):
            server.gauges["num_requests_waiting"].labels(engine).set(at)
            server.gauges["kv_cache_usage_perc"].labels(engine).set(use)
        texts.append(server.scrape(at))
    path.write_text("".join(texts))
    assert main(["trace", "info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "3 scrapes of metrics.prom over 10.0 s" in said and "8.00 requests ended per second" in said
    assert "block size 16, KV blocks 400, prefix caching True" in said
    assert "160 output tokens/s" in said and "prefix cache: 40% of 200 prompt tokens found" in said
    assert "waiting requests at the scrapes: 10.0 on average, at most 20" in said
    assert "use of KV blocks at the scrapes: 28% on average, at most 50%" in said
    assert "a request's time in the engine: queue " in said and "cannot answer: which request was slow" in said


def test_a_restart_is_noticed(tmp_path):
    old, new = Server(), Server()
    old.serve(30)
    before = old.scrape(1)
    new.serve(4)
    middle = new.scrape(2)
    new.serve(6)
    path = tmp_path / "metrics.prom"
    path.write_text(before + middle + new.scrape(3))
    scrapes = read_scrapes(path)
    assert scrapes.num_restarts == 1 and [window.num_finished for window in scrapes.windows] == [4, 6]
    assert scrapes.whole.num_finished == 6 and "restarted 1 times" in repr(scrapes)
    path.write_text(before + middle)
    assert read_scrapes(path).whole.num_finished == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# scraped 1\nvllm:a 1\n", "holds 1 scrapes, and at least 2 are needed"),
        ("vllm:a 1\n", "holds 0 scrapes"),
        ("# scraped 2\nvllm:a 1\n# scraped 2\nvllm:a 1\n", "scrape 2: its time 2.0 must be later than 2.0"),
        ("# scraped 1\nup 1\n# scraped 2\nup 1\n", "holds no metrics of vLLM"),
        ("# scraped 1\nvllm:a 1\n# scraped 2\nvllm:a{b 1\n", "scrape 2: not Prometheus' text format"),
    ],
)
def test_a_malformed_file(tmp_path, text, message):
    path = tmp_path / "metrics.prom"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_scrapes(path)
