"""A request is found by its id, or by a beginning that no other id has."""

import pickle
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


def test_a_mapping_of_a_step_says_which_requests_it_has():
    record = simulate({"config": {"max_num_seqs": 2}, "requests": REQUESTS})[0]
    for name, ids in (
        ("block_tables", record.running),
        ("block_tables_by_group", record.running),
        ("num_kv_computed", record.running),
        ("not_scheduled", record.waiting),
    ):
        found = getattr(record, name)
        assert tuple(found) == ids and type(found.get(ids[0])) is type(found[ids[0]])
        with pytest.raises(KeyError, match=f"^{name} of step 0 has no request 'y'; it has {', '.join(ids)}$"):
            found["y"]


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


def test_an_id_that_is_not_there_is_named_with_a_similar_one_and_the_way_to_list_all(tmp_path, capsys):
    names = [f"chatcmpl-{n:04}" for n in range(300, 340)]
    trace = simulate({"requests": [{"id": name, "prompt": {"len": 4}, "max_tokens": 1} for name in names]})
    trace.save(tmp_path / "run.jsonl")
    said = (
        "the trace has no request 'chatcmlp-0300' (did you mean chatcmpl-0300?); it has chatcmpl-0300, chatcmpl-0301, "
        "chatcmpl-0302, chatcmpl-0303, chatcmpl-0304 and 35 more; list(trace.requests) or "
        "'workbench trace explain FILE --slowest 40' lists all"
    )
    for ask in (
        trace.requests.__getitem__,
        trace.metrics().requests.__getitem__,
        trace.explain,
        lambda name: trace.to_link(request_id=name),
        lambda name: trace.fork(without=[name]),
    ):
        with pytest.raises(KeyError) as refused:
            ask("chatcmlp-0300")
        assert str(refused.value) == said and isinstance(refused.value, TraceError)
    assert main(["trace", "link", str(tmp_path / "run.jsonl"), "--request", "chatcmlp-0300"]) == 2
    assert capsys.readouterr().err == f"workbench trace link: {said}\n"
    assert main(["trace", "explain", str(tmp_path / "run.jsonl"), "--slowest", "40"]) == 0
    assert all(name in capsys.readouterr().out for name in names[:1])
    assert trace.requests.get("nobody") is None and trace.metrics().requests.get("nobody", 3) == 3
    assert "request=chatcmpl-0317" in trace.to_link(request_id="chatcmpl-0317")
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args
