"""API keys with names: their file, their limits, and where the names appear."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for

from workbench.apps.serve import access_log
from workbench.apps.serve.keys import MAX_KEYS, ApiKey, KeyRing, digest_of, read_api_keys
from workbench.apps.serve.settings import ServeSettings

ALICE, BATCH = "key-of-alice-1", "key-of-batch-1"


def key_file(tmp_path, text):
    path = tmp_path / "keys.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


# -- the file -------------------------------------------------------------------------------------------------------


def test_a_file_holds_names_keys_and_limits(tmp_path):
    path = key_file(tmp_path, f"# name key\n\nalice {ALICE}\n  batch\t{BATCH}  60\n")
    alice, batch = read_api_keys(path)
    assert (alice.name, alice.per_minute, batch.name, batch.per_minute) == ("alice", None, "batch", 60.0)
    assert alice.digest == digest_of(ALICE) and ALICE not in repr(alice)
    settings = ServeSettings(api_keys=(alice, batch), api_key="key-without-a-name", max_requests_per_minute=5)
    assert [(key.name, key.per_minute) for key in settings.keys] == [("", 5), ("alice", 5), ("batch", 60)]


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{ALICE}\n", "line 1: expected NAME KEY [REQUESTS_PER_MINUTE], got 1 words"),
        (f"\na {ALICE} 1 2\n", "line 2: expected NAME KEY [REQUESTS_PER_MINUTE], got 4 words"),
        (f"al/ice {ALICE}\n", "line 1: the name must have from 1 to 32 letters"),
        (f"{'a' * 33} {ALICE}\n", "line 1: the name must have from 1 to 32 letters"),
        ("alice seven77\n", "line 1: api_key must have at least 8 characters"),
        (f"alice {ALICE}\x7f\n", "line 1: api_key must have at least 8 characters, all of them ASCII"),
        (f"alice {ALICE} often\n", "line 1: max_requests_per_minute, the third word, must be a number"),
        (f"alice {ALICE} 0\n", "line 1: max_requests_per_minute must be in (0, 1e+06], got 0"),
        (f"alice {ALICE} nan\n", "line 1: max_requests_per_minute must be"),
        (f"alice {ALICE}\nbob {ALICE}\n", "each key must be there once"),
        (f"alice {ALICE}\nalice {BATCH}\n", "each name must be there once"),
        ("# nothing\n", f"from 1 to {MAX_KEYS} keys, it has 0"),
        ("".join(f"n{i} key-number-{i}\n" for i in range(MAX_KEYS + 1)), f"it has {MAX_KEYS + 1}"),
        ("alice schl\u00fcssel-1\n", "must be ASCII text"),
        (b"#" * ((1 << 20) + 1), "1048576 bytes"),
    ],
)
def test_an_error_names_the_line_and_never_the_key(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_api_keys(key_file(tmp_path, text))
    assert "keys.txt" in str(caught.value) and ALICE not in str(caught.value) and BATCH not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.txt: No such file"):
        read_api_keys(tmp_path / "none.txt")


def test_limits_need_keys_and_are_checked():
    with pytest.raises(ValueError, match="max_requests_per_minute limits each key: give --api-key-file"):
        ServeSettings(max_requests_per_minute=5)
    with pytest.raises(ValueError, match=re.escape("max_requests_per_minute must be in (0, 1e+06], got -1")):
        ServeSettings(api_key=ALICE, max_requests_per_minute=-1)
    assert ServeSettings(host="0.0.0.0", api_keys=(ApiKey.of(ALICE),)).keys


# -- comparison -----------------------------------------------------------------------------------------------------


def test_every_comparison_is_of_digests_and_reaches_the_last_key(monkeypatch):
    """Neither the length of a key nor the position of its first wrong byte can change what is compared."""
    import hmac

    compared = []

    def compare(a, b):
        compared.append((a, b))
        return hmac_compare(a, b)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("workbench.apps.serve.keys.hmac.compare_digest", compare)
    keys = [ApiKey.of(f"key-number-{i}", f"n{i}") for i in range(5)]
    ring = KeyRing(keys)
    for given in ("", "k", "key-number-0", "key-number-4", "key-number-x", "x" * 10_000, "\udcff"):
        compared.clear()
        found = ring.find(given)
        assert found == next((key for key in keys if key.digest == digest_of(given)), None)
        assert [b for _, b in compared] == [key.digest.encode() for key in keys]
        assert all(a == digest_of(given).encode() for a, _ in compared)


# -- limits ---------------------------------------------------------------------------------------------------------


def test_a_limit_is_a_number_per_minute_for_each_key():
    now = [100.0]
    fast, slow, free = (ApiKey.of(f"key-number-{i}", str(i), limit) for i, limit in enumerate((60, 0.5, None)))
    ring = KeyRing((fast, slow, free), clock=lambda: now[0])
    assert [ring.take(fast) for _ in range(60)] == [0.0] * 60
    assert ring.take(fast) == pytest.approx(1.0) and ring.take(free) == 0.0
    assert ring.take(slow) == 0.0 and ring.take(slow) == pytest.approx(120.0)
    now[0] += 2.5
    assert [ring.take(fast) > 0 for _ in range(3)] == [False, False, True]
    now[0] += 117.5
    assert ring.take(slow) == 0.0
    now[0] += 10_000
    assert sum(ring.take(fast) == 0.0 for _ in range(100)) == 60, "what is not used does not add up"


def test_a_minute_of_random_requests_never_exceeds_the_limit():
    import random

    draw, now = random.Random(3), [0.0]
    key = ApiKey.of("key-number-0", "n", 30)
    ring = KeyRing((key,), clock=lambda: now[0])
    used = []
    for _ in range(5000):
        now[0] += draw.expovariate(1.0)
        if ring.take(key) == 0.0:
            used.append(now[0])
    for start in used:
        assert sum(start <= moment < start + 60 for moment in used) <= 60, "the burst and a minute's refill"
    assert len(used) == pytest.approx(now[0] / 2, rel=0.02), "in the long run the limit itself"


# -- the server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from workbench import Engine, EngineConfig

    keys = (ApiKey.of(ALICE, "alice"), ApiKey.of(BATCH, "batch", 2))
    log = tmp_path_factory.mktemp("log") / "access.log"
    with (
        Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine,
        serving(engine, api_keys=keys, access_log=str(log)) as client,
    ):
        client.log = log
        yield client


def test_names_of_keys_appear_in_the_trace(server):
    for path, body, kind in (
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "n": 2}, "cmpl"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w7"}], "max_tokens": 2}, "chatcmpl"),
    ):
        status, _, text = server.ask("POST", path, body, bearer(ALICE))
        assert status == 200 and re.fullmatch(rf"{kind}-alice-[0-9a-f]{{24}}", json.loads(text)["id"])
        of_answer = [name for name in server.engine.trace.requests if name.startswith(json.loads(text)["id"])]
        assert len(of_answer) == body.get("n", 1)


def test_each_key_and_its_cookie_is_accepted_and_no_other(server):
    for key in (ALICE, BATCH):
        assert server.ask("GET", "/v1/models", headers=bearer(key))[0] == 200
        status, headers, _ = server.ask("GET", f"/dashboard?api_key={key}")
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert status == 302 and server.ask("GET", "/v1/models", headers=cookie)[0] == 200
    for wrong in ("", "x" * 14, ALICE[:-1], ALICE + "1", f"{ALICE},{BATCH}", digest_of(ALICE)):
        assert server.ask("GET", "/v1/models", headers=bearer(wrong))[0] == 401
        assert server.ask("GET", f"/dashboard?api_key={wrong}")[0] == 401


def test_the_cookie_of_a_key_and_its_page_keep_it(server):
    """A stranger's X-Forwarded-Proto is not believed: a cookie that is Secure would not come back over http."""
    headers = server.ask("GET", f"/dashboard?api_key={ALICE}", headers={"X-Forwarded-Proto": "https"})[1]
    assert headers["Set-Cookie"] == f"workbench_api_key={digest_of(ALICE)}; Path=/; HttpOnly; SameSite=Strict"
    assert (headers["Location"], headers["Referrer-Policy"]) == ("/dashboard", "no-referrer")


