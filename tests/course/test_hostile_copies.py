"""Copies of the course that attack the grader: each harms its own grade alone."""

import csv
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from course_answers import ANSWERS

from workbench.apps.cli import main
from workbench.apps.cli.notebooks import COURSE
from workbench.apps.course.grade import exercises
from workbench.apps.course.judge import judge_apart

EXERCISES = {exercise.name: exercise for exercise in exercises(COURSE)}
RIGHT = {name: ANSWERS[name][0] for name in ("slots", "victim")}
RIGHT["slots"] += "\n"
VERDICT = json.dumps({"passed": True, "message": "right", "number": "0"})

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="answers are judged on Linux and macOS")


def notebook_of(name):
    return EXERCISES[name].notebook


def answer_cell(notebook, name):
    (cell,) = [c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == name]
    return cell


def make_class(tmp_path, monkeypatch):
    """A course of two exercises, and the class: ada before, and zoe behind, all others, both right."""
    folder = tmp_path / "course"
    folder.mkdir()
    for name in RIGHT:
        shutil.copy(COURSE / notebook_of(name), folder)
    monkeypatch.setattr("workbench.apps.cli.course.COURSE", folder)
    for copy in ("ada", "zoe"):
        make_copy(folder, tmp_path / "class" / copy, RIGHT)
    return folder


@pytest.fixture
def course(tmp_path, monkeypatch):
    return make_class(tmp_path, monkeypatch)


def make_copy(course, folder, answers):
    shutil.copytree(course, folder)
    for name, answer in answers.items():
        path = folder / notebook_of(name)
        notebook = json.loads(path.read_text())
        answer_cell(notebook, name)["source"] = answer
        path.write_text(json.dumps(notebook))
    return folder / notebook_of("slots")


def graded(tmp_path, *options):
    """The rows of the class by copy and exercise, and what was printed; all copies are there, ada and zoe right."""
    file = tmp_path / "grades.csv"
    with redirect_stdout(io.StringIO()) as said:
        assert main(["course", "grade", str(tmp_path / "class"), "--out", str(file), *options]) == 0
    with file.open(newline="", encoding="utf-8") as stream:
        rows = {(row["copy"], row["exercise"]): row for row in csv.DictReader(stream)}
    printed = said.getvalue()
    for copy in ("ada", "zoe"):
        assert [rows[copy, name]["points"] for name in RIGHT] == ["1", "1"], rows
        assert f"{copy}: 2 of 2 points" in printed
    assert all(text.isprintable() for text in printed.splitlines())
    assert len(rows) == 2 * len(list((tmp_path / "class").iterdir()))
    return rows, printed


OWN_SLOT = "def slot_of(block_table, position, block_size): return 0\n"
ANSWERS_THAT_HARM = (
    ("raise Exception('\\ud800')", r"line 1: Exception: \ud800"),
    ("raise Exception('\\x1b]0;PWN\\x07')", r"Exception: \x1b]0;PWN\x07"),
    ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E, whose message cannot be made"),
    (f"import os; os.write(1, {VERDICT.encode()!r}); os._exit(0)", "it ended the process with status 0"),
    (
        f"import os\nfor i in range(64):\n    try: os.write(i, {VERDICT.encode()!r} + b'\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        "it ended the process with status 0",
    ),
    (OWN_SLOT + "from workbench.apps.course import Verdict\ncheck_slots = lambda f: Verdict(True, 'x')", "gives 0"),
    (
        OWN_SLOT + "import workbench.apps.course.exercises as e\nfrom workbench.apps.course import Verdict\n"
        "e.try_cases = e.check_slots = lambda *a: Verdict(True, 'x')",
        "gives 0",
    ),
    ("import os; raise Exception(os.environ.get('SECRET', 'no secret'))", "Exception: no secret"),
    ("while True: print('x' * 10**6)", "it printed more than 16 MiB"),
    ("import os\nwhile True: os.write(2, b'x' * 10**6)", "it printed more than 16 MiB"),
    ("x = bytearray(2**36)", "MemoryError"),
    ("import os, time; os.kill(os.getppid(), 9); time.sleep(600)", "it ended the process with status -9"),
    ("open('big', 'wb').write(bytes(2**27))", "OSError"),
    ("(" * 10**5, "SyntaxError"),
    ("x = '\ud800'", "UnicodeEncodeError"),
    ("x" * (2**20 + 1), "characters, 1,048,576 are allowed"),
)


def test_part_of_a_verdict_is_not_waited_for(course):
    answer = "import os, time\nfor i in range(3, 64):\n    try: os.write(i, b'{')\n    except OSError: pass\n"
    verdict = judge_apart(EXERCISES["slots"], answer + "time.sleep(10**6)", course, 4)
    assert verdict.message == "it took more than 4 s"


def set_cell(**fields):
    def change(path, course):
        notebook = json.loads(path.read_text())
        answer_cell(notebook, "slots").update(fields)
        path.write_text(json.dumps(notebook))

    return change


def replaced_by(make):
    def change(path, course):
        path.unlink()
        make(path, course)

    return change


def a_large_file(path, course):
    with path.open("wb") as file:
        file.truncate(2**40)


