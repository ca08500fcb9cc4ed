"""The metadata of a GGUF file that describes its model: every key is read, or refused by name."""

from __future__ import annotations

import math
from typing import Any

from workbench.base.text import shown
from workbench.models.gguf import fields
from workbench.models.gguf.fields import MAX_SIZE, GGUFError
from workbench.models.gguf.file import GGUFFile

# Metadata keys, with the values that change nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}
# Metadata keys that describe the file and not the computation.
_DESCRIPTIVE = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


class Hyperparameters:
    """The metadata of one architecture, read key by key; keys that were never read are refused at the end.

    Args:
        file: The GGUF file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        prefix = f"{file.metadata['general.architecture']}."
        self._prefix = prefix
        self._values = {key.removeprefix(prefix): v for key, v in file.metadata.items() if key.startswith(prefix)}
        self._unread = set(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or ``default`` if the file has none."""
        self._unread.discard(key)
        return self._values.get(key, default)

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> Any:
        """A finite number above a limit, the same for all layers.

        Raises:
            GGUFError: The key is missing, differs between layers, or is not such a number.
        """
        return fields.number(self._one_value(key, default), self._prefix + key, above=above)

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer that is the same for all layers.

        Raises:
            GGUFError: The key is missing, differs between layers, or is not an integer from ``low`` to ``high``.
        """
        value = fields.whole_number(self._one_value(key, default), self._prefix + key, low=low, high=high)
        assert value is not None  # _one_value refuses a missing key
        return value

    def _one_value(self, key: str, default: Any) -> dict[str, Any]:
        """A value that is the same for all layers, under its full name."""
        value = self.get(key, default)
        if value is None:
            raise GGUFError(f"{self.file.path}: metadata {self._prefix}{key} is missing: download the file again")
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise GGUFError(f"{self.file.path}: {self._prefix}{key} differs between layers, which is not supported")
            value = value[0]
        return {self._prefix + key: value}

    def count_per_layer(self, key: str, num_layers: int) -> list[int]:
        """Integers from 0, one for each layer.

        Raises:
            GGUFError: The key is missing, or is not a list of ``num_layers`` such integers.
        """
        name = self._prefix + key
        values = fields.list_of({name: self.get(key)}, name, int, num_layers)
        if values is None:
            raise GGUFError(f"{self.file.path}: metadata {name} is missing: download the file again")
        for value in values:
            fields.whole_number({name: value}, name, low=0)
        return values

    def require(self, key: str, expected: Any) -> None:
        """Refuse a file with any value but the one that is built into the mlx-lm model.

        Raises:
            GGUFError: The value differs.
        """
        value = self.get(key, expected)
        if value != expected:
            raise GGUFError(
                f"{self.file.path}: {self._prefix}{key}={shown(value)} is not supported for this architecture, "
                f"only {expected!r} is"
            )

    def refuse_unread(self) -> None:
        """Refuse metadata that was not read and that may change the computation.

        Raises:
            GGUFError: There is such metadata; the message names the first key and its value.
        """
        for key in sorted(self._unread):
            value = self._values[key]
            if key not in _DESCRIPTIVE and value not in _WITHOUT_EFFECT.get(key, ()):
                raise GGUFError(
                    f"{self.file.path}: metadata {self._prefix}{key}={shown(value)} is unknown; "
                    "ignoring it could give wrong results, so the file is not loaded"
                )
