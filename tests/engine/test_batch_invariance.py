"""Logits are the same to the last bit whatever else is in the batch, with packed weights on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, tiny_loaded_model

from workbench import Engine, EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import Segment, pack

SIZE, NUM_BLOCKS, LONGEST = 8, 256, 90
SIZES = (1, 2, 3, 5, 8, 15)


class Runs:
    """Requests with random tokens on one pool, each with blocks that nobody else has."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.runner, self.rng, self._free = runner, np.random.default_rng(seed), iter(range(1, NUM_BLOCKS))

    def request(self, length: int, hit: tuple[list[int], list[int]] | None = None) -> tuple[list[int], list[int]]:
        """Tokens and block table; a hit is another request, whose blocks come first, and whose tokens these are."""
        tokens, table = hit or (self.rng.integers(1, VOCAB_SIZE, length).tolist(), [])
        return tokens, [*table, *(next(self._free) for _ in range(-(-length // SIZE) - len(table)))]

    def logits(self, *parts: tuple[tuple[list[int], list[int]], int, int]) -> np.ndarray:
        """Logits after the last of the tokens [start, stop) of each request, computed together."""
        segments = [
            Segment(table, start, stop - start, tokens[start:stop], 1, str(index))
            for index, ((tokens, table), start, stop) in enumerate(parts)
        ]
        return np.array(self.runner.forward(pack(segments, SIZE))[0].values)

    def decode(self, length: int) -> tuple[tuple[list[int], list[int]], int, int]:
        """A request whose next row is a decode."""
        request = self.request(length)
        self.logits((request, 0, length - 1))
        return request, length - 1, length


def runner_of(model, *, batch_invariant=False):
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=SIZE,
        max_num_batched_tokens=512,
        max_model_len=128,
        batch_invariant=batch_invariant,
        attention_backend="cpu",
    )
    return ModelRunner(model, config)


@pytest.fixture(scope="module")
def runner(smollm2):
    runner = runner_of(smollm2, batch_invariant=True)
    assert runner.path.name == "compiled"
    yield runner
    runner.close()


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("seed", [3, 0, 1, 2])  # the first has the most batches
def test_a_row_has_the_same_bits_in_every_batch(runner, seed):
    runs = Runs(runner, seed)
    length = int(runs.rng.integers(12, LONGEST))
    request, prompt = runs.decode(length), runs.request(length)
    alone, whole = runs.logits(request)[0], runs.logits((prompt, 0, length))[0]
    for count in SIZES[: 3 + seed % 4]:
        others = [runs.decode(int(runs.rng.integers(3, 20))) for _ in range(count)]
        place = int(runs.rng.integers(0, count + 1))
        batch = [*others[:place], request, *others[place:]]
        np.testing.assert_array_equal(runs.logits(*batch)[place], alone)
    beside = (runs.request(40), 0, 40)
    np.testing.assert_array_equal(runs.logits(request, beside)[0], alone)
    np.testing.assert_array_equal(runs.logits(beside, (prompt, 0, length))[1], whole)
    for cut in (1, int(runs.rng.integers(2, length - 1)), length - 1):
        chunked = runs.request(length, hit=(prompt[0], []))
        runs.logits((chunked, 0, cut), beside)
        np.testing.assert_array_equal(runs.logits((chunked, cut, length))[0], whole)
    found = runs.request(length, hit=(prompt[0], prompt[1][: (length - 2) // SIZE]))
    np.testing.assert_array_equal(runs.logits((found, (length - 2) // SIZE * SIZE, length))[0], whole)


def test_without_it_a_row_that_is_computed_alone_differs_in_its_last_bits(smollm2):
    """The control: a chunk of one row is computed as a decode is, whose sums have another order."""
    runner, differ = runner_of(smollm2), 0
    for seed in range(2):
        runs = Runs(runner, 100 + seed)
        request = runs.request(LONGEST)
        whole = runs.logits((request, 0, LONGEST))[0]
        again = runs.request(LONGEST, hit=(request[0], []))
        runs.logits((again, 0, LONGEST - 1))
        single = runs.logits((again, LONGEST - 1, LONGEST))[0]
        np.testing.assert_allclose(single, whole, rtol=0, atol=1e-4)
        differ += bool((single != whole).any())
    runner.close()
    assert differ


@pytest.mark.parametrize(("architecture", "problem"), [("llama", "weights are not packed"), ("mamba", "not packed")])
def test_a_model_without_compiled_code_is_refused(architecture, problem):
    with pytest.raises(ValueError, match=f"batch_invariant=True takes compiled code.*{problem}.*set it to False"):
        Engine(tiny_loaded_model(architecture), EngineConfig(num_blocks=40, batch_invariant=True))


def test_products_of_a_blas_depend_on_the_number_of_rows():
    """The control: weights that are not packed are multiplied by the BLAS."""
    runner, differ = runner_of(tiny_loaded_model("llama")), 0
    for seed in range(6):
        runs = Runs(runner, seed)
        request, others = runs.decode(LONGEST), [runs.decode(9) for _ in range(7)]
        differ += bool((runs.logits(request, *others)[0] != runs.logits(request)[0]).any())
    runner.close()
    assert differ
