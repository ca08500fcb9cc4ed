"""Predictions and tuning: against a run of the machine that the recording came from, with the known error in view."""

import json
import math
import operator
import random
import re
from dataclasses import replace
from html import escape
from statistics import fmean

import msgspec
import pytest

from workbench import Trace, simulate
from workbench.analysis.check import MAX_ERROR, off_words, shown
from workbench.analysis.flags import vllm_flags
from workbench.analysis.intervals import Interval
from workbench.analysis.predict import Predictor, values_of
from workbench.analysis.rerun import SIZES
from workbench.analysis.tuning import mark_front, read_slo, score
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel, step_features
from workbench.trace import TraceError
from workbench.trace.readings.compare import compare
from workbench.trace.readings.metrics import amount
from workbench.viz.feed import Feed
from workbench.viz.layout.pareto import tuning_marks
from workbench.viz.pareto import tuning_facts, tuning_html


class Machine:
    """A roofline with a soft corner and 5% noise, which is not the model's form."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)

    def step_seconds(self, chunks):
        sequences, prefill, kv_tokens, cells = step_features(chunks)
        memory, compute = 0.016 + 1e-6 * kv_tokens, 13e-5 * (sequences + prefill) + 2e-8 * cells
        joined = memory + 0.002 * math.log1p(math.exp((compute - memory) / 0.002))
        return (0.003 + 6e-5 * sequences + joined) * self.rng.gauss(1, 0.05)


COST = CostModel(fixed=0.02, per_row=1e-4)

CONFIG = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "num_blocks": 4000, "enable_prefix_caching": False}


def workload(count=60, rate=6.0, seed=3):
    rng, now, requests = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        length = rng.randint(1200, 2400) if rng.random() < 0.1 else rng.randint(30, 400)
        requests.append(
            {"id": f"r{i}", "prompt": {"len": length}, "max_tokens": rng.randint(10, 70), "arrival_time": now}
        )
    return {"config": CONFIG, "requests": requests}


@pytest.fixture(scope="module")
def recording():
    return simulate(workload(), cost_model=Machine())


CHANGES = [
    {},
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
    {"long_prefill_token_threshold": 128},
    {"max_num_seqs": 16},
]


def test_predictions_hold_and_their_intervals_contain_a_real_run(recording):
    predictor = Predictor(recording, num_draws=4)
    inside = []
    for seed, changes in enumerate(CHANGES):
        real = values_of(simulate(workload(), config=changes, cost_model=Machine(seed + 1)))
        prediction = predictor.predict(**changes)
        assert prediction["duration"].value == pytest.approx(real["duration"], rel=0.02)
        for name in ("ttft_mean", "tpot_mean", "e2e_mean"):
            assert prediction[name].value == pytest.approx(real[name], rel=0.15)
        inside += [
            prediction[name].low <= real[name] <= prediction[name].high
            for name in ("ttft_mean", "ttft_p99", "e2e_mean")
        ]
    assert sum(inside) >= 0.7 * len(inside)


def test_the_error_of_the_unchanged_setting_is_known_and_widens_every_interval(recording):
    predictor = Predictor(recording, num_draws=2)
    assert abs(predictor.errors["duration"]) < 0.02 and abs(predictor.errors["ttft_mean"]) < 0.1
    twice = Predictor(recording, CostModel(fixed=0.06), num_draws=1)  # a model that is far off
    assert twice.errors["tpot_mean"] > 0.5
    interval = twice.predict(max_num_seqs=9)["tpot_mean"]
    assert interval.low < interval.value / (1 + twice.errors["tpot_mean"]) < interval.high


def test_a_setting_beyond_the_recording_is_called_extrapolated(recording):
    prediction = Predictor(recording, num_draws=0).predict(max_num_batched_tokens=4096, max_num_seqs=64)
    assert any(note.startswith("extrapolated:") and "sequences and prompt tokens" in note for note in prediction.notes)
    assert not Predictor(recording, num_draws=0).unchanged.notes


def test_a_recorded_step_that_the_fit_leaves_out_makes_nothing_but_a_change_extrapolated():
    """The first step, which warms up, has the most sequences."""
    trace = Trace.load("examples/vllm_preemption.jsonl.gz")
    sizes = [len(record.chunks) for record in trace]
    assert sizes[0] == 3 > max(sizes[1:]) == 2
    predictor = Predictor(trace, num_draws=0, rough=True)
    changed = predictor.predict(num_blocks=20)
    share = fmean(len(record.chunks) > 2 for record in changed.trace)
    told = f"{share:.0%} of the steps have more than the 2 sequences of the largest step used for the fit, up to 3"
    assert f"extrapolated: {told}" in changed.notes
    assert any(len(record.chunks) > 2 for record in predictor.unchanged.trace)
    assert not predictor.unchanged.outcome.extrapolated and not predictor.unchanged.notes


def test_a_change_is_predicted_with_the_notes_on_steps_that_the_fit_leaves_out():
    class Stalling(Machine):
        num_steps = 0

        def step_seconds(self, chunks):
            self.num_steps += 1
            return super().step_seconds(chunks) + 3.0 * (self.num_steps == 100)

    stalled = simulate(workload(), cost_model=Stalling())
    predictor = Predictor(stalled, num_draws=0, rough=True)
    (note,) = predictor.report.notes
    assert note.startswith("left out: 1 stall,")
    for changes in ({}, {"max_num_seqs": 5}):
        assert predictor.predict(**changes).notes.count(note) == 1
    tuning = stalled.tune("ttft_p99=1s", grid={"max_num_seqs": [5, 8]}, num_draws=0, force=True)
    assert repr(tuning).count("1 stall,") == 1


def test_tune_picks_a_setting_as_good_as_the_best_of_all_measured(recording):
    grid = {"max_num_batched_tokens": [128, 512, 2048], "max_num_seqs": [4, 8, 32]}
    slo = {"ttft_p99": 1.0, "itl_p99": 0.2}
    tuning = recording.tune(slo, grid=grid, num_draws=3)
    measured = {}
    for budget in grid["max_num_batched_tokens"]:
        for seats in grid["max_num_seqs"]:
            config = {"max_num_batched_tokens": budget, "max_num_seqs": seats}
            measured[budget, seats] = score(values_of(simulate(workload(), config=config, cost_model=Machine(9))), slo)
    picked = {**CONFIG, **tuning.best.changes}
    assert measured[picked["max_num_batched_tokens"], picked["max_num_seqs"]] <= 1.05 * min(measured.values())
    assert tuning.best.score < tuning.current.score and tuning.best.flags in str(tuning)
    assert len(tuning.rows) == 9 and any(row["pareto"] for row in tuning.rows)


def test_a_setting_that_cannot_be_told_from_the_recorded_one_does_not_replace_it(recording):
    tuning = recording.tune("e2e_mean=2s", grid={"max_num_seqs": [8], "block_size": [16, 32]}, num_draws=3)
    assert tuning.best.changes == {} and "the recorded setting" in str(tuning)


def test_of_equal_settings_the_one_with_the_fewest_changes_is_taken(recording):
    grid = {"max_num_seqs": [8, 32], "max_num_batched_tokens": [504, 508, 512, 516]}
    tuning = recording.tune("e2e_mean=30s", grid=grid, num_draws=2)
    assert tuning.best.changes == {"max_num_seqs": 32}
    assert min(candidate.score for candidate in tuning.runners_up) < tuning.best.score


def test_a_limit_inside_the_interval_is_not_decided(recording):
    value = Predictor(recording, num_draws=2).predict(max_num_seqs=32)["ttft_p50"].value
    for limit, verdict in ((value, "cannot tell"), (3 * value, "meets"), (value / 9, "misses")):
        tuning = recording.tune({"ttft_p50": limit}, grid={"max_num_seqs": [32]}, num_draws=2)
        assert tuning.best.changes and tuning.verdict == verdict


def test_a_target_can_be_given_by_name(recording):
    by_name, both = (recording.tune(*given, ttft_p99=1, grid={"max_num_seqs": [8]}, num_draws=1)
                     for given in ((), ("itl_p99=100ms",)))  # fmt: skip
    assert by_name.slo == {"ttft_p99": 1.0} and both.slo == {"itl_p99": 0.1, "ttft_p99": 1.0}
    with pytest.raises(ValueError, match=r"no target is known for 'ttft' \(did you mean ttft_p99\?\)"):
        recording.tune(ttft=1)
    with pytest.raises(ValueError, match="there is no target"):
        recording.tune()
    for count in (0, "a", -1):
        with pytest.raises(ValueError, match=r"count must be .*>= 1, or None for all, got"):
            recording.slowest(count)


def test_whatif_has_one_zero(tmp_path, capsys):
    requests = [{"id": f"r{n}", "prompt": {"len": 90 + n}, "max_tokens": 9, "arrival_time": n / 9} for n in range(40)]
    simulate({"requests": requests}, cost_model=CostModel(fixed=0.0123, per_row=1e-5)).save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "+0.0%" in said and "-0.0%" not in said


def test_the_recorded_setting_is_judged_by_its_record(recording):
    now = values_of(recording)["ttft_p50"]
    for limit, verdict in ((1.01 * now, "meets"), (0.99 * now, "misses")):
        tuning = recording.tune({"ttft_p50": limit}, grid={"max_num_seqs": [8]}, num_draws=2)
        assert tuning.best is tuning.current and tuning.verdict == tuning.current_verdict == verdict
        words = {"meets": "met the target when it was recorded", "misses": f"(recorded {shown('ttft_p50', now)}, limit"}
        assert words[verdict] in tuning.verdict_sentence


def test_a_target_that_the_recorded_setting_meets_too_is_no_reason_to_change_it(recording):
    grid, name = {"max_num_seqs": [4, 8, 32]}, "ttft_p99"
    predictor = Predictor(recording, num_draws=3)
    highest = 1.01 * predictor.predict(max_num_seqs=32)[name].high
    far, near = (recording.tune({name: limit}, grid=grid, num_draws=3) for limit in (100.0, highest))
    for tuning in (far, near):
        assert tuning.best.changes == {"max_num_seqs": 32} and tuning.verdict == "meets"
        also = "; the recorded setting met it: ttft_p99 " in " ".join(repr(tuning).split())
        assert also == (tuning.current.prediction[name].high <= tuning.slo[name]) == (tuning is far)
        assert tuning.words_of_best == ("best" if also else "take"), "nobody is told to take what is not needed"


def test_whatif_runs_at_the_recorded_times(recording):
    again = recording.whatif()
    for request_id, info in recording.requests.items():
        assert again.requests[request_id].arrival_time == pytest.approx(info.arrival_time)
    assert all(set(step.timings) == {"forward"} for step in again if step.chunks)
    other = recording.whatif(max_num_batched_tokens=128)
    assert max(step.num_tokens for step in other) <= 128
    assert compare(recording, other).unit == "s"
    assert recording.whatif(CostModel(fixed=0.5)).metrics().summary.duration > 10 * again.metrics().summary.duration / 9


def test_a_trace_without_a_clock_is_refused():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]})
    with pytest.raises(ValueError, match="at least 20 steps with timings"):
        trace.whatif()
    with pytest.raises(TraceError, match="no clock"):
        values_of(trace)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("", "there is no target"),
        ("ttft_p99", "must be NAME=TIME"),
        ("ttft_p99=fast", "must be NAME=TIME"),
        ("ttft_p99=1s,ttft_p99=2s", "once each"),
        ("speed=1s", "no target is known for 'speed'; the names are ttft, "),
        ("ttft=1s", "'ttft' .did you mean ttft_p99"),
        ("TTFT_P50=1s", "did you mean ttft_p50"),
        ("p95 itl=1s", "did you mean itl_p95"),
        ("throughput=9", "did you mean output_throughput"),
        (1, "slo must be a text such as 'ttft_p99=1s,itl_p99=100ms' or a mapping, got 1"),
        ({"ttft_p99": 0}, "target ttft_p99 must be > 0"),
    ],
)
def test_invalid_targets(slo, message):
    with pytest.raises(ValueError, match=message):
        read_slo(slo)


def test_units_and_flags():
    assert read_slo("ttft_p99=1.5s, itl_p99=80ms,e2e_max=2min") == pytest.approx(
        {"ttft_p99": 1.5, "itl_p99": 0.08, "e2e_max": 120}
    )
    changes = {
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "num_blocks": 99,
        "max_loras": 4,
    }
    assert vllm_flags(changes) == (
        "--max-num-batched-tokens 2048 --no-enable-prefix-caching --async-scheduling --num-gpu-blocks-override 99 "
        "--max-loras 4"
    )


def test_the_front_holds_what_nothing_beats():
    rows = [
        {"end": "done", "ttft_p99": ttft, "output_throughput": speed}
        for ttft, speed in ((1, 10), (2, 20), (3, 15), (1, 9))
    ]
    assert [row["pareto"] for row in mark_front(rows, ["ttft_p99"])] == [True, True, False, False]


def test_a_change_is_that_of_two_predictions(recording, tmp_path, capsys, monkeypatch):
    """Both settings are predicted; what the prediction of the recorded one is off by stands once."""
    path = tmp_path / "run.jsonl"
    recording.save(path)
    assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=4"]) == 0
    head, *lines = (said := capsys.readouterr().out).splitlines()[-30:]
    while not head.lstrip().startswith("now, predicted"):
        head, *lines = lines
    predictor = Predictor(Trace.load(path))
    changed, check = predictor.predict(max_num_seqs=4), predictor.check
    rows = {line.split()[0]: line for line in lines if re.match(r"[a-z]\w+ ", line)}
    assert {"duration", "ttft_p99", "itl_p99", "output_throughput"} <= set(rows)
    for name in set(rows) & set(check.errors):
        now, new = check.unchanged[name], changed.intervals[name].value
        cells = re.split(r"\s{2,}", rows[name])[1:]
        assert cells[0] == shown(name, now) and cells[1] == shown(name, new), rows[name]
        assert cells[2] == f"{new / now - 1:+.0%}" and f"{check.errors[name]:+.1%}" in rows[name]
        assert rows[name].endswith(" !") == (abs(check.errors[name]) > MAX_ERROR)
    assert said.count("vllm serve MODEL --max-num-seqs 4") == 1
    assert main(["trace", "whatif", str(path), "--set", f"max_num_seqs={recording.config['max_num_seqs']}"]) == 0
    assert "vllm serve" not in capsys.readouterr().out, "nothing changes"
    monkeypatch.setattr("workbench.analysis.check.MAX_ERROR", 1e-9)
    assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=4", "--force"]) == 0
    marked = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" !")]
    assert marked == [name for name in rows if abs(check.errors.get(name, 0.0)) > 1e-9]
    monkeypatch.undo()
    assert main(["trace", "tune", str(path), "--slo", "ttft_p99=1s", "--sweep", "max_num_seqs=8,32"]) == 0
    said = capsys.readouterr().out
    assert said.count("the prediction of the recorded setting is off by: ttft_p99 ") == said.count("off by: ") == 1


@pytest.mark.parametrize("change", ["max_num_seqs=4", "num_blocks=20"])
def test_the_answer_of_the_command_is_one_of_python_too(recording, tmp_path, capsys, change):
    recording.save(path := tmp_path / "run.jsonl")
    of_vllm = Trace.load(path)
    of_vllm.meta = msgspec.structs.replace(of_vllm.meta, source="vllm 0.33.0")
    of_vllm.save(path)
    assert main(["trace", "whatif", str(path), "--set", change]) == 0
    said = capsys.readouterr().out
    name, _, value = change.partition("=")
    trace = Trace.load(path)
    answer = Predictor(trace, rough=True).whatif(**{name: int(value)})
    assert said.endswith(f"{answer!r}\n")
    html = answer._repr_html_()
    assert all(cell in html for row in answer.table for cell in row)
    assert html.count("<tr>") == len(answer.table) and all(escape(remark) in html for remark in answer.remarks)
    hangs = trace.whatif(**{name: int(value)}, force=True).end != "done"
    assert hangs == (change == "num_blocks=20") == ("would hang" in html) == (answer.command == "")


def table_of(said):
    """The rows of the table of an answer by setting, each with its cells by heading."""
    lines = iter(said.splitlines())
    heads = next(cells for line in lines if (cells := re.split(r"\s{2,}", line.strip()))[0] == "setting")
    rows = {}
    for cells in (re.split(r"\s{2,}", line) for line in iter(lambda: next(lines), "")):
        rows[cells[1].removesuffix(" (cannot tell from the first)")] = dict(zip(heads, cells[1:]))
    return rows


def random_recording(seed, kind):
    """A loaded machine, at times with a pause of nine seconds, or cut off while requests wait for their first token."""
    rng, now, requests = random.Random(seed), 0.0, []
    for i in range(45):
        now += rng.expovariate(7.0) + (9.0 if kind == "paused" and i == 22 else 0.0)
        prompt = {"len": rng.choice([rng.randint(20, 300), rng.randint(800, 1500)])}
        requests.append({"id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(2, 40), "arrival_time": now})
    config = CONFIG | {"max_num_seqs": rng.choice([3, 4]), "max_num_batched_tokens": rng.choice([256, 512])}
    trace = simulate({"config": config, "requests": requests}, cost_model=Machine(seed))
    if kind != "cut":
        return trace
    at = next(i for i, record in enumerate(trace) if i > 100 and len(record.waiting) > 2)
    return trace[:at]


@pytest.mark.parametrize("kind", ["whole", "paused", "cut"])
@pytest.mark.parametrize("seed", range(2))
def test_the_card_the_search_and_whatif_have_the_same_values(seed, kind, tmp_path, capsys):
    path, names = tmp_path / "run.jsonl", ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "duration")
    random_recording(seed, kind).save(path)
    slo = ",".join([*(f"{name}=600s" for name in names), "output_throughput=1"])
    names = (*names, "output_throughput")
    trace = Trace.load(path)
    assert any(each.age is not None for each in trace.metrics().requests.values()) == (kind == "cut")
    card = tuning_facts(trace.tune(slo, grid={"max_num_seqs": [trace.config["max_num_seqs"], 16]}, force=True))
    assert main(["trace", "tune", str(path), "--slo", slo, "--sweep", f"max_num_seqs={trace.config['max_num_seqs']},16",
                 "--force"]) == 0  # fmt: skip
    tuned = capsys.readouterr().out
    assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=16", "--force"]) == 0
    said = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in said.splitlines() if len(cells := re.split(r"\s{2,}", line)) > 4}
    for one in card["candidates"]:
        is_now = one["setting"] == "as recorded, predicted"
        for name in names:
            now, changed, _, interval, *_ = rows[name]
            value, _, spread = one["values"][name].partition(" (")
            assert value == (now if is_now else changed), (name, one)
            assert is_now or spread == f"{interval})", (name, one)
            told = table_of(tuned)["the recorded one, predicted" if is_now else one["setting"]]
            assert told[name] == one["values"][name].partition(", recorded")[0], name
    assert {one["setting"] for one in card["candidates"]} == {"as recorded, predicted", "max_num_seqs=16"}
    for words in (said, tuned):
        assert ("had not ended with the recording" in words) == (kind == "cut")
    shown, facts = what_if(trace, {"max_num_seqs": 16})
    words = {"ttft_mean": "mean TTFT", "ttft_p99": "P99 TTFT", "itl_mean": "mean ITL", "itl_p99": "P99 ITL"}
    for name, word in words.items():
        now, changed, _, interval, *_ = rows[name]
        assert shown[word][:2] == [now, f"{changed} ({interval})"], name
        (error,) = re.findall(rf"([+-]\d+)% for {word}", facts["fork"]["predicted"]) or ["0"]
        assert abs(int(error) - float(rows[name][5].rstrip("%"))) <= 1, name  # below 1% the page says nothing
    means = [amount(each, "s") for each in facts["mean"][:4]]
    assert means == [cell.partition(" (")[0] for word in ("mean TTFT", "mean ITL") for cell in shown[word][:2]]


def test_a_size_beyond_the_token_budget_is_not_told_as_rows(recording):
    """A row is a token of the packed batch; the model's size counts each request that prefills once more."""
    rows = [sum(chunk.num_tokens for chunk in record.chunks) for record in recording]
    prefills = [sum(chunk.arm != "decode" for chunk in record.chunks) for record in recording]
    predictor = Predictor(recording, num_draws=0, rough=True)
    largest = predictor.report.largest["rows"]
    assert largest == max(map(sum, zip(rows, prefills))) > CONFIG["max_num_batched_tokens"] >= max(rows)
    notes = " ".join(predictor.predict(max_num_batched_tokens=4 * CONFIG["max_num_batched_tokens"]).notes)
    assert f"more than the {largest} sequences and prompt tokens of the largest step used for the fit" in notes


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_requests_that_would_end_later_are_named_or_counted(recording, count):
    tuning = recording.tune("ttft_p99=1s", grid={"max_num_seqs": [8]}, num_draws=2)
    tuning = replace(tuning, losers=tuple((f"r{n}", 1.0, 2.0 + n) for n in range(count)))
    said = tuning_facts(tuning)["losers"]
    assert (said in repr(tuning)) and bool(said) == bool(count)
    for n in range(count):
        assert (f"r{n} (1 s to {2 + n} s)" in said) == (n < 3)
    assert said.endswith(f" and {count - 3} more") == (count > 3) and said.startswith(
        f"{count} request" if count else ""
    )


