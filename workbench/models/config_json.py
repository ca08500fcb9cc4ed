"""config.json: what each key means to the architecture that runs the model.

mlx-lm takes the fields that an architecture's ``ModelArgs`` names, and drops all other keys. Here each of those is
judged: by the tables below, and by transformers' own class of the model, if it has one. A value that this class would
give the key anyway is what mlx-lm's architecture computes, besides the values in `ALSO_COMPUTED`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.key_table import OFF, Finding, Rule, UnknownKeyError, judge
from workbench.base.text import shown
from workbench.models.config_forms import fold, judge_windows, missing, own_rules
from workbench.models.config_tables import (
    ALSO_COMPUTED,
    ALWAYS_ON,
    CHANGES_LOGITS,
    DESCRIPTIVE,
    NEUTRAL,
    OTHER_INPUTS,
    PUBLISHED,
    SIZES,
    TEXT_PARTS,
    UNREAD,
    WITHOUT_CLASS,
)
from workbench.models.rope import Rope, RopeError, read_rope
from workbench.models.rope_layers import match_rope
from workbench.models.transformers_values import TransformersValues

_ADVICE = (
    '; if it does not change what the model computes, accept it with ignore_config_keys=("{key}",) or '
    "--ignore-config-key {key}"
)


_KINDS = re.compile(r"\b(bool|int|float|str|[lL]ist|[dD]ict|Tuple|Union|Literal|Any|Callable)\b")


class Config(NamedTuple):
    """A configuration that was read.

    Attributes:
        architecture: mlx-lm's name of the text part.
        text: The keys of the text part, under the names that mlx-lm reads.
        changes: Keys that mlx-lm is given in place of the file's.
        rope: Its settings of RoPE.
        findings: The verdict on each key.
        max_position: Longest context in which nothing that mlx-lm lacks would show; None for any.
        window: A window that every layer has; None for the layers' own.
        is_unknown: Whether mlx-lm cannot load the architecture; then no key has been judged.
    """

    architecture: str
    text: dict[str, Any]
    changes: dict[str, Any]
    rope: Rope | None
    findings: list[Finding]
    max_position: int | None = None
    window: int | None = None
    is_unknown: bool = False


def read_keys(place: str, config: Mapping[str, Any], ignored: Iterable[str] = ()) -> Config:
    """Judge a configuration, and bring it into the form that mlx-lm reads.

    Args:
        place: The file, for messages.
        config: Its content.
        ignored: Keys that are accepted without effect.

    Raises:
        UnknownKeyError: A key, a value or a form is refused; the message names it and what to do.
    """
    from mlx_lm.utils import _decode_tagged_floats

    config = dict(_decode_tagged_floats(json.loads(json.dumps(config))))  # parts of it are changed
    accepted = frozenset(ignored)
    model_type = str(config["model_type"])
    found = arguments_of(config)
    if found is None:
        return Config(model_type, config, {}, None, [], is_unknown=True)
    architecture, arguments, has_part = found
    text: dict[str, Any] = config["text_config"] if has_part else config
    if not isinstance(text, dict):
        raise UnknownKeyError(f"{place}: text_config must be an object, got {shown(text)}")
    text_type = str(text.get("model_type") or model_type)
    _check_kinds(place, arguments, text)
    fields = {field.name for field in dataclasses.fields(arguments)}
    read = fields - _unused(architecture, arguments)
    try:
        rope = read_rope(architecture, text)
        default = TransformersValues(text_type, text)
        changes = fold(architecture, arguments, text, rope, fields)
        changes |= missing(architecture, arguments, {**text, **changes}, default, config)
    except RopeError as problem:
        raise UnknownKeyError(f"{place}: {problem}") from None
    folded = {**text, **changes}
    window, max_position, about_windows = judge_windows(
        place, architecture, model_type, folded, read, default, accepted
    )
    rules = [
        *about_windows,
        *own_rules(architecture, text, read, folded),
        *DESCRIPTIVE,
        *NEUTRAL,
        SIZES,
        *([OTHER_INPUTS] if has_part or "vision_config" in config else []),
    ]
    findings = _judge(place, architecture, text, rules, default, accepted)
    if has_part:
        outer = {key: value for key, value in config.items() if key != "text_config"}
        repeated = [key for key, value in outer.items() if key in text and text[key] == value]
        known = " ".join([*_outer_fields(model_type), *repeated])
        rules = [Rule("read", known, "mlx-lm reads it"), *DESCRIPTIVE, *NEUTRAL, OTHER_INPUTS]
        whole = TransformersValues(model_type, outer)
        findings += _judge(place, architecture, outer, rules, whole, accepted)
        given = {"text_config": folded} if changes else {}
    else:
        given = changes
    return Config(architecture, folded, given, rope, findings, max_position, window)


def _check_kinds(place: str, arguments: type, text: Mapping[str, Any]) -> None:
    """Refuse a text in place of a number or a truth value, of which "false" would be a true one."""
    for field in dataclasses.fields(arguments):
        kinds = set(_KINDS.findall(str(field.type)))
        if kinds and kinds <= {"bool", "int", "float"} and isinstance(value := text.get(field.name), str):
            wanted = "true or false" if kinds == {"bool"} else "a number"
            raise UnknownKeyError(f"{place}: {field.name} must be {wanted}, got the text {shown(value)}")


def _judge(
    place: str,
    architecture: str,
    values: Mapping[str, Any],
    rules: list[Rule],
    default: TransformersValues,
    ignored: frozenset[str],
) -> list[Finding]:
    """The meaning of each key: by the rules, or else by transformers' class and by its name."""
    findings = []
    for key, value in values.items():
        more = [*rules]
        if (architecture, key) in ALSO_COMPUTED:
            more.append(Rule("harmless", key, "mlx-lm computes it", ALSO_COMPUTED[architecture, key]))
        if not any(rule.holds(key, value) for rule in more):
            known, usual = default.of(key)
            if known:
                because = f"mlx-lm's {architecture} does not read it, and computes what {shown(usual)} means"
                more.append(Rule("harmless", key, "it is what transformers' class says without it", (usual,)))
                if value is not None:
                    more.append(Rule("refused", key, because))
                more.append(Rule("harmless", key, "it is not set", (None,)))
            else:
                more += [*((PUBLISHED,) if default.exists else WITHOUT_CLASS), *ALWAYS_ON, OFF, *CHANGES_LOGITS]
                if key in vocabulary():
                    more.append(Rule("harmless", key, "it is for other architectures"))
        findings += judge(place, {key: value}, more, ignored, _ADVICE.format(key=key))
    return findings


