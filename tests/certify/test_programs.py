"""Programs that speak the protocol of a certificate: a small simulator, and those that break it in every way."""

import fcntl
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import examples

from workbench import certify
from workbench.analysis.certify import program as programs
from workbench.analysis.certify.features import FEATURES, draw
from workbench.analysis.certify.neutral import read_schedule
from workbench.analysis.certify.speak import _answer

SIMULATORS = Path(__file__).parents[2] / "examples" / "simulators"
FIRST_COME = SIMULATORS / "first_come.py"
HAS = ["chunked prefill", "preemption"]

SPEAKS = """
import json, os, sys, time
sys.path.insert(0, {folder!r})
from first_come import answer
for number, line in enumerate(sys.stdin):
    workload = json.loads(line)
    told = answer(workload)
    {body}
"""


def command(tmp_path, body):
    """A program that gives the simulator's answers as `body` says."""
    (tmp_path / "program.py").write_text(SPEAKS.format(folder=str(SIMULATORS), body=body.replace("\n", "\n    ")))
    return f"{sys.executable} {tmp_path / 'program.py'}"


SAY = "print(json.dumps(told), flush=True)"


def test_the_small_simulator_is_certified_for_what_it_has():
    count = examples(25)
    made = certify(f"{sys.executable} {FIRST_COME}", workloads=count, seed=1)
    assert {row.feature for row in made.rows if row.verdict == "equal"} == set(HAS)
    assert {row.verdict for row in made.rows} == {"equal", "not supported"} and not made.certified
    assert all(row.num_workloads == count and not row.unsupported for row in made.rows if row.feature in HAS)
    told = str(made).splitlines()
    assert re.search(rf"^adapters +0 of {count} .* not supported$", "\n".join(told), re.M)
    assert f"adapters: not supported: no max_loras ({count} workloads)" in told
    assert "not certified: 2 of 19 features are, 17 not supported" in told[-1]
    facts = {row["feature"]: row for row in made.facts()["features"]}
    assert facts["adapters"]["verdict"] == "not supported" and facts["adapters"]["reasons"] == {"no max_loras": count}


@pytest.mark.parametrize("feature", HAS)
def test_an_error_of_one_token_in_a_simulator_is_told(feature, tmp_path):
    """A chunk is a token too short in the workloads of one feature."""
    body = "wrong = [c for step in told['steps'] for c in step['chunks'] if c['num_tokens'] > 1]\n"
    body += f"if workload['id'].startswith({feature!r}) and wrong: wrong[0]['num_tokens'] -= 1\n{SAY}"
    made = certify(command(tmp_path, body), workloads=10, seed=2, features=HAS)
    rows = {row.feature: row for row in made.rows}
    right = next(row for name, row in rows.items() if name != feature)
    assert right.certified and not rows[feature].certified and rows[feature].first.aspect == "chunks"
    place = f"workload {rows[feature].first.workload['id']!r}, step {rows[feature].first.step}: expected"
    assert f"{feature}: {place}" in str(made)