def what_if(trace, changes):
    """The measures of the page's *What if*, by their words, and all facts of its comparison."""
    feed = Feed(trace)
    feed._in_background = lambda work: work()
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": changes}})
    packet = feed.other_packet()
    facts = json.loads(packet[4 : 4 + int.from_bytes(packet[:4], "little")])["comparison"]
    return {row[0]: row[1:] for row in facts["measures"]}, facts


def test_commands(recording, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    recording.save(path)
    assert (
        main(["trace", "whatif", str(path), "--set", "max_num_batched_tokens=1024", "--out", str(tmp_path / "p.jsonl")])
        == 0
    )
    said = capsys.readouterr().out
    assert "off by" in said and "vllm serve MODEL --max-num-batched-tokens 1024" in said
    plot, table = tmp_path / "front.svg", tmp_path / "all.csv"
    arguments = ["trace", "tune", str(path), "--slo", "ttft_p99=1s", "--sweep", "max_num_seqs=8,32"]
    assert main([*arguments, "--plot", str(plot), "--out", str(table)]) == 0
    said = capsys.readouterr().out
    assert "wrote" in said
    assert (
        "--max-num-seqs 32" in said and plot.read_text().startswith("<svg") and len(table.read_text().split("\n")) == 4
    )
    assert main(["trace", "tune", str(path), "--slo", "speed=1s"]) == 2
    assert "no target is known for 'speed'" in capsys.readouterr().err


def test_an_asynchronous_run_is_predicted_with_its_step_of_lag():
    cost = CostModel(fixed=0.1)
    requests = [
        {"id": "a", "prompt": {"len": 20}, "max_tokens": 4, "arrival_time": 0.0},
        {"id": "b", "prompt": {"len": 20}, "max_tokens": 2, "arrival_time": 0.15},
    ]
    trace = simulate({"config": {"async_scheduling": True}, "requests": requests}, cost_model=cost)
    # Steps follow each other without a pause. "b" is seen when step 1 ends at 0.2 s. Step 2 is in flight by then, so
    # the prompt of "b" runs from 0.3 to 0.4 s.
    assert [round(step.time, 9) for step in trace if step.chunks] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert trace.metrics().requests["b"].ttft.seconds == pytest.approx(0.4 - 0.15)
    assert trace.metrics().requests["a"].e2e.seconds == pytest.approx(0.4)  # its last token, not the step after it
    assert [step.chunks for step in trace.whatif(cost)] == [step.chunks for step in trace]
    slower = trace.whatif(cost, async_scheduling=False)
    assert slower.metrics().requests["b"].ttft.seconds == pytest.approx(0.3 - 0.15)


def test_an_asynchronous_recording_is_fitted_as_it_was():
    config = CONFIG | {"async_scheduling": True}
    trace = simulate(workload() | {"config": config}, cost_model=Machine())
    model, report = CostModel.fit(trace)
    assert report.total_error < 0.05
    again = values_of(trace.whatif(model))
    assert again["ttft_mean"] == pytest.approx(values_of(trace)["ttft_mean"], rel=0.1)


GROUPS = {
    "alike": [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 64}],
    "another size": [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 64, "block_size": 16}],
    "states": [{"kind": "full_attention"}, {"kind": "mamba"}],
}


