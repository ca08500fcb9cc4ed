"""generation_config.json and tokenizer_config.json: what each key means here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from workbench.base.key_table import OFF, Finding, Rule, judge
from workbench.base.outside_files import read_json

GENERATION = (
    Rule("read", "eos_token_id", "mlx-lm reads it"),
    Rule("harmless", "forced_*", "it is not set", (None,)),
    Rule("refused", "forced_*", "it changes which tokens are sampled, and nothing here does that"),
    Rule("harmless", "*_token_id *_token_ids transformers_version _from_model_config trust_remote_code chat_format "
         "max_window_size cache_implementation cache_config use_cache return_* output_* num_assistant_tokens* "
         "assistant_* is_assistant prompt_lookup_num_tokens max_matching_ngram_size compile_config disable_compile "
         "target_lookbehind prefill_chunk_size", "it says how others compute the same"),
    Rule("harmless", "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff "
         "repetition_penalty presence_penalty frequency_penalty encoder_repetition_penalty length_penalty "
         "no_repeat_ngram_size encoder_no_repeat_ngram_size num_beams num_beam_groups diversity_penalty early_stopping "
         "penalty_alpha max_length max_new_tokens min_length min_new_tokens max_time num_return_sequences "
         "renormalize_logits remove_invalid_values low_memory exponential_decay_length_penalty dola_layers",
         "it is a default of sampling, and requests say how to sample"),
    Rule("harmless", "guidance_scale", "it multiplies by 1", (1, 1.0)),
    OFF,
    Rule("refused", "suppress_tokens begin_suppress_tokens bad_words_ids force_words_ids sequence_bias "
         "constraints guidance_scale watermarking_config stop_strings token_healing",
         "it changes which tokens are sampled, and nothing here does that"),
)  # fmt: skip
"""The table for generation_config.json."""

TOKENIZER = (
    Rule("harmless", "split_special_tokens", "special tokens in a text are recognised", (False, None)),
    Rule("refused", "split_special_tokens", "special tokens in a text are recognised here"),
    Rule("harmless", "clean_up_tokenization_spaces", "texts are decoded as the tokens say"),
    Rule("harmless", "padding* pad_to_* truncation* max_length stride model_max_length processor_class auto_map "
         "name_or_path special_tokens_map_file device_map model_input_names tool_parser_type", "no text gets it"),
    Rule("read", "*", "transformers makes the tokenizer from it"),
)  # fmt: skip
"""The table for tokenizer_config.json, which transformers reads."""

_TABLES = {"generation_config.json": GENERATION, "tokenizer_config.json": TOKENIZER}
_ADVICE = '; accept it with ignore_config_keys=("{key}",) or --ignore-config-key {key}'


def judge_side_files(folder: Path, ignored: Collection[str], source: str = "") -> dict[str, list[Finding]]:
    """The verdict on each key of a folder's files beside config.json; files that are not there are left out.

    Args:
        folder: The folder.
        ignored: Keys that are accepted without effect.
        source: The repository that it came from, for messages; "" for the folder itself.

    Raises:
        UnknownKeyError: A key is refused; the message names it and what to do.
    """
    found = {}
    for name, table in _TABLES.items():
        path = folder / name
        try:
            content = read_json(path)
        except (OSError, ValueError):  # mlx-lm and transformers say what is wrong with it
            continue
        if isinstance(content, dict):
            found[name] = [
                finding
                for key, value in content.items()
                for finding in judge(
                    f"{source}: {name}" if source else str(path), {key: value}, table, ignored, _ADVICE.format(key=key)
                )
            ]
    return found
