"""Load a model by name: the bundled model, a GGUF file, or any model that mlx-lm can load."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from workbench.base.device import Device, check_device, default_device, holding_device, runs_on_gpu
from workbench.base.field_checks import suggestion
from workbench.base.key_table import Finding
from workbench.base.outside_files import open_bytes
from workbench.kernels.attention.dtypes import DTYPES, dtype_name
from workbench.models.bundled import BUNDLED_NAME, fetch_bundled, is_bundled
from workbench.models.config_json import Config, complete_model, read_keys
from workbench.models.folder import (
    check_location,
    context_length,
    needs_own_code,
    read_config,
    text_field,
    why_no_tokenizer,
    why_not_loaded,
)
from workbench.models.gguf.file import MAGIC, GGUFFile
from workbench.models.gguf.loader import gguf_config, load_gguf_model
from workbench.models.gguf.other_keys import judge_other_keys
from workbench.models.gguf.tokenizer import GGUFTokenizer
from workbench.models.other_weights import check_numbers, why_weights_are_not_read
from workbench.models.packed.errors import WrongProductError
from workbench.models.remembered import NOTHING, Remembered, remembered
from workbench.models.repository import fetch_repository
from workbench.models.sharding import check_heads_divide, shard
from workbench.models.side_files import judge_side_files
from workbench.models.tokenizer import HuggingFaceTokenizer, Tokenizer, chosen_template

log = logging.getLogger("workbench")

Weights = Literal["packed", "float32"]
"""Weights stay as the file holds them, or each becomes a floating-point number of the model's type."""

Activations = Literal["float32", "int8"]
"""Products take inputs as they are, or as codes of 8 bits, which change logits."""

Keep = Literal["packed", "mlx", "no"]
"""Quantised weights are kept for compiled code of this processor, for MLX's own products, or not at all."""


@dataclass(repr=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: The mlx-lm model, evaluated.
        tokenizer: Its tokenizer, None if it has none.
        name: A short name: that of the file without its extension, of the folder, or of the repository.
        architecture: mlx-lm's ``model_type``.
        max_position: Length of the model's context in tokens.
        eos_token_ids: Tokens that end an output.
        vocab_size: Number of logits per position.
        dtype: Element type of activations and of weights that are not quantised, such as "float32".
        num_parameters: Number of weights of the whole model, counted before any quantisation.
        source: The file, folder or repository it came from.
        quantized: Bits per weight of weights that stayed as the file holds them, such as "4 bits"; "" if none did.
        activations: Type of the inputs that packed weights are multiplied with: "float32" or "int8".
        device: Device that it was loaded for, "cpu" or "gpu".
        preflights: Results of `preflight_once`, by attention backend and device.
        findings: The verdict on each key of the model's files, by file.
        found_before: Findings of earlier starts about the same files; by default there are none.
    """

    model: nn.Module
    tokenizer: Tokenizer | None
    name: str
    architecture: str
    max_position: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    dtype: str
    num_parameters: int
    source: str
    quantized: str = ""
    activations: Activations = "float32"
    device: Literal["cpu", "gpu"] = field(default_factory=default_device)
    findings: dict[str, list[Finding]] = field(default_factory=dict, compare=False)
    preflights: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)
    found_before: InitVar[Remembered | None] = None

    def __post_init__(self, found_before: Remembered | None) -> None:
        # Also arrays that are not parameters, such as wavelengths of RoPE: MLX evaluates an array in no other thread
        # than the one that described it, and an engine computes in a thread that is not this one.
        mx.eval([value for module in self.model.modules() for value in module.values() if isinstance(value, mx.array)])
        self._findings = Remembered() if found_before is None else found_before
        self._as_loaded = tuple(map(weakref.ref, _parts(self.model)))

    @property
    def remembered(self) -> Remembered:
        """Findings about the model and its files, which are kept; none if a module or array has been replaced."""
        parts = _parts(self.model)
        unchanged = len(parts) == len(self._as_loaded) and all(
            ref() is part for ref, part in zip(self._as_loaded, parts)
        )
        return self._findings if unchanged else NOTHING

    def become(self, other: LoadedModel) -> None:
        """Hold what another object holds, for all who have this one; the same files, loaded otherwise."""
        vars(self).update(vars(other) | {"tokenizer": self.tokenizer})

    def described_files(self) -> dict[str, Any]:
        """The verdict on each key of the model's files, whether its template asks it to think, and what that loses."""
        files: dict[str, Any] = {}
        for file, findings in self.findings.items():
            harmless = {finding.key: finding.because for finding in findings if finding.verdict == "harmless"}
            files[file] = {"read": [f.key for f in findings if f.verdict == "read"], "harmless": harmless}
        thinking = getattr(self.tokenizer, "thinking", None)
        leaves_out = getattr(self.tokenizer, "leaves_out", list)
        return {
            "files": files,
            "thinking": thinking() if thinking is not None else "",
            "template_leaves_out": leaves_out(),
        }

    def __repr__(self) -> str:
        millions = self.num_parameters / 1e6
        size = f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.2f}B"
        weights = f"{self.dtype}, {self.quantized}" if self.quantized else self.dtype
        if self.activations == "int8":
            weights += ", int8 activations"
        return (
            f"LoadedModel({self.name!r}: {self.architecture}, {size} parameters, {weights}, "
            f"context {self.max_position}, vocabulary {self.vocab_size})"
        )


