"""Adapters (LoRA) of a model: which are known, which are in memory, and what they add to the model's linear layers.

An adapter adds ``scale * (x @ a) @ b`` to the output of some linear layers, with matrices of a small rank. Those in
memory lie in slots, ``max_loras`` of them: an adapter that a step needs takes the place of the one that was not needed
for the longest time. The layers of a model whose class is changed (`AdapterPatch`) add the part of each row's own
adapter: the first matrices of all slots are one product, a mask keeps the columns of the row's own slot, and the second
matrices are another. A row without an adapter gets zeros. Compiled code reads the slots of `Adapters.compiled`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.base.cache_salt import check_adapter
from workbench.models.adapter_files import AdapterError, Factors, Signature, digest, read_adapter, signature
from workbench.models.class_patch import ClassPatch, subclass_that_calls
from workbench.models.packed.layers import PackedLinear

if TYPE_CHECKING:
    from workbench.models.packed.description import Place

_SELECTED: ContextVar[Selection | _Watch | None] = ContextVar("selected_adapters", default=None)
"""The adapters of the rows that the model computes. Per thread, so that engines that share a model do not interfere."""


AdapterTables = tuple[np.ndarray, np.ndarray]
"""The table of the adapters of a batch, int64, and each row's adapter in it, -1 for none, int64 [T]."""


class _Version(NamedTuple):
    """A version of an adapter's files."""

    folder: Path
    digest: str
    signature: Signature