@pytest.mark.parametrize(
    "body, words",
    [
        (
            "if number == 1: os._exit(3)\n" + SAY,
            "ended before it answered workload 'chunked prefill 1', with exit status 3",
        ),
        (SAY + "\nbreak", "ended before it answered workload 'chunked prefill 1', with exit status 0"),
        ("print('garbage', flush=True)", "is not a line of JSON: 'garbage"),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\n')\nsys.stdout.flush()", "is not a line of JSON: '\ufffd\ufffd"),
        ("print('[' * 100000, flush=True)", "is not a line of JSON: '[[["),
        ("print('{\"steps\": [', end='', flush=True)\nbreak", "is not a line of JSON: '{"),
        ("print()\nsys.stdout.flush()", "is not a line of JSON: '\\n'"),
        ("told['id'] = 'another'\n" + SAY, "answer.id is 'another', and the workload was 'chunked prefill 0'"),
        (SAY + "\n" + SAY, "answer each workload once, in order"),
        ("del told['id']\n" + SAY + "\n" + SAY, "wrote more answers than it was asked for"),
        ("told['steps'] *= 10000\n" + SAY, "is longer than"),
        ("print(json.dumps({'steps': [{'chunks': []}] * 20000}), flush=True)", "answer.steps has 20,000 steps"),
    ],
    ids=[
        "crash",
        "early end",
        "garbage",
        "bytes",
        "nesting",
        "half",
        "empty",
        "id",
        "twice",
        "unnamed",
        "much",
        "steps",
    ],
)
def test_what_breaks_the_protocol_is_told_and_not_certified(body, words, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MOST_BYTES", 1 << 20)
    made = certify(command(tmp_path, body), workloads=2, seed=1, features=HAS)
    assert words in made.rows[0].problem and not any(row.certified for row in made.rows)
    assert words in str(made)


def test_a_program_that_floods_its_output_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MOST_BYTES", 1 << 20)
    endless = command(tmp_path, "while True: print('x' * 1000, end='')")
    made = certify(endless, workloads=2, seed=1, features=HAS)
    assert "is longer than 1,048,576 bytes" in made.rows[0].problem and made.rows[1].problem == made.rows[0].problem
    lines = command(tmp_path, SAY + "\nwhile True: print(json.dumps(told))")
    made = certify(lines, workloads=2, seed=1, features=HAS)
    assert "answer each workload once" in made.rows[0].problem and not made.certified


def test_a_program_that_hangs_is_given_up(tmp_path):
    """Neither its silence nor what it does not read holds a certificate up for every feature."""
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    made = certify(f"{sys.executable} {tmp_path / 'hangs.py'}", workloads=1, seed=1, timeout=0.02)
    assert all("no answer to workload" in row.problem for row in made.rows[: programs.MOST_LATE])
    assert {row.problem for row in made.rows[programs.MOST_LATE :]} == {
        f"the program was ended after {programs.MOST_LATE} workloads without an answer (--timeout)"
    }


def test_a_workload_that_nobody_reads_stops_nobody():
    asked = programs.Program(f'{sys.executable} -c "import time; time.sleep(600)"', 0.02)
    with pytest.raises(ValueError, match="no answer to workload 'long' within"):
        asked.schedule({"id": "long", "config": {}, "requests": ["x" * (1 << 22)]})
    assert asked.close() == ""


def test_a_crash_in_one_feature_leaves_the_others(tmp_path):
    body = "if workload['id'] == 'chunked prefill 1': os._exit(9)\n" + SAY
    crashed, right = certify(command(tmp_path, body), workloads=3, seed=1, features=HAS).rows
    assert "ended before it answered workload 'chunked prefill 1'" in crashed.problem
    assert crashed.verdict == "no answer" and right.certified


def test_a_farewell_is_not_an_answer(tmp_path):
    text = SPEAKS.format(folder=str(SIMULATORS), body=SAY) + "print('served', number + 1)\n"
    (tmp_path / "polite.py").write_text(text)
    assert certify(f"{sys.executable} {tmp_path / 'polite.py'}", workloads=2, seed=1, features=HAS).certified


def test_a_function_that_exits_ends_its_row_alone():
    made = certify(lambda workload: sys.exit("stop"), workloads=1, seed=1, features=HAS)
    assert [row.problem for row in made.rows] == ["SystemExit: stop"] * 2


@pytest.mark.parametrize(
    "step, words",
    [
        ({"chunks": [{"id": "a", "start": 0, "num_tokens": 1, "num_drafts": "x"}]}, "chunks[0].num_drafts"),
        ({"chunks": [], "finished": ["a", 1]}, "finished[1] must be a request's id, got 1"),
        ({"chunks": [], "preempted": [["a"]]}, "preempted[0] must be a request's id"),
        ({"chunks": [], "hits": {"a": "x"}}, "hits['a']"),
        ({"chunks": [], "blocks": {"a": [1]}}, "blocks['a'][0] must be a list of blocks, got 1"),
        ({"chunks": [], "blocks": {"a": [[None]]}}, "blocks['a'][0][0]"),
    ],
)
def test_each_field_of_a_step_is_checked(step, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"answer.steps[0].{words}")):
        read_schedule({"steps": [step]})
    row = certify(lambda workload: {"steps": [step]}, workloads=1, features=HAS[:1], out=tmp_path).rows[0]
    assert words in row.problem


