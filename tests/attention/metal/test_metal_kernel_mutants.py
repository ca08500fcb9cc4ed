"""The tests catch every kernel with a fault from `kernel_mutants`, and the unchanged kernels pass."""

import pytest
from kernel_mutants import MUTANTS, why_caught
from msl_runs import skip_without_compiler

skip_without_compiler()


def test_the_kernels_as_they_are_pass():
    assert why_caught(None) == ""


@pytest.mark.repeats(step=26)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant):
    assert why_caught(mutant)
