"""Least squares with a handful of unknowns, in plain Python: a fit runs where numpy is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

DEPENDENT = 1e-12
"""An unknown whose column is a combination of earlier ones up to this share of its square is left at 0."""

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
        products: A symmetric positive semi-definite matrix, such as the products of columns with each other; of each
            row, only the part up to the diagonal is read.
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


def normal_equations(
    columns: Sequence[Vector], target: Vector, weights: Vector
) -> tuple[list[list[float]], list[float]]:
    """The products of a constant 1 and of columns with each other and with a target, each row times its weight.

    Args:
        columns: Columns, each with a number per row.
        target: One number per row.
        weights: Weight of each row.

    Returns:
        The lower triangle of the products, in which the constant comes first, and the products with the target.
    """
    weighted = [weights, *(list(map(mul, weights, column)) for column in columns)]
    products = [[sum(one), *(dot(one, columns[k]) for k in range(i))] for i, one in enumerate(weighted)]
    return products, [dot(one, target) for one in weighted]


def non_negative_least_squares(products: Sequence[Vector], right: Vector) -> list[float]:
    """The x >= 0 that minimises the sum of squares with these normal equations.

    Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, chapter 23). If columns are nearly
    dependent, the products lose up to half of the digits of x, but hardly any of the sum that fits the target.

    Args:
        products: Products of the columns with each other.
        right: Their products with the target.
    """
    count = len(right)
    # Columns differ by ten orders of magnitude: scale each to length 1.
    scale = [max(math.sqrt(products[i][i]), 1e-150) for i in range(count)]
    products = [[value / one / size for value, size in zip(row, scale)] for row, one in zip(products, scale)]
    right = [value / size for value, size in zip(right, scale)]
    tolerance = 1e-10 * max(right, default=0.0)
    solution, active = [0.0] * count, list[int]()
    for _ in range(10 * count):
        gradient = {i: right[i] - dot(products[i], solution) for i in range(count) if i not in active}
        candidate = max(gradient, key=gradient.__getitem__, default=0)
        if not gradient or not gradient[candidate] > tolerance:
            break
        active = sorted([*active, candidate])
        while True:
            found = solve([[products[i][j] for j in active] for i in active], [right[i] for i in active])
            trial = [0.0] * count
            for i, value in zip(active, found):
                trial[i] = value
            negative = [i for i in active if trial[i] <= 0]
            if not negative:
                break
            part = min(solution[i] / max(solution[i] - trial[i], 1e-300) for i in negative)
            solution = [old + part * (new - old) for old, new in zip(solution, trial)]
            smallest = 1e-15 * max(solution)
            active = [i for i in active if solution[i] > smallest]
            solution = [value if i in active else 0.0 for i, value in enumerate(solution)]
        solution = trial
    return [value / size for value, size in zip(solution, scale)]
