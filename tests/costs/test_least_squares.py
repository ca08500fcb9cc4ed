"""Least squares in plain Python against numpy's, and the fit and its trend against formulas in numpy."""

import itertools
import math
import random

import numpy as np
import pytest

from workbench.simulation.costs.drift import STRETCHES, find_drift, stretches
from workbench.simulation.costs.least_squares import combined, non_negative_least_squares, normal_equations, solve
from workbench.simulation.costs.step_model import columns, predicted_seconds, slopes


def random_problem(seed, rows=50, count=5):
    """Columns that differ by nine orders of magnitude, a target between them, and weights; some columns equal."""
    rng = np.random.default_rng(seed)
    matrix = np.abs(rng.normal(size=(rows, count))) * 10.0 ** rng.integers(-3, 6, count)
    matrix[:, 0] = 10.0 ** rng.integers(-3, 6)
    if seed % 3 == 0:
        matrix[:, 1] = 0.0 if seed % 2 else 3 * matrix[:, 0]
    target = matrix @ (rng.normal(size=count) / np.maximum(np.abs(matrix).max(axis=0), 1e-9)) + rng.normal(size=rows)
    return matrix, target, rng.uniform(0.1, 10, rows)


def solved(matrix, target, weights):
    """The solution from the normal equations; the first column is constant."""
    constant = matrix[0, 0]
    lower, right = normal_equations(matrix.T[1:].tolist(), target.tolist(), weights.tolist())
    products = [[lower[max(i, j)][min(i, j)] for j in range(len(right))] for i in range(len(right))]
    first, *others = non_negative_least_squares(products, right)
    return np.array([first / constant, *others])


def best_subset(matrix, target, weights):
    """The smallest weighted sum of squares with coefficients >= 0, from every subset of the columns."""
    roots = np.sqrt(weights)
    smallest = ((target * roots) ** 2).sum()
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), size):
            part = matrix[:, chosen] * roots[:, None]
            found = np.linalg.lstsq(part, target * roots, rcond=None)[0]
            if (found >= 0).all():
                smallest = min(smallest, ((part @ found - target * roots) ** 2).sum())
    return smallest


@pytest.mark.parametrize("seed", range(40))
def test_coefficients_are_never_negative_and_the_best(seed):
    matrix, target, weights = random_problem(seed)
    found = solved(matrix, target, weights)
    assert min(found) >= 0
    misfit = (weights * (matrix @ found - target) ** 2).sum()
    assert misfit == pytest.approx(best_subset(matrix, target, weights), rel=1e-9)


def test_a_coefficient_that_is_slightly_wrong_is_not_the_best():
    """The check above sees an error of one in a thousand."""
    matrix, _, weights = random_problem(1)
    target = matrix @ (3 / matrix.max(axis=0)) + np.random.default_rng(1).normal(size=len(matrix))
    found = solved(matrix, target, weights)
    largest = int(np.argmax(found * np.abs(matrix).sum(axis=0)))
    found[largest] *= 1.001
    misfit = (weights * (matrix @ found - target) ** 2).sum()
    assert misfit != pytest.approx(best_subset(matrix, target, weights), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_nearly_dependent_columns_cost_the_coefficients_digits_and_the_sum_none(seed):
    """Columns of which two are equal except for one part in 1,000."""
    rng = np.random.default_rng(seed)
    base = rng.uniform(1, 2, 200)
    matrix = np.column_stack([np.ones(200), base, base + 1e-3 * rng.uniform(0, 1, 200), rng.uniform(0, 1, 200)])
    true = rng.uniform(0.5, 2, 4)
    target = matrix @ true
    found = solved(matrix, target, np.ones(200))
    assert found == pytest.approx(true, rel=1e-6)
    assert matrix @ found == pytest.approx(target, rel=1e-10)


@pytest.mark.parametrize("seed", range(20))
def test_equations_are_solved_as_numpy_solves_them(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 6))
    products, right = matrix.T @ matrix, rng.normal(size=6)
    assert solve(products.tolist(), right.tolist()) == pytest.approx(np.linalg.solve(products, right), rel=1e-9)
    twice = np.hstack([matrix, matrix[:, :1]])
    solution = solve((twice.T @ twice).tolist(), [*right, right[0]])
    assert solution[-1] == 0.0  # the dependent unknown
    assert twice.T @ twice @ solution == pytest.approx([*right, right[0]], rel=1e-9)


