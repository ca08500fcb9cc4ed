"""mlx-lm's continuous batching, with requests that arrive while it runs: the loop under ``batch_generate``."""

from __future__ import annotations

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from serving.replay import Events


class MlxLmEngine:
    """A BatchGenerator with its defaults (8 prompts at once, 2,048 tokens of each per step).

    Args:
        model: An mlx-lm model.
        concurrency: Sequences that decode at once.
    """

    def __init__(self, model: nn.Module, concurrency: int) -> None:
        self._generator = BatchGenerator(model, completion_batch_size=concurrency)
        self._index: dict[int, int] = {}
        self._unscheduled: set[int] = set()

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        (uid,) = self._generator.insert([prompt], [max_tokens])
        self._index[uid] = index
        self._unscheduled.add(uid)

    def step(self) -> Events:
        """One ``next()``: a decode step, then a prefill step."""
        prompts, generated = self._generator.next()
        begun = [response.uid for response in prompts if response.uid in self._unscheduled]
        self._unscheduled.difference_update(begun)
        return Events(
            [self._index[uid] for uid in begun],
            [(self._index[response.uid], response.token) for response in generated],
        )

    def close(self) -> None:
        """Release the generator's resources."""
        self._generator.close()
