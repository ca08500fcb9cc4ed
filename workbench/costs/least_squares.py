"""Least squares with a handful of unknowns, in plain Python: a fit runs where numpy is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

DEPENDENT = 1e-12
"""An unknown whose column is a combination of earlier ones up to this share of its square is left at 0."""

MAX_REFINEMENTS = 3
"""Maximum number of corrections from the residual: a solution of the products alone has half of the digits."""

REFINED = 1e-7
"""A correction by a smaller share is the last one: the next would be its square."""

Vector = Sequence[float]


def dot(one: Iterable[float], other: Iterable[float]) -> float:
    """The sum of the products of two columns."""
    return sum(map(mul, one, other))


def combined(columns: Sequence[Vector], coefficients: Sequence[float]) -> list[float]:
    """The sum of columns times their coefficients.

    Args:
        columns: At least one column, each with a number per row.
        coefficients: One per column.
    """
    used = [(column, factor) for column, factor in zip(columns, coefficients) if factor]
    if not used:
        return [0.0] * len(columns[0])
    column, factor = used[0]
    total = [factor * value for value in column]
    for column, factor in used[1:]:
        total = [so_far + factor * value for so_far, value in zip(total, column)]
    return total


def solve(products: Sequence[Vector], right: Vector) -> list[float]:
    """The x with products @ x = right, by Cholesky's method; dependent unknowns are 0.

    Args:
        products: A symmetric positive semi-definite matrix, such as the products of columns with each other.
        right: One number per row.
    """
    count = len(right)
    lower: list[list[float]] = []
    reduced: list[float] = []
    for i in range(count):
        row: list[float] = []
        for j in range(i):
            pivot = lower[j][j]
            row.append((products[i][j] - dot(row, lower[j])) / pivot if pivot else 0.0)
        left = products[i][i] - dot(row, row)
        row.append(math.sqrt(left) if left > DEPENDENT * products[i][i] else 0.0)
        reduced.append((right[i] - dot(row, reduced)) / row[i] if row[i] else 0.0)
        lower.append(row)
    solution = [0.0] * count
    for i in reversed(range(count)):
        if pivot := lower[i][i]:
            solution[i] = (reduced[i] - sum(lower[k][i] * solution[k] for k in range(i + 1, count))) / pivot
    return solution


def non_negative_least_squares(columns: Sequence[Vector], target: Vector, weights: Vector) -> list[float]:
    """The x >= 0 that minimises the weighted sum of squares of target - sum(x * columns).

    Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, chapter 23).

    Args:
        columns: Columns of non-negative numbers, each with one per row.
        target: One number per row.
        weights: Weight of each row.
    """
    count = len(columns)
    weighted = [list(map(mul, weights, column)) for column in columns]
    # Columns differ by ten orders of magnitude: scale each to length 1.
    scale = [max(math.sqrt(dot(one, column)), 1e-150) for one, column in zip(weighted, columns)]
    products = [[0.0] * count for _ in columns]
    for i in range(count):
        for j in range(i + 1):
            products[i][j] = products[j][i] = dot(weighted[i], columns[j]) / scale[i] / scale[j]
    right = [dot(column, target) / size for column, size in zip(weighted, scale)]
    tolerance = 1e-10 * math.sqrt(dot(map(mul, weights, target), target))
    solution, active = [0.0] * count, list[int]()
    for _ in range(10 * count):
        gradient = {i: right[i] - dot(products[i], solution) for i in range(count) if i not in active}
        candidate = max(gradient, key=gradient.__getitem__, default=0)
        if not gradient or not gradient[candidate] > tolerance:
            break
        active = sorted([*active, candidate])
        while True:
            trial = _solve_active(products, right, active)
            negative = [i for i in active if trial[i] <= 0]
            if not negative:
                break
            part = min(solution[i] / max(solution[i] - trial[i], 1e-300) for i in negative)
            solution = [old + part * (new - old) for old, new in zip(solution, trial)]
            smallest = 1e-15 * max(solution)
            active = [i for i in active if solution[i] > smallest]
            solution = [value if i in active else 0.0 for i, value in enumerate(solution)]
        solution = trial
    for _ in range(MAX_REFINEMENTS if active else 0):
        fitted = combined([columns[i] for i in active], [solution[i] / scale[i] for i in active])
        residual = [wanted - found for wanted, found in zip(target, fitted)]
        left = [dot(weighted[i], residual) / scale[i] if i in active else 0.0 for i in range(count)]
        changes = _solve_active(products, left, active)
        refined = [old + change for old, change in zip(solution, changes)]
        if min(refined) < 0:
            break
        solution = refined
        if max(map(abs, changes)) <= REFINED * max(solution):
            break
    return [value / size for value, size in zip(solution, scale)]


def _solve_active(products: Sequence[Vector], right: Vector, active: Sequence[int]) -> list[float]:
    """The solution in the active unknowns; the others are 0."""
    found = iter(solve([[products[i][j] for j in active] for i in active], [right[i] for i in active]))
    return [next(found) if i in active else 0.0 for i in range(len(right))]
