"""Steps that are as late as most others of their size are not stalls: their size costs more than the model knows."""

import pytest

from workbench.simulation.costs.fit import find_stalls
from workbench.simulation.costs.step_model import StepCosts


def steps_with(late, calm=0):
    """A decode of 4 sequences again and again, and some of 7, the first of which are ten times as late."""
    features = [(4, 0, 100.0 + i, 0.0) for i in range(200)] + [(7, 0, 150.0, 0.0)] * (late + calm)
    seconds = [0.1 + 1e-6 * i for i in range(200)] + [1.0] * late + [0.1] * calm
    return StepCosts(features, seconds, [(0, i) for i in range(len(seconds))], [0.0] * len(seconds))


@pytest.mark.parametrize(("late", "calm", "found"), [(1, 0, 1), (2, 0, 2), (3, 0, 0), (9, 0, 0), (2, 5, 2), (4, 9, 4)])
def test_late_steps_are_stalls_unless_most_of_their_size_are_late(late, calm, found):
    assert sorted(find_stalls(steps_with(late, calm))) == list(range(200, 200 + found))