def load_model(
    name_or_path: str | Path,
    *,
    weights: Weights = "packed",
    activations: Activations = "float32",
    dtype: str | mx.Dtype | None = None,
    device: Device = "auto",
    keep_quantized: bool | None = None,
    group: mx.distributed.Group | None = None,
    ignore_config_keys: Collection[str] = (),
    chat_template: str | Path | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: "smollm2" (the bundled model), a GGUF file, a folder in MLX or Hugging Face format, or the name
            of a repository, which is downloaded.
        weights: "packed" keeps the bits of weights as the file holds them; products are computed in float32 from the
            exact values. "float32" turns every weight into a number of ``dtype``.
        activations: "float32" computes with inputs of products as they are. "int8" rounds them to codes of 8 bits
            with a scale per 32 columns, which is faster and changes logits; for quantised weights that are packed on
            a CPU.
        dtype: "float32", "float16" or "bfloat16". The default is float32 on a CPU, because MLX has fast matrix
            products for no other type there, and the file's own type on a GPU.
        device: "cpu" or "gpu"; "auto" takes the device of engines that are not closed, else the one that
            WORKBENCH_DEVICE names, else the GPU if there is one. An engine computes where its model was loaded for.
        keep_quantized: Deprecated: use ``weights``.
        group: Ranks that share the model; each loads it with the same arguments and keeps its own part. On a CPU, they
            share weights of ``dtype``.
        chat_template: A chat template in place of the model's: a file, or the template itself.
        ignore_config_keys: Keys of the model's files that are accepted without effect. Otherwise a key that nothing
            here reads, and that could change what the model computes, is refused by name.

    Raises:
        FileNotFoundError: No such file or folder.
        ValueError: A format, architecture, type or tokenizer is not supported, or the ranks of ``group`` cannot
            share the model, which is found before any weight is read; or an engine computes on another device. The
            message names the cause.
        OSError: A download failed; the message says what to do.

    Example:
        >>> model = load_model("smollm2", device="cpu")
        >>> model.tokenizer.encode("The capital of France is")
        [504, 3575, 282, 4649, 314]
    """
    with holding_device(str(name_or_path), device):
        on_gpu = _runs_on_gpu()
        keep = _kept_weights(weights, keep_quantized, on_gpu, group)
        _check_activations(activations, weights, keep, on_gpu)
        names, template = _check_names(ignore_config_keys), chosen_template(chat_template)
        wanted = _Wanted(_check_dtype(dtype), on_gpu, keep, group, names, template)
        try:
            loaded = _load(name_or_path, wanted)
        except WrongProductError as problem:
            log.warning('weights="packed" becomes weights="float32": %s', problem)
            return _load(name_or_path, wanted._replace(keep="no"))
        if activations == "int8":
            from workbench.models.packed.int8 import use_int8

            use_int8(loaded.model, loaded.remembered)
            loaded.activations = activations
        return loaded


def device_for(device: Device, *models: str | Path | LoadedModel | None) -> Device:
    """The device for an engine: as it was asked for, or that of the models that are loaded already.

    Raises:
        ValueError: There is no such device, or a model was loaded for another.
    """
    check_device("device", device)
    for model in models:
        if isinstance(model, LoadedModel):
            if device not in ("auto", model.device):
                raise ValueError(
                    f"device is {device!r}, but {model.name!r} was loaded for the {model.device.upper()}: load it with "
                    f"load_model(..., device={device!r})"
                )
            device = model.device
    return device


def _check_activations(activations: Activations, weights: Weights, keep: Keep, on_gpu: bool) -> None:
    """Refuse activations that products on this machine cannot take."""
    if activations not in ("float32", "int8"):
        raise ValueError(f'activations is {activations!r}; it must be "float32" or "int8"')
    if activations == "float32":
        return
    if keep == "packed":
        from workbench.models.packed.int8 import why_no_int8

        reason = why_no_int8()
    elif on_gpu:
        reason = "on a GPU, MLX multiplies with activations of the model's type"
    elif weights == "float32":
        reason = 'weights="float32" have no codes'
    else:
        reason = "the weights are not packed here"
    if reason:
        raise ValueError(f'activations="int8" is not possible: {reason}; use activations="float32"')


class _Wanted(NamedTuple):
    """The way to load a model: arguments of `load_model` on this machine."""

    dtype: mx.Dtype | None
    on_gpu: bool
    keep: Keep
    group: mx.distributed.Group | None
    ignored: frozenset[str] = frozenset()
    chat_template: str | None = None


def _check_names(ignore_config_keys: Collection[str]) -> frozenset[str]:
    names = frozenset(ignore_config_keys)
    if isinstance(ignore_config_keys, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'ignore_config_keys must be names of keys, such as ("key",), got {ignore_config_keys!r}')
    return names


def _load(name_or_path: str | Path, wanted: _Wanted) -> LoadedModel:
    """The model of a name."""
    if is_bundled(name_or_path):
        return _load_gguf(BUNDLED_NAME, fetch_bundled(), wanted)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        with open_bytes(path) as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is not a GGUF file; give a GGUF file, a folder or a repository")
        return _load_gguf(path.stem, path, wanted)
    return _load_with_mlx_lm(str(name_or_path), wanted)


def _kept_weights(
    weights: Weights, keep_quantized: bool | None, on_gpu: bool, group: mx.distributed.Group | None
) -> Keep:
    """The way to keep weights that are not float32 on this machine."""
    if weights not in ("packed", "float32"):
        raise ValueError(f'weights is {weights!r}; it must be "packed" or "float32"')
    if keep_quantized is not None:
        warnings.warn(
            'load_model(keep_quantized=...) is deprecated: use weights="packed" or weights="float32"',
            DeprecationWarning,
            stacklevel=3,
        )
        return "mlx" if keep_quantized else "no"
    if weights == "float32":
        return "no"
    if on_gpu:
        return "mlx"
    if group is not None:
        return "no"
    from workbench.models.packed.pack_model import why_not_packed

    if reason := why_not_packed():
        log.warning('weights="packed" becomes weights="float32": %s', reason)
        return "no"
    return "packed"


def _runs_on_gpu() -> bool:
    return runs_on_gpu()


def _check_dtype(dtype: str | mx.Dtype | None) -> mx.Dtype | None:
    if dtype is None:
        return None
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if wanted is None or wanted not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}{suggestion(dtype, DTYPES)}")
    return wanted


def _load_gguf(name: str, path: Path, wanted: _Wanted) -> LoadedModel:
    file = GGUFFile(path)
    dtype, on_gpu, keep, group, ignored, chat_template = wanted
    findings = {path.name: judge_other_keys(path, file.metadata, ignored)}
    found_before = _found_before(file.paths, wanted)
    tokenizer = GGUFTokenizer(file.metadata, chat_template, ignored)
    file.forget_tokenizer()
    if dtype is None:
        dtype = _gguf_dtype(file) if on_gpu else mx.float32
    if group is not None:
        check_heads_divide(name, gguf_config(file), group.size())
    model, config = load_gguf_model(
        file, dtype=dtype, keep_quantized=keep == "mlx", pack=keep == "packed", remembered=found_before
    )
    num_parameters = _count_parameters(model)
    if group is not None:
        shard(name, model, group)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        architecture=config["model_type"],
        max_position=config["max_position_embeddings"],
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=config["vocab_size"],
        dtype=dtype_name(dtype),
        num_parameters=num_parameters,
        source=str(path),
        quantized=_kept_bits(model),
        findings=findings | {"tokenizer": tokenizer.findings},
        found_before=found_before,
    )


def _gguf_dtype(file: GGUFFile) -> mx.Dtype:
    """Element type on a GPU: bfloat16 for bfloat16 files and for Gemma 3, whose activations overflow float16."""
    types = {tensor.type_name for tensor in file.tensors.values()}
    return mx.bfloat16 if "BF16" in types or file.metadata.get("general.architecture") == "gemma3" else mx.float16


def _load_with_mlx_lm(name: str, wanted: _Wanted) -> LoadedModel:
    from mlx_lm.utils import load_model as load_weights
    from mlx_lm.utils import load_tokenizer

    from workbench.models.dequantise import dequantise

    dtype, on_gpu, keep, group, ignored, chat_template = wanted
    location = check_location(name)
    source = "" if Path(location).is_dir() else location
    if source:
        location = check_location(str(fetch_repository(source, ignored)))
    file = read_config(location)
    keys = read_keys(f"{source or location}: config.json", file, ignored)
    findings = {"config.json": keys.findings} | judge_side_files(Path(location), ignored, source)
    if group is not None:
        check_heads_divide(name, file, group.size())
    model = None
    try:
        model, config = load_weights(Path(location), lazy=True, model_config=keys.changes, trust_remote_code=False)
        # If it is left out, transformers asks on standard input whether to run the model's code.
        options = {"trust_remote_code": False}
        tokenizer = load_tokenizer(Path(location), options, eos_token_ids=config.get("eos_token_id"))
    except (Exception, SystemExit) as problem:  # many kinds; mlx-lm ends the process if an architecture lacks a package
        if "trust_remote_code" in str(problem):
            raise ValueError(needs_own_code(name, location)) from None
        if model is not None:
            raise ValueError(why_no_tokenizer(problem, location)) from problem
        words = why_not_loaded(problem, location)
        raise ValueError(why_weights_are_not_read(location, words) or words) from problem
    check_numbers(location, model)
    complete_model(f"{source or location}: config.json", model, keys)
    found_before = _found_before(sorted(Path(location).iterdir()), wanted)
    if dtype is None and not on_gpu:
        dtype = mx.float32
    if keep == "packed":
        from workbench.models.packed.pack_model import pack_model

        pack_model(model, dtype or mx.float32, found_before)
    if keep != "mlx":
        model = dequantise(model, dtype)  # packed models: layers of kinds that are not packed
    elif dtype is not None:
        model.set_dtype(dtype)
    num_parameters = _count_parameters(model)
    if group is not None:
        shard(name, model, group)
    model.eval()
    mx.eval(model.parameters())
    wrapped = HuggingFaceTokenizer(tokenizer, chat_template)
    return LoadedModel(
        model=model,
        tokenizer=wrapped,
        name=Path(name).name,
        architecture=config["model_type"],
        max_position=_context(name, config, model, keys),
        eos_token_ids=wrapped.eos_token_ids,
        vocab_size=text_field(config, ("vocab_size",)) or wrapped.vocab_size,
        dtype=dtype_name(dtype or _common_dtype(model)),
        num_parameters=num_parameters,
        source=name,
        quantized=_kept_bits(model),
        found_before=found_before,
        findings=findings,
    )


def _context(name: str, config: Mapping[str, Any], model: nn.Module, keys: Config) -> int:
    """Length of the model's context, cut to what mlx-lm's architecture computes rightly."""
    length = context_length(name, config, model)
    if keys.max_position is None or length <= keys.max_position:
        return length
    log.warning(
        "the context of %s is cut from %d to %d tokens: mlx-lm's %s lacks its window",
        name,
        length,
        keys.max_position,
        keys.architecture,
    )
    return keys.max_position


def _found_before(files: Sequence[Path], wanted: _Wanted) -> Remembered:
    """Findings of earlier starts about a model; none about one that is shared, or whose files are elsewhere."""
    files = [path for path in files if path.is_file()]
    known = files and wanted.group is None
    return remembered(files, dtype=str(wanted.dtype), weights=wanted.keep) if known else NOTHING


def _parts(model: nn.Module) -> list[Any]:
    """All modules and arrays of a model, also arrays that are not parameters."""
    modules = model.modules()
    return modules + [value for module in modules for value in module.values() if isinstance(value, mx.array)]


def _common_dtype(model: nn.Module) -> mx.Dtype:
    """The floating-point type of most weights that are not quantised."""
    sizes: dict[mx.Dtype, int] = {}
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _count_parameters(model: nn.Module) -> int:
    packed = [module for module in model.modules() if hasattr(module, "num_packed_weights")]
    if not packed and any(hasattr(module, "bits") for module in model.modules()):
        from mlx_lm.utils import get_total_parameters  # imports transformers, in two seconds

        return int(get_total_parameters(model))
    others = sum(array.size for array in dict(tree_flatten(model.parameters())).values())
    return others + sum(module.num_packed_weights for module in packed)


def _kept_bits(model: nn.Module) -> str:
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")} - {32})
    return f"{' and '.join(map(str, bits))} bits" if bits else ""