@pytest.mark.parametrize("groups", [None, *GROUPS])
def test_blocks_of_another_size_take_the_memory_of_the_recorded_pool(groups):
    config = CONFIG | {"num_blocks": 400, "max_model_len": 4096, "kv_cache_groups": GROUPS.get(groups)}
    requests = [{"id": f"r{n}", "prompt": {"len": 90}, "max_tokens": 9, "arrival_time": n / 9} for n in range(30)]
    predictor = Predictor(simulate({"config": config, "requests": requests}, cost_model=COST), COST, num_draws=0)
    for size in (8, 48):
        prediction = predictor.predict(block_size=size)
        num_blocks = prediction.trace.num_blocks
        if groups in (None, "alike"):
            assert num_blocks == 400 * 16 // size
            assert f"block_size={size} in the same KV memory: num_blocks={num_blocks}, recorded are 400" in (
                prediction.notes
            )
        else:
            assert num_blocks == 400 and any("whose memory may be another one" in each for each in prediction.notes)
        again = simulate({"config": config | {"num_blocks": num_blocks}, "requests": requests}, cost_model=COST,
                         config={"block_size": size})  # fmt: skip
        assert prediction["peak_kv_use"].value == pytest.approx(values_of(again)["peak_kv_use"])
    both = predictor.predict(block_size=8, num_blocks=400)
    assert both.trace.num_blocks == 400 and not any("memory" in each for each in both.notes)


