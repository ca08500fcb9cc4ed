"""A command reads of a recording what its answer needs, and keeps what it needs later."""

import json
import subprocess
import sys
from statistics import fmean

import numpy as np
import pytest

from tests.support.private_traces import without_tokens
from workbench import simulate
from workbench.analysis import hit_rates, predict
from workbench.analysis.explain import explainer_of
from workbench.analysis.predict import Predictor
from workbench.analysis.rerun import RecordedRun
from workbench.scheduler.policies import DecodeFirst
from workbench.scheduler.request import Request
from workbench.simulation.costs.coefficients import Regression
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.metrics import percentile
from workbench.trace.readings.ordered import Ordered

COST = CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-3)


@pytest.fixture
def trace():
    parts = [{"len": 64, "seed": "A"}, {"len": 20}]
    requests = [
        {"id": f"r{n}", "prompt": {"parts": parts}, "max_tokens": 4 + n % 7, "arrival_time": n * 0.03}
        for n in range(60)
    ]
    config = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return simulate({"config": config, "requests": requests}, cost_model=COST)


def test_info_imports_no_other_command_and_no_reader_of_another_format(trace, tmp_path):
    trace.save(tmp_path / "t.jsonl.gz")
    program = """
import json, sys
from workbench.apps.cli import main
status = main(["trace", "info", sys.argv[1]])
print(json.dumps([status, [name for name in sys.modules if name.startswith("workbench.")]]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "t.jsonl.gz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    commands = {name for name in modules if name.startswith("workbench.apps.cli.")}
    assert status == 0
    assert commands == {
        f"workbench.apps.cli.{name}" for name in ("options", "say", "settings", "trace", "trace_decide", "trace_watch")
    }
    others = ("simulation.access_log", "simulation.request_log", "trace.formats", "trace.readings.fleet")
    assert not [name for name in modules if name.removeprefix("workbench.").startswith(others)]


def test_whether_a_fit_holds_is_known_before_all_steps_are_fitted(trace, monkeypatch):
    fitted, whole = [], Regression.coefficients
    monkeypatch.setattr(Regression, "coefficients", lambda self, steps: fitted.append(len(steps)) or whole(self, steps))
    explainer = explainer_of(trace)
    assert explainer.misfit == "" and fitted == [len(trace) - len(trace) // 5]
    assert explainer.model == CostModel.fit(trace)[0] and max(fitted) == len(trace)
    num_fits = len(fitted)
    explainer.explain("r3")
    assert explainer.misfit == "" and len(fitted) == num_fits


def test_prefixes_are_compared_only_where_they_are_known(trace, monkeypatch):
    made = []
    whole = hit_rates.Contents
    monkeypatch.setattr(hit_rates, "Contents", lambda *arguments: made.append(arguments) or whole(*arguments))
    bare = without_tokens(trace, hashes=False)
    assert "neither token ids nor hashes" in str(hit_rates.hit_rates([bare])) and not made
    assert "no sessions: no prompt begins" in str(hit_rates.hit_rates([without_tokens(trace)])) and len(made) == 1


def test_a_simulation_for_its_values_keeps_no_request(trace):
    predictor = Predictor(trace, COST, num_draws=0)
    summed, end = predictor._run._summed(predict.recorded_config(trace), COST)
    assert end == "done" and len(summed.requests) == 60
    kept = [times.request for times in summed.requests.values()]
    assert not any(isinstance(request, Request) for request in kept)
    assert max(len(request.prompt_token_ids) for request in kept) == 1


def test_a_prediction_keeps_one_run_and_no_metrics(trace, monkeypatch):
    bare, runs, seen = without_tokens(trace, hashes=False), [], []
    whole = predict.spread_out

    def spread_out(function, shared, tasks, **options):
        runs.append((shared, options["apart"]))
        seen.append(predictor.__dict__.get("_run"))
        return whole(function, shared, tasks, **options)

    monkeypatch.setattr(predict, "spread_out", spread_out)
    predictor = Predictor(bare, num_draws=1)
    prediction = predictor.predict(num_blocks=600)
    assert predict.unknown_sharing("its engine evicted blocks") in prediction.notes
    (one, one_apart), (most, most_apart) = runs
    assert isinstance(most, RecordedRun) and most is not one and (one_apart, most_apart) == (False, True)
    assert seen == [one, None], "the first run is given up before the second is made"
    assert "metrics" not in bare._lazy and predictor.recorded == predict.values_of(bare)


def test_equal_gaps_are_kept_once(trace):
    gaps = [gap for request in trace.metrics().requests.values() for gap in request.gaps("s")]
    ordered = Ordered(gaps)
    assert len(ordered) == len(gaps) > 1.5 * len(ordered.different)
    assert list(ordered) == sorted(gaps) == [ordered[place] for place in range(len(gaps))]
    assert ordered[-1] == max(gaps) and fmean(ordered) == fmean(sorted(gaps))
    assert [percentile(ordered, part) for part in (0, 7, 50, 99, 100)] == [
        percentile(sorted(gaps), part) for part in (0, 7, 50, 99, 100)
    ]
    assert percentile(ordered, 95) == pytest.approx(np.percentile(gaps, 95))
    assert not Ordered([]) and list(Ordered({0.5: 2, 0.25: 1})) == [0.25, 0.5, 0.5]
    with pytest.raises(IndexError):
        ordered[len(gaps)]


def test_a_policy_in_python_is_predicted_where_prefixes_are_unknown(trace):
    bare = without_tokens(trace, hashes=False)
    prediction = Predictor(bare, num_draws=1).predict(policy=DecodeFirst(), num_blocks=600)
    assert predict.unknown_sharing("its engine evicted blocks") in prediction.notes
    assert prediction["hit_rate"].low < prediction["hit_rate"].high
