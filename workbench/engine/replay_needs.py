"""The limits of a replay: traces, models and adapters that it refuses, and recorded tokens that it does not judge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from workbench.config import SamplingParams

if TYPE_CHECKING:
    from workbench.models.load import LoadedModel
    from workbench.trace import RequestInfo, StepRecord, Trace

_SAME_MODEL = ("architecture", "num_parameters", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
"""Facts of `ModelRunner.describe` that tell one model from another; the file it came from may have moved."""

_SAME_NUMBERS = ("dtype", "activations")
"""Facts on which the last bits of a model's numbers depend, and with them which of two near tokens wins."""

_CHOICE = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "sampler",
    "logits_processors",
    "structured_outputs",
)
"""Sampling parameters under which the chosen token may be another than the most likely one."""


def step_with_chunks(trace: Trace, step: int) -> StepRecord:
    """A step of a trace that computed something.

    Raises:
        ValueError: There is none; the message says which steps there are.
    """
    for record in trace:
        if record.step == step and record.chunks:
            return record
    raise ValueError(f"step is {step}; it must be a step of this trace with chunks: it holds {trace.steps_in_words}")


def check_trace(trace: Trace, record: StepRecord) -> None:
    """Refuse a step whose blocks hold what the steps before it in the trace did not write.

    Raises:
        ValueError: The message says what is missing.
    """
    if trace.keyframe is not None:
        raise ValueError(
            f"the trace begins at step {trace[0].step}: its blocks were written before; record from the start"
        )
    if record.num_groups > 1:
        raise ValueError(f"the trace has {record.num_groups} KV cache groups, and a replay takes one")
    if (kind := trace.kv_cache_groups[0].kind) != "full_attention":
        raise ValueError(f"the KV cache group of the trace is of kind {kind!r}, and a replay takes full_attention")
    for before in trace:
        if before.step <= record.step and before.loads:
            raise ValueError(
                f"step {before.step} loaded blocks of {before.loads[0].request_id!r} from the second tier, and the "
                "trace does not have what was in them; give an earlier step"
            )


def check_adapters(request: RequestInfo, known: Collection[str]) -> None:
    """Refuse a request whose adapter is not given.

    Raises:
        ValueError: The message names both.
    """
    name = request.adapter
    if name and name not in known:
        raise ValueError(
            f"request {request.request_id!r} was computed with adapter {name!r}, which is not given: "
            f"replay(..., adapters={{{name!r}: its folder}})"
        )


def check_model(trace: Trace, facts: Mapping[str, Any]) -> None:
    """Refuse a model that is not the recorded one.

    Args:
        trace: The recording; one of another engine says less about its model.
        facts: `ModelRunner.describe` of the model that was given.

    Raises:
        ValueError: The message says how they differ.
    """
    recorded = trace.meta.model if trace.meta.source == "engine" else {}
    other = [name for name in _SAME_MODEL if name in recorded and facts.get(name) not in (None, recorded[name])]
    if other:
        differs = ", ".join(f"{name} {recorded[name]!r} instead of {facts[name]!r}" for name in other)
        raise ValueError(f"the trace was recorded with another model, of {differs}: give the recorded one")


def judges_tokens(trace: Trace, model: LoadedModel, request: RequestInfo) -> bool:
    """Whether the recorded tokens of a request should be the most likely ones of a model.

    Tokens of a simulation are made up, and sampling chooses others. Recordings of vLLM do not say how they were chosen.
    """
    meta = trace.meta
    if meta.source.startswith("simulation"):
        return False
    if meta.source == "engine" and any(
        name in meta.model and meta.model[name] != getattr(model, name) for name in _SAME_NUMBERS
    ):
        return False
    greedy = SamplingParams()
    return all(name not in request.sampling or request.sampling[name] == getattr(greedy, name) for name in _CHOICE)