class Adapters:
    """The adapters of a model.

    Args:
        model: The model, patched for its pool.
        max_loras: Number of slots; 0 for as many as there are adapters.
        max_rank: Maximum rank of an adapter.
        mixers: Dotted names of the modules that see a recurrent layer's rows sequence by sequence.
    """

    def __init__(self, model: nn.Module, max_loras: int, max_rank: int, mixers: Sequence[str] = ()) -> None:
        self._model, self._max_loras, self._max_rank = model, max_loras or sys.maxsize, max_rank
        self._mixers = tuple(f"{path}." for path in mixers)
        self._by_rows: set[str] = set()
        self._folders: dict[str, Path] = {}
        self._versions: dict[str, _Version] = {}
        self._current: dict[str, str] = {}
        self._slots: dict[str, dict[str, Factors]] = {}  # in the order of their use, the latest last
        self._joined: Selection | None = None
        self._tables: dict[str, np.ndarray | None] = {}
        self._patch: ClassPatch | None = None
        self._layers: dict[str, nn.Module] = {}

    @property
    def names(self) -> list[str]:
        """Names of the known adapters."""
        return list(self._folders)

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each whose files are still those that were added."""
        return {name: folder for name, folder in self._folders.items() if self._current[name] == name}

    @property
    def loaded(self) -> list[str]:
        """Names of those in memory, the one that goes first at the front."""
        return list(self._slots)

    def version(self, name: str) -> str:
        """The name of the adapter in a new request: with a digest, if its files are others than when it was added.

        The prefix cache tells adapters apart by this name, so that KV of other files is never found. An adapter in
        memory stays what it is, and files that cannot be read fail in the step that needs them.
        """
        current = self._current[name]
        if current in self._slots:
            return current
        known, folder = self._versions[current], self._folders[name]
        try:
            if (now := signature(folder)) == known.signature:
                return current
            found = digest(folder)
        except AdapterError:
            return current
        first = self._versions[name]
        current = name if found == first.digest else f"{name}@{found[:12]}"
        self._versions[current] = _Version(folder, found, now)
        self._current[name] = current
        return current

    def check(self, name: str) -> None:
        """Refuse the name of an adapter that was not added.

        Raises:
            ValueError: The message names those that exist.
        """
        if name not in self._folders:
            known = f"there is {', '.join(map(repr, self.names))}" if self.names else "add_adapter() adds one"
            raise ValueError(f"there is no adapter {name!r}: {known}")

    def add(self, name: str, path: str | Path) -> None:
        """Check an adapter's files, and know it by a name; see ``Engine.add_adapter``."""
        if not check_adapter("name", name):
            raise ValueError("name of an adapter must not be empty")
        if name in self._folders:
            raise ValueError(f"name {name!r} is in use, for {self._folders[name]}: choose another name")
        folder = Path(path).expanduser()
        factors, version = self._read_version(name, folder)
        self._folders[name], self._versions[name], self._current[name] = folder, version, name
        if len(self._slots) < self._max_loras:
            self._put(name, factors)

    def _read_version(self, name: str, folder: Path) -> tuple[dict[str, Factors], _Version]:
        """An adapter's matrices, and which version of its files has them.

        Raises:
            AdapterError: The files cannot be used, or were written meanwhile.
        """
        if not folder.is_dir():
            self._read(name, folder)  # says what is missing
        before = signature(folder) if any(folder.iterdir()) else ()
        factors = self._read(name, folder)
        version = _Version(folder, digest(folder), signature(folder))
        if version.signature != before:
            raise AdapterError(f"adapter {name!r} ({folder}): its files were written while they were read: try again")
        return factors, version

    def _read(self, name: str, folder: Path) -> dict[str, Factors]:
        """An adapter's matrices, if the model has their layers."""
        if self._patch is None:
            self._layers = _linear_layers(self._model)
            self._patch = ClassPatch(list(self._layers.values()), _adding)
            self._by_rows = _applied_by_rows(self._model, self._layers)

        def check(path: str, rank: int, num_inputs: int, num_outputs: int) -> None:
            self._check_layer(name, path, rank, (num_inputs, num_outputs))

        return read_adapter(name, folder, check, len(getattr(self._model, "layers", ())) or None)

    def _check_layer(self, name: str, path: str, rank: int, given: tuple[int, int]) -> None:
        """Refuse what an adapter would change, from its header."""
        layer = self._layers.get(path)
        if layer is None or path not in self._by_rows or path.startswith(self._mixers):
            what = "is not applied row by row" if layer is not None else "is not a linear layer of the model"
            like = "".join(f"; there is {other!r}" for other in get_close_matches(path, self._layers, 1))
            raise AdapterError(f"adapter {name!r} changes {path!r}, which {what}{like}")
        if given != (size := _size(layer)):
            raise AdapterError(
                f"adapter {name!r} changes {path!r} from {given[0]} to {given[1]} features, the model's has "
                f"{size[0]} and {size[1]}: it was made for another model"
            )
        if rank > self._max_rank:
            raise AdapterError(
                f"adapter {name!r} has rank {rank} in {path!r}, max_lora_rank={self._max_rank} allows "
                f"{self._max_rank}: raise max_lora_rank"
            )

    def _put(self, name: str, factors: dict[str, Factors]) -> None:
        self._slots[name] = factors
        self._joined, self._tables = None, {}

    def _bring(self, names: Sequence[str]) -> list[str]:
        """Load the adapters that a step needs, each in the place of the one that was not needed for the longest time.

        Returns:
            The slots.

        Raises:
            AdapterError: The files of one have changed since it was added.
        """
        needed = dict.fromkeys(filter(None, names))
        for name in needed:
            if name not in self._slots:
                known = self._versions[name]
                factors, version = self._read_version(name, known.folder)
                if version.digest != known.digest:
                    raise AdapterError(
                        f"adapter {name!r} ({known.folder}): its files have changed since this request was "
                        f"added: add it again"
                    )
                unneeded = [other for other in self._slots if other not in needed]
                if len(self._slots) >= self._max_loras and unneeded:
                    del self._slots[unneeded[0]]
                self._put(name, factors)
        order = [*(name for name in self._slots if name not in needed), *needed]
        if order != [*self._slots]:
            self._slots = {name: self._slots[name] for name in order}
        return order

    @contextmanager
    def selecting(self, names: Sequence[str], cu_seqlens: np.ndarray, rows: np.ndarray) -> Iterator[None]:
        """Add the parts of adapters to the model's linear layers inside the block.

        Args:
            names: The adapter of each sequence, "" for none.
            cu_seqlens: Cumulative numbers of rows, int32 [num_seqs + 1].
            rows: Rows that the head gets, int32.
        """
        self._bring(names)
        if self._joined is None:
            self._joined = Selection(self._slots, self._layers)
        token = _SELECTED.set(self._joined.of_rows(np.repeat(names, np.diff(cu_seqlens)), rows))
        try:
            yield
        finally:
            _SELECTED.reset(token)

    def compiled(
        self, names: Sequence[str], cu_seqlens: np.ndarray, places: Mapping[str, Place]
    ) -> AdapterTables | None:
        """The adapters of a batch for compiled code.

        Args:
            names: The adapter of each sequence, "" for none.
            cu_seqlens: Cumulative numbers of rows, int32 [num_seqs + 1].
            places: The layers that compiled code knows.

        Returns:
            Fields of `workbench.kernels.cpu.layer_loop.Batch`; None if an adapter changes a layer that compiled code
            does not know.
        """
        from workbench.models.packed.description import table_of_adapter

        self._bring(names)
        needed = [*dict.fromkeys(filter(None, names))]
        for name in needed:
            if name not in self._tables:
                self._tables[name] = table_of_adapter(self._slots[name], places)
        tables = [self._tables[name] for name in needed]
        if any(table is None for table in tables):
            return None
        slots = np.array([needed.index(name) if name else -1 for name in names], np.int64)
        return np.stack([table for table in tables if table is not None]), np.repeat(slots, np.diff(cu_seqlens))

    def restore(self) -> None:
        """Leave the model as it was before."""
        if self._patch is not None:
            self._patch.restore()


