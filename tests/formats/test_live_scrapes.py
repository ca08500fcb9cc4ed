"""A running server by its /metrics and KV events alone: what is drawn, what is refused by name, what is forgotten."""

import contextlib
import http.server
import random
import socket
import threading
import time
import types
from pathlib import Path

import pytest

from workbench.apps.cli import main
from workbench.trace import TraceError
from workbench.trace.formats import live_scrapes
from workbench.trace.formats.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from workbench.trace.formats.kv_events.live import MAX_REMOVED, LiveEvents
from workbench.trace.formats.live_scrapes import Moment, ServerFollower, fetch_scrape, moment_of
from workbench.trace.formats.scrapes import MARK, read_scrapes
from workbench.viz.server_page import ONLY_A_RECORDING, server_html, server_svg

RECORDED = Path(__file__).parents[1] / "data/vllm-metrics/0.32.0.prom"
TEXTS = MARK.split(RECORDED.read_text())[2::2]


@contextlib.contextmanager
def serving(answers, kind="text/plain; version=0.0.4; charset=utf-8"):
    """A server of 127.0.0.1 that answers /metrics with these in turn, the last one repeatedly: texts or statuses."""
    left = list(answers)

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = left.pop(0) if len(left) > 1 else left[0]
            status = 404 if self.path != "/metrics" else answer if isinstance(answer, int) else 200
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            if status == 200:
                self.wfile.write(answer if isinstance(answer, bytes) else answer.encode())

        def log_message(self, *arguments):
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def clock(monkeypatch):
    """Wall-clock times five seconds apart, as in the recording."""
    at = [1000.0]

    def now():
        at[0] += 5
        return at[0]

    monkeypatch.setattr(live_scrapes, "time", types.SimpleNamespace(time=now, monotonic=time.monotonic))
    return at


def test_a_look_says_what_the_recorded_scrapes_say(clock):
    with serving(TEXTS) as url:
        follower = ServerFollower(url)
        assert follower.minute is None and "waiting for the second look" in server_html(follower)
        follower.look()
        follower.look()
    recorded = read_scrapes(RECORDED)
    for moment, window in zip(follower.moments, recorded.windows, strict=True):
        assert moment.running == 4 and moment.waiting == 5 and moment.deferred == 0
        assert moment.kv_use == window.last.total("vllm:kv_cache_usage_perc") > 0
        assert moment.preemptions == 0 and moment.cached_blocks is None
        assert moment.tokens == window.increase("vllm:generation_tokens_total") / window.seconds > 0
        for field in ("queue", "ttft"):
            found = window.latency(field)
            assert getattr(moment, field) == (found and pytest.approx(found.mean))
    assert follower.minute.whole.increase("vllm:prompt_tokens_total") == recorded.whole.increase(
        "vllm:prompt_tokens_total"
    )
    page = server_html(follower)
    assert "4 running, 5 waiting" in page and "prefix cache: " in page and "0 preemptions" in page
    assert "--scheduler-cls workbench.vllm.RecordingScheduler" in page and "why a request waits" in page


def test_rows_without_values_are_left_out_and_silence_is_a_gap():
    moments = [Moment(10.0, running=1, tokens=5.0), Moment(12.0), Moment(14.0, running=3, tokens=2.0)]
    picture = server_svg(moments)
    assert "output tokens per second" in picture and "running" in picture
    assert "prefix cache" not in picture and "preemptions" not in picture and "KV" not in picture
    line = next(part for part in picture.split("<path") if 'stroke="#0072b2"' in part)
    assert line.count("M") == 2 and "L" not in line.partition('"')[2].partition('"')[0]
    assert server_svg([Moment(10.0, running=1)]) and server_svg([Moment(10.0)])


def test_a_server_that_stops_answering_and_one_that_restarts(clock):
    empty = TEXTS[0].replace(" 4.0", " 0.0")
    restarted = "\n".join(line if "{" not in line else line.rpartition(" ")[0] + " 0.0" for line in empty.splitlines())
    with serving([TEXTS[0], TEXTS[1], 503, TEXTS[2], restarted, restarted]) as url:
        follower = ServerFollower(url)
        follower.look()
        follower.look()
        assert "HTTP status 503" in follower.problem and follower.moments[-1].running is None
        assert "no answer since" in server_html(follower) and "HTTP status 503" in server_html(follower)
        follower.look()
        assert not follower.problem and follower.moments[-1].running == 4
        follower.look()
        assert follower.minute is None  # of the new server there is one scrape
        follower.look()
        assert follower.minute.whole.increase("vllm:generation_tokens_total") == 0
        assert all((moment.tokens or 0) >= 0 for moment in follower.moments)
    clock[0] -= 3600  # the clock is set back: times before mean nothing beside those after
    with serving([TEXTS[2]]) as url:
        follower.url = url
        follower.look()
    assert not follower.moments and follower.minute is None


def test_what_is_kept_is_bounded(clock, monkeypatch):
    with serving(TEXTS[:1]) as url:
        follower = ServerFollower(url)
    scrape = follower._recent[-1]
    monkeypatch.setattr(live_scrapes, "fetch_scrape", lambda url: scrape._replace(at=live_scrapes.time.time()))
    for _ in range(2000):
        follower.look()
    assert len(follower.moments) == live_scrapes.MAX_MOMENTS and len(follower._recent) == live_scrapes.RECENT


PAGE = "<!doctype html><html><title>Grafana</title></html>"


