"""A certificate tells a faithful simulator from one with an error of one token in one feature, and says where."""

import io
import json
import random
import sys
from pathlib import Path

import pytest

from workbench import certify
from workbench.analysis.certify.features import FEATURES, draw
from workbench.analysis.certify.judgement import Row
from workbench.analysis.certify.neutral import judge, neutral_workload, read_schedule, simulated_workload, steps_of
from workbench.analysis.certify.speak import speak
from workbench.apps.cli import main
from workbench.simulation.simulate import simulate
from workbench.trace import Trace

SELF = f"{sys.executable} -m workbench certify --speak workbench"


def faithful(workload):
    return {"steps": steps_of(judge(workload))}


def test_we_are_certified_through_the_protocol():
    made = certify(SELF, workloads=2, seed=3)
    assert made.certified, str(made)
    assert {row.feature for row in made.rows} == {feature.name for feature in FEATURES}
    assert all(row.num_workloads == 2 for row in made.rows)


ERRORS = {
    "chunk caps": lambda workload, step: bool(workload["config"].get("long_prefill_token_threshold")),
    "priority": lambda workload, step: workload["config"].get("policy") == "priority",
    "drafts": lambda workload, step: any(chunk["num_drafts"] for chunk in step["chunks"]),
    "adapters": lambda workload, step: any(request.get("adapter") for request in workload["requests"]),
}


@pytest.mark.parametrize("feature", ERRORS)
def test_an_error_of_one_token_in_one_feature_is_told(feature):
    places = []

    def wrong(workload):
        """One token more in the last chunk that has the feature."""
        steps = faithful(workload)["steps"]
        if not workload["config"].get("async_scheduling") and workload["id"].startswith(feature):
            index = max(i for i, step in enumerate(steps) if step["chunks"] and ERRORS[feature](workload, step))
            steps[index]["chunks"][0]["num_tokens"] += 1
            places.append((workload["id"], index))
        return {"steps": steps}

    names = ["chunked prefill", feature]
    made = certify(wrong, workloads=3, seed=5, features=names)
    right, row = made.rows
    assert right.certified and not row.certified and not made.certified
    assert (row.first.workload["id"], row.first.step) == places[0] and row.first.aspect == "chunks"
    assert f"step {places[0][1]}: expected" in str(made) and row.scores["chunks"].equal == row.scores["chunks"].of - 3


@pytest.mark.parametrize("aspect", ["hits", "preempted", "finished", "blocks"])
def test_each_aspect_is_compared_and_may_be_left_out(aspect):
    def wrong(workload):
        steps = faithful(workload)["steps"]
        index = next(i for i, step in enumerate(steps) if step[aspect])
        steps[index][aspect] = type(steps[index][aspect])()
        return {"steps": steps}

    def silent(workload):
        return {
            "steps": [
                {key: value for key, value in step.items() if key != aspect} for step in faithful(workload)["steps"]
            ]
        }

    feature = ["prefix caching with preemption"]
    row = certify(wrong, workloads=2, seed=1, features=feature).rows[0]
    assert row.first.aspect == aspect and row.scores["chunks"].equal == row.scores["chunks"].of > 0
    row = certify(silent, workloads=2, seed=1, features=feature).rows[0]
    assert row.certified and str(row.scores[aspect]) == "-"


@pytest.mark.parametrize("change", [lambda steps: steps[:-1], lambda steps: [*steps, {"chunks": []}], lambda steps: []])
def test_another_number_of_steps_is_a_difference(change):
    row = certify(lambda w: {"steps": change(faithful(w)["steps"])}, workloads=1, features=["chunked prefill"]).rows[0]
    assert not row.certified and "no such step" in row.first.message


def test_empty_steps_behind_the_end_do_not_raise_the_share():
    def idle(workload):
        return {"steps": [*([{"chunks": []}] * 500)]}

    row = certify(idle, workloads=2, seed=1, features=["chunked prefill"]).rows[0]
    assert row.scores["steps"].of < 400 and row.scores["steps"].equal < row.scores["steps"].of / 2
    assert not row.certified


