"""Compare the compiled forward pass with a model's own layers; only a pass that is right is used.

Both run the steps of the preflight on a small pool, whose windows are narrowed. With float32 activations their logits
agree to rounding, and the same comparison with shifted positions has to fail. The steps run near the start and far from
it. A small copy of the model shows rules that begin at some length (`workbench.models.far_trial`), and layers that are
given more than their input and a cache are not compiled.

With activations of 8 bits they do not agree to rounding: a difference in the last bit of an input changes some codes,
and after a few layers many. So both are compared with float32 activations. The compiled pass may not be much further
from those than the layers are, and the same comparison with codes in a wrong order has to fail. Positions and all else
that is not the codes were compared before, with float32 activations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.cpu.layer_loop import Model, ProductField
from workbench.models import trial_steps
from workbench.models.class_patch import calls_through
from workbench.models.far_trial import far_trial
from workbench.models.model_code import code_digest, position_limit
from workbench.models.packed.activations import float32_activations
from workbench.models.packed.compiled_step import CompiledStep
from workbench.models.packed.description import Description, NotDescribed, layers_of
from workbench.models.packed.pack_model import pack_model
from workbench.models.paged_cache import PagedKVCache
from workbench.models.paged_layer import PagedLayerCache
from workbench.models.patch import patch_model
from workbench.models.preflight_result import TOLERANCE, PreflightResult
from workbench.models.remembered import NOTHING, Remembered
from workbench.models.small_copy import small_copy

INT8_RATIO = 4.0
"""Largest error of the compiled pass with activations of 8 bits, in units of the error of the model's own layers with
these. In a dozen rows of logits, one or two with a large error decide both."""

_EXACT, _INT8 = "compiled step", "compiled step, int8"


def make_compiled_step(
    model: nn.Module, result: PreflightResult, kv_cache: PagedKVCache, remembered: Remembered = NOTHING
) -> tuple[CompiledStep | None, str]:
    """The compiled forward pass of a model, if it passes the comparison with the model's own layers.

    Args:
        model: The mlx-lm model; it is unchanged afterwards.
        result: The result of its preflight.
        kv_cache: The pool to run on.
        remembered: A comparison that was passed in an earlier start is not repeated.

    Returns:
        The compiled pass, or None and the reason.
    """
    backend = kv_cache.backend
    if result.mode != "kernel" or backend is None or backend.name != "cpu":
        return None, "attention does not run in compiled code"

    about = f"{dtype_name(result.layers[0].dtype)}, {code_digest(model)}"
    exact_name, int8_name = f"{_EXACT}, {about}", f"{_INT8}, {about}"
    variant, int8_passed = remembered.get(exact_name), remembered.get(int8_name) is not None
    try:
        with float32_activations(model) as are_int8:
            description = _described(model, result, kv_cache)
            compare_int8 = are_int8 and not int8_passed
            if variant is None or compare_int8:
                trial = _Trial(model, result, backend)
                exact = trial.logits_by_layer()
            if variant is None:
                variant = _right_variant(trial, description, exact, result.layers[0].dtype)
                _check_far(model, result, backend, variant)
                remembered.put(exact_name, variant)
        if are_int8:
            description = _described(model, result, kv_cache)
        tables, scale = list(description.variants())[variant]
        if compare_int8:
            _check_int8(trial, description, tables, scale, exact)
            remembered.put(int8_name, variant)
    except _Refused as reason:
        return None, str(reason)
    return CompiledStep(description, kv_cache.kernel_layers, tables, scale), ""


class _Refused(Exception):
    """The model has no compiled pass; the message says why."""


def _described(model: nn.Module, result: PreflightResult, kv_cache: PagedKVCache) -> Description:
    """The model with its present activations."""
    try:
        return Description(model, kv_cache.kernel_layers, result.num_heads)
    except NotDescribed as unknown:
        raise _Refused(f"the model has {unknown}") from None
    except Exception as problem:  # modules of any shape are looked at
        raise _Refused(f"the model cannot be described ({type(problem).__name__}: {problem})") from None


class _Trial:
    """The steps of the preflight on a small pool.

    Args:
        model: The mlx-lm model.
        result: The result of its preflight.
        backend: Attention over the pool.
    """

    def __init__(self, model: nn.Module, result: PreflightResult, backend: AttentionBackend) -> None:
        self._model, self._backend = model, backend
        narrow = [layer.with_window(min(layer.window, trial_steps.NARROW_WINDOW)) for layer in result.layers]
        self._pool = PagedKVCache(narrow, trial_steps.NUM_TRIAL_BLOCKS, trial_steps.BLOCK_SIZE, backend)
        token_ids, end = trial_steps.probe_tokens(model), position_limit(model) - trial_steps.NUM_TOKENS
        places = [(end, end // 2, end // 5), (0, 0, 0)]
        steps = [(step, token_ids, offsets) for offsets in places for step in trial_steps.STEPS]
        self._steps = [trial_steps.pack_probe(*step) for step in steps]

    def logits_by_layer(self) -> list[np.ndarray]:
        """Logits of each chunk's last row, computed by the model's own layers: an array for each step."""
        patches = patch_model(self._model, self._backend)
        try:
            with calls_through(layers_of(self._model), _call_known):
                return [trial_steps.packed_logits(self._model, self._pool, *step) for step in self._steps]
        finally:
            for patch in patches:
                patch.restore()

    def logits_compiled(
        self, description: Description, tables: Model, scale: float, shift: int = 0
    ) -> list[np.ndarray]:
        """The same logits in compiled code, with positions shifted in the last step."""
        step = CompiledStep(description, self._pool.kernel_layers, tables, scale)
        shifts = [0] * (len(self._steps) - 1) + [shift]
        return [
            np.array(step.run(token_ids, positions + np.int32(by), metadata.cu_seqlens_q[1:] - 1, metadata))
            for (metadata, positions, token_ids), by in zip(self._steps, shifts)
        ]


def _right_variant(trial: _Trial, description: Description, exact: list[np.ndarray], stored: mx.Dtype) -> int:
    """The number of the variant with the logits of the model's layers, with float32 activations.

    A pool of codes is judged by all rows together: a difference in the last bit of a key changes some of its codes, and
    one row by more than the tolerance.

    Raises:
        _Refused: No variant has them, or a shift of positions cannot be told from rounding.
    """
    tolerance, error_of = TOLERANCE[stored], typical_error if stored == mx.int8 else worst_error
    errors: dict[float, float] = {}
    for number, variant in enumerate(description.variants()):
        error = error_of(trial.logits_compiled(description, *variant), exact)
        shifted = trial.logits_compiled(description, *variant, shift=trial_steps.POSITION_SHIFT)
        control = errors[error] = error_of(shifted[-1:], exact[-1:])
        if error <= tolerance and control > max(tolerance, 4 * error):  # 4 as in the preflight
            return number
    best = min(errors)
    raise _Refused(
        f"its logits in compiled code differ by {best:.1e} of their spread, "
        f"and by {errors[best]:.1e} with positions shifted by {trial_steps.POSITION_SHIFT}"
    )


def _call_known(path: str, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a layer, or a part of one, if it is given its input and a cache, and nothing that compiled code ignores.

    Raises:
        _Refused: It is given more.
    """
    given = inspect.signature(call).bind(module, *args, **kwargs).arguments
    for name, value in list(given.items())[2:]:
        if value is not None and not isinstance(value, PagedLayerCache):
            raise _Refused(f"{path} is given {name!r}, which compiled code does not know")
    return call(module, *args, **kwargs)