def test_a_search_that_is_ended_answers_with_the_best_so_far(recording):
    told = []

    def tell(num_done, num_all):
        told.append((num_done, num_all))
        if num_done == 3:
            raise KeyboardInterrupt

    tuning = recording.tune("ttft_p99=1s", tell=tell)
    assert told == [(number, told[0][1]) for number in range(4)]
    assert any("interrupted" in note for note in tuning.notes) and tuning.best.prediction.intervals


@pytest.mark.parametrize(
    ("slo", "words"), [("ttft_p50=1ms", "closest"), ("ttft_p99=1ms", "best"), ("ttft_p99=100s", "best")]
)
def test_nobody_is_told_to_take_what_misses_and_the_price_is_named(recording, slo, words):
    tuning = recording.tune(slo)
    assert tuning.words_of_best == words and f"\n{words}: " in f"\n{tuning!r}"
    assert ("take:" in repr(tuning)) == (words == "take")
    before, after = (each.prediction.intervals for each in (tuning.current, tuning.best))
    for name, (old, new) in tuning.costs.items():
        assert (before[name].value, after[name].value) == (old, new) and old != new
        assert name in tuning.costs_sentence
    facts = tuning_facts(tuning)
    assert facts["costs"] == (f"I{tuning.costs_sentence[1:]}." if tuning.costs else "")
    assert "it costs" not in facts["verdict"] and (f"<p>{escape(facts['costs'])}</p>" in tuning_html(tuning)) == bool(
        tuning.costs
    )
    assert (
        tuning.costs
        or tuning.best is tuning.current
        or all(after[name].value <= 1.05 * before[name].value for name in ("ttft_mean", "itl_mean", "e2e_mean"))
    )