def test_steps_behind_the_end_count_as_long_as_something_runs():
    row, chunk = Row("chunked prefill"), {"id": "a", "start": 0, "num_tokens": 1}
    runs, idle = {"chunks": [chunk]}, {"chunks": []}
    row.add({"id": "w"}, [runs], [runs, idle, runs, idle, idle])
    assert (row.scores["steps"].equal, row.scores["steps"].of) == (2, 3)  # two chunks of one, and a pause
    row.add({"id": "w"}, [runs, runs], [runs])
    assert (row.scores["steps"].equal, row.scores["steps"].of) == (3, 5)


def test_what_ends_a_row_is_told_beside_its_first_difference():
    answers = iter([{"steps": []}, {"steps": None}])
    made = certify(lambda workload: next(answers), workloads=3, seed=1, features=["chunked prefill"])
    assert "step 0: expected" in str(made) and "answer.steps must be a list of steps, got None" in str(made)


def test_a_driven_scheduler_refuses_what_it_does_not_have(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "hunt"))
    name = f"{sys.executable} -m workbench certify --speak planted:generous"
    made = certify(name, workloads=2, seed=1, features=["chunked prefill", "priority", "adapters"])
    plain, priority, adapters = made.rows
    assert plain.num_workloads == 2 and not plain.unsupported
    assert priority.unsupported == ["no priority"] * 2 and adapters.unsupported == ["no adapters"] * 2


@pytest.mark.parametrize(
    "setting, value, feature",
    [
        ("long_prefill_token_threshold", 4, "caps"),
        ("max_num_scheduled_tokens", 4, "caps"),
        ("max_num_active_seqs", 1, "caps"),
        ("watermark", 0.1, "pools"),
        ("scheduler_reserve_full_isl", False, "pools"),
        ("kv_cache_groups", [{"kind": "sliding_window", "sliding_window": 8}], "groups"),
        ("enable_chunked_prefill", False, "unchunked"),
    ],
)
def test_each_setting_needs_its_feature(setting, value, feature, monkeypatch, capfd):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "hunt")
    requests = [{"id": "a", "prompt": {"len": 3}, "max_tokens": 2}]
    workloads = [neutral_workload("w", {"config": config, "requests": requests}) for config in ({}, {setting: value})]
    speak("planted:bare", io.StringIO("".join(json.dumps(each) + "\n" for each in workloads)))
    plain, needing = map(json.loads, capfd.readouterr().out.splitlines())
    assert len(plain["steps"]) == 2 and needing["unsupported"] == f"no {feature}"