def _check_far(model: nn.Module, result: PreflightResult, backend: AttentionBackend, variant: int) -> None:
    """Compare the compiled pass with the plain model far from the start, and at length.

    Raises:
        _Refused: They differ.
    """
    far = far_trial(model, result)
    copy = small_copy(model) if far.model is not model else None
    if copy is not None:
        pack_model(copy)
    packed = model if copy is None else copy
    num_heads = far.num_heads(backend)

    def forward(kv_cache: PagedKVCache, metadata: Any, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        description = Description(packed, kv_cache.kernel_layers, num_heads)
        tables, scale = list(description.variants())[variant]
        step = CompiledStep(description, kv_cache.kernel_layers, tables, scale)
        rows = np.arange(len(token_ids), dtype=np.int32)  # code for another type would be compiled for this alone
        return np.array(step.run(token_ids, positions, rows, *metadata))

    if difference := far.difference(backend, TOLERANCE[mx.float32], f"compiled {variant}", forward):
        raise _Refused(f"in compiled code, {difference}")


def _check_int8(trial: _Trial, description: Description, tables: Model, scale: float, exact: list[np.ndarray]) -> None:
    """Compare the compiled pass with activations of 8 bits.

    Raises:
        _Refused: It is much further from ``exact`` than the layers are, or codes in a wrong order cannot be told.
    """
    allowed = INT8_RATIO * typical_error(trial.logits_by_layer(), exact)
    error = typical_error(trial.logits_compiled(description, tables, scale), exact)
    control = typical_error(trial.logits_compiled(description, _in_wrong_order(tables), scale), exact)
    if not error <= allowed < control:
        raise _Refused(
            f"its logits in compiled code with activations of 8 bits differ from those with float32 by {error:.1e} of "
            f"their spread (allowed: {allowed:.1e}), and by {control:.1e} with codes in a wrong order"
        )


def _in_wrong_order(tables: Model) -> Model:
    """Tables whose inputs of 8 bits are ordered for weights of another width."""
    products = tables.products.copy()
    codes = products[:, ProductField.CODES]
    codes[:] = np.where(codes == 0, 0, np.where(codes == 8, 4, 8))
    return tables._replace(products=products)


def worst_error(logits: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Error of the worst row, relative to the spread of its step's logits; infinity if it is not a number."""
    errors = [np.sqrt(np.square(a - b).mean(axis=1)).max() / b.std() for a, b in zip(logits, expected)]
    return _finite(np.max(errors))


def typical_error(logits: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Root mean square error of all rows, relative to the spread of the logits; infinity if it is not a number."""
    a, b = np.concatenate(logits), np.concatenate(expected)
    return _finite(np.sqrt(np.square(a - b).mean()) / b.std())


def _finite(error: float) -> float:
    return float(error) if np.isfinite(error) else float("inf")