class Told(Predictor):
    """Predicts what a table says: by changed fields the value and its draws, in units of the recorded setting's."""

    def __init__(self, trace, told):
        self.told = told
        super().__init__(trace, COST, num_draws=3)

    def predict_all(self, settings, **options):
        return [self._told(each) for each in super().predict_all(settings, **options)]

    @property
    def unchanged(self):
        return self._told(super().unchanged)

    def _told(self, prediction):
        value, draws = self.told[tuple(sorted(prediction.changes))]
        intervals = dict(prediction.intervals) | {"ttft_p99": Interval(value, value / 2, value * 2)}
        return replace(prediction, intervals=intervals, draws=dict(prediction.draws) | {"ttft_p99": draws})


class Rough(Told):
    """The same of a recording whose predictions are only good for a comparison."""

    @property
    def check(self):
        check = super().check
        return replace(check, unchanged={**check.unchanged, "e2e_mean": 1.4 * check.measured["e2e_mean"]})


SEATS, BLOCKS = "max_num_seqs", "num_blocks"
ALIKE = [0.8] * 3


@pytest.mark.parametrize(
    ("told", "predictor", "best", "alike"),
    [
        # Few changes do not justify a setting that is worse than now.
        ({(): (1.0, [1.0] * 3), (SEATS,): (1.5, ALIKE), (BLOCKS,): (2.0, ALIKE), (SEATS, BLOCKS): (0.5, ALIKE)}, Told,
         {SEATS: 7, BLOCKS: 300}, {(SEATS,), (BLOCKS,)}),
        # The lowest value varies, and another one is surely below that of now.
        ({(): (1.0, [1.0] * 3), (SEATS,): (0.95, ALIKE), (BLOCKS,): (1.5, [9.0] * 3),
          (SEATS, BLOCKS): (0.5, [0.5, 0.8, 2.0])}, Told, {SEATS: 7}, {(SEATS, BLOCKS)}),
        # With a caution, a difference of up to 10% says nothing.
        ({(): (1.0, [1.0] * 3), (SEATS,): (0.95, ALIKE), (BLOCKS,): (1.5, [9.0] * 3),
          (SEATS, BLOCKS): (0.92, ALIKE)}, Rough, {}, {(SEATS,), (SEATS, BLOCKS)}),
        ({(): (1.0, [1.0] * 3), (SEATS,): (0.85, ALIKE), (BLOCKS,): (1.5, [9.0] * 3),
          (SEATS, BLOCKS): (0.92, ALIKE)}, Rough, {SEATS: 7}, {(SEATS, BLOCKS)}),
    ],
)  # fmt: skip
def test_no_other_setting_surely_beats_the_answer(recording, told, predictor, best, alike):
    predictor = predictor(recording, told)
    grid = {SEATS: [8, 7], BLOCKS: [4000, 300]}
    tuning = recording.tune("ttft_p99=1ms", grid=grid, predictor=predictor, cost_model=predictor.model)
    assert bool(tuning.check.caution) == isinstance(predictor, Rough)
    assert tuning.best.changes == best, tuning
    assert {tuple(sorted(each.changes)) for each in tuning.runners_up if each.same_as_best} == alike
    assert tuning.best.score <= tuning.current.score == pytest.approx(1000)


