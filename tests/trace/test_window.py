"""`workbench.trace.window`: a part of a trace has the steps and the requests of its time."""

from random import Random

import pytest

from workbench import simulate
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import TraceError
from workbench.trace.window import read_time, window

WORKLOAD = {
    "generate": {"num_requests": 40, "prompt": 60, "output": 12, "arrivals": {"process": "poisson", "rate": 6}},
    "config": {"num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def trace():
    return simulate(WORKLOAD, cost_model=CostModel(fixed=0.05))


def test_random_windows_have_the_steps_and_the_requests_of_their_time(trace):
    random, zero = Random(5), min(info.arrival_time for info in trace.requests.values())
    for _ in range(200):
        begin, end = sorted(random.uniform(0, trace[-1].end - zero) for _ in range(2))
        inside = [record for record in trace if record.end > begin + zero and record.time < end + zero]
        if not inside:
            continue
        part = window(trace, begin=begin, end=end)
        assert list(part) == inside
        named = {name for record in inside for name in (*record.running, *record.waiting, *record.finished)}
        arrived = {
            name for name, info in trace.requests.items() if inside[0].time <= info.arrival_time <= inside[-1].end
        }
        assert set(part.requests) == named | arrived
        assert part.metrics().summary.num_requests == len(named | arrived)


def test_the_last_seconds_and_the_time_around_a_request(trace):
    last = window(trace, last=1.0)
    assert last[-1] is trace[-1] and last[0].end > trace[-1].end - 1.0 >= trace[last[0].step - 1].end - 1e-9
    name = list(trace.requests)[20]
    part, whole = window(trace, around=name), trace.metrics().requests[name]
    assert part.metrics().requests[name] == whole
    length = whole.e2e.seconds
    assert part[0].time <= trace.requests[name].arrival_time - length / 2 + 0.1
    assert window(trace) is trace


def test_what_is_no_window_is_refused(trace):
    for wrong in ({"begin": 1.0, "last": 1.0}, {"begin": 2.0, "end": 1.0}, {"begin": 1e6}):
        with pytest.raises(ValueError):
            window(trace, **wrong)
    with pytest.raises(
        ValueError, match=r"--from, the beginning .* before its end \(--to, or that of the trace, .* s\), got 356,400"
    ):
        window(trace, begin=99 * 3600.0)
    with pytest.raises(TraceError, match="no clock"):
        window(simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]}), last=1.0)
    with pytest.raises(TraceError, match="no request"):
        window(trace, around="nobody")
    for text in ("", "-1s", "10 minutes", "nan", "1e3", "5x"):
        with pytest.raises(ValueError, match="--last must be a time"):
            read_time("--last", text)
    assert [read_time("t", text) for text in ("90", "1.5h", "250ms", "2 min")] == [90, 5400, 0.25, 120]


def test_commands_take_a_part(trace, tmp_path, capsys):
    path = tmp_path / "run.jsonl.gz"
    trace.save(path)
    for words in (["info"], ["narrate"], ["explain"], ["explain", "--slowest", "2"], ["misses"]):
        command, *rest = words
        assert main(["trace", command, str(path), *rest, "--last", "1s"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["trace", "info", str(path), "--from", "1s", "--to", "2s"]) == 0
    assert "earlier steps are not in this trace" in capsys.readouterr().out
    assert main(["trace", "info", str(path), "--from", "1s", "--last", "2s"]) != 0
    assert "give one of the three" in capsys.readouterr().err


def test_the_dashboard_takes_a_part(trace, tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.jsonl.gz"
    trace.save(path)
    served = []
    monkeypatch.setattr("workbench.viz.app.serve", lambda source, **options: served.append(source))
    assert main(["trace", "watch", str(path), "--around", list(trace.requests)[9]]) == 0, capsys.readouterr().err
    assert 0 < len(served[0]) < len(trace) and list(trace.requests)[9] in served[0].requests
    monkeypatch.setattr("workbench.viz.fleet_page.make_fleet_app", lambda fleet: fleet)
    monkeypatch.setattr("workbench.viz.app.serve_session", lambda fleet, **options: served.append(fleet))
    assert main(["trace", "watch", str(tmp_path), "--last", "1s"]) == 0, capsys.readouterr().err
    assert [0 < len(part) < len(trace) for part in served[1].traces.values()] == [True]


def test_the_verdict_is_about_the_end_of_the_part(tmp_path, capsys):
    config = {"block_size": 4, "num_blocks": 6, "max_num_batched_tokens": 64}
    requests = [
        {"id": "early", "prompt": {"len": 8}, "max_tokens": 5},
        {"id": "big", "prompt": {"len": 40}, "arrival_time": 1.0},
    ]
    stuck = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.1), as_vllm=True)
    stuck.save(tmp_path / "run.jsonl")
    assert main(["why", str(tmp_path / "run.jsonl")]) == 0
    assert "never" in capsys.readouterr().out
    assert main(["why", str(tmp_path / "run.jsonl"), "--to", "0.3s"]) == 0
    said = capsys.readouterr().out
    assert "never" not in said and "1 running" in said
