"""`workbench.analysis.apart` names what was planted in the slowest requests, and nothing else."""

import re
from random import Random

import pytest

from workbench import simulate
from workbench.analysis.apart import apart
from workbench.analysis.explain import explainer_of
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel

COSTS = CostModel(fixed=0.01, per_prefill_token=1e-4)


def run(random, *, long=(), burst=False):
    """120 requests, 2 s apart; some have long prompts, or six arrive together."""
    requests = []
    for number in range(120):
        at = 2.0 * number + random.random()
        if burst and 60 <= number < 72:
            at = 120.0
        length = 900 if number in long else random.randrange(90, 110)
        requests.append({"id": f"r{number}", "prompt": {"len": length}, "max_tokens": 3, "arrival_time": at})
    return simulate({"config": {"max_num_batched_tokens": 256}, "requests": requests}, cost_model=COSTS)


@pytest.mark.parametrize("seed", range(5))
def test_planted_causes_are_named_with_their_counts(seed):
    random = Random(seed)
    long = random.sample(range(120), 6)
    first = apart(run(random, long=long))[0]
    assert "prompt tokens" in first.property
    assert (first.num_slowest, first.of_slowest, first.of_others) == (5, 5, 115)
    assert str(first).startswith("5 of the 5 slowest have more than ")
    [arrival] = [one for one in apart(run(random, burst=True)) if "arrived" in one.property]
    assert arrival.num_slowest == 5 and arrival.num_others <= 12


def test_nothing_is_named_where_requests_are_alike():
    requests = [{"id": f"r{n}", "prompt": {"len": 100}, "max_tokens": 3, "arrival_time": 2.0 * n} for n in range(120)]
    assert apart(simulate({"requests": requests}, cost_model=COSTS)) == ()
    assert apart(simulate({"requests": requests[:10]}, cost_model=COSTS)) == ()


def test_the_command_says_it(tmp_path, capsys):
    path = tmp_path / "run.jsonl.gz"
    run(Random(1), long=range(0, 120, 20)).save(path)
    assert main(["trace", "explain", str(path), "--slowest", "6"]) == 0
    out = capsys.readouterr().out
    assert "6 of the 6 slowest have more than" in out
    assert "own computation" in out  # a long prompt alone in the engine


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("count", [2, 4, 6, 9, 14])
def test_the_command_says_it_of_the_requests_in_its_table(count, folder, tmp_path, capsys):
    for rank in range(1 + folder):
        run(Random(rank), long=range(rank, 120, 20)).save(tmp_path / f"run{rank}.jsonl.gz")
    source = tmp_path if folder else tmp_path / "run0.jsonl.gz"
    assert main(["trace", "explain", str(source), "--slowest", str(count)]) == 0
    table, said = [], []
    for line in capsys.readouterr().out.splitlines()[1:]:
        (said if " slowest " in line else table).append(line)
    assert len(table) == count
    for line in said:
        rank, num_shown = re.match(r"(?:(run\d): )?\d+ of the (\d+) slowest ", line).groups()
        assert int(num_shown) == sum(row.startswith(f"{rank}: ") for row in table) if rank else int(num_shown) == count
    ranks = [row[:5] if folder else "" for row in table]
    assert bool(said) == (max(map(ranks.count, ranks)) >= 5)


def test_an_incident_finds_the_causes_of_the_slowest_without_copies_of_the_run(monkeypatch):
    """Copying the rest of the run for each request took time that grew with its steps squared."""

    class Pieces(list):
        def __getitem__(self, at):
            assert not isinstance(at, slice)
            return super().__getitem__(at)

    monkeypatch.setattr("workbench.analysis.incident.MAX_SLOW", 7)
    trace = run(Random(0), long=(3, 50))
    explainer = explainer_of(trace)
    explainer._stretches = Pieces(explainer._stretches)
    asked = []
    first_token = explainer.first_token
    monkeypatch.setattr(explainer, "first_token", lambda name: asked.append(name) or first_token(name))
    found = trace.incident()
    assert [one.request_id for one in found.slow] == asked == explainer.slowest()[:7]
    assert {"r3", "r50"} == set(asked[:2])


def test_an_incident_is_a_few_lines():
    found = run(Random(0), long=(3, 50)).incident()
    head, *lines = repr(found).splitlines()
    assert head == "time to first token, the slowest first" and "Slow(" not in repr(found)
    for one, line in zip(found.slow[:5], lines):
        assert line.startswith(f"  {one.request_id}: {one.ttft}, {one.share:.0%} of it {one.cause}")
    assert lines[5] == f"  ... and {len(found.slow) - 5} more requests"
    assert lines[6:] == [str(difference) for difference in found.apart[:5]]
    empty = run(Random(0), long=(3, 50))[:0].incident()
    assert repr(empty) == "no request waited for a first token"