def random_steps(seed, count=300):
    rng = random.Random(seed)
    features = [
        (rng.randint(1, 40), rng.choice([0, 0, rng.randint(1, 500)]), rng.randint(1, 9000), rng.randint(0, 90000))
        for _ in range(count)
    ]
    names = ("fixed", "weights", "per_sequence", "per_prefill_token", "per_row", "per_kv_token")
    values = {name: rng.choice([0.0, rng.uniform(1e-5, 1e-3)]) for name in names}
    return features, values | {"fixed": 0.01, "per_attention_cell": 1e-8, "overlap": rng.choice([1.0, 1.5, 4.0, 30.0])}


@pytest.mark.parametrize("seed", range(12))
def test_durations_and_slopes_are_those_of_the_formula(seed):
    features, values = random_steps(seed)
    sequences, prefill, kv_tokens, cells = np.array(features, float).T
    p = values["overlap"]

    def seconds(of):
        memory = of.get("weights", 0) + of.get("per_kv_token", 0) * kv_tokens
        compute = of.get("per_prefill_token", 0) * prefill + of.get("per_row", 0) * (sequences + prefill)
        compute = compute + of.get("per_attention_cell", 0) * cells
        added = of["fixed"] + of.get("per_sequence", 0) * sequences
        return added + of.get("per_prefill_step", 0) * (prefill > 0) + (memory**p + compute**p) ** (1 / p)

    assert predicted_seconds(values, features) == pytest.approx(seconds(values), rel=1e-9)
    positive = [name for name, value in values.items() if value > 0 and name in columns(features)]
    for name, slope in zip(positive, slopes(values, features), strict=True):
        step = 1e-6 * values[name]
        both = [seconds(values | {name: values[name] + sign * step}) for sign in (1, -1)]
        assert slope == pytest.approx((both[0] - both[1]) / (2 * step), rel=1e-3, abs=1e-3 * max(slope) + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_trend_is_that_of_numpys_least_squares(seed):
    features, values = random_steps(seed)
    rng = np.random.default_rng(seed)
    predicted = np.array(predicted_seconds(values, features))
    rows = np.array([sequences + prefill for sequences, prefill, _, _ in features], float)
    measured = predicted * rng.lognormal(0, 0.1, len(rows)) * (1 + 0.3 * np.arange(len(rows)) / len(rows))
    gradients = slopes(values, features)
    progress = np.cumsum(rows) / rows.sum()
    center = np.average(progress, weights=predicted)
    matrix = np.column_stack([*gradients, predicted * (progress - center)]) / np.sqrt(predicted)[:, None]
    scale = np.linalg.norm(matrix, axis=0)

    def change(kept):
        found = np.linalg.lstsq(matrix[kept] / scale, (measured / np.sqrt(predicted))[kept], rcond=1e-9)[0][-1]
        return found / scale[-1] / (measured.sum() / predicted.sum())

    parts = [np.arange(len(rows))[part] for part in stretches(len(rows), STRETCHES)]
    without = np.array([change(np.setdiff1d(np.arange(len(rows)), part)) for part in parts])
    error = math.sqrt((STRETCHES - 1) * ((without - without.mean()) ** 2).mean())
    drift = find_drift(rows.tolist(), measured.tolist(), predicted.tolist(), gradients)
    assert drift.change == pytest.approx(change(np.arange(len(rows))), rel=1e-6)
    assert drift.error == pytest.approx(error, rel=1e-3)


def test_stretches_cover_a_sequence_once():
    for length, count in [(20, 8), (7, 7), (397, 20)]:
        cut = [range(length)[part] for part in stretches(length, count)]
        assert [*itertools.chain(*cut)] == [*range(length)]
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_sum_of_no_column_is_zero():
    assert combined([[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0]) == [0.0, 0.0]
