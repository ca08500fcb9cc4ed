"""A request is found by its id, or by a beginning that no other id has."""

import random

import pytest

from workbench import simulate
from workbench.apps.cli import main
from workbench.trace import TraceError
from workbench.trace.find_request import find_request

REQUESTS = [{"id": name, "prompt": {"len": 40}, "max_tokens": 2} for name in ("chat-81f", "chat-9e2", "chat-9e2b", "x")]


def test_every_beginning_means_its_request_or_is_refused():
    draw = random.Random(4)
    for _ in range(200):
        ids = sorted({"".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 8))})
        for name in {request_id[:end] for request_id in ids for end in range(1, 7)} | {"c", "aaaaaaa", ""}:
            able = [request_id for request_id in ids if request_id.find(name) == 0 and name != ""]
            if name in ids or len(able) == 1:
                assert find_request(ids, name) == (name if name in ids else able[0])
            else:
                with pytest.raises(TraceError) as refused:
                    find_request(ids, name)
                assert all(request_id in str(refused.value) for request_id in able[:5])


def test_explain_and_why_missed_take_a_beginning():
    trace = simulate({"requests": REQUESTS})
    assert str(trace.explain("chat-8")) == str(trace.explain("chat-81f"))
    assert str(trace.explain("chat-9e2")).startswith("chat-9e2: "), "an id is meant before what it begins"
    assert str(trace.why_missed("chat-8")) == str(trace.why_missed("chat-81f"))
    for ask in (trace.explain, trace.why_missed):
        with pytest.raises(TraceError, match=r"'chat-9' is the beginning of 2 ids: chat-9e2, chat-9e2b; give more"):
            ask("chat-9")
        with pytest.raises(TraceError, match="no request 'y'; it has chat-81f, chat-9e2, chat-9e2b, x"):
            ask("y")


def test_the_command_line_takes_a_beginning(tmp_path, capsys):
    simulate({"requests": REQUESTS[:2]}).save(tmp_path / "a.jsonl")
    simulate({"requests": REQUESTS[2:]}).save(tmp_path / "b.jsonl")
    assert main(["trace", "explain", str(tmp_path / "a.jsonl"), "chat-8"]) == 0
    assert "chat-81f" in capsys.readouterr().out
    assert main(["trace", "misses", str(tmp_path / "a.jsonl"), "chat-9"]) == 0
    capsys.readouterr()
    assert main(["trace", "explain", str(tmp_path), "chat-9e2b"]) == 0, "of the second rank"
    assert "chat-9e2b" in capsys.readouterr().out
    assert main(["trace", "explain", str(tmp_path), "chat"]) != 0
    assert "beginning of 3 ids" in capsys.readouterr().err
