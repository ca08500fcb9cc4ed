"""A step taken phase by phase: what each phase made, as names and short texts."""

from __future__ import annotations

from typing import Any

MOST_VALUES = 48
"""Values of an array that are written out."""

_WHAT = {
    "schedule": "chosen by the scheduler; nothing has been computed yet",
    "prepare": "what the forward pass is handed",
    "forward": "one row of logits for each sequence that samples",
    "sample": "the tokens that were drawn",
}
"""What a phase made, in words."""


def describe_phase(name: str, made: Any) -> dict[str, Any]:
    """The name of a phase, what it is, and facts about what it made as (name, text) pairs.

    Args:
        name: "schedule", "prepare", "forward" or "sample"; others are described by their attributes.
        made: What ``step_into()`` gave: a scheduled batch, a packed batch, logits or a list of sampled tokens.
    """
    if name == "schedule":
        facts = [
            (
                chunk.request.request_id,
                f"tokens [{chunk.start}, {chunk.start + chunk.num_tokens}), {chunk.arm.replace('_', ' ')}, "
                f"limited by {chunk.limited_by.replace('_', ' ')}"
                + (f", new blocks {_values(chunk.new_block_ids)}" if len(chunk.new_block_ids) else ""),
            )
            for chunk in made.chunks
        ]
    elif name == "forward":
        facts = [("logits", f"{' x '.join(map(str, made.shape))} {made.dtype}")]
    elif name == "sample":
        facts = [(f"row {row}", f"token {token.token_id}") for row, token in enumerate(made)]
        facts = facts or [("none", "no sequence has reached its last known token")]
    else:
        public = {key: value for key, value in _attributes(made).items() if not key.startswith("_")}
        facts = [
            (key, f"{_shape(value)}{_values(value)}") for key, value in public.items() if hasattr(value, "__len__")
        ]
    return {"name": name, "what": _WHAT.get(name, ""), "facts": facts}


def _attributes(made: Any) -> dict[str, Any]:
    names = getattr(type(made), "__dataclass_fields__", None) or getattr(made, "__dict__", {})
    return {name: getattr(made, name) for name in names}


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{getattr(value, 'dtype', '')} [{', '.join(map(str, shape))}]: " if shape is not None else ""


def _values(value: Any) -> str:
    flat = value.ravel().tolist() if hasattr(value, "ravel") else list(value)
    shown = " ".join(str(item) for item in flat[:MOST_VALUES])
    return shown + (f" … {len(flat)} in all" if len(flat) > MOST_VALUES else "")
