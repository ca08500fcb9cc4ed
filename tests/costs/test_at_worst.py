"""A step beyond the measured rows takes at most as long as the measured steps into which it can be cut."""

import pytest

from workbench.simulation.costs.at_worst import TOLERANCE, AtWorst
from workbench.simulation.costs.cost_model import CostModel

PART = (4, 96, 5_000, 40_000)
"""Sequences, prompt rows, KV positions and cells of the largest measured step, of 100 rows."""

MODELS = {
    "fixed": CostModel(fixed=0.1),
    "sequences": CostModel(fixed=0.01, per_sequence=0.02),
    "prompt rows": CostModel(fixed=0.01, per_prefill_token=1e-3, per_prefill_step=0.01),
    "KV positions": CostModel(fixed=0.01, per_kv_token=1e-4),
    "cells": CostModel(fixed=0.01, per_attention_cell=1e-5),
    "hidden arithmetic": CostModel(weights=0.1, per_row=1e-3, per_kv_token=1e-6, overlap=30.0),
}


@pytest.mark.parametrize("times", [2, 5, 7.5])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_so_many_parts_take_so_many_times_as_long(model, times):
    whole = tuple(times * size for size in PART)
    assert AtWorst(model, 100).seconds(whole) == pytest.approx(times * model.seconds(PART))


def test_a_step_that_was_measured_takes_what_the_fit_says():
    model = CostModel(fixed=0.1)
    assert AtWorst(model, 100).seconds((0, TOLERANCE * 100, 0, 0)) == 0.1
    assert AtWorst(model, 100).seconds((0, TOLERANCE * 100 + 1, 0, 0)) > 0.1