class FarOff(Predictor):
    """Predicts a third of every TTFT: what it says of a target of TTFT cannot be relied on."""

    def predict_all(self, settings, **options):
        return [self._told(each) for each in super().predict_all(settings, **options)]

    @property
    def unchanged(self):
        return self._told(super().unchanged)

    @property
    def check(self):
        check = super().check
        return replace(check, unchanged={**check.unchanged, "ttft_p99": check.measured["ttft_p99"] / 3})

    def _told(self, prediction):
        value = values_of(self.trace)["ttft_p99"] / (6 if prediction.changes else 3)
        return replace(
            prediction,
            intervals=dict(prediction.intervals) | {"ttft_p99": Interval(value, value * 0.9, value * 1.1)},
            draws=dict(prediction.draws) | {"ttft_p99": [value] * 3},
        )


def test_a_value_that_cannot_be_relied_on_decides_nothing(recording):
    predictor = FarOff(recording, CostModel(fixed=0.02, per_row=1e-4), num_draws=3)
    now = predictor.check.measured["ttft_p99"]
    options = {"grid": {"max_num_seqs": [8, 7]}, "predictor": predictor, "cost_model": predictor.model}
    tuning = recording.tune({"ttft_p99": now * 0.9}, **options)
    assert tuning.best.changes and tuning.best.prediction["ttft_p99"].high < now * 0.9
    assert (tuning.verdict, tuning.words_of_best) == ("cannot tell", "perhaps")
    facts = tuning_facts(tuning)
    for said in (" ".join(repr(tuning).split()), " ".join([facts["verdict"], *facts["notes"]])):
        assert "is off by: ttft_p99 -67% (do not rely on it)" in said
        assert "cannot tell whether it meets the target: its predictions are too far off (ttft_p99 -67%)" in said
        assert "take:" not in said and "whole interval" not in said
    kept, far = (recording.tune({"ttft_p99": limit}, **options) for limit in (now * 1.01, now / 100))
    assert kept.best is kept.current and kept.words_of_best == "keep" and far.verdict == "misses"