ANSWER = """
import json, sys
from {module} import {name} as answer
print(json.dumps([answer(workload) for workload in json.load(sys.stdin)]))
"""
NAMES = {"first_come": "answer", "vidur_simulator": "sarathi", "vidur_simulator ": "vllm"}


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.parametrize("value", [True, False, 0, None])
def test_a_setting_that_a_simulator_does_not_know_is_refused(module, value):
    """Its value does not matter: nobody else knows which one stands for off."""
    request = {"id": "a", "prompt_token_ids": [1], "output_token_ids": [2], "max_tokens": 1}
    names = ["scheduler_reserve_full_isl", "a_setting_of_next_year"]
    asked = [{"id": "w", "config": {name: value}, "requests": [request]} for name in names]
    asked.append({"id": "w", "config": {}, "requests": [{**request, "a_field_of_next_year": value}]})
    code = ANSWER.format(module=module.strip(), name=NAMES[module])
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=SIMULATORS,
        check=True,
    )
    told = [each["unsupported"] for each in json.loads(done.stdout)]
    assert [text.split()[1] for text in told] == [*names, "a_field_of_next_year"]


def test_the_simulator_in_go_names_each_setting_that_it_reads():
    """It has no compiler here: what it asks a configuration for is what it knows, and the reserve is not among it."""
    text = (SIMULATORS / "inference_sim.go").read_text()
    known = set(re.findall(r'"(\w+)": true', text.partition("known = ")[2].partition("}")[0]))
    read = set(re.findall(r'config\["(\w+)"\]|number\(config, "(\w+)"', text))
    assert {name for pair in read for name in pair if name} == known - {"max_model_len"}
    assert "scheduler_reserve_full_isl" not in known and "!known[name]" in text and "!fields[name]" in text


