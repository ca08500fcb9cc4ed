"""Loading a model by name: the bundled one, a GGUF file, or whatever mlx-lm can load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from workbench.attention.dtypes import DTYPES, dtype_name
from workbench.models.bundled import BUNDLED_NAME, fetch_bundled
from workbench.models.gguf_file import MAGIC, GGUFFile
from workbench.models.gguf_loader import gguf_config, load_gguf_model
from workbench.models.gguf_tokenizer import GGUFTokenizer
from workbench.models.sharding import check_heads_divide, shard
from workbench.models.tokenizer import HuggingFaceTokenizer, Tokenizer

# Where configurations keep the length of the model's context; transformers' names, the common one first.
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


@dataclass(repr=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: The mlx-lm model, evaluated.
        tokenizer: Its tokenizer, None where it has none.
        name: A short name: of the file without its extension, of the folder, or of the repository.
        architecture: mlx-lm's ``model_type``.
        max_position: Length of the model's context in tokens.
        eos_token_ids: Tokens that end an output.
        vocab_size: Logits per position.
        dtype: Element type of activations and of weights that are not quantised, such as "float32".
        num_parameters: Weights of the whole model, counted before any quantisation.
        source: The file, folder or repository it came from.
        quantized: Bits per weight that stayed quantised, such as "4 bits"; "" where none did.
        preflights: What `preflight_once` found out, by attention backend and device.
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
    preflights: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        millions = self.num_parameters / 1e6
        size = f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.2f}B"
        weights = f"{self.dtype}, {self.quantized}" if self.quantized else self.dtype
        return (
            f"LoadedModel({self.name!r}: {self.architecture}, {size} parameters, {weights}, "
            f"context {self.max_position}, vocabulary {self.vocab_size})"
        )


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    keep_quantized: bool | None = None,
    group: mx.distributed.Group | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: "smollm2" (the bundled model), a GGUF file, a folder in MLX or Hugging Face format, or the name
            of a repository, which mlx-lm downloads.
        dtype: "float32", "float16" or "bfloat16". By default float32 on a CPU, where MLX has fast matrix products
            for nothing else; on a GPU what the file holds.
        keep_quantized: Leave quantised weights quantised where MLX can compute with them. By default on a GPU only.
        group: Ranks that share the model, each loading it with the same arguments; this one keeps its part.

    Raises:
        FileNotFoundError: No such file or folder.
        ValueError: A format, architecture, type or tokenizer that is not supported, or a model that the ranks of
            ``group`` cannot share, which is found before any weight is read; the message names it.
        OSError: A download failed; the message says what to do.
    """
    on_gpu = _runs_on_gpu()
    keep = on_gpu if keep_quantized is None else keep_quantized
    wanted = _check_dtype(dtype)
    if name_or_path == BUNDLED_NAME:
        return _load_gguf(BUNDLED_NAME, fetch_bundled(), wanted, on_gpu, keep, group)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is not a GGUF file; give a GGUF file, a folder or a repository")
        return _load_gguf(path.stem, path, wanted, on_gpu, keep, group)
    return _load_with_mlx_lm(str(name_or_path), wanted, on_gpu, keep, group)


def _runs_on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _check_dtype(dtype: str | mx.Dtype | None) -> mx.Dtype | None:
    if dtype is None or dtype in DTYPES.values():
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")
    return DTYPES[dtype]


def _load_gguf(
    name: str, path: Path, dtype: mx.Dtype | None, on_gpu: bool, keep: bool, group: mx.distributed.Group | None
) -> LoadedModel:
    file = GGUFFile(path)
    tokenizer = GGUFTokenizer(file.metadata)
    if dtype is None:
        dtype = _gguf_dtype(file) if on_gpu else mx.float32
    if group is not None:
        check_heads_divide(name, gguf_config(file), group.size())
    model, config = load_gguf_model(file, dtype=dtype, keep_quantized=keep)
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
    )


