"""Grammars of strangers over HTTP: they hold up nobody else, and nothing of them is left."""

import contextlib
import http.client
import json
import re
import socket
import threading
from pathlib import Path

import pytest
from letter_llama import make_letter_llama
from serve_helpers import ServerProcess, serving, wait_for
from slow_grammars import ambiguous, hidden, is_running, wide

from workbench import Engine, EngineConfig
from workbench.engine.grammar_host import GrammarHost

ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "block_size": 4, "num_blocks": 800, "max_model_len": 128}


@pytest.fixture(scope="module")
def server():
    process = ServerProcess(letters=True, engine=ENGINE)
    yield process
    process.end()


@pytest.fixture
def local():
    """A server of this process, whose engine a test can inspect."""
    with Engine(make_letter_llama(), EngineConfig(**ENGINE)) as engine, serving(engine) as client:
        yield client


def ask(server, **body):
    """Status and answer of a completion."""
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 20, **body})
    return status, json.loads(text)


def begin(server, **body):
    """A connection whose request has been sent."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    data = json.dumps({"prompt": "abc", "max_tokens": 20, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def at_work(server):
    """The grammars that /health shows."""
    status, _, text = server.ask("GET", "/health")
    assert status == 200 and json.loads(text)["status"] == "ok"
    return json.loads(text).get("grammars", [])


def others_are_served(server):
    """Whether plain and structured requests, and /tokenize, are answered now."""
    assert ask(server, max_tokens=3)[0] == 200
    status, answer = ask(server, structured_outputs={"regex": "ab{3}"})
    assert status == 200 and answer["choices"][0]["text"] == "abbb"
    assert ask(server, response_format={"type": "json_object"}, max_tokens=3)[0] == 200
    assert server.ask("POST", "/tokenize", {"prompt": "abc"})[0] == 200
    return True


def test_an_automaton_with_millions_of_states_is_refused(server):
    for schema in (
        {"type": "integer", "multipleOf": 9_999_991},
        {"items": {"type": "number", "multipleOf": 0.9999991}},
    ):
        status, answer = ask(server, structured_outputs={"json": schema})
        assert status == 400 and "multipleOf is " in answer["error"]["message"]
        assert others_are_served(server)
    assert at_work(server) == []


@pytest.mark.parametrize("wanted", [{"grammar": ambiguous(450)}, {"json": {"type": "integer", "multipleOf": 999_983}}])
def test_a_grammar_whose_client_leaves_is_ended_and_holds_up_nobody(local, monkeypatch, wanted):
    made, fork = [], GrammarHost.fork
    monkeypatch.setattr(GrammarHost, "fork", lambda self: made.append(fork(self)) or made[-1])
    with contextlib.closing(begin(local, structured_outputs=wanted, n=4)):
        wait_for(lambda: made and [text["state"] for text in at_work(local)] == ["compiling"])
        slow = made[0].number
        assert others_are_served(local)
        assert [text["kind"] for text in at_work(local)] == [*wanted] and is_running(slow)
    wait_for(lambda: not is_running(slow))
    assert at_work(local) == []
    wait_for(lambda: local.server.bridge.num_open == 0)
    assert not any(text.num_users for text in local.engine.grammars.texts._known.values())


def test_clients_that_leave_before_their_grammar_is_read_are_forgotten(local, monkeypatch):
    from workbench.engine import grammar_texts

    def read_for_ever(self, text):
        while self._may_continue(text):
            threading.Event().wait(0.01)

    with monkeypatch.context() as endless:
        endless.setattr(grammar_texts.GrammarTexts, "_validate", read_for_ever)
        connections = [begin(local, structured_outputs={"regex": f"a{{{index}}}"}) for index in range(1, 13)]
        wait_for(lambda: len(at_work(local)) == 12)
        assert {text["state"] for text in at_work(local)} == {"compiling", "waiting"}
        assert ask(local, max_tokens=3)[0] == 200
        for connection in connections:
            connection.close()
        wait_for(lambda: at_work(local) == [] and not any(local.engine.grammars.texts._at_work.values()))
    assert others_are_served(local)
    assert not any(text.num_users for text in local.engine.grammars.texts._known.values())


def test_choices_and_requests_share_one_compilation(local, monkeypatch):
    made, fork = [], GrammarHost.fork
    monkeypatch.setattr(GrammarHost, "fork", lambda self: made.append(fork(self)) or made[-1])
    results = []

    def one():
        results.append(ask(local, structured_outputs={"json": wide(300)}, n=8, temperature=1, max_tokens=8))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in results] == [200] * 3 and len(made) == 1
    assert all(len(answer["choices"]) == 8 for _, answer in results)


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_mask_ends_its_request_and_no_other(server, stream):
    plain = ask(server, max_tokens=40, ignore_eos=True, temperature=0)[1]["choices"][0]["text"]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as honest:
        body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
        honest.request("POST", "/v1/completions", json.dumps(body))
        wanted = {"grammar": hidden(15 + stream)}
        status, _, text = server.ask(
            "POST", "/v1/completions", {"prompt": "n", "structured_outputs": wanted, "max_tokens": 40, "stream": stream}
        )
        assert status == (200 if stream else 400) and "take too long to find" in text
        status, answer = ask(server, structured_outputs=wanted)  # it is known now
        assert status == 400 and "take too long to find" in answer["error"]["message"]
        events = honest.getresponse().read().decode()
    texts = [json.loads(event)["choices"] for event in re.findall(r"data: (\{.*)", events)]
    assert "".join(choice["text"] for choices in texts for choice in choices) == plain


def test_no_process_is_left_when_the_server_has_ended():
    process = ServerProcess(letters=True, engine=ENGINE)
    assert ask(process, structured_outputs={"regex": "ab"})[0] == 200
    with contextlib.closing(begin(process, structured_outputs={"grammar": ambiguous(450)})):
        wait_for(lambda: at_work(process))
        family = children_of(process.process.pid)
    assert family or not Path("/proc").exists()
    process.end()
    wait_for(lambda: not any(map(is_running, family)))


@pytest.mark.skipif(not Path("/proc").exists(), reason="there is no list of processes")
def test_no_process_is_left_when_the_server_was_killed():
    process = ServerProcess(letters=True, engine=ENGINE)
    with contextlib.closing(begin(process, structured_outputs={"grammar": ambiguous(450)})):
        wait_for(lambda: at_work(process))
        family = children_of(process.process.pid)
        process.process.kill()
    process.end()
    wait_for(lambda: not any(map(is_running, family)))


def children_of(process):
    """The numbers of all processes that a process has started, with theirs."""
    if not Path("/proc").exists():
        return []
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == process]
    return found + [each for child in found for each in children_of(child)]
