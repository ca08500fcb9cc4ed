"""Write the tables of configurations in docs/models.md: ``python scripts/list_config_forms.py [--check]``.

The first table is that of the keys of a model's files, from the tables of their readers.

For every architecture of mlx-lm of which transformers has a configuration class: a tiny configuration as this class
writes it (``rope_parameters``) is read as a folder's config.json is, and the logits are compared with those of plain
mlx-lm with the same weights and the configuration in the older form (``rope_theta``, ``rope_scaling``). Names of
architectures as arguments try these and print their lines.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from generated_files import replaced, rule_cells, write_or_check
from list_models import architectures

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- begin configurations -->\n", "<!-- end configurations -->\n"
KEYS_BEGIN, KEYS_END = "<!-- begin keys -->\n", "<!-- end keys -->\n"
THETA = 500_000.0
MAX_PARAMETERS = 30_000_000
SAME, RIGHT, REFUSED, NOT_TRIED = "same logits", "right, not in plain mlx-lm", "refused", "not tried"
_MEANT = ("hidden_act", "attention_bias", "mlp_bias", "norm_topk_prob", "sliding_window", "sliding_window_pattern")
_MEANT += ("layer_types", "partial_rotary_factor", "use_bias", "rms_norm_eps")
"""Fields of the tiny configurations that are not sizes: transformers' own values stay."""


class Row(NamedTuple):
    """A line of the table."""

    architecture: str
    result: str
    reason: str


