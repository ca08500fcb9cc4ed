"""The puzzles about kernels: right answers on other random numbers, and the hint for each wrong one."""

import pytest
from kernel_answers import RIGHT, WRONG
from tiers import examples

from workbench import course, msl
from workbench.apps.course.puzzle_judge import HINTS
from workbench.apps.course.puzzle_list import PUZZLES
from workbench.apps.course.tile_puzzle import shipped_part
from workbench.kernels.msl.report import DESCRIPTIONS

needs_compiler = pytest.mark.skipif(bool(msl.why_unavailable()), reason=msl.why_unavailable() or "")
NAMES = [*PUZZLES, "paged_tile"]


def test_there_are_sixteen_puzzles_and_a_tile_each_with_answers():
    assert len(PUZZLES) == 16
    assert list(RIGHT) == list(WRONG) == NAMES
    assert all(len(wrong) >= 3 for wrong in WRONG.values())
    assert set(HINTS) <= set(DESCRIPTIONS), "hints are for faults that exist"


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_is_right_for_all_numbers(name):
    for seed in range(examples(2)):
        verdict = course.check_kernel(name, RIGHT[name], seed=seed)
        assert verdict, f"seed {seed}: {verdict}"


def check_wrong_answers(name, answers):
    for source, hint in answers:
        verdict = course.check_kernel(name, source)
        assert not verdict, f"accepted: {source}"
        assert hint in verdict.message, f"{verdict} does not say {hint!r}"


def of_new_hints(name):
    """The wrong answers of a puzzle, the first for each of its hints."""
    first = {hint or source: (source, hint) for source, hint in reversed(WRONG[name])}
    return list(first.values())


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_gets_a_hint_that_names_the_mistake(name):
    check_wrong_answers(name, of_new_hints(name))


@pytest.mark.repeats(of="test_a_wrong_answer_gets_a_hint_that_names_the_mistake")
@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_other_wrong_answers_get_the_same_hints(name):
    check_wrong_answers(name, [answer for answer in WRONG[name] if answer not in of_new_hints(name)])


@pytest.mark.repeats(of="test_a_right_answer_is_right_for_all_numbers")
@needs_compiler
def test_the_kernel_as_it_ships_solves_the_last_puzzle():
    assert course.check_kernel("paged_tile", shipped_part())


def test_an_unknown_puzzle_and_an_empty_answer():
    with pytest.raises(ValueError, match="name must be"):
        course.check_kernel("sort", "y[0] = 0;")
    if not msl.why_unavailable():
        assert PUZZLES["map"].task in course.check_kernel("map", "  ").message


def test_a_machine_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr(msl, "why_unavailable", lambda: "there is no clang")
    assert course.check_kernel("map", RIGHT["map"]).message == "kernels cannot run here: there is no clang"
