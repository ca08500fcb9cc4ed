"""The phases of a step that has not ended, and the attention weights of a layer, as one view shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.trace.trace import Trace
from workbench.viz.attention_weights import weights_facts
from workbench.viz.phases import as_dictionaries, describe_phase, likely_tokens, rows_of_logits, verified_drafts


class VisibleStep:
    """Follows the phases of an engine's step, taken from any view.

    Args:
        engine: A controller with ``phase`` and ``capture``, or None.
        newest_trace: Returns its trace.

    Attributes:
        capture: The layer whose attention weights are shown, or None.
    """

    def __init__(self, engine: Any, newest_trace: Callable[[], Trace]) -> None:
        self._engine = engine
        self._newest_trace = newest_trace
        self.capture: Any = None
        self._weights: dict[str, Any] | None = None
        self._phase: tuple[str, Any] | None = None
        self._facts: dict[str, Any] | None = None
        self._batch: Any = None
        self._logits: Any = None

    def follow(self) -> int | None:
        """Describe the latest phase. For a new layer, the result is the row whose weights are to be shown."""
        phase: tuple[str, Any] | None = getattr(self._engine, "phase", None)
        if phase is self._phase:
            return None
        self._phase = phase
        self._facts = None if phase is None else self._describe(*phase)
        if phase is None or self._facts is None or "layer" not in self._facts:
            return None
        layer = self.capture = phase[1]
        # A chosen row stays chosen from layer to layer; at first it is the last row of the first sequence.
        chosen = self._weights if self._weights is not None and self._weights["step"] == layer.step else None
        return layer.cu_seqlens_q[1] - 1 if chosen is None else chosen["row"]

    def status(self) -> dict[str, Any]:
        """The latest phase and the captured layer, for the status of a view."""
        facts: dict[str, Any] = {"phase": self._facts}
        if self.capture is not None:
            facts["capture"] = {
                "layer": self.capture.layer,
                "step": self.capture.step,
                "sequences": list(zip(self.capture.request_ids, self.capture.cu_seqlens_q[1:])),
            }
            facts["weights"] = self._weights
        return facts

    def show_layer(self, capture: Any) -> None:
        """Show the weights of another layer, or of none."""
        self.capture = capture
        self._weights = None

    def show_weights(self, row: int, trace: Trace) -> None:
        """Show the weights of a row.

        Raises:
            ValueError: No layer is captured, or it has no such row.
        """
        if self.capture is None:
            raise ValueError("nothing has been captured: choose a layer and take a step")
        self._weights = weights_facts(self.capture, row, trace, self._decode())

    def _describe(self, name: str, result: Any) -> dict[str, Any]:
        """`describe_phase`, with the number of the step and, for a phase after the forward pass, the likely tokens."""
        if name == "schedule":
            self._batch, self._logits = result, None
        facts = describe_phase(name, result)
        trace = self._newest_trace()
        facts["step"] = getattr(self._batch, "step", trace[-1].step + 1 if len(trace) else 0)
        if name == "forward" and self._batch is not None:
            self._logits = result
            rows = rows_of_logits(self._batch.chunks, (), {})
            facts["candidates"] = likely_tokens(result, [row.request_id for row in rows], self._decode())
        if name in ("forward", "sample") and self._logits is not None and self._batch is not None:
            sampled = [token.token_id for token in result] if name == "sample" else []
            rows = rows_of_logits(self._batch.chunks, sampled, getattr(self._engine, "drafts", {}))
            facts["drafts"] = verified_drafts(self._logits, rows, self._decode())
        if name == "sample" and (tops := [token.top for token in result if getattr(token, "top", None) is not None]):
            facts["candidates"] = as_dictionaries(tops, self._decode())
            facts["facts"] = [(top.request, f"{self._decode()([top.sampled])!r} (id {top.sampled})") for top in tops]
        return facts

    def _decode(self) -> Callable[[list[int]], str]:
        decode = getattr(getattr(self._engine, "tokenizer", None), "decode", None)
        return decode or (lambda ids: f" {ids[0]}")
