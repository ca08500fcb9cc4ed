"""Hits in the prefix cache by session, turn, depth and adapter, against an independent count."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict

import pytest
from private_traces import without_tokens

from workbench import Trace, simulate
from workbench.analysis.hit_rates import DEPTHS, hit_rates
from workbench.apps.cli import main


def answer(name, prompt, count):
    """The tokens that a simulation gives a request."""
    trace = simulate({"requests": [{"id": name, "prompt": prompt, "max_tokens": count}]})
    return [chunk.sampled for record in trace for chunk in record.chunks if chunk.sampled is not None]


def sessions_workload(seed, num_sessions=6, num_alone=5, **config):
    """Sessions that repeat their conversation, and prompts of strangers behind one system prompt; the truth beside."""
    rng = random.Random(seed)
    system = [rng.randrange(900) for _ in range(rng.choice([0, 24, 40]))]
    requests, truth = [], {}
    for session in range(num_sessions + num_alone):
        tokens = system + [rng.randrange(900) for _ in range(rng.randint(40, 300))]
        for turn in range(1, (rng.randint(2, 4) if session < num_sessions else 1) + 1):
            name = f"s{session}t{turn}"
            output = answer(name, tokens, rng.randint(1, 20))
            request = {"id": name, "prompt": [*tokens], "max_tokens": len(output)}
            requests.append(request | {"arrival_step": 3 * session + 60 * turn})
            truth[name] = (session, turn)
            tokens = tokens + output + [rng.randrange(900) for _ in range(rng.randint(1, 60))]
    config = {"block_size": 8, "num_blocks": 400, "max_num_batched_tokens": 128, "enable_prefix_caching": True} | config
    return {"config": config, "requests": requests}, truth


def hits_of(trace):
    """Of each request: the length of its prompt, and its hit at the first admission; from the records alone."""
    found = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.request_id in record.admitted:
                found[chunk.request_id] = trace.requests[chunk.request_id].num_prompt_tokens, chunk.num_cached_tokens
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [400, 90])  # with evictions and preemptions too
def test_an_independent_count(seed, num_blocks):
    workload, truth = sessions_workload(seed, num_blocks=num_blocks)
    trace = simulate(workload)
    rates, hits = hit_rates([trace]), hits_of(trace)
    assert (rates.total.looked_up, rates.total.found) == tuple(map(sum, zip(*hits.values())))
    turns, sessions = defaultdict(lambda: [0, 0, 0]), defaultdict(lambda: [0, 0, 0])
    for name, (length, hit) in hits.items():
        session, turn = truth[name]
        for row in (turns[turn], sessions[f"s{session}t1"]):
            row[:] = row[0] + 1, row[1] + length, row[2] + hit
    as_rows = {key: [rate.num_requests, rate.looked_up, rate.found] for key, rate in rates.by_turn.items()}
    assert as_rows == dict(turns)
    as_rows = {key: [rate.num_requests, rate.looked_up, rate.found] for key, rate in rates.by_session.items()}
    assert as_rows == {name: row for name, row in sessions.items() if row[0] > 1}
    places = [(place, place < hit) for length, hit in hits.values() for place in range(length)]
    for start, rate in rates.by_depth.items():
        end = DEPTHS[DEPTHS.index(start) + 1]
        here = [found for place, found in places if start <= place < end]
        assert (rate.looked_up, rate.found) == (len(here), sum(here))


def test_adapters_are_counted_alone_and_share_no_session():
    prompt = [*range(40)]
    [token] = answer("a", prompt, 1)
    rows = [("a", "x", prompt), ("b", "y", [*prompt, token, 2, 3]), ("c", "x", [*prompt, token, 8])]
    requests = [
        {
            "id": name,
            "adapter": adapter,
            "prompt": tokens,
            "max_tokens": 1,
            "arrival_step": step,
        }
        for step, (name, adapter, tokens) in zip((0, 5, 10), rows)
    ]
    config = {"block_size": 8, "num_blocks": 60, "enable_prefix_caching": True, "max_loras": 2}
    rates = hit_rates([simulate({"config": config, "requests": requests})])
    assert {name: (rate.looked_up, rate.found) for name, rate in rates.by_adapter.items()} == {
        "x": (82, 40),
        "y": (43, 0),
    }
    assert list(rates.by_session) == ["a"] and rates.by_turn[2].num_requests == 1
    assert "by adapter: x: 48.8% of 82, y: 0.0% of 43" in str(rates)


def test_equal_beginnings_are_not_sessions():
    """A repeated prompt, and one that begins alike and has another answer."""
    prompt = [*range(33)]
    [token] = answer("a", prompt, 1)
    prompts = {"a": prompt, "again": prompt, "other": [*prompt, token + 1, 98, 97]}
    requests = [
        {"id": name, "prompt": tokens, "max_tokens": 1, "arrival_step": 5 * step}
        for step, (name, tokens) in enumerate(prompts.items())
    ]
    config = {"block_size": 8, "num_blocks": 60, "enable_prefix_caching": True}
    rates = hit_rates([simulate({"config": config, "requests": requests})])
    assert not rates.by_session and not rates.by_turn
    assert "no sessions: no prompt begins with an earlier prompt and its answer" in str(rates)


def test_a_recording_without_tokens_and_hashes_says_so():
    trace = Trace.load("examples/vllm_preemption.jsonl.gz")
    from msgspec.structs import replace

    bare = Trace(replace(trace.meta, prefix_hashes=None, config={**trace.config, "token_ids_recorded": False}))
    for info in trace.requests.values():
        bare.add_request(replace(info, prompt_token_ids=(), block_hashes=""))
    for record in trace:
        bare.append(record)
    assert "neither token ids nor hashes" in hit_rates([bare]).no_sessions


def test_info_prints_it_for_a_file_and_for_ranks_together(tmp_path, capsys):
    workload, truth = sessions_workload(3)
    trace = simulate(workload)
    trace.save(tmp_path / "one.jsonl")
    assert main(["trace", "info", str(tmp_path / "one.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert str(hit_rates([trace])) in printed
    assert "by session: 6 sessions of several turns" in printed
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    halves = [[request for request in workload["requests"] if truth[request["id"]][1] % 2 == part] for part in (0, 1)]
    for rank, half in enumerate(halves):
        simulate(workload | {"requests": half}).save(ranks / f"vllm-20260101-120000-host-rank{rank}-7-0-00000.jsonl")
    assert main(["trace", "info", str(ranks)]) == 0
    assert "by session: 6 sessions of several turns" in capsys.readouterr().out  # turns on both ranks


def counted(rates):
    """Sessions by their numbers of requests, and turns: without names."""
    sessions = sorted((rate.num_requests, rate.looked_up, rate.found) for rate in rates.by_session.values())
    return sessions, {turn: (rate.num_requests, rate.looked_up) for turn, rate in rates.by_turn.items()}


@pytest.mark.parametrize("made", [lambda trace: trace, without_tokens], ids=["tokens", "hashes"])
@pytest.mark.parametrize("seed", range(3))
def test_equal_ids_in_two_recordings_are_two_requests(made, seed, tmp_path, capsys):
    """Copies have the sessions of each, unrelated runs those of all, and turns on two ranks are one session."""
    runs = [made(simulate(sessions_workload(n)[0] | {"cost_model": {"fixed": 0.01}})) for n in (seed, seed + 1)]
    for traces in ([runs[0], runs[0]], runs, [runs[0], runs[1], runs[0]]):
        alone, together = [counted(hit_rates([trace])) for trace in traces], counted(hit_rates(traces))
        assert together[0] == sorted(session for sessions, _ in alone for session in sessions)
        for turn, (number, looked_up) in together[1].items():
            parts = [turns.get(turn, (0, 0)) for _, turns in alone]
            assert (number, looked_up) == tuple(map(sum, zip(*parts)))
    for name in "ab":
        runs[0].save(tmp_path / f"{name}.jsonl")
    assert main(["trace", "info", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "by session: 12 sessions of several turns" in printed and " of recording 1: " in printed


@pytest.mark.parametrize("made", [lambda trace: trace, without_tokens], ids=["tokens", "hashes"])
def test_a_turn_continues_the_longest_conversation_of_any_rank(made):
    workload, truth = sessions_workload(3)
    workload["cost_model"] = {"fixed": 0.01}
    for request in workload["requests"]:
        request["arrival_time"] = 0.02 * request.pop("arrival_step")
    ranks = [[each for each in workload["requests"] if truth[each["id"]][1] % 2 == part] for part in (0, 1)]
    traces = [made(simulate(workload | {"requests": requests})) for requests in ranks]
    is_exact = made is not without_tokens  # hashes: two users of a block may be two conversations
    for given in (traces, *([[*traces, *traces]] if is_exact else [])):
        rates = hit_rates(given)
        turns = Counter(turn for _, turn in truth.values())
        copies = len(given) // 2
        assert {turn: rate.num_requests for turn, rate in rates.by_turn.items()} == {
            turn: number * copies for turn, number in turns.items()
        }


def test_the_sessions_of_a_simulated_fleet_are_found_on_all_replicas(tmp_path, capsys):
    turns = {"turns": {"uniform": [2, 4]}, "input": 40, "output": 20, "think": 1}
    sessions = {"count": 6, "arrivals": {"process": "poisson", "rate": 0.2}, "shared": 80, **turns}
    config = {"block_size": 16, "num_blocks": 400}
    (tmp_path / "w.json").write_text(
        json.dumps({"cost_model": {"fixed": 0.01}, "config": config, "sessions": sessions})
    )
    command = ["fleet", "run", str(tmp_path / "w.json"), "--replicas", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "by session: 6 sessions of several turns" in capsys.readouterr().out
    traces = [Trace.load(path) for path in sorted((tmp_path / "out").glob("*.jsonl*"))]
    rates = hit_rates(traces)
    names = [name for trace in traces for name in trace.requests]
    assert len(traces) == 2 and sum(rate.num_requests for rate in rates.by_session.values()) == len(names)
    for turn, rate in rates.by_turn.items():
        assert rate.num_requests == sum(name.endswith(f"/{turn}") for name in names)


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_without_tokens_has_the_sessions_of_one_with_them(seed, tmp_path, capsys):
    workload, _ = sessions_workload(seed)
    trace = simulate(workload | {"cost_model": {"fixed": 0.01}})
    hashed = without_tokens(trace)
    expected, found = hit_rates([trace]), hit_rates([hashed])
    assert len(expected.by_session) == 6 and found.by_session == expected.by_session
    assert (found.total, found.by_depth, found.by_turn) == (expected.total, expected.by_depth, expected.by_turn)
    hashed.save(tmp_path / "run.jsonl")
    assert main(["fleet", "run", str(tmp_path / "run.jsonl"), "--load", "2x"]) == 0
    assert "by session: 12 sessions of several turns" in capsys.readouterr().out
