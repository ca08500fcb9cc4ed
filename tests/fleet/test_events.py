"""Closed loops, changes of a fleet, and prefill apart from decode, against what the traces say."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from workbench import EngineConfig, simulate, simulate_fleet
from workbench.analysis.fleet.crossover import crossover
from workbench.analysis.fleet.events import Change
from workbench.analysis.fleet.routers import ROUTERS
from workbench.analysis.fleet.split import Split
from workbench.apps.cli import main
from workbench.base.text import duration
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.fleet import Fleet

from .workloads import random_workload

CONFIG = {"num_blocks": 300, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 16}
MODEL = {"fixed": 0.01, "per_row": 1e-4}
AGENTS = {
    "count": 10,
    "arrivals": {"process": "poisson", "rate": 4},
    "shared": 100,
    "turns": {"uniform": [2, 6]},
    "input": {"uniform": [1, 90]},
    "output": {"uniform": [1, 30]},
}
BRANCHES = {
    "think": 0.4,
    "branch": 0.3,
    "subagents": {"chance": 0.4, "count": 3, "turns": 2, "input": 40, "output": 9, "report": 20},
}
SPLIT = {"replicas": 2, "kv_bytes_per_token": 1e5, "bandwidth": 1e9, "latency": 0.002}


def agents(**changes):
    return {"sessions": AGENTS | changes, "cost_model": MODEL, "config": CONFIG}


def requests_of(run):
    """Arrival, end and all tokens of each request, from the traces."""
    found = {}
    for trace in run.traces:
        for name, info in trace.requests.items():
            found[name] = [info.arrival_time, None, list(info.prompt_token_ids)]
        for step in trace:
            for chunk in step.chunks:
                found[chunk.request_id][2] += chunk.accepted
                found[chunk.request_id][1] = step.end
    return found


def test_the_loop_of_events_gives_what_the_plain_loop_gives():
    """A change after the last request takes the requests through the loop of events."""
    compared = 0
    for seed in range(40):
        workload = random_workload(seed, True)
        for request in workload["requests"]:
            request.pop("abort_step", None)
        try:
            simulate(workload)
        except ValueError:  # no schedule can serve a request
            continue
        router = [*ROUTERS][compared % len(ROUTERS)]
        plain = simulate_fleet(workload, replicas=3, router=router)
        run = simulate_fleet(workload, replicas=3, router=router, changes=[Change(1e6, 0, "drains")])
        assert run.choices == plain.choices, (seed, router)
        assert [list(trace) for trace in run.traces] == [list(trace) for trace in plain.traces], (seed, router)
        compared += 1
        if compared == 2 * len(ROUTERS):
            return
    raise AssertionError("too few workloads can be served")


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix"])
def test_a_turn_comes_when_the_one_before_has_ended_and_continues_it(router):
    found = requests_of(simulate_fleet(agents(), replicas=3, router=router))
    followers = 0
    for name, (arrival, _, tokens) in found.items():
        session, turn = name.split("/")
        if (before := found.get(f"{session}/{int(turn) - 1}")) is not None:
            assert arrival == before[1] and tokens[: len(before[2])] == before[2]
            followers += 1
    assert followers == len(found) - AGENTS["count"] and followers > 20


def test_branches_drop_an_answer_and_users_think():
    found = requests_of(simulate_fleet(agents(think=0.4, branch=0.3), replicas=2))
    waits, dropped = [], 0
    for name, (arrival, _, tokens) in found.items():
        session, turn = name.split("/")
        if (before := found.get(f"{session}/{int(turn) - 1}")) is not None:
            waits.append(arrival - before[1])
            dropped += tokens[: len(before[2])] != before[2]
    assert min(waits) > 0 and 0.2 < sum(waits) / len(waits) < 0.8
    assert 0.1 < dropped / len(waits) < 0.5


def test_a_session_waits_for_its_last_subagent_and_reads_their_reports():
    found = requests_of(simulate_fleet(agents(**BRANCHES | {"think": 0.0, "branch": 0.0}), replicas=2))
    helped = 0
    for name, (arrival, _, tokens) in found.items():
        session, turn = name.split("/")
        before = found.get(f"{session}/{int(turn) - 1}")
        if "." in session or before is None or arrival == before[1]:
            continue
        helpers = [its for other, its in found.items() if other.startswith(f"{session}.") and its[0] >= before[1]]
        helpers = [its for its in helpers if its[1] <= arrival]
        assert arrival == max(its[1] for its in helpers)  # the last of them
        assert all(its[2][: len(before[2])] == before[2] for its in helpers)  # they know what was said
        assert len(tokens) - len(before[2]) > 60  # three reports and the next input
        helped += 1
    assert helped > 2


def test_sessions_are_the_same_again_whatever_the_router():
    names = [
        {name.split("/")[0] for name in simulate_fleet(agents(**BRANCHES), replicas=2, router=router).choices}
        for router in ("round_robin", "round_robin", "sticky")
    ]
    assert names[0] == names[1] and {name for name in names[0] if "." not in name} == {f"s{i}" for i in range(10)}


def test_a_replica_dies_drains_and_joins():
    changes = [Change(0.5, 2, "joins"), Change(1.2, 0, "dies"), Change(1.6, 1, "drains")]
    run = simulate_fleet(agents(think=0.1), replicas=3, router="least_loaded", changes=changes)
    again = [name for name in run.choices if " again " in name]
    assert again and all(run.choices[name].time == 1.2 and run.choices[name].replica in (1, 2) for name in again)
    for choice in run.choices.values():
        expected = {0, 1} if choice.time < 0.5 else {0, 1, 2} if choice.time < 1.2 else {1, 2}
        assert set(choice.candidates) <= expected and choice.replica in choice.candidates
        assert choice.time <= 1.6 or choice.candidates == (2,)
    lost = {name.partition(" again ")[0] for name in again}
    ended = {name for trace in run.traces for step in trace for name in step.finished}
    assert set(run.choices) - ended == lost and all(not trace.check() for trace in run.traces)
    assert {name for step in run.traces[0] for name in step.aborted} <= lost


def test_requests_wait_for_a_replica_and_fail_without_any():
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "arrival_time": n / 10} for n in range(5)]
    workload = {"requests": requests, "cost_model": MODEL}
    run = simulate_fleet(workload, replicas=1, changes=[Change(0.25, 0, "joins")])
    assert [choice.time for choice in run.choices.values()] == [0.25, 0.25, 0.25, 0.3, 0.4]
    with pytest.raises(ValueError, match="2 requests are left and no replica takes any"):
        simulate_fleet(workload, replicas=1, changes=[Change(0.25, 0, "drains")])


def test_prefill_and_decode_apart():
    requests = [
        {"id": f"r{n}", "prompt": {"len": 10 + 31 * n}, "max_tokens": 1 + n, "arrival_time": n / 20} for n in range(12)
    ]
    run = simulate_fleet({"requests": requests, "cost_model": MODEL, "config": CONFIG}, replicas=2, split=SPLIT)
    assert len(run.traces) == 4 and list(run.hand_overs) == sorted(run.hand_overs, key=lambda r: int(r[1:]))
    found, links = run.metrics(), {}
    assert found.summary.num_requests == 12 and found.summary.num_output_tokens == sum(range(1, 13))
    for n, (name, move) in enumerate(run.hand_overs.items()):
        assert move.num_tokens == (10 + 31 * n - 1) // 16 * 16 and move.source < 2 <= move.replica
        seconds = 0.002 + move.num_tokens * 1e-4 if move.num_tokens else 0
        assert move.ends - move.begins == pytest.approx(seconds)
        assert move.begins == max(move.time, links.get(move.replica, 0.0))  # one move after another
        links[move.replica] = move.ends
        ttft = found.requests[f"replica {move.replica}/{name}"].ttft.seconds
        assert n / 20 + ttft > move.ends
    for trace in run.traces[2:]:
        assert sum(chunk.num_tokens for step in trace for chunk in step.chunks if chunk.arm != "decode") < 16 * 12
    assert not any(chunk.is_partial_prefill for trace in run.traces[2:] for step in trace for chunk in step.chunks)


def test_a_free_link_moves_what_is_not_there():
    """The second request of a prompt has its KV on the only replica that decodes."""
    requests = [{"id": f"r{n}", "prompt": {"len": 100, "seed": "s"}, "arrival_time": float(n)} for n in range(2)]
    workload = {"requests": requests, "cost_model": MODEL, "config": CONFIG}
    run = simulate_fleet(workload, replicas=1, split=SPLIT | {"replicas": 1})
    assert [move.num_tokens for move in run.hand_overs.values()] == [96, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost_model": None}, "need a clock"),
        ({"config": {"eviction": "belady"}}, "needs to know what comes"),
        ({"sessions": AGENTS | {"branch": 2}}, "sessions.branch must be"),
        ({"sessions": AGENTS | {"subagents": {"chance": 0.1}}}, "sessions.subagents.count"),
        ({"sessions": {"count": 3}}, "sessions.turns must be a number of tokens"),
        ({"sessions": AGENTS | {"turn": 2}}, "turn"),
        ({"requests": []}, "one of requests, generate and sessions"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate_fleet(agents() | changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": {"replicas": 1}}, "split lacks kv_bytes_per_token, bandwidth"),
        ({"split": SPLIT | {"bandwidth": 0}}, "split.bandwidth must be"),
        ({"changes": [Change(-1.0, 0, "dies")]}, "the time of a change"),
        ({"changes": [Change(1.0, 2, "dies")]}, "the replica of a change"),
        ({"changes": [Change(1.0, 0, "rests")]}, "the change of a replica"),
    ],
)
def test_malformed_changes_and_splits_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        simulate_fleet(agents(), **given)


def test_the_second_choice_is_the_same_run_with_one_request_elsewhere():
    workload = random_workload(3, True)
    for request in workload["requests"]:
        request.pop("abort_step", None)
    for router in ("cache_aware", "round_robin", "prefix"):
        run = simulate_fleet(workload, replicas=3, router=router)
        for name in ("r5", "r30"):
            fork = run.second_choice(name)

            class Told(ROUTERS[router]):
                told = (name, fork.other)

                def choose(self, request, replicas):
                    decision = super().choose(request, replicas)
                    return decision._replace(
                        replica=self.told[1] if request.request_id == self.told[0] else decision.replica
                    )

            other = simulate_fleet(workload, replicas=3, router=Told())
            assert fork.other != fork.replica == run.choices[name].replica
            for found, index, place in ((run, fork.replica, 0), (other, fork.other, 1)):
                request = found.metrics().requests[f"replica {index}/{name}"]
                assert (fork.ttft[place], fork.e2e[place]) == (request.ttft.seconds, request.e2e.seconds)
            assert f"{name} on replica {fork.other} instead of {fork.replica}" in str(fork)


def test_a_second_choice_needs_a_clock_and_another_replica():
    requests = [{"id": "a", "prompt": {"len": 9}}]
    with pytest.raises(ValueError, match="no clock"):
        simulate_fleet({"requests": requests}).second_choice("a")
    run = simulate_fleet({"requests": requests, "cost_model": MODEL}, replicas=1)
    with pytest.raises(ValueError, match="had no second choice"):
        run.second_choice("a")
    with pytest.raises(ValueError, match="there is no request 'b'"):
        run.second_choice("b")


def test_prompt_lengths_for_which_a_split_is_worth_it(monkeypatch):
    """At any length, tokens are not delayed by prompts; without a link, the first token waits for the move."""
    config, model = EngineConfig(**CONFIG | {"num_blocks": 4000}), CostModel(fixed=0.01, per_row=1e-4)
    given = {"replicas": 2, "config": config, "cost_model": model, "num_requests": 40, "output": 30}
    found = crossover([1000, 100], Split(**SPLIT), tokens_per_second=1500, **given)
    assert [length.num_tokens for length in found.lengths] == [100, 1000]
    assert found.lengths[0].rate == pytest.approx(1500 * 4 / 130)
    assert found.worth("itl_p99") == [100, 1000] and found.worth("ttft_mean") == []
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, repr(found).splitlines())) <= 80 and " ms" in repr(found)
    even = replace(found.lengths[0], together={"e2e_mean": 1.0}, apart={"e2e_mean": 0.995})
    assert replace(found, lengths=[even]).worth() == []
    assert replace(found, lengths=[replace(even, apart={"e2e_mean": 0.98})]).worth() == [even.num_tokens]
    slow = crossover([1000, 100], Split(**SPLIT | {"bandwidth": 1e7}), tokens_per_second=1500, **given)
    assert all(late.ratio("ttft_mean") > 3 * soon.ratio("ttft_mean") for late, soon in zip(slow.lengths, found.lengths))
    assert found.to_svg().count("<circle") == 6
    assert "2 that decode are better for prompts of 100 or 1,000" in repr(found)


def test_the_command_line_tells_when_a_split_is_worth_it(tmp_path, capsys):
    path, plot = tmp_path / "workload.json", tmp_path / "split.svg"
    path.write_text(json.dumps({"requests": [], "cost_model": MODEL, "config": CONFIG}))
    words = ["fleet", "split", str(path), "--kv-bytes-per-token", "1e5", "--bandwidth", "1e9", "--plot", str(plot)]
    assert main([*words, "--lengths", "50,200", "--tokens-per-second", "500"]) == 0
    assert "1 that decode are better for" in capsys.readouterr().out and plot.read_text().startswith("<svg")
    assert main([*words, "--lengths", "long"]) == 2
    assert "--lengths must be numbers" in capsys.readouterr().err


def test_a_fleet_is_drawn_as_rows_of_one_time_axis(tmp_path):
    run = simulate_fleet(agents(), replicas=3, router="sticky")
    picture = run.to_svg("s3/1")
    assert [picture.count(f">replica {index}<") for index in range(3)] == [1, 1, 1]
    assert picture.count('fill="none" stroke="#d55e00"') == 1 and "the way of s3/1" in picture
    first = min(info.arrival_time for trace in run.traces for info in trace.requests.values())
    assert f"3 replicas over {duration(max(trace[-1].end for trace in run.traces) - first)}" in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg") and "<svg" in run._repr_html_()
    assert picture.count("stroke-dasharray") == 3 and "kept in the prefix cache" in picture
    with pytest.raises(ValueError, match="request 's99/1' has no step"):
        run.to_svg("s99/1")
    still = simulate_fleet({"requests": [{"id": "a", "prompt": {"len": 9}}]})
    with pytest.raises(ValueError, match="nothing to draw"):
        still.to_svg()
    assert "<svg" not in still._repr_html_()
    run.save(tmp_path / "fleet")
    names = {name: len(trace) for name, trace in Fleet(tmp_path / "fleet").traces.items()}
    assert names == {f"replica-{index}": len(trace) for index, trace in enumerate(run.traces)}
