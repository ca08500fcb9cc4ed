"""The grader: right and wrong answers to every exercise, and copies of the course."""

import csv
import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from course_answers import ANSWERS
from tiers import examples

from workbench.apps.cli import main
from workbench.apps.cli.notebooks import COURSE, copy_course
from workbench.apps.course.grade import exercises, find_copies, grade

EXERCISES = {exercise.name: exercise for exercise in exercises(COURSE)}
QUICK = ("slots", "victim", "cached_tokens", "tokens_kept")


def test_every_notebook_has_an_exercise_and_every_exercise_has_answers():
    assert [exercise.notebook for exercise in EXERCISES.values()] == [
        path.name for path in sorted(COURSE.glob("*.ipynb"))
    ]
    assert set(ANSWERS) == set(EXERCISES)
    assert all(len(set(answers)) >= 4 for answers in ANSWERS.values())


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_answer_is_accepted_and_three_wrong_ones_get_a_hint(name, monkeypatch):
    monkeypatch.chdir(COURSE)
    exercise, (right, *wrong) = EXERCISES[name], ANSWERS[name]
    verdict = exercise.judge(right)
    assert verdict, verdict
    assert exercise.hint
    for answer in (*wrong, exercise.answer):
        verdict = exercise.judge(answer)
        assert not verdict, f"accepted:\n{answer}"
        assert len(verdict.message) > 20, verdict


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            "def slot_of(block_table, position, block_size):\n    return 1 / 0",
            "raises ZeroDivisionError: division by zero",
        ),
        ("x = 1\nundefined", "line 2: NameError: name 'undefined' is not defined"),
        ("def slot_of(:", "SyntaxError"),
        ("slot = 3", "NameError: name 'slot_of' is not defined"),
    ],
)
def test_an_answer_that_fails_is_told_why(answer, reason):
    verdict = EXERCISES["slots"].judge(answer)
    assert not verdict and reason in verdict.message


def test_the_grades_on_the_page_for_teachers_are_those_of_the_exercises(monkeypatch):
    monkeypatch.chdir(COURSE)
    page = (Path(__file__).parents[2] / "docs" / "teaching.md").read_text()
    ((reached, possible, listed),) = re.findall(r"ada: (\d+) of (\d+) points\n((?: {8,}\S.*\n)+)", page)
    wrong = re.findall(r"^ {8}(\d\d) (\w+): (.*)\n +Hint: (.*)", listed, re.MULTILINE)
    assert int(possible) == sum(exercise.points for exercise in EXERCISES.values())
    assert int(reached) == int(possible) - sum(EXERCISES[name].points for _, name, _, _ in wrong)
    answers = {"slots": "def slot_of(block_table, position, block_size):\n    return 0"}
    for number, name, reason, hint in wrong:
        exercise = EXERCISES[name]
        assert exercise.notebook.startswith(number) and exercise.hint == hint
        # A grader says "not answered yet" of an answer that is still the notebook's own.
        assert reason == (exercise.judge(answers[name]).message if name in answers else "not answered yet")


def write_answers(folder, answers):
    """Put answers into the notebooks of a copy, by exercise."""
    for name, answer in answers.items():
        path = folder / EXERCISES[name].notebook
        notebook = json.loads(path.read_text())
        (cell,) = [c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == name]
        cell["source"] = answer.splitlines(keepends=True)
        path.write_text(json.dumps(notebook))


@pytest.fixture
def small_course(tmp_path):
    """A course of four exercises that are judged quickly."""
    folder = tmp_path / "course"
    folder.mkdir()
    for name in QUICK:
        shutil.copy(COURSE / EXERCISES[name].notebook, folder)
    return folder


def test_thirty_copies_are_graded_with_one_command(tmp_path, small_course, capsys, monkeypatch):
    """Every copy gets the points of its answers, whatever else is in it, and the same ones again."""
    monkeypatch.setattr("workbench.apps.cli.course.COURSE", small_course)
    rng, expected = random.Random(36), {}
    for number in range(examples(30)):
        copy = tmp_path / "class" / f"student{number:02d}"
        shutil.copytree(small_course, copy)
        chosen = {name: rng.randrange(4) for name in QUICK}
        write_answers(copy, {name: ANSWERS[name][place] for name, place in chosen.items()})
        expected[copy.name] = sum(place == 0 for place in chosen.values())
    assert len(set(expected.values())) > 2
    command = ["course", "grade", str(tmp_path / "class"), "--out", str(tmp_path / "grades.csv")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for name, points in expected.items():
        assert f"{name}: {points} of 4 points" in printed
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(expected) and sum(int(row["points"]) for row in rows) == sum(expected.values())
    assert all(row["reason"] and bool(row["hint"]) == (row["points"] == "0") for row in rows)
    again = grade(tmp_path / "class" / "student07", small_course)
    assert [(result.points, result.reason) for result in again] == [
        (int(row["points"]), row["reason"]) for row in rows if row["copy"] == "student07"
    ]


def test_nothing_but_the_answer_counts(tmp_path, small_course):
    """A changed check, made-up outputs and other cells give no points."""
    copy = tmp_path / "copy"
    shutil.copytree(small_course, copy)
    path = copy / EXERCISES["slots"].notebook
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade"):
            cell["source"] = ["Verdict(True, 'of course')"]
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["Right"]}]
    path.write_text(json.dumps(notebook))
    write_answers(copy, {"victim": ANSWERS["victim"][0]})
    (copy / EXERCISES["cached_tokens"].notebook).unlink()
    (copy / EXERCISES["tokens_kept"].notebook).write_text("{")
    found = {result.exercise: result for result in grade(copy, small_course)}
    assert [name for name, result in found.items() if result.points] == ["victim"]
    assert found["slots"].reason == "not answered yet" and found["cached_tokens"].reason == "the notebook is missing"
    assert "is not a notebook" in found["tokens_kept"].reason


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("while True: pass", "it took more than 5 s"),
        ("import os; os._exit(3)", "it ended the process with status 3: no message"),
        ("print('Right')\nraise SystemExit('enough')", "it ended the process with status 1: enough"),
    ],
)
def test_an_answer_that_never_comes_back_costs_its_points_only(tmp_path, small_course, answer, reason):
    copy = tmp_path / "copy"
    shutil.copytree(small_course, copy)
    write_answers(copy, {"slots": answer, "victim": ANSWERS["victim"][0]})
    began = time.monotonic()
    found = {result.exercise: result for result in grade(copy, small_course, timeout=5)}
    assert found["slots"].reason == reason and found["slots"].hint and time.monotonic() - began < 60
    if "True" not in answer:
        assert found["victim"].points == 1


def test_what_is_no_copy_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"neither NAME\.ipynb nor COPY/NAME\.ipynb"):
        find_copies(tmp_path)
    assert main(["course", "grade", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder: name a copy" in capsys.readouterr().err


@pytest.mark.repeats(of="test_a_right_answer_is_accepted_and_three_wrong_ones_get_a_hint")
def test_a_whole_course_is_graded(tmp_path):
    """A copy as `workbench notebooks` makes it, with every right answer."""
    copy_course(tmp_path / "copy")
    write_answers(tmp_path / "copy", {name: answers[0] for name, answers in ANSWERS.items()})
    found = grade(tmp_path / "copy", Path(COURSE), timeout=300)
    assert all(result.points for result in found), [result for result in found if not result.points]
