"""config.json: what each key means to the architecture that runs the model.

mlx-lm takes the fields that an architecture's ``ModelArgs`` names, and drops all other keys. Here each of those is
judged: by the tables below, and by transformers' own class of the model, if it has one. A value that this class would
give the key anyway is what mlx-lm's architecture computes, apart from the exceptions in `NOT_COMPUTED`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.field_checks import shown
from workbench.models.key_table import OFF, Finding, Rule, UnknownKeyError, judge
from workbench.models.rope import FULL, SLIDING, Rope, RopeError, fold_rope, match_rope, read_rope

log = logging.getLogger("workbench")

TEXT_PARTS: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
}
"""Architectures that hand ``text_config`` to another one, and the arguments of that."""

DESCRIPTIVE = (
    Rule("harmless", "architectures model_type auto_map *_name_or_path name_or_path name transformers_version "
         "torch_dtype dtype transformers.js_config *attn_implementation* *experts_implementation* _commit_hash license* "
         "unsloth_* is_llama_config task_specific_params finetuning_task tokenizer_class base_model* mlx* "
         "transformers_weights *auto_class* model_name model_file", "it describes the file"),
    Rule("harmless", "quantization quantization_config compression_config", "mlx-lm reads it beside the arguments"),
    Rule("harmless", "quantize_activations", "it is off", (False, None)),
    Rule("harmless", "*_token_id *_token_ids *_token_index *_token eos_ids tokenizer_* tokenizer",
         "the tokenizer decides; mlx-lm reads eos_token_id"),
    Rule("harmless", "initializer_* init_* *_init_variance_scale *_init_* *dropout* *_pdrop *_loss* *loss_* aux_loss_alpha "
         "*_jitter_noise gradient_checkpointing seq_aux rescale_prenorm_residual layerdrop *_a_log_* *_dt_* "
         "time_step_m* time_step_floor time_step_scale time_step_init_scheme router_bias_update_* use_aux_*",
         "it is for training"),
    Rule("harmless", "use_cache cache_implementation output_* return_dict* torchscript pruned_heads id2label label2id "
         "problem_type num_labels summary_* classifier_* chunk_size_feed_forward keys_to_ignore_at_inference "
         "num_logits_to_keep is_decoder add_cross_attention cross_attention_hidden_size pretraining_tp tf_legacy_loss "
         "use_bfloat16 *flash_attn* use_fused_* fused_* use_sdpa* ep_size moe_shared_expert_overlap use_mamba_kernels "
         "use_mambapy use_associative_scan mamba_ssm_cache_dtype mamba_chunk_size chunk_size residual_in_fp32 "
         "*_softmax_in_fp32 reorder_and_upcast_attn use_triton* use_cache_quantization use_cache_kernel _cross_* "
         "softmax_in_fp32 onnx_safe fp16 fp32 bf16", "it says how others compute the same"),
    Rule("harmless", "do_sample temperature top_k top_p typical_p repetition_penalty length_penalty num_beams* min_length "
         "max_length max_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size early_stopping diversity_penalty "
         "num_return_sequences exponential_decay_length_penalty remove_invalid_values bad_words_ids prefix",
         "sampling is asked for by requests"),
    Rule("harmless", "num_nextn_predict_layers mtp_* num_mtp_* *_mtp_*", "the layers that draft further tokens are left out"),
    Rule("harmless", "max_position_embeddings n_positions max_seq_len max_sequence_length seq_length n_ctx "
         "model_max_length max_context_length", "it is the length of the context"),
)  # fmt: skip
"""Keys of all architectures that change nothing here, whatever their values."""

NEUTRAL = (
    Rule("harmless", "is_encoder_decoder tie_encoder_decoder", "the model is a decoder", (False, None)),
    Rule("harmless", "use_bidirectional_attention", "attention looks back alone", (False, None)),
    Rule("refused", "use_bidirectional_attention", "attention of mlx-lm's architectures looks back alone"),
    Rule("harmless", "rope_scaling rope_parameters", "there is none", (None,)),
    Rule(
        "harmless",
        "*bias add_bias_linear *qk_norm *qk_layernorm",
        "the weights decide: mlx-lm refuses weights that it has no place for, and weights that are missing",
    ),
    Rule(
        "harmless",
        "tie_word_embeddings",
        "the weights decide: mlx-lm refuses a head that it has no place for",
        (False,),
    ),
    Rule(
        "read",
        "rope_scaling rope_parameters rope_theta partial_rotary_factor",
        "each layer's rotation is compared with it",
    ),
    Rule("harmless", "original_max_position_embeddings", "RoPE's own parameters have it"),
    Rule("harmless", "rope_interleaved rope_traditional", "halves of a head are rotated", (False, None)),
)
"""Keys of all architectures that change nothing with some values."""

SIZES = Rule(
    "harmless",
    "hidden_size head_dim num_key_value_heads num_attention_heads intermediate_size *intermediate_size vocab_size "
    "num_hidden_layers num_layers num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts "
    "*_lora_rank qk_*head_dim v_head_dim linear_head_dim linear_num_heads *_kernel_dim *_kernel_size d_model n_embd "
    "n_layer n_layers n_head n_heads n_inner *expand lru_width conv1d_width vocab_size_per_layer_input",
    "the shapes of the weights decide",
)  # fmt: skip
"""Sizes under names that an architecture does not read: mlx-lm refuses weights of other shapes than the model's."""

