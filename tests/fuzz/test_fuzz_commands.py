"""Changed recordings through every command: each answers, or refuses with an error that Workbench raises."""

import json
from random import Random

from hostile_recordings import SOURCES, run, source_lines, try_one
from tiers import examples


def test_every_command_answers_or_refuses_by_name(tmp_path):
    findings, outcomes = [], []
    for seed in range(examples(40)):
        found, problems = try_one(Random(f"test {seed}"), tmp_path)
        outcomes += found.elements()
        findings += problems
    assert not findings, findings[0]
    assert outcomes.count("files read") > len(range(examples(40))) / 3
    for command in ("info", "explain", "misses", "html", "diff"):
        assert f"trace {command} answered" in outcomes
    assert {"trace whatif answered", "trace tune answered"} & {*outcomes}, "a file meets one of the two"
    assert "why answered" in outcomes


def test_a_request_with_more_hits_than_tokens_has_an_autopsy(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [json.loads(line) for line in source_lines(SOURCES[3]).splitlines()]
    (request,) = [line for line in lines if line.get("request_id") == "s3t1" and line["kind"] == "request"]
    request["num_prompt_tokens"] = 7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert run(["trace", "misses", str(path), "s3t1"]) == "answered"


def test_an_error_of_python_is_a_finding(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text(source_lines(SOURCES[0]), encoding="utf-8")
    assert run(["trace", "info", str(path)]) == "answered"
    assert run(["trace", "info", str(tmp_path / "none.jsonl")]) != "answered"
    for problem in (lambda path: max(()), lambda path: {}["a"], lambda path: int("x")):
        monkeypatch.setattr("workbench.trace.Trace.load", problem)
        assert "Error" in run(["trace", "info", str(path)])