class Selection:
    """The adapters in memory, joined for the model's layers.

    Args:
        slots: The matrices of each adapter by layer.
        layers: The linear layers of the model.
    """

    def __init__(self, slots: Mapping[str, Mapping[str, Factors]], layers: Mapping[str, nn.Module]) -> None:
        self._ranks = {name: max(len(a) for a, _ in factors.values()) for name, factors in slots.items()}
        self._parts: dict[int, tuple[mx.array, mx.array]] = {}
        for path in {path for factors in slots.values() for path in factors}:
            size = _size(layers[path])
            first = [_padded(slots[name].get(path), 0, size[0], rank) for name, rank in self._ranks.items()]
            second = [_padded(slots[name].get(path), 1, size[1], rank) for name, rank in self._ranks.items()]
            joined = mx.array(np.ascontiguousarray(np.concatenate(first).T)), mx.array(np.concatenate(second))
            self._parts[id(layers[path])] = joined
        mx.eval(*self._parts.values())
        self._masks: tuple[mx.array, mx.array]

    def of_rows(self, names: np.ndarray, selected: np.ndarray) -> Selection:
        """The same with the adapter of each row, and the rows that the head gets."""
        of_slot = np.stack([names == name for name in self._ranks], axis=1).astype(np.float32)
        mask = np.repeat(of_slot, list(self._ranks.values()), axis=1)
        self._masks = mx.array(mask), mx.array(mask[selected])
        return self

    def part(self, layer: nn.Module, x: mx.array) -> mx.array | None:
        """The adapters' part of a layer's output of x [..., num_columns]; None if they do not change the layer."""
        factors = self._parts.get(id(layer))
        if factors is None:
            return None
        num_rows = x.size // x.shape[-1]
        mask = next((mask for mask in self._masks if len(mask) == num_rows), None)
        if mask is None:
            raise RuntimeError(f"a layer with an adapter got {num_rows} rows, the batch has {len(self._masks[0])}")
        lowered = (x.reshape(num_rows, -1) @ factors[0]) * mask
        return (lowered @ factors[1]).reshape(*x.shape[:-1], -1)


class _Watch:
    """Counts the rows that layers get, in place of a `Selection`."""

    def __init__(self) -> None:
        self.num_rows: dict[int, list[int]] = {}

    def part(self, layer: nn.Module, x: mx.array) -> None:
        self.num_rows.setdefault(id(layer), []).append(x.size // x.shape[-1])


def _applied_by_rows(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """The linear layers that are called once for the rows of a pass, and for no others, such as those of the cache."""
    from mlx_lm.models.cache import make_prompt_cache

    caches, watch = make_prompt_cache(model), _Watch()
    model(mx.array([[1, 2, 3, 4, 5]]), cache=caches)
    token = _SELECTED.set(watch)
    try:
        model(mx.array([[1, 2]]), cache=caches)
    finally:
        _SELECTED.reset(token)
    return {path for path, layer in layers.items() if watch.num_rows.get(id(layer)) == [2]}


def _padded(factors: Factors | None, index: int, size: int, rank: int) -> np.ndarray:
    """A matrix of an adapter, filled up with zeros to a rank, float32 [rank, size]."""
    padded = np.zeros((rank, size), np.float32)
    if factors is not None:
        padded[: len(factors[index])] = factors[index]
    return padded


@cache
def _adding(layer_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a linear layer that adds the part of the rows' adapters."""

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = layer_class.__call__(self, x, *args, **kwargs)
        selected = _SELECTED.get()
        part = None if selected is None else selected.part(self, x)
        return y if part is None else y + part.astype(y.dtype)

    return subclass_that_calls(layer_class, call)


def _size(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(layer, PackedLinear):
        return layer.product.matrix.num_columns, len(layer.product.outputs_of(layer.index))
    num_outputs, num_columns = layer.weight.shape
    return num_columns * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else num_columns, num_outputs


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by their dotted names."""
    kinds = (nn.Linear, nn.QuantizedLinear, PackedLinear)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
