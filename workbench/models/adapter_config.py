"""adapter_config.json of PEFT and of mlx-lm: what each key means, and the factor of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from workbench.base.key_table import OFF, Finding, Rule, judge
from workbench.base.text import shown

PEFT = (
    Rule("read", "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules "
         "layers_to_transform layers_pattern", "the matrices are compared with it"),
    Rule("harmless", "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
         "runtime_config "
         "lora_dropout megatron_core megatron_config qalora_group_size ensure_weight_tying *loftq_config eva_config "
         "corda_config lora_ga_config", "it describes the file or its training"),
    Rule("harmless", "init_lora_weights", "it begins the training, and leaves the model's own weights as they are",
         (True, False, None, "gaussian", "eva", "orthogonal")),
    Rule("refused", "init_lora_weights", "this start of the training changes the model's own weights too, so "
         "that the sum "
         "is not that of an adapter alone: convert it with PEFT's save_pretrained(..., "
         "path_initial_model_for_weight_conversion=...)"),
    Rule("harmless", "bias", "no bias is trained", ("none", None)),
    Rule("refused", "bias", "only 'none' is supported"),
    OFF,
    Rule("refused", "alora_invocation_tokens", "an activated LoRA begins at its invocation tokens, and this one "
         "would act "
         "on every token"),
    Rule("refused", "modules_to_save trainable_token_indices target_parameters", "only matrices of linear "
         "layers are served"),
    Rule("refused", "use_dora use_qalora use_bdlora arrow_config lora_bias layer_replication fan_in_fan_out "
         "velora_config",
         "only plain LoRA is served"),
)  # fmt: skip
"""The table for PEFT."""

MLX_LM = (
    Rule("read", "fine_tune_type num_layers lora_layers lora_parameters", "the matrices are compared with it"),
    Rule("harmless", "model train optimizer optimizer_config data seed batch_size iters val_batches learning_rate "
         "steps_per_report steps_per_eval resume_adapter_file adapter_path save_every test test_batches max_seq_length "
         "config grad_checkpoint grad_accumulation_steps clear_cache_threshold lr_schedule mask_prompt report_to "
         "project_name trust_remote_code hf_dataset wandb prompt_feature completion_feature chat_feature text_feature",
         "it is an option of mlx_lm.lora's training"),
    OFF,
)  # fmt: skip
"""The table for mlx-lm."""

_PARAMETERS = (
    Rule("read", "rank scale keys", "the matrices are compared with it"),
    Rule("harmless", "dropout alpha", "it is for training"),
    OFF,
)
_LIMIT = 1e6
_MOST_STARS = 3


class Layers(NamedTuple):
    """The meaning of a configuration for the matrices.

    Attributes:
        findings: The verdict on each key.
        kind: "PEFT" or "mlx-lm".
        config: Its content.
    """

    findings: list[Finding]
    kind: str
    config: Mapping[str, Any]

    def factor(self, path: str, rank: int) -> float:
        """The factor of a layer's matrices.

        Raises:
            ValueError: The configuration means other matrices.
        """
        return self._peft(path, rank) if self.kind == "PEFT" else self._mlx(path, rank)

    def check_layers(self, paths: Collection[str], num_layers: int | None) -> None:
        """Refuse layers that the configuration leaves out: PEFT and mlx-lm would not load them.

        Raises:
            ValueError: The message names one.
        """
        for path in paths:
            if reason := (self._left_out_by_peft(path) if self.kind == "PEFT" else self._left_out(path, num_layers)):
                raise ValueError(f"{reason}, and the file holds matrices of {path!r}")

    def _peft(self, path: str, rank: int) -> float:
        expected = _of_pattern(self.config.get("rank_pattern"), path, self.config.get("r"))
        if expected is not None and expected != rank:
            raise ValueError(f"r is {shown(expected)} for {path!r}, its matrices have the rank {rank}")
        alpha = _of_pattern(self.config.get("alpha_pattern"), path, self.config.get("lora_alpha", 8))
        return _finite("lora_alpha", alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _mlx(self, path: str, rank: int) -> float:
        parameters = self.config["lora_parameters"]
        expected = parameters.get("rank")
        if expected is not None and expected != rank:
            raise ValueError(
                f"lora_parameters.rank is {shown(expected)}, the matrices of {path!r} have the rank {rank}"
            )
        return _finite("lora_parameters.scale", parameters.get("scale"))

    def _left_out_by_peft(self, path: str) -> str:
        layers, layer = self.config.get("layers_to_transform"), _layer_of(path)
        if layers is not None and layer is not None and layer not in ([layers] if isinstance(layers, int) else layers):
            return f"layers_to_transform is {shown(layers)}"
        targets, excluded = self.config.get("target_modules"), self.config.get("exclude_modules")
        if isinstance(targets, list) and not _is_one_of(targets, path):
            return f"target_modules is {shown(targets)}"
        if isinstance(excluded, list) and _is_one_of(excluded, path):
            return f"exclude_modules is {shown(excluded)}"
        return ""

    def _left_out(self, path: str, num_layers: int | None) -> str:
        last = self.config.get("num_layers", self.config.get("lora_layers"))
        layer = _layer_of(path)
        if isinstance(last, int) and last > 0 and num_layers and layer is not None and layer < num_layers - last:
            return f"num_layers is {last}, the last of {num_layers}"
        keys = self.config["lora_parameters"].get("keys")
        if isinstance(keys, list) and path not in keys and re.sub(r"^.*?\.\d+\.", "", path) not in keys:
            return f"lora_parameters.keys is {shown(keys)}"
        return ""


def read_adapter_config(place: str, config: Mapping[str, Any]) -> Layers:
    """Judge each key of an adapter's configuration.

    Raises:
        ValueError: A key or a value is refused; the message names it.
    """
    if "peft_type" in config:
        if (kind := config["peft_type"]) != "LORA":
            raise ValueError(f"{place}: peft_type {shown(kind)} is not supported, only 'LORA'")
        findings = judge(place, config, PEFT)
        _check_peft(place, config)
        return Layers(findings, "PEFT", config)
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise ValueError(f"{place}: fine_tune_type {shown(kind)} is not supported, only 'lora'")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ValueError(f"{place}: lora_parameters must be an object, got {shown(parameters)}")
    findings = judge(place, config, MLX_LM) + judge(f"{place}: lora_parameters", parameters, _PARAMETERS)
    try:
        _finite("lora_parameters.scale", parameters.get("scale"))
    except ValueError as problem:
        raise ValueError(f"{place}: {problem}") from None
    return Layers(findings, "mlx-lm", config)


def _check_peft(place: str, config: Mapping[str, Any]) -> None:
    """Refuse values of other types than PEFT's."""
    layers = config.get("layers_to_transform")
    whole = isinstance(layers, int) or (isinstance(layers, list) and all(type(layer) is int for layer in layers))
    checks = {
        "use_rslora": isinstance(config.get("use_rslora", False), bool),
        "r": config.get("r") is None or (type(config["r"]) is int and config["r"] > 0),
        "layers_to_transform": layers is None or whole,
        "rank_pattern": isinstance(config.get("rank_pattern") or {}, dict),
        "alpha_pattern": isinstance(config.get("alpha_pattern") or {}, dict),
    }
    expected = {
        "use_rslora": "true or false",
        "r": "a whole number from 1",
        "layers_to_transform": "a number of a layer, or a list of them",
        "rank_pattern": "an object of layers and ranks",
        "alpha_pattern": "an object of layers and numbers",
    }
    for field, fits in checks.items():
        if not fits:
            raise ValueError(f"{place}: {field} must be {expected[field]}, got {shown(config[field])}")
    try:
        for field, value in (("lora_alpha", config.get("lora_alpha", 8)), *_items(config, "alpha_pattern")):
            _finite(field, value)
        for field, value in _items(config, "rank_pattern"):
            if type(value) is not int or value < 1:
                raise ValueError(f"{field} must be a whole number from 1, got {shown(value)}")
    except ValueError as problem:
        raise ValueError(f"{place}: {problem}") from None


