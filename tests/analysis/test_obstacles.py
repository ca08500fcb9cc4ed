"""Settings that nobody can use, as they hang or the server refuses them: said first, without a command, not advised."""

import random
import re
from statistics import fmean

import msgspec
import pytest

from workbench import CostModel, Trace, simulate
from workbench.analysis.flags import Server
from workbench.analysis.fork import fork
from workbench.apps.cli import main
from workbench.viz.changed_run import changed_run
from workbench.viz.settings_in_steps import settings_in_steps

CONFIG = {"max_num_batched_tokens": 16, "max_num_seqs": 12, "num_blocks": 300, "enable_prefix_caching": False}
HANG = {"num_blocks": 10}


@pytest.fixture(scope="module")
def recording():
    """A server of vLLM, of which some prompts need more than nine blocks."""
    rng = random.Random(4)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.choice([10, 10, 10, 200])}, "max_tokens": 30, "arrival_time": i / 20}
        for i in range(40)
    ]
    cost = CostModel(fixed=0.02, per_row=1e-4)
    trace = simulate({"config": CONFIG, "requests": requests}, cost_model=cost)
    trace.meta = msgspec.structs.replace(trace.meta, source="vllm 0.33.0")
    return trace


@pytest.fixture(scope="module")
def path(recording, tmp_path_factory):
    recording.save(path := tmp_path_factory.mktemp("run") / "run.jsonl.gz")
    return path


def is_refused(changes):
    """The check of vLLM's SchedulerConfig."""
    config = CONFIG | changes
    return config["max_num_batched_tokens"] < config["max_num_seqs"]


CHANGES = [{"max_num_batched_tokens": 11}, {"max_num_batched_tokens": 12}, {"max_num_seqs": 17}, {"max_num_seqs": 16}]


@pytest.mark.parametrize("changes", [*CHANGES, HANG, {"num_blocks": 200}], ids=str)
def test_a_setting_that_nobody_can_use_is_no_command(path, capsys, changes):
    ((name, value),) = changes.items()
    assert main(["trace", "whatif", str(path), "--set", f"{name}={value}"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    hangs = fork(Trace.load(path), **changes).end != "done"
    assert hangs == (changes == HANG)
    assert first.startswith("! this setting would hang: ") == hangs
    assert first.startswith("! vLLM refuses this setting: ") == is_refused(changes)
    assert any(line.startswith("vllm serve") for line in lines) == (not hangs and not is_refused(changes))
    assert not any(first[2:] in line for line in lines), "it is said once"
    assert Server(is_sglang=True, config=CONFIG).flags(changes), "SGLang has no such rule"


def test_no_search_advises_such_a_setting(recording):
    swept = recording.tune("ttft_p99=1ms", cost_model=CostModel(fixed=0.02, per_row=1e-4), num_draws=0)
    settings = [{name: row[name] for name in swept.settings} for row in swept.rows]
    assert len(settings) > 9 and not any(map(is_refused, settings))
    grid = {"max_num_seqs": [6, 12, 24], "num_blocks": [10, 300]}
    tuning = recording.tune("ttft_mean=1ms", grid=grid, cost_model=CostModel(fixed=0.02, per_row=1e-4), num_draws=0)
    done = [row for row in tuning.rows if row["end"] == "done"]
    lowest = min(done, key=lambda row: row["ttft_mean"])
    assert [row["max_num_seqs"] for row in done] == [6, 12, 24] and is_refused({"max_num_seqs": lowest["max_num_seqs"]})
    assert tuning.best is tuning.current and [each.changes for each in tuning.runners_up] == [{"max_num_seqs": 6}]
    assert {"not advised: 3 settings of the sweep that would hang",
            "not advised: 1 setting of the sweep that vLLM refuses"} <= {*tuning.notes}  # fmt: skip
    assert ["vLLM refuses" in row["error"] for row in done] == [False, False, True]


def test_counts_offer_no_such_setting(recording):
    """Twice the seats are more than the budget."""
    hanging = {"max_num_batched_tokens": 64}

    def forked(**changes):
        changes.pop("at_step")
        return fork(recording, **({**changes, **HANG} if changes == hanging else changes))

    found = settings_in_steps(recording, forked, "Times vary", lambda done, num_all: None)
    shown = [each["setting"] for each in found["candidates"]]
    assert "max_num_seqs=6" in shown and "max_num_seqs=24" not in shown and "max_num_batched_tokens=64" not in shown
    assert "Requests would wait forever with max_num_batched_tokens=64." in found["notes"]


def test_a_run_that_serves_fewer_requests_is_better_in_nothing(recording):
    """Its mean is shorter, as it is that of the requests that have one."""
    measures = changed_run(recording, None, 0, HANG).facts["measures"]
    sides = [recording, fork(recording, cost_model=CostModel(fixed=0.02, per_row=1e-4), **HANG)]
    gaps = [[gap for request in side.metrics().requests.values() for gap in request.gaps("s")] for side in sides]
    served = [sum(bool(request.token_steps) for request in side.metrics().requests.values()) for side in sides]
    assert served[1] < served[0] and fmean(gaps[1]) < fmean(gaps[0])
    assert "requests without a first token 0 -> " in measures["verdict"] and "better" not in measures["verdict"]
    marked = {name: change.endswith(" (of fewer requests)") for name, *_, change in measures["measures"]}
    assert marked.pop("output tokens per s") is False and marked.pop("requests without a first token") is False
    assert len(marked) >= 4 and all(marked.values()), marked


@pytest.mark.parametrize("changes", [HANG, {"num_blocks": 200}], ids=str)
def test_latencies_of_fewer_requests_have_no_change(path, capsys, changes):
    trace = Trace.load(path)
    ((name, value),) = changes.items()
    assert main(["trace", "whatif", str(path), "--set", f"{name}={value}"]) == 0
    said = capsys.readouterr().out
    rows = {cells[0]: cells[3] for line in said.splitlines() if len(cells := re.split(r"\s{2,}", line)) > 4}
    served = [sum(bool(each.token_steps) for each in run.metrics().requests.values())
              for run in (trace, fork(trace, **changes))]  # fmt: skip
    is_fewer = served[1] < served[0]
    assert is_fewer == (changes == HANG) and len({"ttft_mean", "itl_p99", "e2e_mean"} & rows.keys()) == 3
    for latency in ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "e2e_mean"):
        assert rows[latency].endswith("%") != is_fewer, latency
    assert rows["num_steps"].endswith("%") and ("those of fewer requests than now" in said) == is_fewer