CHANGES_LOGITS = (
    Rule(
        "harmless",
        "*_multiplier *_scaling *_scaling_factor *_scale scale_* *_temperature*",
        "it multiplies by 1",
        (1, 1.0),
    ),
    Rule(
        "refused",
        "*softcap* *soft_cap* *_multiplier *_multipliers *_scalar *_scaling *_scaling_factor *_scale scale_* *clip* "
        "*alibi* *parallel_residual* *parallel_attn* *_temperature* *_chunk_size *_types layernorm* *_norm",
        "mlx-lm's architecture does not read it, and it changes what a model computes",
    ),
)
"""Keys that change what a model computes wherever they are read; those that are off or 1 do not."""

OTHER_INPUTS = Rule(
    "harmless",
    "vision_* audio_* image_* video_* mm_* projector_* *_projector* speech_* vit_* vqmodel_* boi_* eoi_* boa_* "
    "multimodal_* spatial_* num_image* downsample_* use_image* out_hidden_size media_* patch_* use_vision* "
    "num_channels vision_config audio_config encoder_* *_vision_* ignore_index max_image* do_image* tile_* use_thumbnail "
    "min_image* *_vit_* is_native* deepstack_*",
    "images and sounds are not served; the text part runs alone",
)  # fmt: skip
"""Keys of models that take other inputs than text."""

_ACTIVATIONS = "hidden_act hidden_activation activation_function activation mlp_hidden_act hidden_function"
WITHOUT_CLASS = (
    Rule("harmless", _ACTIVATIONS, "mlx-lm's architecture computes it", ("silu", "swish")),
    Rule("refused", _ACTIVATIONS, "mlx-lm's architecture computes another function"),
)
"""Keys of architectures of which transformers has no class."""

ALSO_COMPUTED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("gemma", "hidden_act"): ("gelu", "gelu_pytorch_tanh"),
    ("gemma", "hidden_activation"): ("gelu", "gelu_pytorch_tanh"),
    ("gemma2", "hidden_act"): ("gelu_pytorch_tanh",),
    ("gemma2", "hidden_activation"): ("gelu_pytorch_tanh",),
    ("gemma3_text", "hidden_act"): ("gelu_pytorch_tanh",),
    ("gpt_neox", "hidden_act"): ("gelu", "gelu_fast", "gelu_new"),
    ("phi", "hidden_act"): ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    ("starcoder2", "hidden_act"): ("gelu_pytorch_tanh", "gelu"),
    ("gpt_bigcode", "activation_function"): ("gelu_pytorch_tanh", "gelu"),
    ("gpt2", "activation_function"): ("gelu_new", "gelu_pytorch_tanh"),
    ("mixtral", "head_dim"): (None,),
    ("rwkv7", "hidden_act"): ("sqrelu",),
    ("gear", "hidden_activation"): ("gelu_pytorch_tanh",),
    ("phixtral", "activation_function"): ("gelu_new",),
    ("phi3small", "hidden_act"): ("gegelu",),
    ("openelm", "activation_fn_name"): ("swish",),
}
"""Values that mlx-lm's architecture computes, besides those of transformers' class."""