def _items(config: Mapping[str, Any], field: str) -> Iterable[tuple[str, Any]]:
    return ((f"{field}.{key}", value) for key, value in (config.get(field) or {}).items())


def _of_pattern(pattern: Mapping[str, Any] | None, path: str, usual: Any) -> Any:
    """The value for a layer, as PEFT finds it: of the first key that matches the layer's name or its end.

    Raises:
        ValueError: A key is an expression that could take long.
    """
    for key, value in (pattern or {}).items():
        if not re.fullmatch(r"(?:[\w.^$]|\\\.|\.[*+])+", key) or len(re.findall("[*+]", key)) > _MOST_STARS:
            raise ValueError(
                f"the pattern {shown(key)} is not supported: it may have names, dots and {_MOST_STARS} '.*'"
            )
        if re.fullmatch(rf"(?:.*\.)?(?:{key})", path):
            return value
    return usual


def _is_one_of(names: Iterable[Any], path: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names) or "all-linear" in names


def _layer_of(path: str) -> int | None:
    """The number of the layer that a module belongs to."""
    found = re.search(r"\.(\d+)\.", f".{path}")
    return int(found[1]) if found else None


def _finite(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LIMIT:
        raise ValueError(f"{field} must be a number between -1000000 and 1000000, got {shown(value)}")
    return float(value)
