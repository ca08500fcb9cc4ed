"""Repositories of models: their small files are fetched and judged as a folder's are, and then the weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from workbench.models.config_json import read_keys
from workbench.models.folder import (
    SHOWN,
    TOKENIZERS,
    check_model_type,
    lacks_tokenizer,
    needs_own_code,
    own_code,
    read_config,
)
from workbench.models.side_files import judge_side_files

SMALL = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files that decide whether a model is refused."""


def fetch_repository(name: str, ignored: Collection[str] = ()) -> Path:
    """The folder of a repository, downloaded unless it is there.

    Args:
        name: The name, such as "owner/name".
        ignored: Keys of its files that are accepted without effect.

    Raises:
        UnknownKeyError: A key of its files is refused; the message names it, and no weights have been fetched.
        ValueError: It is not a model that can be loaded.
        OSError: There is no such repository, or it cannot be fetched; the message says what to do.
    """
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    folder, files = _download(name, SMALL), _files(name)
    if not (folder / "config.json").exists():
        raise ValueError(_without_config(name, files))
    config = check_model_type(f"{name}: config.json", read_config(str(folder)))
    _check_files(name, files)
    judge_side_files(folder, ignored, name)
    is_unknown = read_keys(f"{name}: config.json", config, ignored).is_unknown
    if "model_file" in config or (is_unknown and own_code(str(folder))):
        raise ValueError(needs_own_code(name, str(folder)))
    if is_unknown:
        raise ValueError(
            f"{name}: mlx-lm cannot load model_type {config['model_type']!r}, so its weights were not fetched; the "
            "table in docs/models.md has the architectures that are served"
        )
    return _download(name, DEFAULT_ALLOW_PATTERNS)


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as problem:  # the hub raises exceptions of many kinds
        raise OSError(_not_fetched(name, problem)) from problem


def _files(name: str) -> list[str]:
    """The names of a repository's files; none if the hub does not say."""
    from huggingface_hub import list_repo_files

    try:
        return list(list_repo_files(name))
    except Exception:  # without a connection, what was downloaded earlier is enough
        return []


def _check_files(name: str, files: Sequence[str]) -> None:
    if not files:
        return
    if not any(fnmatch(file, "model*.safetensors") for file in files):
        others = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors", ".npz"))]
        found = f", only {', '.join(others[:3])}" if others else ""
        raise ValueError(
            f"{name} has no weights that mlx-lm reads: there is no model*.safetensors{found}; convert it with "
            "mlx_lm.convert, or name a GGUF file"
        )
    if lacks_tokenizer(files):
        raise ValueError(
            f"{name} has no tokenizer that transformers reads ({', '.join(TOKENIZERS)}): use a conversion of the model"
        )


def _without_config(name: str, files: Sequence[str]) -> str:
    found = [file for file in files if file.endswith(".gguf")]
    hint = f": download one of its GGUF files ({', '.join(found[:3])}) and give its path" if found else ""
    return f"{name} has no config.json, so it is not a model in MLX or Hugging Face format{hint}"


def _not_fetched(name: str, problem: Exception) -> str:
    """The message for a name that is neither a folder nor a repository that can be fetched."""
    reason = f"{type(problem).__name__}: {problem}".strip().replace("\n", " ")
    if type(problem).__name__ == "LocalEntryNotFoundError":
        reason = "the Hub does not answer, and it was not downloaded before"
    reason = reason.rstrip(".") if len(reason) <= SHOWN else f"{reason[:SHOWN]}..."
    parent = Path(name).parent
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    similar = get_close_matches(Path(name).name, names, n=1)
    hint = f" Did you mean {str(parent / similar[0])!r}?" if similar else ""
    return (
        f"{name!r} is neither a folder nor a file here, and cannot be fetched as a repository: {reason}. Check its "
        f"name and the connection, or give the path of a GGUF file or of a model's folder.{hint}"
    )