def _gguf_dtype(file: GGUFFile) -> mx.Dtype:
    """Element type on a GPU: bfloat16 for a file of bfloat16 and for Gemma 3, whose activations overflow float16."""
    types = {tensor.type_name for tensor in file.tensors.values()}
    return mx.bfloat16 if "BF16" in types or file.metadata.get("general.architecture") == "gemma3" else mx.float16


def _load_with_mlx_lm(
    name: str, dtype: mx.Dtype | None, on_gpu: bool, keep: bool, group: mx.distributed.Group | None
) -> LoadedModel:
    from mlx_lm.utils import dequantize_model
    from mlx_lm.utils import load as mlx_lm_load

    location = _check_location(name)
    if group is not None:
        check_heads_divide(name, _read_config(location), group.size())
    try:
        model, tokenizer, config = mlx_lm_load(location, lazy=True, return_config=True)
    except Exception as problem:  # mlx-lm, transformers and the hub raise whatever they meet
        reason = f"{type(problem).__name__}: {problem}"
        if Path(location).is_dir():
            raise ValueError(f"mlx-lm cannot load the folder {location!r}: {reason}") from problem
        raise OSError(
            f"mlx-lm cannot load {name!r}: {reason}. If it is a repository, check its name and the connection; "
            "otherwise give the path of a GGUF file or of a model's folder"
        ) from problem
    if not keep:
        model = dequantize_model(model)
    if dtype is None and not on_gpu:
        dtype = mx.float32
    if dtype is not None:
        model.set_dtype(dtype)
    num_parameters = _count_parameters(model)
    if group is not None:
        shard(name, model, group)
    model.eval()
    mx.eval(model.parameters())
    wrapped = HuggingFaceTokenizer(tokenizer)
    return LoadedModel(
        model=model,
        tokenizer=wrapped,
        name=Path(name).name,
        architecture=config["model_type"],
        max_position=_context_length(name, config, model),
        eos_token_ids=wrapped.eos_token_ids,
        vocab_size=_text_field(config, ("vocab_size",)) or wrapped.vocab_size,
        dtype=dtype_name(dtype or _common_dtype(model)),
        num_parameters=num_parameters,
        source=name,
        quantized=_kept_bits(model),
    )


def _check_location(name: str) -> str:
    """The folder or the repository's name, as mlx-lm takes it; what can be neither is refused without a download."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; name one of its GGUF files: {', '.join(files)}" if files else ""
            raise FileNotFoundError(f"{path} has no config.json, so it is no model in MLX or Hugging Face format{hint}")
    elif name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise FileNotFoundError(f"{path} does not exist")
    return str(path) if path.is_dir() else name


def _read_config(location: str) -> dict[str, Any]:
    """The config.json of a folder or a repository, without its weights."""
    path = Path(location) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(location, "config.json"))
        except Exception as problem:  # the hub raises whatever it meets
            raise OSError(
                f"{location!r} has no config.json to be had: {type(problem).__name__}: {problem}"
            ) from problem
    try:
        return json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}") from problem


def _text_field(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """A field of a configuration, or of its part about text where a model also takes other inputs."""
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(part.get(name), int):
                return part[name]
    return None


def _context_length(name: str, config: Mapping[str, Any], model: nn.Module) -> int:
    length = _text_field(config, _CONTEXT_FIELDS) or getattr(
        getattr(model, "args", None), "max_position_embeddings", None
    )
    if not length:
        raise ValueError(
            f"{name}: config.json does not say how long the context is; add max_position_embeddings to it "
            f"(looked for {', '.join(_CONTEXT_FIELDS)})"
        )
    return int(length)


def _common_dtype(model: nn.Module) -> mx.Dtype:
    """The floating-point type of most weights that are not quantised."""
    sizes: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _count_parameters(model: nn.Module) -> int:
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))


def _kept_bits(model: nn.Module) -> str:
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{' and '.join(map(str, bits))} bits" if bits else ""