def test_a_key_beyond_its_limit_gets_429_and_others_do_not(server):
    body = {"prompt": "w3"}
    answers = [server.ask("POST", "/tokenize", body, bearer(BATCH)) for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 200, 429, 429]
    _, headers, text = answers[-1]
    assert 1 <= int(headers["Retry-After"]) <= 30
    error = json.loads(text)["error"]
    assert "2 requests a minute" in error["message"] and error["code"] == "rate_limit_exceeded"
    assert server.ask("GET", "/v1/models", headers=bearer(BATCH))[0] == 200
    assert server.ask("POST", "/tokenize", body, bearer(ALICE))[0] == 200


COMBINED = re.compile(
    r'(?P<host>\S+) \S+ (?P<user>\S+) \[(?P<time>[^\]]+)\] "(?P<request>(?:[^"\\]|\\.)*)" (?P<status>\d{3}) '
    r'(?P<size>\d+|-) "(?P<referrer>(?:[^"\\]|\\.)*)" "(?P<agent>(?:[^"\\]|\\.)*)"'
)
"""The combined log format, as tools that analyse logs read it."""


def read_log(server):
    return [COMBINED.fullmatch(line) for line in server.log.read_text().splitlines()]


def ask_and_read(server, *request):
    wait_for(lambda: not server.server.listener._connections)  # the lines of earlier ones are written
    before = len(read_log(server))
    answer = server.ask(*request)
    wait_for(lambda: len(read_log(server)) > before)
    return answer, read_log(server)[before:]


