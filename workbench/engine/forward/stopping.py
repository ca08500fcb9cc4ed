"""The forward pass layer by layer: it stops inside the model after each layer's attention and continues from there.

An mlx-lm model is one function of the whole pass, and a layer's attention is the one place in it that is ours. To stop
there, the pass runs as a greenlet: a second stack of calls on the same thread, which can be left in the middle and
entered again. A second thread would not do, because MLX's streams belong to the thread that made them. A greenlet also
has its own context variables, so a value that the stopped pass has set (the rows that its final norm lets through) is
not visible to another model that runs on the thread in the meantime.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

from greenlet import greenlet

from workbench.engine.forward.path import ForwardOutput, ForwardPath
from workbench.engine.packed_batch import PackedBatch
from workbench.models.capture import LayerCapture

if TYPE_CHECKING:
    from workbench.engine.model_runner import ModelRunner
    from workbench.models.layer_cache import AttentionCall, Tap


class StoppingPath(ForwardPath):
    """One forward pass, taken from one layer's attention to the next.

    A model whose attention does its own arithmetic (mode "gather") has no place to stop: its pass is one piece.

    Args:
        runner: Runs the model, layer by layer while something looks at its layers. Nothing else may be asked of it
            until the pass is over.
        packed: The batch.
        step: Index of the step, for the captures.
    """

    name = "stopping"

    def __init__(self, runner: ModelRunner, packed: PackedBatch, step: int) -> None:
        self._thread = threading.current_thread()
        self._pass = greenlet(partial(runner.forward, packed))
        self._pass.gr_context = copy_context()
        self._taps: list[tuple[list[Tap], Tap]] = []
        self._result: ForwardOutput
        if runner.mode == "kernel":
            for index, cache in enumerate(runner.kv_cache.kernel_layers):
                capture = LayerCapture(index)
                tap = partial(self._stop_at, capture, step, packed.request_ids)
                cache.taps.append(tap)
                self._taps.append((cache.taps, tap))

    def advance(self) -> LayerCapture | None:
        """Continue to the next layer's attention; None when the pass is over.

        Returns:
            The layer's inputs and its output.

        Raises:
            Exception: The pass raised it.
        """
        made = self._pass.switch()
        if not self._pass.dead:
            return made
        self._result = made
        return None

    def run(self, packed: PackedBatch) -> ForwardOutput:
        """Take what is left of the pass, without a stop; see `ForwardPath.run`."""
        self._stop_no_more()
        if not self._pass.dead:
            self.advance()
        return self._result

    def _stop_no_more(self) -> None:
        """Let the pass go to its end."""
        for taps, tap in self._taps:
            taps.remove(tap)
        self._taps.clear()

    def close(self) -> None:
        """Give up what is left of the pass, as if it had been interrupted; nothing happens when it is over."""
        self._stop_no_more()
        # Only its own thread can enter a greenlet. An engine that is collected elsewhere takes its pool with it.
        if self._pass and threading.current_thread() is self._thread:
            self._pass.throw()

    def _stop_at(self, capture: LayerCapture, step: int, request_ids: Sequence[str], call: AttentionCall) -> None:
        capture.fill(step, call, request_ids)
        self._pass.parent.switch(capture)