def arguments_of(config: Mapping[str, Any]) -> tuple[str, type, bool] | None:
    """The architecture that runs a configuration's text, the class of its arguments, and whether it is a part.

    None if mlx-lm has no such architecture, or ends the process that imports it: loading will say so.
    """
    from mlx_lm.utils import _get_classes

    try:
        model, _ = _get_classes(dict(config))
    except (Exception, SystemExit):
        return None
    name = model.__module__.rpartition(".")[2]
    parts = config.get("text_config")
    if name == "mistral3":
        kind = parts.get("model_type") if isinstance(parts, dict) else ""
        part = (kind if kind in ("ministral3", "mistral4") else "llama", "ModelArgs")
    elif name in TEXT_PARTS:
        part = TEXT_PARTS[name]
    else:
        part = (name, "ModelArgs")
    module = importlib.import_module(f"mlx_lm.models.{part[0]}")
    return part[0], getattr(module, part[1]), "text_config" in config


def _outer_fields(model_type: str) -> list[str]:
    """The fields that the arguments of a whole model name."""
    from mlx_lm.utils import _get_classes

    _, arguments = _get_classes({"model_type": model_type})
    return [field.name for field in dataclasses.fields(arguments)]


@cache
def vocabulary() -> frozenset[str]:
    """The names of the arguments of all architectures of mlx-lm, read from their source."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None and spec.submodule_search_locations is not None
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    return frozenset(name for file in files for name in re.findall(r"^    (\w+): ", file.read_text(), re.MULTILINE))


@cache
def _unused(architecture: str, arguments: type) -> frozenset[str]:
    """Fields whose name stands nowhere in the architecture's code but where they are declared."""
    sources, rest = dict[str, str](), [importlib.import_module(arguments.__module__)]
    rest += [importlib.import_module(f"mlx_lm.models.{architecture}")]
    while rest:
        module = rest.pop()
        if module.__name__ in sources or not module.__name__.startswith("mlx_lm.models"):
            continue
        sources[module.__name__] = inspect.getsource(module)
        for value in vars(module).values():
            home = value if inspect.ismodule(value) else inspect.getmodule(value)
            if home is not None:
                rest.append(home)
    code = "\n".join(sources.values())
    unused = {
        field.name
        for field in dataclasses.fields(arguments)
        if not re.search(rf"""\.{field.name}\b|["']{field.name}["']""", code)
    }
    return frozenset(unused | set(UNREAD.get(architecture, ())))


def complete_model(place: str, model: Any, config: Config) -> list[str]:
    """Give a model what its configuration says and mlx-lm's architecture does not read.

    Args:
        place: The file, for messages.
        model: The model, whose weights need not be read yet.
        config: Its configuration.

    Returns:
        Paths of the modules that were replaced.

    Raises:
        UnknownKeyError: The model cannot compute what the configuration says.
    """
    try:
        replaced = match_rope(config.architecture, model, config.text, config.rope)
    except RopeError as problem:
        raise UnknownKeyError(f"{place}: {problem}") from None
    if config.window is not None:  # mlx-lm's llama builds no model in which no layer has full attention
        inner = model.model
        inner.sliding_window, inner.swa_idx = config.window, 0
        for layer in inner.layers:
            layer.use_sliding = True
    return replaced