def test_a_long_field_of_the_access_log_is_cut_off():
    from workbench.apps.serve.access_log import MAX_FIELD, escape

    assert escape("x" * 30_000) == "x" * MAX_FIELD


def test_the_access_log_has_a_line_per_request(server):
    from datetime import UTC, datetime

    agent = 'tool "x" \\ \xe9\t'
    body = {"prompt": [5, 6], "max_tokens": 3, "stream": True}
    (status, _, text), [line] = ask_and_read(
        server, "POST", "/v1/completions?api_key=hidden", body,
        bearer(ALICE) | {"User-Agent": agent, "Referer": "http://127.0.0.1/"},
    )  # fmt: skip
    assert (line["host"], line["user"], line["request"]) == ("127.0.0.1", "alice", "POST /v1/completions HTTP/1.1")
    assert int(line["status"]) == status == 200 and int(line["size"]) > len(text)
    assert line["agent"] == r"tool \"x\" \\ \xe9" and line["referrer"] == "http://127.0.0.1/"
    written = datetime.strptime(line["time"], "%d/%b/%Y:%H:%M:%S %z")
    assert abs((datetime.now(UTC) - written).total_seconds()) < 120
    for path, headers, expected in (
        ("/health", {}, ("-", "200")),
        ("/v1/models", {}, ("-", "401")),
        ("/nowhere", bearer(ALICE), ("alice", "404")),
        ("/dashboard", bearer(ALICE), ("alice", "200")),
        (f"/dashboard?api_key={ALICE}", {}, ("alice", "302")),
        ("/static/js/bokeh.min.js", bearer(ALICE), ("alice", "200")),
        ("/v1/models", {"Host": "evil.example"}, ("-", "403")),
    ):
        _, [line] = ask_and_read(server, "GET", path, None, headers)
        assert (line["user"], line["status"]) == expected, path
    assert ALICE not in server.log.read_text() and "hidden" not in server.log.read_text()


def test_a_rotated_access_log_is_opened_again(server):
    moved = server.log.with_suffix(".1")
    server.log.rename(moved)
    before = moved.read_text()
    server.ask("GET", "/health")
    wait_for(lambda: server.log.exists() and read_log(server))
    assert moved.read_text() == before