@pytest.mark.parametrize(
    "answer, words",
    [
        ([], "answer must be"),
        ({}, "answer.steps must be a list"),
        ({"steps": [{}]}, "answer.steps[0].chunks must be a list"),
        ({"steps": [{"chunks": [{"id": 1}]}]}, "answer.steps[0].chunks[0].id"),
        ({"steps": [{"chunks": [{"id": "a", "start": -1}]}]}, "answer.steps[0].chunks[0].start"),
        ({"steps": [{"chunks": [], "hits": []}]}, "answer.steps[0].hits must be a dict"),
    ],
)
def test_an_answer_that_is_no_schedule_is_named(answer, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        read_schedule(answer)
    row = certify(lambda workload: answer, workloads=1, features=["chunked prefill"]).rows[0]
    assert words in row.problem and not row.certified


@pytest.mark.parametrize("share, certified", [(0.4, True), (0.6, False)])
def test_what_is_not_supported_does_not_count_unless_it_is_most(share, certified):
    number = iter(range(10))

    def partly(workload):
        return {"unsupported": "not built yet"} if next(number) < 10 * share else faithful(workload)

    made = certify(partly, workloads=10, seed=2, features=["chunked prefill"])
    assert made.certified is certified and "not supported: not built yet" in str(made)


@pytest.mark.parametrize(
    "code, words",
    [
        ("", "the program ended before it answered workload 'chunked prefill 0'"),
        ("print('hello')", "is not a line of JSON: 'hello"),
        ("import time; time.sleep(60)", "no answer to workload 'chunked prefill 0' within 0.2 s"),
    ],
)
def test_a_command_that_does_not_answer(code, words):
    row = certify(
        f'{sys.executable} -c "{code}"',
        workloads=1,
        features=["chunked prefill"],
        timeout=0.2 if "sleep" in code else 60,
    ).rows[0]
    assert words in row.problem


def test_a_late_answer_is_not_that_of_the_next_workload(tmp_path):
    (tmp_path / "late.py").write_text(
        "import json, sys, time\n"
        "from workbench.analysis.certify.neutral import judge, steps_of\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    time.sleep(4 if number == 1 else 0)\n"
        "    print(json.dumps({'steps': steps_of(judge(json.loads(line)))}), flush=True)\n"
    )
    program = f"{sys.executable} {tmp_path / 'late.py'}"
    made = certify(program, workloads=2, seed=1, features=["chunked prefill", "priority"], timeout=3)
    late, right = made.rows
    assert "no answer to workload 'chunked prefill 1' within 3 s" in late.problem and right.certified


def test_the_files_of_a_certificate(tmp_path, monkeypatch, capsys):
    (tmp_path / "simulator.py").write_text("def schedule(workload):\n    return {'steps': [{'chunks': []}]}\n")
    monkeypatch.chdir(tmp_path)
    command = [
        "certify",
        "simulator:schedule",
        "--workloads",
        "1",
        "--features",
        "priority,drafts",
        "--seed",
        "4",
        "--out",
        "out",
    ]
    assert main(command) == 1
    told = capsys.readouterr().out.splitlines()
    assert json.loads(told[-1]) == {"certified": False, "seed": 4} and told[-2] == "wrote the certificate to out"
    assert "not certified: 0 of 2 features are" in told[-3]
    facts = json.loads((tmp_path / "out/certificate.json").read_text())
    assert [row["feature"] for row in facts["features"]] == ["priority", "drafts"]
    folder = tmp_path / "out/priority"
    workload = json.loads((folder / "workload.json").read_text())
    assert steps_of(Trace.load(folder / "expected.jsonl.gz")) == steps_of(judge(workload))
    assert "<th align=left>got</th>" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    "command, words",
    [
        (["certify"], "give PROGRAM"),
        (["certify", "a:b", "--speak", "workbench"], "give PROGRAM"),
        (["certify", "no_such_module:schedule"], "cannot be imported"),
        (["certify", "json:decoder"], "is not a function"),
        (["certify", "/no/such/program"], "cannot be started"),
        (["certify", "a:b", "--features", "speed"], "the features are chunked prefill, chunk caps"),
        (["certify", "a:b", "--workloads", "0"], "workloads"),
    ],
)
def test_bad_options_are_named(command, words, capsys):
    assert main(command) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_neutral_workload_is_the_same_workload(feature):
    for made, trace in draw(feature, 2, random.Random(7)):
        again = simulate(simulated_workload(json.loads(json.dumps(made))), as_vllm=True)
        assert list(again) == list(trace)
        given = {request["id"]: request["output_token_ids"] for request in made["requests"]}
        for name, tokens in given.items():  # the tokens that the file promises are those of the run
            told = [
                token for step in trace for chunk in step.chunks if chunk.request_id == name for token in chunk.accepted
            ]
            assert told == tokens[: len(told)]


def test_a_stop_is_the_end_of_the_output():
    workload = {
        "config": {"max_model_len": 20},
        "requests": [{"id": "a", "prompt": {"len": 4}, "max_tokens": 9, "stop_at": 3}],
    }
    made = neutral_workload("w", workload)
    assert len(made["requests"][0]["output_token_ids"]) == 3
    assert [list(step.finished) for step in judge(made)][-1] == ["a"] and len(judge(made)) == 3