@pytest.mark.parametrize("other", [(0.4, 1.2), (0.4, 0.5)], ids=["may miss", "meets"])
def test_the_recorded_setting_that_met_the_target_is_kept_unless_another_surely_meets_it(recording, other):
    now = values_of(recording)["ttft_p99"]
    low, high = other

    class Better(Told):
        @property
        def check(self):
            check = super().check
            return replace(check, unchanged={**check.unchanged, "ttft_p99": now})

        def _told(self, prediction):
            better = bool(prediction.changes)
            interval = Interval(0.45 * now, low * now, high * now) if better else Interval(now, 0.9 * now, 1.3 * now)
            intervals = dict(prediction.intervals) | {"ttft_p99": interval}
            return replace(
                prediction, intervals=intervals, draws=dict(prediction.draws) | {"ttft_p99": [interval.value] * 3}
            )

    predictor = Better(recording, {})
    options = {"grid": {"max_num_seqs": [8, 7]}, "predictor": predictor, "cost_model": predictor.model}
    tuning = recording.tune({"ttft_p99": now * 1.1}, **options)
    said, recorded = " ".join(repr(tuning).split()), f"recorded {shown('ttft_p99', now)}"
    values = [one["values"]["ttft_p99"] for one in tuning_facts(tuning)["candidates"]]
    assert bool(tuning.best.changes) == (high < 1), tuning
    met = f"the recorded setting met it: ttft_p99 {shown('ttft_p99', now)}"
    kept = f"met the target when it was recorded (ttft_p99 {shown('ttft_p99', now)})"
    assert (met if tuning.best.changes else kept) in said
    assert [recorded in each for each in values] == ([True, False] if high > 1 else [False, True]), values
    assert table_of(repr(tuning))["the recorded one, measured"]["ttft_p99"] == shown("ttft_p99", now)
    assert "cannot tell" not in said


