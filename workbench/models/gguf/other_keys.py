"""Keys of a GGUF file outside of its architecture's and its tokenizer's: what each means here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from workbench.base.key_table import Finding, Rule, judge

OTHER_KEYS = (
    Rule("read", "general.architecture", "the architecture"),
    Rule("read", "split.* general.alignment", "the parts of the file, and where its tensors begin"),
    Rule("harmless", "general.type", "it is a model", ("model",)),
    Rule("refused", "general.type", "only a file of a whole model is loaded"),
    Rule("refused", "adapter.* controlvector.*", "it is an adapter: load its model, and the adapter from a folder"),
    Rule("refused", "clip.*", "it belongs to an encoder of images: load the file of the text model"),
    Rule("refused", "diffusion.*", "the model does not write from left to right"),
    Rule("harmless", "general.*", "the format says that it describes the file"),
    Rule("harmless", "*", "no loader reads keys of such a name: it describes the file"),
)
"""The table, for keys that begin with neither the architecture nor ``tokenizer.``."""


def judge_other_keys(place: Any, metadata: Mapping[str, Any], ignored: Collection[str] = ()) -> list[Finding]:
    """The verdict on each key that says nothing about the architecture or the tokenizer.

    Args:
        place: The file, for messages.
        metadata: All its keys.
        ignored: Keys that are accepted without effect.

    Raises:
        UnknownKeyError: A key is refused; the message names it.
    """
    prefixes = (f"{metadata.get('general.architecture')}.", "tokenizer.")
    others = {key: value for key, value in metadata.items() if not key.startswith(prefixes)}
    advice = "; accept it with ignore_config_keys or --ignore-config-key"
    return judge(str(place), others, OTHER_KEYS, ignored, advice)
