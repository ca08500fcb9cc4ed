"""An answer checks itself on the setting that was recorded, and refuses seconds beyond a bound."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from workbench import Trace, simulate
from workbench.analysis.causes import Confirmation
from workbench.analysis.check import COUNTS, MAX_ERROR, Check
from workbench.analysis.explain import Explainer
from workbench.analysis.fork import Past
from workbench.analysis.predict import Predictor, values_of
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.two_sides import UNSERVED

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_preemption.jsonl.gz"
COST = CostModel(fixed=0.02, per_sequence=1e-3, per_prefill_token=2e-4)
CONFIG = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "num_blocks": 90}


class Noisy:
    """Steps that vary, and become slower in the middle of a run if they depend on what no cost model sees."""

    def __init__(self, hidden=0.0):
        self.rng, self.count, self.hidden = random.Random(3), 0, hidden

    def step_seconds(self, chunks):
        """Duration of the next step."""
        self.count += 1
        return COST.step_seconds(chunks) * self.rng.uniform(0.95, 1.05) * (1 + self.hidden * (self.count % 2))


def run(cost, requests=30, shared=False, **config):
    rng = random.Random(1)
    prefix = {"len": 800, "seed": "shared"}
    load = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [prefix, {"len": rng.randint(10, 60)}]} if shared else {"len": rng.randint(50, 200)},
            "max_tokens": rng.randint(5, 30),
            "arrival_time": i * 0.1,
        }
        for i in range(requests)
    ]
    return simulate({"config": CONFIG | config, "requests": load}, cost_model=cost)


@pytest.fixture(scope="module")
def recording():
    return run(Noisy())


def with_a_hidden_wait(trace, tmp_path):
    """The trace of an engine that did nothing for a minute between two steps."""
    private = Trace(msgspec.structs.replace(trace.meta, source="vllm 0.33.0"))
    for info in trace.requests.values():
        private.add_request(info)
    for record in trace:
        wait = 60.0 if record.step > 10 else 0.0
        private.append(msgspec.structs.replace(record, time=record.time + wait, end=record.end + wait))
    private.save(tmp_path / "private.jsonl")
    return Trace.load(tmp_path / "private.jsonl")


def test_the_check_holds_the_recorded_values_and_those_predicted_for_the_same_setting(recording):
    predictor = Predictor(recording, num_draws=2)
    check, known = predictor.check, values_of(recording)
    assert check.holds and check.refusal == ""
    for name in ("ttft_mean", "tpot_mean", "e2e_mean", "output_throughput", *COUNTS):
        assert check.recorded[name] == known[name]
        assert check.unchanged[name] == predictor.unchanged[name].value
        assert (f"{name} " in str(check)) == (name not in UNSERVED), name  # none of these requests is unserved
    assert known["num_preemptions"] == recording.metrics().summary.num_preemptions
    said = predictor.report.sentence
    assert "steps held out; no drift; 0.0% of the steps stalled" in said and said in str(check)


def test_counts_are_those_of_the_simulated_run_and_are_in_every_prediction(recording):
    prediction = Predictor(recording, num_draws=2).predict(num_blocks=40)
    assert prediction["num_preemptions"].value == prediction.trace.metrics().summary.num_preemptions
    assert prediction["peak_kv_use"].low <= prediction["peak_kv_use"].value <= prediction["peak_kv_use"].high
    hits = run(COST, shared=True, num_blocks=300)
    summary = hits.metrics().summary
    prompts = sum(info.num_prompt_tokens for info in hits.requests.values())
    assert values_of(hits)["hit_rate"] == pytest.approx(summary.num_cached_tokens / prompts, abs=0.02)


def test_beyond_the_bound_seconds_are_refused_and_steps_are_answered(tmp_path, capsys):
    trace = with_a_hidden_wait(run(Noisy(), shared=True, num_blocks=300), tmp_path)
    check = Predictor(trace, num_draws=2).check
    assert abs(check.worst[1]) > MAX_ERROR and not check.holds
    with pytest.raises(
        ValueError, match=r"no seconds: for the recorded setting .* is off by -.*force=True \(--force\)"
    ):
        trace.whatif(max_num_seqs=8)
    with pytest.raises(ValueError, match="no seconds"):
        trace.tune("ttft_p99=1s", grid={"max_num_seqs": [2, 4]}, num_draws=1)
    assert main(["trace", "whatif", str(tmp_path / "private.jsonl"), "--set", "max_num_seqs=8"]) == 0
    said = capsys.readouterr().out
    assert "no seconds" in said and "--force prints them" in said and "ttft_p99" not in said
    assert all((name in said) == (name not in UNSERVED) for name in COUNTS)
    assert main(["trace", "whatif", str(tmp_path / "private.jsonl"), "--set", "max_num_seqs=8", "--force"]) == 0
    assert "ttft_p99" in capsys.readouterr().out


def test_nothing_measured_is_said():
    check = Check(None)
    assert check.holds and "nothing was measured" in str(check)


def test_equal_priorities_change_nothing_and_other_changes_do(recording):
    predictor = Predictor(recording, num_draws=0)
    [note] = predictor.predict(policy="priority").notes
    assert note.startswith("all requests have the same priority: nothing changes")
    assert not any("nothing changes" in note for note in predictor.predict(max_num_seqs=2).notes)
    assert any("nothing changes" in note for note in predictor.predict(max_model_len=100_000).notes)


def test_a_target_that_no_setting_meets_gets_the_closest(recording):
    tuning = recording.tune("ttft_p99=1ms", grid={"max_num_seqs": [2, 4, 8]}, num_draws=2)
    assert tuning.verdict == "misses" and set(tuning.misses) == {"ttft_p99"}
    said = repr(tuning)
    assert tuning.misses["ttft_p99"] > 1 and "misses ttft_p99 (" in said
    assert "closest: " in said and "take: " not in said
    assert "check, the recorded setting predicted: " in said and "hit_rate" in said


def test_only_fields_of_vllm_can_be_set(recording, tmp_path, capsys):
    recording.save(tmp_path / "run.jsonl")
    for field in ("seed", "attention_backend", "max_num_partial_prefills", "shadow_metal"):
        assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--set", f"{field}=1"]) == 2
        assert f"unknown field '{field}'" in capsys.readouterr().err


def test_an_explanation_states_its_fit_and_what_was_recorded(recording):
    explanation = Explainer(recording).explain("r20")
    assert f"within {explanation.fit.median_error:.1%} for half of the steps" in repr(explanation)
    said = explanation.confirmation
    assert said.holds and "both simulated, recorded " in said.sentence("s")
    assert "not confirmed" in type(said)("with x", said.before, said.after, 3 * said.before).sentence("s")
    assert Explainer(recording, COST).explain("r20").fit is None


def started_late(trace, wait):
    """The trace of an engine that took its first step so late, when some requests had been waiting for it."""
    late = Trace(trace.meta)
    for info in trace.requests.values():
        waited = 0.0 if info.arrival_time <= trace[0].time else wait
        late.add_request(msgspec.structs.replace(info, arrival_time=info.arrival_time + waited))
    for record in trace:
        late.append(msgspec.structs.replace(record, time=record.time + wait, end=record.end + wait))
    return late


@pytest.mark.parametrize("changes", [{}, {"max_num_seqs": 2}])
def test_requests_wait_for_an_engine_that_starts_late_under_every_setting(changes):
    """As in `workbench demo`, which adds two requests and waits for the browser; the others arrive while it runs."""
    at_once = run(COST)
    late = started_late(at_once, 4.0)
    first = [name for name, info in at_once.requests.items() if info.arrival_time <= at_once[0].time]
    expected, found = (trace.whatif(COST, **changes).metrics().requests for trace in (at_once, late))
    for name, each in expected.items():
        waited = 4.0 if name in first else 0.0
        assert found[name].ttft.seconds == pytest.approx(each.ttft.seconds + waited, abs=1e-9)
    assert 0 < len(first) < len(expected)


def test_times_of_the_shipped_recording_are_predicted():
    """Its three requests arrive 1.54 ms before the first step, 87% of their time to first token."""
    trace = Trace.load(EXAMPLE)
    assert trace[0].time - trace.requests["p0"].arrival_time > 1.5e-3
    check = Predictor(trace, num_draws=1).check
    assert check.holds and abs(check.errors["ttft_mean"]) < 0.15
    assert trace.explain("p2").confirmation.holds


def test_a_request_that_arrives_during_a_step_is_seen_at_once():
    times = {"early": 0.0, "during": 0.05, "late": 2.0}
    requests = [
        {"id": name, "prompt": {"len": 9}, "max_tokens": 4, "arrival_time": time} for name, time in times.items()
    ]
    trace = simulate({"requests": requests, "cost_model": {"fixed": 0.1}})
    past = Past(trace)
    assert [past.timed_arrival(info, 0).arrives_at for info in trace.requests.values()] == list(times.values())


def test_a_wrong_setting_is_refused_before_the_check(tmp_path):
    trace = with_a_hidden_wait(run(Noisy(), shared=True, num_blocks=300), tmp_path)
    with pytest.raises(ValueError, match="max_num_seqs must be from 1"):
        trace.whatif(max_num_seqs=0)
    with pytest.raises(ValueError, match="unknown EngineConfig field 'seats'"):
        trace.whatif(seats=1)


def test_time_between_steps_is_the_reason_if_it_is_as_long_as_what_is_missing():
    said = Confirmation("without a", before=1.0, after=0.5, recorded=2.0, between=0.9)
    assert "because it leaves out the 900 ms between steps; rely on the measured parts" in said.sentence("s")
    assert "between steps" not in replace(said, between=0.1).sentence("s")
    assert "out the 900 ms before the first step;" in replace(said, when="before the first step").sentence("s")


def test_a_request_that_the_prediction_alone_admits_is_no_sign_of_unknown_prefixes():
    """It is aborted while it waits; in the prediction, of faster steps, it is admitted before and finds its prefix."""
    shared = {"parts": [{"len": 400, "seed": "shared"}, {"len": 8}]}
    requests = [
        {"id": "first", "prompt": shared, "max_tokens": 20, "arrival_time": 0.0},
        {"id": "aborted", "prompt": shared, "max_tokens": 9, "arrival_time": 0.1, "abort_step": 9},
        {"id": "last", "prompt": {"len": 64}, "max_tokens": 9, "arrival_time": 0.2},
    ]
    config = CONFIG | {"max_num_seqs": 1}
    trace = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.1))
    assert trace.metrics().requests["aborted"].first_scheduled_step is None
    check = Predictor(trace, CostModel(fixed=0.01)).check
    assert check.recorded["hit_rate"] == 0 < 0.4 < check.unchanged["hit_rate"]
    assert check.common_hit_rates == (0, 0) and "prefixes" not in str(check)


def test_hits_that_differ_of_the_same_requests_show_that_prefixes_are_unknown():
    rates = {"hit_rate": 0.4}, {"hit_rate": 0.1}
    for common, is_told in ((None, True), ((0.3, 0.1), True), ((0.1, 0.1), False)):
        said = str(Check(None, *rates, common_hit_rates=common))
        assert ("shared prefixes are not in the recording" in said) is is_told
    said = str(Check(None, *rates, common_hit_rates=(0.3, 0.1)))
    assert "for the requests that were admitted in both" in said and "a hit rate of 30.0%, its prediction 10.0%" in said