def test_a_closest_setting_is_only_called_so_if_no_other_has_a_better_value(recording):
    tuning = recording.tune("ttft_p99=1ms", grid={"max_num_seqs": [8, 9, 10]}, num_draws=2)
    better = [other for other in tuning.runners_up if other.score < tuning.best.score]
    nearest = "the worst value of this one, ttft_p99, is nearer to its limit than that of any other"
    words = "none is surely closer than this one" if better else nearest
    assert tuning.verdict_sentence.endswith(words) and (tuning.words_of_best == "closest") == (not better)
    other = replace(tuning, runners_up=(replace(tuning.best, score=tuning.best.score * 0.9),))
    assert other.verdict_sentence.endswith("none is surely closer than this one") and other.words_of_best == "best"


@pytest.mark.parametrize("slo", ["ttft_p99=1ms", "ttft_p99=1s,output_throughput=1000,itl_p99=20ms"])
def test_a_verdict_says_which_values_miss_and_by_how_much(recording, slo):
    tuning = recording.tune(slo, grid={"max_num_seqs": [8, 16], "max_num_batched_tokens": [128, 512]}, num_draws=2)
    limits, said = read_slo(slo), tuning.verdict_sentence
    is_recorded = tuning.best is tuning.current
    values, of = (tuning.recorded, "recorded ") if is_recorded else (tuning.best.values, "")
    shares = {name: values[name] / limit for name, limit in limits.items()}
    missed = {name for name, share in shares.items() if (share < 1) == (name == "output_throughput")}
    holds, target = {"<=": operator.le, ">=": operator.ge}, " ".join(repr(tuning).split())
    for name, limit in limits.items():
        (sign,) = re.findall(f"{name} ([<>]=) {shown(name, limit)}[, ]", target)
        assert holds[sign](values[name], limit) == (name not in missed)
    assert missed and tuning.verdict == "misses" and set(tuning.misses) == missed
    for name in limits:
        far = abs(shares[name] - 1)
        by = f" by {far:.0%}" if far < 1 else ""
        told = f"{name}{by} ({of}{shown(name, values[name])}, limit {shown(name, limits[name])})"
        assert (told in said) == (name in missed), said
    worst = max(missed, key=lambda name: max(shares[name], 1 / shares[name]))
    assert ("nearer to its limit" in said) <= (f"the worst value of this one, {worst}, is" in said)


@pytest.mark.parametrize("slo", ["ttft_p99=900ms,itl_p99=100ms", "ttft_mean=1ms"])
def test_the_card_has_one_value_for_a_setting_and_all_that_limits_it(recording, slo):
    """Its picture, its table, the command line and the rows of the sweep."""
    tuning = recording.tune(slo)
    facts, said = tuning_facts(tuning), repr(tuning)
    first, places = next(iter(read_slo(slo))), {}
    panel = next(each for each in tuning_marks(tuning).panels if "first token" in each.titles[1])
    for point in panel.points:
        places[point.ring] = point.y
    assert len(places) == len(facts["candidates"]) > 2
    for shown_one in facts["candidates"]:
        word, value = shown_one["words"].partition(" ")[0], shown_one["values"][first]
        assert value.startswith(f"{shown(first, places[word] / 1000)} (")
        setting = "the recorded one, predicted" if "recorded" in shown_one["setting"] else shown_one["setting"]
        assert table_of(said)[setting][first] == value.partition(", recorded")[0]
    once = {row[first] for row in tuning.rows if first in row}
    assert all(any(math.isclose(candidate.values[first], each) for each in once) for _, candidate in tuning.named)
    told = " ".join(facts["notes"])
    off = f"off by: {', '.join(f'{name} {off_words(tuning.errors[name])}' for name in read_slo(slo))}"
    assert off in told and off in said
    for word, candidate in tuning.named:
        sizes = [f"{most:,} {SIZES[size]}" for size, (_, most) in candidate.prediction.outcome.extrapolated.items()]
        assert all((f"{word} up to {', '.join(sizes)}" in each) == bool(sizes) for each in (told, said)), told
    assert "Extrapolated beyond the largest step used for the fit (8 sequences" in told


@pytest.mark.parametrize(("num_blocks", "grid"), [(120, None), (4000, None), (120, {"num_blocks": [120, 240]})])
def test_a_pool_that_was_full_is_named_where_no_other_size_was_tried(num_blocks, grid):
    rng = random.Random(5)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(100, 500)}, "max_tokens": 60, "arrival_time": i / 9}
        for i in range(30)
    ]
    trace = simulate({"config": CONFIG | {"num_blocks": num_blocks}, "requests": requests}, cost_model=Machine())
    is_full = trace.metrics().summary.peak_kv_use > 0.95
    assert is_full == (num_blocks == 120)
    tuning = trace.tune("ttft_p99=1ms", grid=grid)
    told = [note for note in tuning.notes if note.startswith("the KV pool was full at times (")]
    assert bool(told) == (is_full and grid is None) and all("of 120 blocks" in note for note in told)
    assert all(
        note[1:] in " ".join(tuning_facts(tuning)["notes"]) for note in (each.removesuffix(".") for each in told)
    )
    met = trace.tune("ttft_p99=1000s")
    assert not any("KV pool" in note for note in met.notes), "the target is met"