UNREAD = {
    "mixtral": ("rope_scaling",),
    "qwen3_moe": ("rope_scaling",),
    "glm4_moe": ("rope_scaling", "tie_word_embeddings"),
    "gemma3n": ("rope_scaling",),
}
"""Fields that an architecture names and does not use, beyond those whose name stands nowhere else in its code."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale", "sliding_window_size")
MIN_CONTEXT = 1024
"""Shortest context that may be left of a model whose window mlx-lm does not have."""

_ADVICE = (
    '; if it does not change what the model computes, accept it with ignore_config_keys=("{key}",) or '
    "--ignore-config-key {key}"
)


class Config(NamedTuple):
    """A configuration that was read.

    Attributes:
        architecture: mlx-lm's name of the text part.
        text: The keys of the text part, under the names that mlx-lm reads.
        changes: Keys that mlx-lm is given in place of the file's.
        rope: What it says about RoPE.
        findings: What was made of each key.
        max_position: Longest context in which nothing that mlx-lm lacks would show; None for any.
        window: A window that every layer has; None for the layers' own.
    """

    architecture: str
    text: dict[str, Any]
    changes: dict[str, Any]
    rope: Rope | None
    findings: list[Finding]
    max_position: int | None = None
    window: int | None = None


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

    config = _decode_tagged_floats(json.loads(json.dumps(config)))  # parts of it are changed
    ignored = frozenset(ignored)
    model_type = str(config["model_type"])
    found = arguments_of(config)
    if found is None:
        return Config(model_type, config, {}, None, [])
    architecture, arguments, has_part = found
    text: dict[str, Any] = config["text_config"] if has_part else config
    if not isinstance(text, dict):
        raise UnknownKeyError(f"{place}: text_config must be an object, got {shown(text)}")
    text_type = str(text.get("model_type") or model_type)
    fields = {field.name for field in dataclasses.fields(arguments)}
    read = fields - _unused(architecture, arguments)
    try:
        rope = read_rope(architecture, text)
        default = TransformersValues(text_type, text)
        changes = _fold(architecture, arguments, text, rope, fields)
        changes |= _missing(architecture, arguments, {**text, **changes}, default, config)
    except RopeError as problem:
        raise UnknownKeyError(f"{place}: {problem}") from None
    folded = {**text, **changes}
    window, max_position, about_windows = _windows(place, architecture, model_type, folded, read, default)
    rules = [
        *about_windows,
        *_own_rules(architecture, text, read, folded),
        *DESCRIPTIVE,
        *NEUTRAL,
        SIZES,
        *([OTHER_INPUTS] if has_part or "vision_config" in config else []),
    ]
    findings = _judge(place, architecture, text, rules, default, ignored)
    if has_part:
        outer = {key: value for key, value in config.items() if key != "text_config"}
        rules = [
            Rule("read", key, "mlx-lm reads it", (value,)) for key, value in outer.items() if same_in(text, key, value)
        ]
        rules += [
            Rule("read", " ".join(_outer_fields(model_type)), "mlx-lm reads it"),
            *DESCRIPTIVE,
            *NEUTRAL,
            OTHER_INPUTS,
        ]
        whole = TransformersValues(model_type, outer)
        findings += _judge(place, architecture, outer, rules, whole, ignored)
        given = {"text_config": folded} if changes else {}
    else:
        given = changes
    return Config(architecture, folded, given, rope, findings, max_position, window)


def same_in(text: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether the text part says the same about a key."""
    return key in text and text[key] == value


def _judge(
    place: str,
    architecture: str,
    values: Mapping[str, Any],
    rules: list[Rule],
    default: TransformersValues,
    ignored: frozenset[str],
) -> list[Finding]:
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
                more += [*(() if default.exists else WITHOUT_CLASS), OFF, *CHANGES_LOGITS]
                if key in vocabulary():
                    foreign = "it is for other architectures" + (
                        ": transformers' class has no such key" * default.exists
                    )
                    more.append(Rule("harmless", key, foreign))
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


