"""The preflight of a loaded model, which runs once for the same weights."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from workbench.kernels.attention.backend import AttentionBackend
from workbench.models.layer_cache import LayerKV
from workbench.models.load import LoadedModel
from workbench.models.model_code import code_digest
from workbench.models.preflight import preflight
from workbench.models.preflight_result import PreflightResult
from workbench.models.remembered import NOTHING
from workbench.models.state_cache import LayerState


def preflight_once(loaded: LoadedModel, backend: AttentionBackend, kv_cache_dtype: str = "auto") -> PreflightResult:
    """`preflight` of a loaded model, which runs once for the same weights.

    A second engine over a model starts at once, and so does the first one if an earlier start has found the result:
    four forward passes of SmolLM2 take half a second on a CPU.

    Raises:
        UnsupportedModelError: It cannot be served; the message gives the reason.
    """
    weights = list(dict(tree_flatten(loaded.model.parameters())).values())
    code = code_digest(loaded.model)
    key = (backend, kv_cache_dtype, str(mx.default_device()), code)
    seen, result = loaded.preflights.get(key, ((), None))
    # Weak references: the result must not keep an old array alive, and a new array may get an old one's id.
    if result is None or len(seen) != len(weights) or any(ref() is not array for ref, array in zip(seen, weights)):
        result = _remembered_or_new(loaded, backend, kv_cache_dtype, code)
        loaded.preflights[key] = (tuple(map(weakref.ref, weights)), result)
    return result


def _remembered_or_new(
    loaded: LoadedModel, backend: AttentionBackend, kv_cache_dtype: str, code: str
) -> PreflightResult:
    own = type(backend).__module__.startswith("workbench")  # the key has no sources of others
    remembered = loaded.remembered if own else NOTHING
    name = f"preflight, {backend.name}, {kv_cache_dtype}, {code}"
    if (found := remembered.get(name)) is not None:
        return from_json(found)
    result = preflight(loaded.model, backend, kv_cache_dtype)
    remembered.put(name, to_json(result))
    return result


def to_json(result: PreflightResult) -> dict[str, Any]:
    """A result as JSON values."""
    return {field.name: _encoded(getattr(result, field.name)) for field in fields(result)}


def from_json(values: dict[str, Any]) -> PreflightResult:
    """The result of `to_json`."""
    return PreflightResult(**{name: _decoded(value) for name, value in values.items()})


_DTYPES = {str(value).removeprefix("mlx.core."): value for value in vars(mx).values() if isinstance(value, mx.Dtype)}
_KINDS: dict[str, type[Any]] = {"LayerKV": LayerKV, "LayerState": LayerState}


def _encoded(value: Any) -> Any:
    """Lists are tuples, and dictionaries of one key are a kind of cache or an element type."""
    if isinstance(value, mx.Dtype):
        return {"dtype": str(value).removeprefix("mlx.core.")}
    if type(value).__name__ in _KINDS:
        return {type(value).__name__: [_encoded(getattr(value, field.name)) for field in fields(value)]}
    return [_encoded(item) for item in value] if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return _DTYPES[content] if kind == "dtype" else _KINDS[kind](*_decoded(content))
    return tuple(_decoded(item) for item in value) if isinstance(value, list) else value