def test_the_scheduler_of_workbench_refuses_a_setting_that_it_does_not_know():
    names = ["scheduler_reserve_full_isl", "a_setting_of_next_year"]
    request = {"id": "a", "prompt_token_ids": [1], "output_token_ids": [2], "max_tokens": 1}
    asked = [{"version": 1, "id": "w", "config": {name: False}, "requests": [request]} for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "certify", "--speak", "workbench"],
        input="".join(json.dumps(each) + "\n" for each in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    known, unknown = map(json.loads, done.stdout.splitlines())
    assert known["steps"] and "a_setting_of_next_year" in unknown["unsupported"]


def test_every_workload_of_the_reserve_has_one():
    feature = next(each for each in FEATURES if each.name == "admission reserve")
    for workload, _ in draw(feature, 20, random.Random(1)):
        assert workload["config"].keys() & {"watermark", "scheduler_reserve_full_isl"}


CHUNK = {"id": "r0", "start": 0, "num_tokens": 1}


@pytest.mark.parametrize(
    "answer, words",
    [
        ({"steps": [{"chunks": [], "note": object(), (1, 2): {3}}]}, "step 1: expected"),
        ({"steps": [{"chunks": [CHUNK | {"note": {1}}]}]}, "step 0: expected"),
        ({"steps": [{"chunks": [CHUNK | {"id": "\ud800\x1b[2J"}]}]}, r"\ud800\x1b[2J [0, 1)"),
        ({"steps": [{"chunks": [], "finished": ["\udfff"]}]}, "finished ['\\udfff']"),
        ({"steps": [{"chunks": [], "hits": {"\ud800": 1}}]}, r"cached \ud800 1"),
        ({"unsupported": "\ud800"}, r"not supported: \ud800 (1 workload)"),
        ({"unsupported": ""}, "not supported: no reason is given (1 workload)"),
        ({"unsupported": None}, "answer.unsupported must be a text that gives the reason, got None"),
        ({"unsupported": False, "steps": []}, "answer.unsupported must be a text that gives the reason, got False"),
        ({"unsupported": 10**5000}, "answer.unsupported must be a text that gives the reason, got an integer of"),
        ({"steps": []}, "step 0: expected no chunks, got no such step"),
    ],
)
def test_what_an_answer_says_is_written_and_does_not_stop_the_certificate(answer, words, tmp_path):
    made = certify(lambda workload: answer, workloads=1, seed=1, features=["chunked prefill"], out=tmp_path / "out")
    assert not made.certified and words in str(made)
    assert (tmp_path / "out" / "certificate.txt").read_text() == f"{made}\n"


@pytest.mark.parametrize(
    "answer", [{"unsupported": "x" * 100_000}, {"steps": [{"chunks": [CHUNK | {"id": "x" * 100_000}]}]}]
)
def test_long_texts_of_an_answer_are_shortened(answer):
    assert len(str(certify(lambda workload: answer, workloads=1, seed=1, features=["chunked prefill"]))) < 1000


@pytest.mark.parametrize(
    "text, words",
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(text, words, tmp_path, monkeypatch):
    (tmp_path / "broken_simulator.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"PROGRAM 'broken_simulator:f' cannot be imported: {words}"):
        certify("broken_simulator:f", workloads=1)


def test_a_command_line_that_no_shell_would_take_is_named():
    with pytest.raises(ValueError, match='PROGRAM "it\'s here" is not a command line: No closing quotation'):
        certify("it's here", workloads=1)
    with pytest.raises(ValueError, match=r"PROGRAM .* cannot be started: embedded null byte"):
        certify("a\0b", workloads=1)


def test_two_values_of_one_field_are_not_an_answer(tmp_path):
    twice = command(tmp_path, """print(json.dumps(told)[:-1] + ', "steps": []}', flush=True)""")
    (row,) = certify(twice, workloads=1, seed=1, features=HAS[:1]).rows
    assert row.problem == "the answer to workload 'chunked prefill 0' is not JSON: an object has two values of 'steps'"


def test_a_program_that_is_killed_names_the_signal(tmp_path):
    (row,) = certify(command(tmp_path, "os.kill(os.getpid(), 9)"), workloads=1, seed=1, features=HAS[:1]).rows
    assert row.problem == "the program ended before it answered workload 'chunked prefill 0', by signal 9"


def test_the_processes_that_a_program_has_started_end_with_it(tmp_path):
    """A child keeps the output open: the program has ended nevertheless, and so must the child, which holds a lock."""
    held = tmp_path / "held"
    body = (
        f"import fcntl\npath, child = {str(held)!r}, os.fork()\n"
        "if not child: mine = open(path + '.new', 'w')\n"
        "if not child: fcntl.flock(mine, fcntl.LOCK_EX), os.rename(path + '.new', path), time.sleep(600)\n"
        "while not os.path.exists(path): time.sleep(0.01)\n"
    )
    asked = programs.Program(command(tmp_path, body + "os._exit(0)"), 1)
    workload, _ = next(iter(draw(FEATURES[0], 1, random.Random(1))))
    with pytest.raises(ValueError, match=r"the program ended before it answered workload .*, with exit status 0"):
        asked.schedule(workload)
    with held.open() as lock:
        for _ in range(1000):
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
    raise AssertionError("the child still runs")


@pytest.mark.parametrize(
    "line, words",
    [
        ("garbage", "the line is not JSON"),
        ("", "the line is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "workload must be an object, got []"),
        ("{}", "workload.id must be a name, got None"),
        ('{"id": "x", "config": []}', "workload.config must be an object, got []"),
        ('{"id": "x", "config": {}, "requests": {}}', "workload.requests must be a list of requests, got {}"),
        ('{"id": "x", "config": {}, "requests": [1]}', "workload.requests[0] must be an object, got 1"),
        (
            '{"id": "x", "config": {}, "requests": [{"id": "a", "max_tokens": "q"}]}',
            "workload.requests[0].max_tokens must be an integer from 1 to 2147483647, got 'q'",
        ),
        (
            '{"id": "x", "config": {}, "requests": [{"id": "a", "max_tokens": 1}]}',
            "workload.requests[0].prompt_token_ids must be a list of tokens, got None",
        ),
        ('{"id": "x", "config": {"max_model_len": "q"}, "requests": []}', "workload.config.max_model_len must be an"),
        ('{"id": "x", "version": 2, "config": {}, "requests": []}', "workload.version must be from 1 to 1, got 2"),
        ('{"id": "x", "config": {"num_blocks": 1e400}, "requests": []}', "num_blocks must be an integer"),
    ],
)
def test_a_line_that_is_not_a_workload_gets_an_answer(line, words):
    assert words in _answer(None, line)["unsupported"]


def test_a_speaker_answers_after_a_line_that_is_not_utf8():
    right = json.dumps(next(iter(draw(FEATURES[0], 1, random.Random(1))))[0])
    speaker = [sys.executable, "-m", "workbench", "certify", "--speak", "workbench"]
    done = subprocess.run(speaker, input=b"\xff\xfe\n" + right.encode() + b"\n", capture_output=True, timeout=120)
    first, second = map(json.loads, done.stdout.splitlines())
    assert "unsupported" in first and second["steps"] and done.returncode == 0