class TransformersValues:
    """The values that transformers' class of a model gives to keys.

    Args:
        model_type: The model.
        config: Its configuration.
    """

    def __init__(self, model_type: str, config: Mapping[str, Any]) -> None:
        self._class, self._config = _class_of(model_type), dict(config)

    @property
    def exists(self) -> bool:
        """Whether there is a class."""
        return self._class is not None

    def may_read(self, key: str) -> bool:
        """Whether transformers' model may read a key: there is no class, or it knows the key."""
        return self._class is None or self.of(key)[0]

    def of(self, key: str) -> tuple[bool, Any]:
        """Whether the class knows a key, and its value in a configuration that does not name it."""
        if self._class is None:
            return False, None
        with _quiet():
            others = {name: value for name, value in self._config.items() if name != key}
            for given in (others, {}):
                try:
                    values = self._class(**given).to_dict()
                except Exception:  # transformers checks combinations of values
                    continue
                return key in values, json.loads(json.dumps(values.get(key), default=str))
        return False, None

    def attribute(self, name: str) -> Any:
        """What the class calls an attribute, under any of its names; None if it has none."""
        if self._class is None or not name:
            return None
        with _quiet():
            try:
                value = getattr(self._class(**self._config), name, None)
                return json.loads(json.dumps(value))
            except Exception:  # transformers checks combinations of values
                return None


