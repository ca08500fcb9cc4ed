"""Folders in MLX or Hugging Face format: facts in their configuration, and errors for folders that are not whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from workbench.base.outside_files import check_regular, json_value, read_bytes, read_json
from workbench.models.weight_headers import check_config

# Fields of configurations for the length of the model's context; transformers' names, the common one first.
CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_MAX_JSON = 2**26
"""Bytes of the largest file of JSON in a folder (64 MiB); the index of a model of 1,000 billion parameters has 20."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Files of a tokenizer that transformers reads."""

_LACKS = re.compile(r"missing \d+ required positional arguments?: (.+)")
SHOWN = 400
"""Characters of a message of mlx-lm that are shown."""


def check_location(name: str) -> str:
    """The folder or the repository as mlx-lm takes it; a name that can be neither is refused without a download.

    Raises:
        FileNotFoundError: There is no such folder, or it has no config.json.
        ValueError: The folder's config.json does not name a model type, or a file with weights is missing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; name one of its GGUF files: {', '.join(files)}" if files else ""
            raise FileNotFoundError(f"{path} has no config.json: it is not a model in MLX or Hugging Face format{hint}")
        _check_folder(path)
    elif name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise FileNotFoundError(f"{path} does not exist")
    return str(path) if path.is_dir() else name


def _check_folder(folder: Path) -> None:
    """Refuse a folder whose configuration cannot be read, or that lacks files with weights."""
    for path in folder.iterdir():  # mlx-lm and transformers open what they find, and a pipe would keep them
        if path.exists() and not path.is_dir():
            check_regular(path)
    if (folder / "tekken.json").exists() and lacks_tokenizer([path.name for path in folder.iterdir()]):
        raise ValueError(
            f"{folder} has tekken.json, a tokenizer in Mistral's own format, and none that transformers reads: put the "
            "tokenizer.json and tokenizer_config.json of the model's repository beside it, or use a GGUF file"
        )
    config = check_model_type(folder / "config.json", read_config(str(folder)))
    index = folder / "model.safetensors.index.json"
    parts = _read_object(index).get("weight_map") if index.exists() else None
    names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(
            f"{folder / missing[0]} is missing{f', like {len(missing) - 1} more' if len(missing) > 1 else ''}: "
            f"{index.name} names {len(names)} files with weights; download the folder again"
        )
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ValueError(
            f"{folder} has no weights: there is no model*.safetensors; download the folder again, or convert the "
            "weights with mlx_lm.convert"
        )
    check_config(config, weights, str(folder / "config.json"))


def check_model_type(place: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, if it names an architecture.

    Raises:
        ValueError: It does not.
    """
    if not isinstance(model_type := config.get("model_type"), str):
        raise ValueError(
            f'{place}: model_type is {model_type!r}; it must be the name of an architecture of mlx-lm, such as "llama"'
        )
    return config


def lacks_tokenizer(files: Iterable[str]) -> bool:
    """Whether a tokenizer that transformers reads is missing among the names of a model's files."""
    return set(TOKENIZERS).isdisjoint(files)


def why_not_loaded(problem: BaseException, location: str) -> str:
    """The message for a folder that mlx-lm cannot load."""
    if isinstance(problem, TypeError) and (found := _LACKS.search(str(problem))):
        architecture = read_config(location)["model_type"]
        return (
            f"{location}/config.json: {found[1]} missing, which mlx-lm's {architecture} needs: take the file from the "
            "model's repository again, or write them as in a model of this kind that loads"
        )
    if isinstance(problem, SystemExit):
        model_type = read_config(location)["model_type"]
        hint = f"Its module of model_type {model_type!r} needs a package that is missing, and has printed its name"
    else:
        hint = "The config.json and the weights must be those of one model, as its authors or mlx_lm.convert wrote them"
    return f"mlx-lm cannot load the folder {location!r}: {_shortened(problem)}. {hint}"


def why_no_tokenizer(problem: BaseException, location: str) -> str:
    """The message for a folder whose weights were read, and whose tokenizer transformers cannot load."""
    return (
        f"the tokenizer of the folder {location!r} cannot be loaded: {_shortened(problem)}. Take tokenizer.json and "
        "tokenizer_config.json from the model's repository again"
    )


def _shortened(problem: BaseException) -> str:
    """A library's message, which may name every weight that is missing."""
    reason = f"{type(problem).__name__}: {problem}"
    return reason.rstrip(".") if len(reason) <= SHOWN else f"{reason[:SHOWN]}..."


def read_config(location: str) -> dict[str, Any]:
    """The config.json of a folder, read without the weights."""
    return _read_object(Path(location) / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        ValueError: It holds something else.
    """
    content = json_value(read_bytes(path, _MAX_JSON), f"{path} is not JSON")
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; it must be an object of JSON, with names and values"
        )
    return content


def own_code(location: str) -> str:
    """The files of code that a folder's configurations name, for an error message."""
    found = []
    for file in ("config.json", "tokenizer_config.json"):
        try:
            config = read_json(Path(location) / file)
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            found += [
                f"{file}: {key}={str(config[key])[:200]!r}" for key in ("model_file", "auto_map") if key in config
            ]
    return "; ".join(found)


def needs_own_code(name: str, location: str) -> str:
    """The message for a model that cannot be loaded without code of its authors."""
    found = own_code(location) or "auto_map or model_file in its configuration"
    return (
        f"{name!r} needs Python code that comes with the model ({found}), and Workbench never runs that: use a "
        "conversion of the model to mlx-lm's format or a GGUF file"
    )


def text_field(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """A field of a configuration, or of its part about text if the model also takes other inputs."""
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(part.get(name), int):
                return part[name]
    return None


def context_length(name: str, config: Mapping[str, Any], model: nn.Module) -> int:
    """Length of the model's context in tokens.

    Raises:
        ValueError: Neither the configuration nor the model gives it.
    """
    length = text_field(config, CONTEXT_FIELDS) or getattr(
        getattr(model, "args", None), "max_position_embeddings", None
    )
    if not length:
        raise ValueError(
            f"{name}: config.json does not give the length of the context; add max_position_embeddings to it "
            f"(fields looked for: {', '.join(CONTEXT_FIELDS)})"
        )
    return int(length)