@pytest.mark.parametrize(
    "answers, kind, said",
    [
        ([PAGE], "text/html", "is a web page (text/html)"),
        ([PAGE], "text/plain", "/metrics: not Prometheus' text format"),
        ([404], "text/plain", "HTTP status 404"),
        (["# TYPE up gauge\nup 1\nnode_load1 3\n"], "text/plain", "the first of these is 'node_load1'"),
        (["sglang:num_running_reqs 3\n"], "text/plain", "'sglang:num_running_reqs'"),
        ([""], "text/plain", "there are none"),
        ([b"\x00\xff\x1f\x8b" * 99], "text/plain", "metrics"),
    ],
)
@pytest.mark.parametrize("command", [["trace", "watch"], ["why", "--seconds", "0.1"]], ids=["watch", "why"])
def test_another_server_is_refused_by_name(answers, kind, said, command, capsys):
    with serving(answers, kind) as url:
        assert main([*command, url]) == 2
    error = capsys.readouterr().err
    assert said in error and url in error and len(error.splitlines()) == 1 and len(error) < 900


def test_an_answer_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr(live_scrapes, "MAX_ANSWER_BYTES", 1000)
    with serving(TEXTS[:1]) as url, pytest.raises(TraceError, match="answers with more than"):
        fetch_scrape(url)
    monkeypatch.undo()
    monkeypatch.setattr(live_scrapes, "FETCH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        fetch_scrape(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("url", ["http://", "http://:8000", "http://127.0.0.1:99999", "http://[::1", "http://h/?a=1"])
def test_an_address_that_is_none(url, capsys):
    assert main(["trace", "watch", url]) == 2
    assert "must be the address of a server, such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_options_that_need_a_recording_or_a_server(capsys, tmp_path):
    assert main(["trace", "watch", "http://127.0.0.1:9", "--last", "5s"]) == 2
    assert "take a part of a trace" in capsys.readouterr().err
    (tmp_path / "run.jsonl").write_text("")
    assert main(["trace", "watch", str(tmp_path / "run.jsonl"), "--kv-events", "tcp://127.0.0.1:9"]) == 2
    assert "--kv-events goes with the URL of a server" in capsys.readouterr().err
    with serving(TEXTS[:1]) as url:
        assert main(["trace", "watch", url, "--kv-events", "here"]) == 2
    assert "endpoint 'here' must be an address such as" in capsys.readouterr().err
    assert main(["trace", "watch", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


# -- KV events ---------------------------------------------------------------------------------------------------------


def batch(seq, *events, rank=0):
    return KVEventBatch(ts=float(seq), events=list(events), seq=seq, rank=rank)


def stored(*blocks):
    return BlockStored(block_hashes=list(blocks), parent_block_hash=None, token_ids=[], block_size=16)


@pytest.fixture
def events():
    live = LiveEvents("tcp://127.0.0.1:9")
    yield live
    live._batches.close()


def test_events_are_counted_as_a_cache_that_is_kept_whole_counts(events):
    rng = random.Random(3)
    held, left, again = [], set(), 0
    for seq in range(300):
        if held and rng.random() < 0.45:
            held.remove(gone := rng.choice(held))
            left |= {gone} if gone not in held else set()
            events.take(batch(seq, BlockRemoved(block_hashes=[gone])))
        else:
            held.append(block := rng.randrange(40))
            again += block in left
            left.discard(block)
            events.take(batch(seq, stored(block)))
        assert events.num_cached == len(held)
    assert events.num_again == again > 10 and events.num_batches == 300 and events.num_lost == 0
    events.take(batch(303, AllBlocksCleared()))
    assert events.num_cached == 0 and events.num_lost == 3


def test_a_restart_empties_the_cache_and_what_left_is_forgotten_in_time(events):
    events.take(batch(7, stored(1, 2, 3)))
    events.take(batch(0, stored(9)))
    assert events.num_cached == 1 and events.num_lost == 0
    many = range(10, MAX_REMOVED + 20)
    events.take(batch(1, stored(*many), BlockRemoved(block_hashes=list(many))))
    assert [len(left) for left in events._left.values()] == [MAX_REMOVED]
    events.take(batch(2, stored(10, MAX_REMOVED + 19)))
    assert events.num_again == 1  # block 10 left too long ago


def test_events_of_a_publisher_arrive(clock):
    import msgspec
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with serving(TEXTS) as url, LiveEvents(f"tcp://127.0.0.1:{port}") as live:
            follower = ServerFollower(url, live)
            assert "no KV event came" not in server_html(follower) or not live.num_batches
            payload = msgspec.msgpack.encode([1.0, [["BlockStored", [5, 6], None, [], 16, None, "GPU"]], 0])
            for seq in range(500):  # until the subscription has arrived
                publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])
                if live.num_batches:
                    break
                threading.Event().wait(0.02)
            follower.look()
            assert live.num_batches and follower.moments[-1].cached_blocks >= 2
            assert "blocks in the prefix cache" in server_html(follower)
            publisher.send_multipart([b"", b"too few"])
            live._thread.join(10)
            assert "2 frames" in live.problem and live.problem in server_html(follower)


def test_the_page_and_the_terminal_name_the_option(capsys, monkeypatch):
    from workbench.viz import app

    served = []
    monkeypatch.setattr(app, "serve_session", lambda session, **options: served.append(options))
    with serving(TEXTS) as url:
        assert main(["trace", "watch", url]) == 0
    assert ONLY_A_RECORDING in capsys.readouterr().out and served[0]["title"] == url
    assert moment_of(read_scrapes(RECORDED).windows[0]).running == 4