def written(architecture: str) -> dict[str, Any] | None:
    """A tiny configuration as transformers writes it; None if it has no class for the architecture."""
    from tiny_configurations import COMMON, SPECIAL
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        whole = CONFIG_MAPPING[architecture]
    except KeyError:
        return None
    fields = {**COMMON, **SPECIAL.get(architecture, {})}
    usual = whole()
    text = usual.get_text_config()
    has_part = text is not usual
    fields = {**fields, **fields.pop("text_config", {})}
    known = {*text.to_dict(), *text.attribute_map}
    given = {k: v for k, v in fields.items() if k in known and k not in _MEANT and not k.startswith("rope_")}
    if set(text.to_dict().get("layer_types") or ()) == {"sliding_attention", "full_attention"}:
        layers = int(given.get("num_hidden_layers", 4))
        given["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    given.pop("model_type", None)
    part = json.loads(type(text)(**given).to_json_string())
    for parameters in _settings(part.get("rope_parameters")):
        parameters["rope_theta"] = THETA
    if not has_part:
        return {**part, "model_type": architecture}
    outer = {key: value for key, value in json.loads(usual.to_json_string()).items() if not isinstance(value, dict)}
    return {**outer, "model_type": architecture, "vocab_size": part.get("vocab_size"), "text_config": part}


def _settings(parameters: Any) -> Iterator[dict[str, Any]]:
    """The settings in ``rope_parameters`` that have a base."""
    if isinstance(parameters, dict):
        for one in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
            if one.get("rope_theta"):
                yield one


def older(config: Mapping[str, Any], changes: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The configuration with RoPE in the older form, for plain mlx-lm, and other names as it reads them."""
    config = deepcopy(dict(config))
    part = config.get("text_config") or config
    parameters = part.get("rope_parameters")
    if isinstance(parameters, dict):
        nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
        main = nested.get("full_attention", parameters if not nested else {})
        part |= {"rope_theta": main.get("rope_theta"), "rotary_emb_base": main.get("rope_theta")}
        local = nested.get("sliding_attention", {}).get("rope_theta")
        part |= {"rope_local_base_freq": local, "rope_local_theta": local, "swa_rope_theta": local}
        if main.get("rope_type") not in (None, "default"):
            part["rope_scaling"] = {**main, "type": main["rope_type"]}
        if (share := main.get("partial_rotary_factor")) is not None:
            part |= {"partial_rotary_factor": share, "rotary_pct": share}
        if "rope_parameters" not in fields:
            part.pop("rope_parameters")
    renamed = changes.get("text_config", changes)
    part |= {key: value for key, value in renamed.items() if key not in part and not key.startswith("rope")}
    return config


def try_architecture(architecture: str) -> Row:
    """Compare the logits of both forms."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes
    from tiny_configurations import NOT_TRIED as UNTRIED
    from tiny_configurations import VOCAB_SIZE

    from workbench.models.config_json import arguments_of, complete_model, read_keys

    if architecture in UNTRIED:
        return Row(architecture, NOT_TRIED, UNTRIED[architecture])
    try:
        config = written(architecture)
    except Exception as problem:
        return Row(architecture, NOT_TRIED, f"transformers has no tiny configuration: {_one_line(problem)}")
    if config is None:
        return Row(architecture, NOT_TRIED, "transformers has no class for it")
    tokens = mx.array([np.random.default_rng(5).integers(1, VOCAB_SIZE, 40).tolist()])
    try:
        keys = read_keys("config.json", config)
        read = {**config, **keys.changes}
        model_class, arguments = _get_classes(read)
        model = model_class(arguments.from_dict(deepcopy(read)))
        if (size := sum(array.size for _, array in tree_flatten(model.parameters()))) > MAX_PARAMETERS:
            return Row(architecture, NOT_TRIED, f"its configuration leaves {size:,} parameters")
        replaced = complete_model("config.json", model, keys)
        draw = mx.random.split(mx.random.key(3), 10_000)
        weights = [
            (name, mx.random.normal(array.shape, key=key) * (0.1 if array.ndim < 2 else 2 / array.shape[-1] ** 0.5))
            for (name, array), key in zip(tree_flatten(model.parameters()), draw)
        ]
        model.load_weights(weights)
        logits = np.array(model(tokens).astype(mx.float32))
    except (Exception, SystemExit) as problem:
        return Row(architecture, REFUSED, _one_line(problem))
    if replaced:
        return Row(architecture, RIGHT, "its layers get the rotation that the configuration describes")
    try:
        model_class, arguments = _get_classes(config)
        found = arguments_of(config)
        assert found is not None
        given = older(config, keys.changes, {field.name for field in dataclasses.fields(found[1])})
        plain = model_class(arguments.from_dict(given))
        plain.load_weights(weights)
        expected = np.array(plain(tokens).astype(mx.float32))
    except Exception as problem:
        return Row(architecture, RIGHT, f"plain mlx-lm cannot read the older form: {_one_line(problem)}")
    np.testing.assert_allclose(logits, expected, atol=2e-4 * float(np.abs(expected).max()), err_msg=architecture)
    return Row(architecture, SAME, "")


def _one_line(problem: BaseException) -> str:
    return (
        " ".join(str(problem).replace("config.json: ", "").split()).split("; if it does not")[0][:200].replace("|", "")
    )


def table(rows: Iterable[Row]) -> str:
    """The text between the markers."""
    import transformers

    rows = list(rows)
    counts = Counter(row.result for row in rows)
    head = ", ".join(f"{counts[kind]} {kind}" for kind in (SAME, RIGHT, REFUSED, NOT_TRIED))
    lines = [
        f"With transformers {transformers.__version__}: {head}.",
        "",
        "| architecture | result | reason |",
        "|---|---|---|",
    ]
    return "\n".join(lines + [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]) + "\n"


def keys_table() -> str:
    """The rules about keys, in the order in which they are tried."""
    from workbench.models import adapter_config, config_tables, side_files
    from workbench.models.gguf import other_keys, tokenizer

    tables = {
        "config.json": (
            *config_tables.DESCRIPTIVE,
            *config_tables.NEUTRAL,
            config_tables.SIZES,
            config_tables.OTHER_INPUTS,
        ),
        "config.json, if transformers' class lacks the key": (config_tables.PUBLISHED,),
        "config.json, if transformers has no class": (
            *config_tables.WITHOUT_CLASS,
            *config_tables.ALWAYS_ON,
            *config_tables.CHANGES_LOGITS,
        ),
        "generation_config.json": side_files.GENERATION,
        "tokenizer_config.json": side_files.TOKENIZER,
        "adapter_config.json of PEFT": adapter_config.PEFT,
        "adapter_config.json of mlx-lm": adapter_config.MLX_LM,
        "GGUF": other_keys.OTHER_KEYS,
        "GGUF, behind `tokenizer.`": (*tokenizer.KEYS, *tokenizer.CHANGES_TEXT),
    }
    lines = ["| file | keys | values | verdict | because |", "|---|---|---|---|---|"]
    for file, rules in tables.items():
        lines += [f"| {file} | {keys} | {values} | {rest} |" for keys, values, rest in map(rule_cells, rules)]
    return "\n".join(lines) + "\n"


def try_all(names: Iterable[str]) -> Iterator[Row]:
    """The rows of architectures."""
    from workbench.base.device import choose_device

    choose_device()
    logging.disable(logging.CRITICAL)
    yield from map(try_architecture, names)


def main() -> int:
    """Write the page or check it, or print the rows of the given architectures."""
    import workbench  # noqa: F401 - before mlx: it chooses the BLAS

    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if names:
        for row in try_all(names):
            print(row, flush=True)
        return 0
    text = replaced(PAGE.read_text(), BEGIN, table(try_all(architectures())), END)
    text = replaced(text, KEYS_BEGIN, keys_table(), KEYS_END)
    return write_or_check(__doc__.splitlines()[0], [(PAGE, text)], "mlx-lm and transformers")


if __name__ == "__main__":
    raise SystemExit(main())
