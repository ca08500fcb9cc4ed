"""What if, Which setting?, the command line and `tune` take one decision about the seconds of a run."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from workbench import CostModel, Trace, compare, simulate
from workbench.analysis.check import LITTLE, MAX_ERROR
from workbench.analysis.fork import fork
from workbench.analysis.pauses import without_pauses
from workbench.analysis.predict import Predictor, comparing
from workbench.analysis.tune import tune
from workbench.analysis.values import values_of
from workbench.apps.cli import main
from workbench.simulation.costs.fit import FitReport, NoSeconds
from workbench.trace.readings.metrics import amount, number
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz.changed_run import changed_run, terms_of_changes
from workbench.viz.duel import settled
from workbench.viz.feed import Feed
from workbench.viz.layout.comparison import comparison_facts
from workbench.viz.router_duel import settled as settled_routers

COST = CostModel(fixed=0.01, per_prefill_token=0.0006, per_sequence=0.001)
WORDS = {"ttft_mean": "mean TTFT", "ttft_p99": "P99 TTFT", "itl_mean": "mean ITL", "itl_p99": "P99 ITL"}
GRADES = {0.05: "seconds", 0.9: "comparison", 4.0: "steps"}


class Noisy(CostModel):
    """Steps that take more or less than their contents explain."""

    def step_seconds(self, chunks):
        """Duration of the next step."""
        return super().step_seconds(chunks) * math.exp(self.rng.gauss(0, self.sigma))


def as_recorded(run):
    """The same run, as of an engine."""
    trace = Trace(replace(run.meta, source="engine"))
    for info in run.requests.values():
        trace.add_request(info)
    for record in run:
        trace.append(record)
    return trace


def recording(sigma, seed=3, **config):
    """A recording whose steps have lognormal noise."""
    cost, rng = Noisy(**COST.to_dict()), random.Random(seed)
    object.__setattr__(cost, "rng", rng)
    object.__setattr__(cost, "sigma", sigma)
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(20, 300)}, "max_tokens": rng.randint(5, 30)}
        | {"arrival_time": 0.15 * n}
        for n in range(24)
    ]
    config = {"max_num_batched_tokens": 192, "max_num_seqs": 8} | config
    return as_recorded(simulate({"config": config, "requests": requests}, cost_model=cost))


def asked(trace, slo="ttft_p99=1000s"):
    """The answer of *Which setting?*."""
    feed = Feed(trace)
    feed._in_background = lambda work: work()
    feed.handle({"id": 1, "name": "tune", "args": {"slo": slo}})
    return feed.status()["tuned"]


@pytest.mark.parametrize("sigma", [0.05, 4.0])
def test_which_setting_of_a_part_predicts_the_whole_run_for_the_requests_of_the_part(sigma, tmp_path, capsys):
    trace = recording(sigma)
    trace.save(tmp_path / "run.jsonl")
    part = trace[30:90]
    found, of_whole = asked(part), asked(trace)
    if sigma == 4.0:  # counts are of the run
        assert found["candidates"] == of_whole["candidates"] and found["candidates"]
        return
    counted = [name for name in trace.requests if any(name in (*step.running, *step.waiting) for step in part)]
    assert len(counted) < len(trace.requests)
    assert any(f"{len(counted)} requests in the chosen part" in note for note in found["notes"])
    assert not any("in the chosen part" in note for note in of_whole["notes"])
    begin, end = part[0].time - trace.requests["r0"].arrival_time, part[-1].end - trace.requests["r0"].arrival_time
    window = ["--from", f"{begin + 1e-6:.7f}s", "--to", f"{end - 1e-6:.7f}s"]
    assert main(["trace", "tune", str(tmp_path / "run.jsonl"), "--slo", "ttft_p99=1000s", *window]) == 0
    told = capsys.readouterr().out
    recorded = next(row for row in found["candidates"] if row["setting"] == "as recorded, predicted")
    assert recorded["values"]["ttft_p99"].split(" ")[0] in told
    assert recorded not in of_whole["candidates"]


@pytest.mark.parametrize("sigma", GRADES)
def test_every_view_takes_the_same_decision(sigma, tmp_path, capsys):
    trace, grade = recording(sigma), GRADES[sigma]
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--set", "max_num_batched_tokens=64"]) in (0, 2)
    told = capsys.readouterr()
    tuned, changed = asked(trace), changed_run(trace, lambda **changes: fork(trace, **changes), 0, {"max_num_seqs": 4})
    assert terms_of_changes(trace) == ("steps" if grade == "steps" else "s", 0.1 if grade == "comparison" else 0.0)
    if grade == "steps":
        with pytest.raises(NoSeconds):
            comparing(trace)
        with pytest.raises(NoSeconds):
            trace.tune("ttft_p99=1s")
        assert "ttft_p99" not in told.out and changed.unchanged is None and "no_times" in changed.facts
        assert "this counts steps" in tuned["verdict"]
        return
    caution = comparing(trace).check.caution
    assert comparing(trace).check.grade == grade and bool(caution) == (grade == "comparison")
    assert ("not with a clock" in told.out) == bool(caution) and "ttft_p99" in told.out
    assert changed.facts["predicted"].count("not with a clock") == bool(caution)
    assert (" is off by " in changed.facts["predicted"]) == (not caution), "how far it is off is said once"
    assert tuned["verdict"].count("not with a clock") == bool(caution) and tuned["pictures"]
    words = tuned["candidates"][0]["words"]
    tuning = trace.tune("ttft_p99=1000s")
    assert tuning.words_of_best == words and words in (("keep",) if caution else ("best", "keep"))
    if caution:
        assert tuning.verdict == "meets" and not tuning.best.changes and caution[:-1] in repr(tuning)
        far = trace.tune("ttft_p99=1ms", grid={"max_num_seqs": [4, 16]})
        assert far.verdict == far.current_verdict == "misses", "far outside the interval"
        assert far.verdict_sentence.startswith("misses ttft_p99 (") and caution[:-1] in far.verdict_sentence
        changed = {"max_num_batched_tokens": 2048, "max_num_seqs": 24}
        limit = comparing(trace).predict(**changed)["ttft_p99"].low / 1.2
        near = trace.tune({"ttft_p99": limit}, grid={name: [value] for name, value in changed.items()})
        assert near.best.changes and near.verdict == "cannot tell", "near the interval of a rough prediction"
        with pytest.raises(NoSeconds, match="no seconds: "):
            trace.whatif(max_num_seqs=4)
        assert len(trace.whatif(max_num_seqs=4, force=True))
    else:
        assert len(trace.whatif(max_num_seqs=4)) and "not with a clock" not in repr(tuning)


def is_open(before, after, name, sigma):
    """Whether simulations disagree about the direction of a change; up to 10% have none in rough predictions."""
    change, *draws = (
        new / old - 1
        for old, new in [(before[name].value, after[name].value), *zip(before.draws[name], after.draws[name])]
    )
    least = 0.1 if sigma == 0.9 else 0.0
    agree = [draw for draw in draws if draw * change > 0 and abs(draw) > least]
    return change != 0 and (abs(change) <= least or len(agree) < 0.85 * len(draws))


@pytest.mark.parametrize("sigma", [0.05, 0.9])
def test_a_changed_run_is_compared_with_the_prediction_of_the_run_as_it_was(sigma):
    """The values are those of the two runs of the pictures, their ranges those of `tune`."""
    trace, changes = recording(sigma), {"max_num_batched_tokens": 64}
    feed = Feed(trace)
    feed._in_background = lambda work: work()
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": changes}})
    packet = feed.other_packet()
    header = json.loads(packet[4 : 4 + int.from_bytes(packet[:4], "little")])
    predictor = Predictor(trace, rough=True)
    before, after = predictor.unchanged, predictor.predict(**changes)
    shown = {row[0]: row[1:] for row in header["comparison"]["measures"]}
    for name, word in WORDS.items():
        ends = (amount(each, "s") for each in (after[name].low, after[name].high))
        assert shown[word][:2] == [
            amount(before[name].value, "s"),
            f"{amount(after[name].value, 's')} ({' to '.join(ends)})",
        ]
    assert shown["mean TTFT"][0] != compare(trace, trace).measures[0].values()[0], "the control: not the recorded mean"
    weighed = {word: name for name, word in WORDS.items()} | {"longest TTFT": "ttft_max", "longest pause": "itl_max"}
    assert shown.keys() <= {*weighed, "output tokens per s"}, "every row of the table is weighed"
    for word in ("longest TTFT", "longest pause"):
        assert (word in shown) == (word in header["comparison"]["verdict"]), "the table has what the sentence names"
    shares = {words: after[name].value / before[name].value - 1 for words, name in weighed.items()}
    open_ones = {words for words, name in weighed.items() if is_open(before, after, name, sigma)}
    assert {words for words, row in shown.items() if row[2].endswith("(may be no change)")} - {
        "output tokens per s"
    } == (open_ones & shown.keys())
    assert open_ones
    shares = {words: share for words, share in shares.items() if words not in open_ones or abs(share) < 0.03}
    rate, gain = "output tokens per s", before["output_throughput"].value / after["output_throughput"].value - 1
    for word, sign in {"worse: ": 1, "better: ": -1}.items():
        if sign * gain > max(sign * share for share in shares.values()):
            assert f"{word}{rate} " in header["comparison"]["verdict"]
            continue
        words = max(shares, key=lambda name: sign * shares[name])
        values = " -> ".join(amount(side[weighed[words]].value, "s") for side in (before, after))
        is_told = f"{word}{words} {values} (" in header["comparison"]["verdict"]
        assert is_told == (sign * shares[words] >= 0.03)
    nothing = {"max_num_seqs": 9}  # no more than eight run at once
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": nothing}})
    packet = feed.other_packet()
    header = json.loads(packet[4 : 4 + int.from_bytes(packet[:4], "little")])
    if len({len(record.running) for record in predictor.simulate()} - set(range(8))) == 0:
        assert {row[3] for row in header["comparison"]["measures"]} == {"no change"}
        assert header["comparison"]["first_divergence"] is None


def few_prompts(slow):
    """A recording as of the demo: of seven steps with prompts one alone tells a cost per step from one per token.

    Args:
        slow: Factor by which the other six take longer by chance.
    """

    class Uneven(CostModel):
        def step_seconds(self, chunks):
            rows = sum(chunk.num_tokens for chunk in chunks)
            return super().step_seconds(chunks) * (slow if rows > 100 else 1.0)

    requests = [{"id": "long", "prompt": {"len": 1155}, "max_tokens": 40}]
    requests += [{"id": f"q{n}", "prompt": {"len": 8}, "max_tokens": 40} for n in range(5)]
    config = {"max_num_batched_tokens": 192, "max_num_seqs": 8}
    cost = Uneven(fixed=0.01, per_prefill_token=0.006)
    return as_recorded(simulate({"config": config, "requests": requests}, cost_model=cost))


@pytest.mark.parametrize("run", ["quiet", "noisy", "few prompts"])
def test_a_table_a_picture_and_the_rows_below_are_of_one_run(run):
    """Models of stretches that lack the only small step with prompts take 32 tokens for as slow as 192."""
    trace = few_prompts(2.0) if run == "few prompts" else recording(0.05 if run == "quiet" else 0.9)
    changed = changed_run(trace, None, 0, {"max_num_batched_tokens": 32})
    assert changed.unchanged is not None
    drawn = {row[0]: row[1:3] for row in comparison_facts(changed.unchanged, changed.trace)["measures"]}
    shown = {row[0]: row[1:3] for row in changed.facts["measures"]["measures"]}
    for words in WORDS.values():
        assert [cell.partition(" (")[0] for cell in shown[words]] == drawn[words], words
    rows = [each.ttft.seconds for each in metrics(changed.trace).requests.values()]
    assert min(rows) <= changed.values[1]["ttft_mean"] <= max(rows)
    if run == "few prompts":
        draws = comparing(trace).predict(max_num_batched_tokens=32).draws["ttft_mean"]
        assert max(draws) > 2 * max(rows), "the control: the mean of such models would be far from the rows"


def test_the_error_that_is_told_is_that_of_the_values_that_are_shown():
    trace = recording(0.2)
    changed = changed_run(trace, None, 0, {"max_num_seqs": 4})
    told = {name: int(error) for error, name in re.findall(r"([+-]\d+)% for ([\w ]*\w)", changed.facts["predicted"])}
    predictor = Predictor(trace, rough=True)
    predicted, recorded = {name: predictor.unchanged[name].value for name in WORDS}, values_of(trace)
    assert len(told) >= 2
    for name, word in WORDS.items():
        assert told.get(word, 0) == pytest.approx(100 * (predicted[name] / recorded[name] - 1), abs=1.0)


SERVED = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"


@pytest.mark.parametrize("seats", [6, 16])
def test_a_value_that_is_not_to_be_relied_on_decides_nothing(seats):
    """A stall is in the recorded gaps and in no predicted one."""
    trace = Trace.load(SERVED)
    check, facts = comparing(trace).check, changed_run(trace, None, 0, {"max_num_seqs": seats}).facts["measures"]
    names = WORDS | {"ttft_max": "longest TTFT", "itl_max": "longest pause"}
    far = {word for name, word in names.items() if abs(check.errors[name]) > MAX_ERROR}
    assert {"P99 ITL", "longest pause"} <= far and not check.caution
    marked = {row[0] for row in facts["measures"] if row[3].endswith(" (do not rely on it)")}
    assert marked == {row[0] for row in facts["measures"]} & far and "P99 ITL" in marked
    assert not any(word in facts["verdict"] for word in far) and "TTFT" in facts["verdict"]
    assert terms_of_changes(trace, "ttft_mean") == ("s", round(abs(check.errors["ttft_mean"]), 2))
    with pytest.raises(ValueError, match=r"off by -\d+%: choose another one"):
        terms_of_changes(trace, "itl_max")


def test_with_a_caution_the_verdict_names_no_change_that_says_nothing():
    facts = changed_run(recording(0.9), None, 0, {"max_num_seqs": 7}).facts["measures"]
    changes = [row[3] for row in facts["measures"]]
    assert "7% longer (may be no change)" in changes and all(
        re.match(r"no |less than 1%|\d%", change) for change in changes
    )
    assert "worse" not in facts["verdict"] and "better" not in facts["verdict"]
    assert facts["verdict"].endswith(" changes by 10% or more")


@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_one_run_has_one_error_for_a_value_in_every_answer(sigma, tmp_path, capsys):
    """*What if*, a duel of routers, `whatif` and `tune`; a value that is off by more than 20% has a mark in each."""
    trace = recording(sigma)
    errors = comparing(trace).check.errors
    changed = changed_run(trace, None, 0, {"max_num_seqs": 4})
    page, *rest = re.findall(r"Of the run as it was, .*? is off by .*?\.(?= |$)", changed.facts["predicted"])
    routers = {"a": "round_robin", "b": "random", "replicas": 2}
    duel = settled_routers(trace, routers, "mean time to first token").notes
    assert not rest and any(page in note for note in duel), duel
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--set", "max_num_seqs=4", "--force"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    tuning = trace.tune("ttft_p99=1000s", grid={"max_num_seqs": [4]}, force=True)
    assert tuning.errors == errors
    for name, word in WORDS.items():
        is_far = abs(errors[name]) > MAX_ERROR
        assert f"{errors[name]:+.1%}" in rows[name] and rows[name].endswith("!") == is_far
        mark = " (do not rely on it)" if is_far else ""
        told = f"{errors[name]:+.0%} for {word}{mark}"
        assert (f"{told}," in page or f"{told}." in page) == (abs(errors[name]) >= LITTLE), (told, page)
    assert (sigma == 0.3) == any(abs(errors[name]) > MAX_ERROR for name in WORDS)


@pytest.mark.parametrize("seed", range(3))
def test_comparisons_of_noisy_runs_have_the_right_sign_where_steps_do_not(seed):
    """The rule behind the limit, on one setting: with 64 instead of 192 tokens steps are shorter."""
    trace, clean = recording(0.6, seed), recording(0.0, seed)
    requests = {"max_num_batched_tokens": 64}
    true = values_of(fork(clean, cost_model=COST, **requests))["itl_p99"] / values_of(clean)["itl_p99"]
    predictor = Predictor(trace, num_draws=0, rough=True)
    predicted = [predictor.predict(**changes).outcome.values["itl_p99"] for changes in (requests, {})]
    assert true < 0.9 and predicted[0] < predicted[1]
    steps = [fork(trace, **changes).metrics().summary.itl.p99 for changes in (requests, {})]
    assert steps[0] >= steps[1], "in steps nothing becomes shorter"


def paused_for_half_a_minute(trace):
    """The same run, which a person stopped before step 40."""
    moved = 0.0
    paused = Trace(trace.meta)
    at = trace[40].time
    for info in trace.requests.values():
        paused.add_request(replace(info, arrival_time=info.arrival_time + (30.0 if info.arrival_time > at else 0.0)))
    for record in trace:
        moved = 30.0 if record.step >= 40 else 0.0
        paused.append(replace(record, time=record.time + moved, end=record.end + moved))
    return paused


def test_pauses_of_a_person_are_no_error_of_a_prediction():
    trace = recording(0.05)
    paused = paused_for_half_a_minute(trace)
    assert comparing(paused).check.grade == "seconds"
    again = without_pauses(paused)
    assert [record.end for record in again] == pytest.approx([record.end for record in trace])
    assert without_pauses(trace) is None
    other = Trace(replace(paused.meta, source="vllm 0.33.0"))
    assert without_pauses(other) is None, "nobody knows what another engine waited for"


def test_the_errors_of_a_run_with_a_pause_are_the_same_in_every_answer(tmp_path, capsys):
    paused = paused_for_half_a_minute(recording(0.05))
    changes = {"max_num_batched_tokens": 64}
    errors = Predictor(paused).check.errors
    assert max(abs(errors[name]) for name in ("ttft_mean", "itl_p99", "e2e_mean")) < 0.2, "30 s would be seen"
    paused.save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--set", "max_num_batched_tokens=64"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line}
    for name in ("ttft_mean", "ttft_p99", "itl_p99", "e2e_mean"):
        assert f"{errors[name]:+.1%}" in rows[name]
    assert "recorded values are without the pauses" in said
    assert tune(paused, "ttft_p99=1s", grid={"max_num_seqs": [4]}).errors == errors
    page = changed_run(paused, None, 0, changes).errors
    assert {name: page[name] for name in errors if name != "duration"} == pytest.approx(
        {name: error for name, error in errors.items() if name != "duration"}
    )


@pytest.mark.parametrize(
    ("median", "total", "holds", "compares"),
    [
        (0.35, 0.25, True, True),
        (0.36, 0.1, False, True),
        (0.1, 0.26, False, True),
        (0.81, 0.1, False, False),
        (0.1, 0.51, False, False),
        (math.nan, 0.1, False, False),
    ],
)
def test_the_limits_of_a_fit(median, total, holds, compares):
    report = FitReport(80, 20, median, 2 * median, total, 0.5)
    assert (report.holds, report.compares) == (holds, compares)


@pytest.mark.parametrize(
    "changes, why",
    [({}, ""), ({"num_blocks": 1_000}, ""), ({"policy": "priority"}, "all requests have the same priority: ")],
)
def test_a_change_that_changes_nothing_says_so(changes, why):
    changed = changed_run(recording(0.05), None, 0, changes)
    pool = "; another pool: the same blocks are another share of it" if "num_blocks" in changes else ""
    assert changed.facts["measures"]["verdict"] == f"{why}nothing changes, every step is as before{pool}"
    trace = recording(0.05)
    in_steps = comparison_facts(trace, fork(trace, **changes))
    assert in_steps["unit"] == "steps" and in_steps["verdict"] == "nothing changes, every step is as before"


@pytest.mark.parametrize("measure", ["mean time to first token", "hit rate of prompt tokens"])
def test_steps_larger_than_any_measured_one_are_told(measure):
    trace = recording(0.05, max_num_seqs=4)
    changed = changed_run(trace, None, 0, {"max_num_seqs": 8})
    sizes = [len(record.chunks) for record in changed.trace]
    assert max(len(record.chunks) for record in trace) == 4 < max(sizes)
    share = sum(size > 4 for size in sizes) / len(sizes)
    larger = f"{share:.0%} have more than 4 sequences (up to {max(sizes)})"
    told = f"B has steps beyond the largest step used for the fit: {larger}"
    assert f" {told}" in changed.facts["predicted"]
    notes = settled(trace, changed, measure, "s").notes
    assert [told in note for note in notes] == [True] * (measure != "hit rate of prompt tokens")
    smaller = changed_run(trace, None, 0, {"max_num_seqs": 3})
    assert smaller.limits == "" and "used for the fit" not in smaller.facts["predicted"]


@pytest.mark.parametrize("is_simulated", [False, True])
def test_compare_shows_both_predictions_and_no_badge_for_the_tokens_of_a_simulation(deno_page, is_simulated):
    trace = recording(0.2)
    changed = changed_run(trace, None, 0, {"max_num_batched_tokens": 64})
    changed = changed._replace(facts={"at_step": 0, "changes": {"max_num_batched_tokens": 64}, **changed.facts})
    deno_page.open(
        trace, None if is_simulated else changed.trace, changed=changed if is_simulated else None, width=1100
    )
    deno_page.painted("compare")
    assert deno_page("view.panel('compare').badge.hidden") == is_simulated
    words = deno_page("view.panel('compare').measures.textContent")
    caption = deno_page.table("compare")["caption"]
    summary = deno_page("view.panel('compare').summary.textContent")
    if is_simulated:
        assert "as it was, predicted" in words and "changed, predicted" in words and "worse: mean TTFT" in caption
        assert changed.facts["predicted"] in summary
    else:
        assert "predicted" not in words and "of B are predicted, those of A are measured" in summary
        assert caption == "same tokens: B is a simulation, which takes them from A"


def test_a_pause_is_idle_time_of_the_rates_and_said_of_the_latencies():
    trace = recording(0.05)
    paused = paused_for_half_a_minute(trace)
    whole, stopped = metrics(trace), metrics(paused)
    assert "idle" not in repr(whole) and not whole.pauses_note
    rate = f"throughput: {number(whole.summary.output_throughput)} output"
    assert rate in repr(whole) and rate in repr(stopped), "the engine did not work while it waited for a person"
    assert stopped.pauses_note == (
        "latencies include 30 s in which the engine was stopped while requests were there; rates do not"
    )
    assert stopped.pauses_note in repr(stopped) and stopped.pauses_note in stopped._repr_html_()
    assert stopped.summary.itl.max > 29 > whole.summary.itl.max
