"""The stages of a step's computation, and the parts that features take in a step.

A plain step runs the model and samples. Every other feature is a `StepPart`: it adds stages or changes one when it
joins the step, and is asked at the places that it overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.trace import KernelLaunch, StepRecord, Supplement, Trace

if TYPE_CHECKING:
    from workbench.engine.forward.path import ForwardOutput
    from workbench.engine.packed_batch import PackedBatch
    from workbench.engine.sampler import Logits, SampledToken
    from workbench.engine.speculation.proposer import Drafts
    from workbench.scheduler.batch import ScheduledBatch


@dataclass(slots=True)
class Computed:
    """A step's computation, as far as its stages have come.

    Attributes:
        kernel: The launch of the attention kernel.
        sampled: One token or more for each chunk that samples.
        drafts: Drafts for the next step, by request.
        prompt_logprobs: By request what the step found out about its prompt (`prompt_logprobs.PromptLogprobs`).
        supplements: Further facts about the step, which are in the trace.
        batch: The step.
        packed: Its rows.
        lap: Ends a phase of it now.
        output: Result of a forward pass that has been run already.
        logits: The logits of the rows that sample.
    """

    kernel: KernelLaunch | None = None
    sampled: Sequence[Sequence[SampledToken]] = ()
    drafts: Mapping[str, Drafts] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Any] = field(default_factory=dict)
    supplements: Sequence[Supplement] = ()
    batch: ScheduledBatch = None  # type: ignore[assignment]  # the rest is there from the first stage on
    packed: PackedBatch = None  # type: ignore[assignment]
    lap: Callable[[str], None] = lambda phase: None
    output: ForwardOutput | None = None
    logits: Logits = None  # type: ignore[assignment]


Stage = Callable[[Computed], tuple[str, Any] | None]
"""Takes a computation further; returns the phase that a view can stop at, with its result, or None."""

STAGES = ("ask", "forward", "mask", "sample", "draft")
"""The order of all stages. Masks are asked for first, because they are computed beside the forward pass; a mask changes
the logits that tokens are sampled from, and drafts continue sampled tokens."""


class StepPart:
    """The part of a feature in every step. Each method does nothing unless a feature overrides it."""

    def stages(self, others: Mapping[str, Stage]) -> Mapping[str, Stage]:
        """Its stages by their names in STAGES; ``others`` are those of the step without it."""
        return {}

    def took(self, computed: Computed) -> None:
        """Take note of a step's output before its tokens are appended."""

    def updated(self, computed: Computed) -> None:
        """Take note of a step's output after the scheduler has taken it in."""

    def ending(self, iteration: ScheduledBatch) -> None:
        """Take note of the requests that end in an iteration, before their outputs are complete."""

    def recorded(self, record: StepRecord, computed: Computed, trace: Trace) -> Trace:
        """Take note of a step's record, which the trace has; returns the trace that the next one is added to."""
        return trace