def test_a_client_that_leaves_before_its_answer_is_status_499(server):
    import socket

    remove = server.engine.on_step(lambda record: time.sleep(0.02))
    try:
        body = json.dumps({"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True})
        before = len(read_log(server))
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ALICE}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            wait_for(lambda: server.server.bridge.num_open == 1)
        wait_for(lambda: len(read_log(server)) > before)
        assert read_log(server)[-1]["status"] == "499"
    finally:
        remove()


def test_the_client_behind_trusted_proxies_is_the_last_one_that_is_none():
    from types import SimpleNamespace

    from workbench.apps.serve.access_log import client_of

    def client(peer, forwarded, trusted=("10.0.0.1", "10.0.0.2")):
        request = SimpleNamespace(headers={"X-Forwarded-For": forwarded} if forwarded else {})
        return client_of(request, SimpleNamespace(client=peer), trusted)

    assert client("10.0.0.1", "6.6.6.6, 1.2.3.4") == "1.2.3.4", "what the client itself sent is not believed"
    assert client("10.0.0.1", "1.2.3.4, 10.0.0.2") == "1.2.3.4"
    assert client("9.9.9.9", "1.2.3.4") == "9.9.9.9"
    assert client("10.0.0.1", "") == client("10.0.0.1", "unknown") == "10.0.0.1"
    assert client("10.0.0.1", "::1") == "::1"


def test_an_access_log_that_cannot_be_written_is_said_and_the_answer_sent(server, caplog, monkeypatch):
    handler = server.server._access_log._handler

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr(handler, "reopenIfNeeded", lambda: None)
    monkeypatch.setattr(handler, "stream", Full())
    assert server.ask("GET", "/health")[0] == 200
    wait_for(lambda: "the access log cannot be written: [Errno 28]" in caplog.text)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_server_ends_although_the_disk_of_its_access_log_is_full(caplog):
    log = access_log.AccessLog("/dev/full")
    log._write("127.0.0.1", "", "GET /health HTTP/1.1", 200, 2, "-", "-")
    assert log._handler.stream is not None
    log.close()
    assert caplog.text.count("the access log cannot be written: [Errno 28]") == 2


# -- the command ----------------------------------------------------------------------------------------------------


def check(*options, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "workbench", "serve", "--check", *options],
        capture_output=True, text=True, timeout=120, env=os.environ | (environment or {}),
    )  # fmt: skip


def test_check_says_what_is_open_to_whom(tmp_path):
    path = key_file(tmp_path, f"alice {ALICE}\nbatch {BATCH} 60\n")
    path.chmod(0o644)
    run = check("--host", "0.0.0.0", "--api-key-file", str(path), "--allow-host", "api.example.org")
    assert run.returncode == 0 and not run.stderr
    assert "http://0.0.0.0:8000, every machine that can reach this one" in run.stdout
    assert "alice: any number of requests" in run.stdout and "batch: 60 POST requests a minute" in run.stdout
    assert "other users of this machine can read it" in run.stdout and "api.example.org" in run.stdout
    without, with_key = run.stdout.split("open to ")[1:]
    assert "/health" in without and without.count("/") == 1
    for address in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/trace/stream", "/metrics", "/dashboard"):
        assert address in with_key
    assert ALICE not in run.stdout and digest_of(ALICE) not in run.stdout
    path.chmod(0o600)
    assert "chmod" not in check("--api-key-file", str(path)).stdout


def test_what_check_lists_is_what_the_server_opens(server):
    """Each address of the list is asked without a key and with one."""
    from workbench.apps.serve.exposure import exposure

    text = exposure(server.server._settings)
    without, with_key = (part.splitlines()[1:] for part in text.split("open to ")[1:])
    for lines, is_open in ((without, True), (with_key, False)):
        for method, path in (line.split()[:2] for line in lines if line.strip()):
            status = server.ask(method, path.replace("{model}", "x"), "{" if method == "POST" else None)[0]
            assert (status != 401) == is_open, (method, path)


def test_bad_options_are_one_line(tmp_path):
    for options, message in (
        (["--api-key-file", str(key_file(tmp_path, f"{ALICE}\n"))], "keys.txt, line 1: expected NAME KEY"),
        (["--max-requests-per-minute", "5"], "max_requests_per_minute limits each key"),
        (["--access-log", str(tmp_path / "none" / "log")], "--access-log"),
    ):
        run = check(*options)
        assert run.returncode == 2 and message in run.stderr and len(run.stderr.strip().splitlines()) == 1
        assert ALICE not in run.stderr