NOTEBOOKS_THAT_HARM = (
    (set_cell(source=5), "source must be a text or a list of lines, got 5"),
    (set_cell(source=["a", 5]), "source must be a text"),
    (set_cell(source={"a": 1}), "source must be a text"),
    (set_cell(metadata=5), "is not a notebook"),
    (set_cell(metadata={"nbgrader": 5}), "is not a notebook"),
    (replaced_by(lambda path, _: path.write_text("[" * 10**5)), "nested too deeply"),
    (replaced_by(lambda path, _: path.write_text('{"cells": 5}')), "is not a notebook"),
    (replaced_by(lambda path, _: path.write_text('{"cells": [' + "9" * 10**4 + "]}")), "is not a notebook"),
    (replaced_by(lambda path, _: path.write_bytes(b'{"cells": "\xff"}')), "is not a notebook"),
    (replaced_by(lambda path, _: os.mkfifo(path)), "the notebook is missing"),
    (replaced_by(lambda path, _: path.mkdir()), "the notebook is missing"),
    (replaced_by(lambda path, _: path.symlink_to(path)), "the notebook is missing"),
    (replaced_by(lambda path, _: path.symlink_to("/dev/zero")), "the notebook is missing"),
    (replaced_by(lambda path, _: path.symlink_to(path.parents[1] / "ada" / path.name)), "a link to another folder"),
    (replaced_by(a_large_file), "it is too large"),
)


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """The grades of one class with a copy for each of them, answer0, notebook0 and so on, and what was printed."""
    tmp_path = tmp_path_factory.mktemp("harmed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        course = make_class(tmp_path, monkeypatch)
        monkeypatch.setenv("SECRET", "of the teacher")
        for number, (answer, _) in enumerate(ANSWERS_THAT_HARM):
            make_copy(course, tmp_path / "class" / f"answer{number}", {**RIGHT, "slots": answer})
        for number, (change, _) in enumerate(NOTEBOOKS_THAT_HARM):
            change(make_copy(course, tmp_path / "class" / f"notebook{number}", RIGHT), course)
        return graded(tmp_path)


@pytest.mark.parametrize("number", range(len(ANSWERS_THAT_HARM)))
def test_an_answer_harms_its_own_grade_alone(harmed, number):
    (rows, printed), (_, reason), copy = harmed, ANSWERS_THAT_HARM[number], f"answer{number}"
    assert (rows[copy, "slots"]["points"], rows[copy, "victim"]["points"]) == ("0", "1")
    told = re.search(rf"^{copy}: 1 of 2 points\n((?: {{4}}.*\n)+)", printed, re.MULTILINE)[1]
    assert reason in rows[copy, "slots"]["reason"] and reason in told


@pytest.mark.parametrize("number", range(len(NOTEBOOKS_THAT_HARM)))
def test_a_notebook_harms_its_own_grade_alone(harmed, number):
    (rows, _), (_, reason), copy = harmed, NOTEBOOKS_THAT_HARM[number], f"notebook{number}"
    assert (rows[copy, "slots"]["points"], rows[copy, "victim"]["points"]) == ("0", "1")
    assert reason in rows[copy, "slots"]["reason"]


def test_names_of_copies_reach_neither_terminal_nor_spreadsheet_as_commands(course, tmp_path):
    for name in ("=HYPERLINK(1)", "@sum", "\x1b[31mred", "line\nbreak", os.fsdecode(b"\xff")):
        make_copy(course, tmp_path / "class" / name, {**RIGHT, "slots": "import nothing"})
    (tmp_path / "class" / "ada's friend").symlink_to(tmp_path / "class" / "ada")
    rows, printed = graded(tmp_path)
    copies = {copy for copy, _ in rows}
    names = {"'=HYPERLINK(1)", "'@sum", "\\x1b[31mred", "line\\nbreak", "\\udcff"}
    assert copies == {"ada", "zoe", "ada's friend", *names}
    assert "\\x1b[31mred: 1 of 2 points" in printed


def test_a_terminal_without_a_character_ends_no_report(course, tmp_path, capsys, monkeypatch):
    make_copy(course, tmp_path / "class" / "mallory", {**RIGHT, "slots": "raise Exception('\u4e2d')"})
    with open(tmp_path / "terminal", "w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["course", "grade", str(tmp_path / "class")]) == 0
    assert "\\u4e2d" in (tmp_path / "terminal").read_text() and "zoe: 2" in (tmp_path / "terminal").read_text()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_processes_that_an_answer_leaves_are_ended(course, tmp_path):
    answer = f"""import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    while True:
        time.sleep(1)
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.01)
{RIGHT["slots"]}"""
    make_copy(course, tmp_path / "class" / "mallory", {**RIGHT, "slots": answer})
    rows, _ = graded(tmp_path)
    assert rows["mallory", "slots"]["points"] == "1"
    pid = int((tmp_path / "pid").read_text())
    try:
        until = time.monotonic() + 60
        while is_running(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_answers_are_read_before_one_runs_and_write_into_a_folder_that_is_deleted(course, tmp_path):
    zoe = tmp_path / "class" / "zoe" / notebook_of("slots")
    answer = f"open({str(zoe)!r}, 'w').write('')\nopen('mine', 'w').write('')\n{RIGHT['slots']}"
    make_copy(course, tmp_path / "class" / "mallory", {**RIGHT, "slots": answer})
    graded(tmp_path, "--jobs", "1")
    assert not list(tmp_path.rglob("mine")) and not (Path.cwd() / "mine").exists()


def test_what_a_check_reads_is_the_courses_own(monkeypatch):
    """An answer that empties the workload of the check passes nothing."""
    monkeypatch.chdir(COURSE)
    wrong = ANSWERS["knobs"][1]
    assert not EXERCISES["knobs"].judge(f"workload['requests'].clear()\n{wrong}")
    assert not EXERCISES["knobs"].judge(f"workload = {{'requests': []}}\n{wrong}")
    assert EXERCISES["knobs"].judge(ANSWERS["knobs"][0])


def test_grades_are_printed_if_the_csv_file_cannot_be_written(course, tmp_path, capsys):
    assert main(["course", "grade", str(tmp_path / "class"), "--out", str(tmp_path / "none" / "grades.csv")]) == 2
    said = capsys.readouterr()
    assert "zoe: 2 of 2 points" in said.out and "grades.csv" in said.err
