"""Answers about a part of a run are those about the whole: what came before the part is not taken for never."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from runs_to_draw import run

from workbench.analysis.cause_totals import CauseTotals
from workbench.analysis.explain import explainer_of
from workbench.trace import Trace
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.readings.preempted_before import preempted_before

RECORDED = Path(__file__).parents[1] / "data" / "vllm-recorded"

RUNS = (
    "plain 1", "plain 4", "many 2", "timed 3", "timed 4", "async 24", "spec 16", "async_spec 41", "spec_hybrid 51",
    "hybrid_window_prefix 36", "sync/d_preempt", "async/d_preempt", "async/d3_preempt_priority", "async/h_abort",
)  # fmt: skip


def whole_of(name):
    return Trace.load(RECORDED / f"{name}.jsonl.gz") if "/" in name else run(name)[0]


def without_ids(trace):
    """The same run, recorded without token ids, as a recorder of another engine may do."""
    bare = Trace(trace.meta)
    for info in trace.requests.values():
        bare.add_request(replace(info, prompt_token_ids=()))
    for record in trace:
        chunks = tuple(replace(chunk, sampled=None, sampled_before=(), drafts=()) for chunk in record.chunks)
        bare.append(replace(record, chunks=chunks))
    return bare


def forgotten(trace, begin, end):
    """The same run up to a step, which has forgotten the steps before another one."""
    kept, infos = Trace(trace.meta), trace.arrivals()
    for index, record in enumerate(trace[:end]):
        while infos and infos[0][0] <= index:
            kept.add_request(infos.pop(0)[1])
        kept.append(record)
    return kept.continued_from(trace[begin:].keyframe)


class Read:
    """A run as its events tell it: tokens and admissions of requests, and who is preempted in a step."""

    def __init__(self, trace):
        self.tokens = {name: [] for name in trace.requests}
        self.admitted, self.lost_at, self.before, since = {}, {}, {}, {}
        for record in trace:
            self.before[record.step] = dict(since)
            for name in (*record.resumed, *record.aborted):
                since.pop(name, None)
            since |= dict.fromkeys(record.preempted, record.step)
            for name in record.finished:
                since.pop(name, None)
            self.lost_at[record.step] = set(since)
            for name in record.admitted:
                self.admitted.setdefault(name, record.step)
            for chunk in record.chunks:
                self.tokens[chunk.request_id] += [record.step] * len(chunk.accepted)


def cuts(trace, rng, most=12):
    starts = rng.sample(range(1, len(trace)), min(most, len(trace) - 1))
    return [(begin, rng.randint(begin + 1, len(trace))) for begin in starts]


@pytest.mark.parametrize("name", RUNS)
def test_a_part_knows_who_had_a_token_and_a_seat(name):
    trace, rng = whole_of(name), random.Random(name)
    read, seen = Read(trace), 0
    for begin, end in cuts(trace, rng):
        part, kept = trace[begin:end], forgotten(trace, begin, end)
        numbers = outputs_before(kept)
        for request_id, request in metrics(part).requests.items():
            tokens = [step for step in read.tokens[request_id] if step < end]
            has_waited = read.admitted.get(request_id, end) >= end
            assert (request.waited is None) == bool(tokens), (begin, end, request_id)
            of_whole = metrics(trace).requests[request_id]
            assert request.e2e == (of_whole.e2e if (of_whole.finish_step or 0) < end else None), (
                begin,
                end,
                request_id,
            )
            if request.age is not None:
                seen += bool(tokens) and not request.token_steps
                assert (request.so_far("ttft") is not None) == (not tokens and request.ttft is None)
                assert (request.so_far("queue") is not None) == has_waited, (begin, end, request_id)
            if request_id not in kept.requests:
                continue
            if metrics(kept).requests[request_id].waited is not None and tokens:  # no step that is left tells it
                assert numbers[request_id] is None and request_id not in preempted_before(kept)
        assert metrics(part).summary.ttft.num_open == sum(
            each.age is not None and not any(step < end for step in read.tokens[one])
            for one, each in metrics(part).requests.items()
        )
    assert seen or "d_preempt" not in name, "no part in which a request only waits to resume"


@pytest.mark.parametrize("name", RUNS)
def test_a_part_explains_the_wait_of_a_preempted_request(name):
    trace, rng = whole_of(name), random.Random(f"explained {name}")
    read = Read(trace)
    for begin, end in cuts(trace, rng):
        part = trace[begin:end]
        explainer = explainer_of(part)
        assert preempted_before(part) == read.before[begin]
        for request_id in part.requests:
            explanation = explainer.explain(request_id)
            steps = {step for part in explanation.parts if part.kind == "preempted" for step in part.steps}
            waits = {step for step in range(begin, end) if request_id in read.lost_at[step]}
            in_part = {record.step for record in part if record.duration or explainer.unit == "steps"}
            assert steps & in_part == waits & in_part, (begin, end, request_id)
            for gap in explanation.gaps:
                number = int(gap.name.removeprefix("gap before token "))
                before_it, step = read.tokens[request_id][number - 2 : number]
                assert begin <= step < end
                times = [trace[at].end if explainer.unit == "s" else at for at in (before_it, step)]
                assert gap.total == pytest.approx(times[1] - times[0])


def parts_of(trace, begin, end, path):
    """A part of a run: as a slice, as what a run keeps that forgets its beginning, from a file, and a part of that."""
    trace[begin:end].save(path)
    from_file = Trace.load(path)
    middle = (end - begin) // 2
    return [
        (begin, trace[begin:end]),
        (begin, forgotten(trace, begin, end)),
        (begin, from_file),
        (begin + middle, from_file[middle:]),
    ]


@pytest.mark.parametrize("name", RUNS)
def test_a_part_has_the_gaps_that_end_in_it(name, tmp_path):
    trace, longest = whole_of(name), 0
    read, timed = Read(trace), trace[-1].end > 0
    for begin, end in cuts(trace, random.Random(f"gaps {name}"), most=6):
        for first, part in parts_of(trace, begin, end, tmp_path / "part.jsonl.gz"):
            found = metrics(part)
            for request_id, request in found.requests.items():
                gaps = [gap for gap in pairwise(read.tokens[request_id]) if first <= gap[1] < end]
                assert request.gaps("steps") == [after - before for before, after in gaps]
                assert list(request.itl_steps) == request.gaps("steps")
                if timed:
                    assert request.gaps("s") == [trace[after].end - trace[before].end for before, after in gaps]
                longest = max([longest, *(first - before for before, _ in gaps)])
            assert found.summary.num_unknown_gaps == 0 and "unknown" not in str(found)
    assert longest > 1 or "d_preempt" not in name, "no part in which a token before it is not of the step before"


@pytest.mark.parametrize("name", ["plain 4", "timed 3", "timed 4"])
def test_a_part_says_that_its_number_of_output_tokens_is_that_of_the_part(name):
    trace, told = whole_of(name), set()
    read = Read(trace)
    for begin, end in cuts(trace, random.Random(f"words {name}")):
        found = metrics(trace[begin:end]).requests
        cells = {row[0]: row[5] for row in found.rows}
        for request_id, request in found.items():
            steps = read.tokens[request_id]
            number, was_before = sum(begin <= step < end for step in steps), any(step < begin for step in steps)
            words = f"{number} output token{'s' * (number != 1)}" + " in this part" * was_before
            assert f", {words}, " in repr(request)
            assert cells[request_id] == f"{number}" + " in this part" * was_before
            told.add(was_before)
    assert told == {True, False} and "in this part" not in repr(metrics(trace).requests)


def test_a_file_that_lacks_the_tokens_before_it_says_which_gaps_are_unknown(tmp_path):
    trace = whole_of("timed 3")
    read, begin = Read(trace), len(trace) // 2
    part = Trace(trace.meta)
    for info in trace[begin:].requests.values():
        part.add_request(info)
    part.start_from(replace(trace[begin:].keyframe, last_tokens={}))
    for record in trace[begin:]:
        part.append(record)
    lacking = [one for one in part.requests if {step < begin for step in read.tokens[one]} == {True, False}]
    assert metrics(part).summary.num_unknown_gaps == len(lacking) > 1
    words = f"the gap before {len(lacking)} tokens is unknown: the token before is not in the trace"
    assert words in " ".join(str(metrics(part)).split())
    for one in lacking:
        known = [after - before for before, after in pairwise(read.tokens[one]) if before >= begin]
        assert metrics(part).requests[one].gaps("steps") == known


@pytest.mark.parametrize("name", ["timed 3", "timed 4", "async/d_preempt"])
def test_counters_of_a_part_count_no_first_token_twice(name):
    trace = whole_of(name)
    read = Read(trace)
    for begin, end in cuts(trace, random.Random(f"counted {name}")):
        part, totals = trace[begin:end], CauseTotals(0.0)
        totals.update(part)
        firsts = [one for one in part.requests if read.tokens[one] and begin <= read.tokens[one][0] < end]
        assert totals.num_requests["ttft"] == (len(firsts) if explainer_of(part).unit == "s" else 0)


@pytest.mark.parametrize("name", ["plain 1", "plain 4", "many 2"])
def test_outputs_before_a_part_of_a_recording_without_token_ids(name):
    trace = whole_of(name)
    bare, read = without_ids(trace), Read(trace)
    for begin, end in cuts(trace, random.Random(f"bare {name}")):
        counted = {one: sum(step < begin for step in read.tokens[one]) for one in bare[begin:end].requests}
        numbers = outputs_before(bare[begin:end])
        assert numbers == {one: counted[one] for one in numbers}