@cache
def _class_of(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except Exception:  # unknown, or it needs a package that is missing
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which warns of values that are judged here."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        theirs.set_verbosity(before)


def _own_rules(
    architecture: str, text: Mapping[str, Any], read: Iterable[str], folded: Mapping[str, Any]
) -> list[Rule]:
    """Rules that follow from the fields that an architecture reads."""
    rules = [Rule("read", " ".join(sorted(read)), "mlx-lm reads it")]
    layer_types = text.get("layer_types")
    if "layer_types" not in read and isinstance(layer_types, list):
        pattern = folded.get("sliding_window_pattern")
        alternates = "sliding_window_pattern" in read and same_pattern(layer_types, pattern)
        if alternates or set(layer_types) <= {FULL, "attention"}:
            rules.append(Rule("harmless", "layer_types", "it is the order that mlx-lm computes"))
    if "sliding_window_pattern" in read:
        rules.append(Rule("harmless", "_sliding_window_pattern", "layer_types has it"))
    return rules


def same_pattern(layer_types: list[Any], pattern: Any) -> bool:
    """Whether one layer in so many has full attention, the last one of each group."""
    if isinstance(pattern, str):
        names = {"L": SLIDING, "G": FULL}
        wanted = [names.get(pattern[i % len(pattern)]) for i in range(len(layer_types))] if pattern else []
        return layer_types == wanted
    if not isinstance(pattern, int) or pattern < 1:
        return False
    return layer_types == [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(len(layer_types))]


def _fold(
    architecture: str, arguments: type, text: Mapping[str, Any], rope: Rope | None, fields: set[str]
) -> dict[str, Any]:
    """What mlx-lm is given under the names that it reads."""
    changes: dict[str, Any] = {}
    if rope is not None and rope.is_new:
        changes = fold_rope(architecture, rope, fields)
        if changes.get("rope_scaling") and not _takes(arguments, {**text, **changes}):
            changes["rope_scaling"] = None  # its layers are given the rotation after they are made
    layer_types = text.get("layer_types")
    if "sliding_window_pattern" in fields and "layer_types" not in fields and isinstance(layer_types, list):
        pattern = _pattern_of(layer_types, is_text=architecture == "exaone4")
        if pattern is not None:
            changes["sliding_window_pattern"] = pattern
    return {key: value for key, value in changes.items() if key not in text or text[key] != value}


def _pattern_of(layer_types: list[Any], is_text: bool) -> int | str | None:
    """The ``sliding_window_pattern`` of a list of types of layers; None if there is none."""
    first = layer_types.index(FULL) + 1 if FULL in layer_types else len(layer_types) + 1
    if not same_pattern(layer_types, first):
        return None
    return "L" * (first - 1) + "G" if is_text else first


IMPLIED: dict[tuple[str, str], Any] = {
    ("apertus", "mlp_bias"): False,
    ("apertus", "post_norm"): False,
    ("apertus", "qk_norm"): True,
    ("glm_moe_dsa", "topk_method"): "noaux_tc",
    ("glm_moe_dsa", "scoring_func"): "sigmoid",
    ("glm_moe_dsa", "moe_layer_freq"): 1,
    ("longcat_flash", "attention_method"): "MLA",
    ("longcat_flash", "zero_expert_type"): "identity",
    ("longcat_flash", "mla_scale_q_lora"): True,
    ("longcat_flash", "mla_scale_kv_lora"): True,
    ("qwen3_moe", "norm_topk_prob"): True,
}
"""Arguments that mlx-lm needs and transformers' model has in its code."""
_OTHER_NAMES = {"n_ctx": "n_positions", "block_dim": "hidden_size", "full_attn_idxs": ""}


def _missing(
    architecture: str,
    arguments: Any,
    text: Mapping[str, Any],
    default: TransformersValues,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments that mlx-lm needs and a configuration has under another name, by transformers' class of the model."""
    found = {}
    for field in dataclasses.fields(arguments):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if not needed or field.name in text:
            continue
        value = default.attribute(_OTHER_NAMES.get(field.name, field.name))
        if field.name == "is_moe_layer" and isinstance(kinds := text.get("mlp_layer_types"), list):
            value = [kind == "sparse" for kind in kinds]
        if field.name == "tie_word_embeddings":
            value = config.get(field.name, value)
        if value is None:
            value = IMPLIED.get((architecture, field.name))
        if value is None and field.name == "head_dim" and text.get("num_attention_heads"):
            value = text["hidden_size"] // text["num_attention_heads"]
        if value is not None:
            found[field.name] = value
    return found


def _takes(arguments: Any, config: dict[str, Any]) -> bool:
    """Whether an architecture's arguments accept a configuration."""
    try:
        made = arguments.from_dict(json.loads(json.dumps(config)))
    except Exception:
        return False
    return getattr(made, "rope_scaling", None) is not None


def _windows(
    place: str,
    architecture: str,
    model_type: str,
    config: Mapping[str, Any],
    read: set[str],
    default: TransformersValues,
) -> tuple[int | None, int | None, list[Rule]]:
    """The window that every layer gets, the context that windows which mlx-lm lacks leave, and rules about them."""
    layer_types = config.get("layer_types")
    has_types = isinstance(layer_types, list)
    unread = [
        name
        for name in _WINDOWS
        if name not in read and type(config.get(name)) is int and config[name] > 0 and default.may_read(name)
    ]
    used = config.get("use_sliding_window") is not False
    if has_types and "layer_types" not in read and set(layer_types or ()) <= {FULL, "attention"}:
        used = False
    if "max_window_layers" in config and config.get("max_window_layers", 0) >= config.get("num_hidden_layers", 0):
        used = False
    context = next((config[name] for name in ("max_position_embeddings", "n_positions") if name in config), None)
    if (
        model_type == "mistral"
        and not has_types
        and "sliding_window" in read
        and isinstance(config.get("sliding_window"), int)
    ):
        return config["sliding_window"], None, [Rule("read", "sliding_window", "every layer gets it")]
    if (
        not unread
        or model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
        and not config.get("use_sliding_window")
    ):
        off = "windows are switched off, or no layer has one"
        return (
            None,
            None,
            [Rule("harmless", " ".join([*unread, "max_window_layers"]), off)] if unread or not used else [],
        )
    if not used:
        return None, None, [Rule("harmless", " ".join([*unread, "max_window_layers"]), "no layer has a window")]
    smallest = min(config[name] for name in unread)
    if isinstance(context, int) and context <= smallest:
        return None, None, [Rule("harmless", " ".join(unread), "the context is not longer")]
    name = min(unread, key=lambda name: config[name])
    if smallest < MIN_CONTEXT:
        raise UnknownKeyError(
            f"{place}: {name}={smallest} is not read by mlx-lm's {architecture}, which attends to all tokens: without "
            f"it, a context of {smallest} tokens would be left"
        )
    rules = [
        Rule("read", " ".join(unread), f"mlx-lm's {architecture} lacks it: the context is cut to {smallest} tokens"),
        Rule("harmless", "use_sliding_window max_window_layers layer_types", "the context is cut to the window"),
    ]
    return None, smallest, rules


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
