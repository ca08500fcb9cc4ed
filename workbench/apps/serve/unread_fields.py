"""Fields of request bodies that nothing reads: each is harmless for a stated reason, or refused by name.

The structs in `protocol` are the fields that are read. A label changes no answer, and a default asks for what happens
anyway, so clients that send them with every request are served. A field that would change the answer is refused: no
answer is better than one that silently ignores it. docs/serve.md has these rules as a table
(scripts/make_request_table.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.key_table import Rule, judge

LABELS = Rule(
    "harmless",
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "request_id session_id",
    "a label: it says something about the request to a service, and the answer is the same without it",
)

NO_EFFECT = (
    Rule("harmless", "stream_interval", "the text is the same, and each token is sent when it is there"),
    Rule("harmless", "truncation_side", "read with truncate_prompt_tokens alone"),
    Rule("harmless", "return_token_offsets mm_payload return_mm_kwargs", "read by other addresses of vLLM alone"),
)

DEFAULTS = (
    Rule("harmless", "suffix", "the default: nothing stands behind the answer", ("",)),
    Rule("harmless", "min_tokens", "the default: no minimum", (0,)),
    Rule("harmless", "use_beam_search", "the default: each choice is sampled", (False,)),
    Rule("harmless", "length_penalty", "the default, and read by a beam search alone", (1.0,)),
    Rule("harmless", "include_stop_str_in_output", "the default: the text ends before a stop string", (False,)),
    Rule("harmless", "return_tokens_as_token_ids", "the default: log-probabilities name tokens by text", (False,)),
    Rule("harmless", "include_reasoning", "the default: reasoning is part of the answer", (True,)),
    Rule("harmless", "modalities", "the default: an answer is text", (["text"],)),
    Rule("harmless", "verbosity", "the default", ("medium",)),
    Rule("harmless", "functions documents bad_words logits_processors", "the default: there are none", ([],)),
    Rule("harmless", "function_call", "without functions, there is nothing to call", ("none", "auto")),
    Rule(
        "harmless",
        "kv_transfer_params ec_transfer_params vllm_xargs mm_processor_kwargs media_io_kwargs",
        "there are none",
        ({},),
    ),
    Rule("harmless", "return_token_strs", "the default: tokens are returned as ids", (False,)),
    Rule("harmless", "logprob_token_ids", "the default: log-probabilities are those of the likely tokens", ([],)),
    Rule("harmless", "thinking_token_budget", "the default: no limit", (-1,)),
    Rule("harmless", "watermarking return_prompt_text return_weight_versions", "the default", (False,)),
    Rule("harmless", "routed_experts_prompt_start", "the default", (0,)),
)

NOT_SERVED = (
    Rule("refused", "functions function_call", "OpenAI's older names: use tools and tool_choice"),
    Rule(
        "refused",
        "guided_json guided_regex guided_choice guided_grammar guided_json_object guided_decoding_backend "
        "guided_whitespace_pattern structural_tag",
        "vLLM's older names: use structured_outputs",
    ),
    Rule("refused", "audio modalities prediction web_search_options moderation", "the server answers with text alone"),
    Rule("refused", "suffix prompt_embeds", "a prompt is text or token ids, and the answer stands behind it"),
    Rule("refused", "verbosity", "no template reads it: ask for it in a message"),
    Rule("refused", "documents", "put them into a message"),
    Rule("refused", "chat_template", "the server's is used: start it with --chat-template"),
    Rule("refused", "mm_processor_kwargs media_io_kwargs", "messages hold text alone"),
    Rule("refused", "min_tokens", "use ignore_eos with max_tokens for an exact length"),
    Rule("refused", "use_beam_search length_penalty", "each choice is sampled"),
    Rule("refused", "bad_words allowed_token_ids logits_processors", "use logit_bias or structured_outputs"),
    Rule("refused", "thinking_token_budget include_reasoning", "reasoning is as long as the model makes it, and sent"),
    Rule("refused", "include_stop_str_in_output", "a text ends before its stop string, which the client knows"),
    Rule("refused", "truncate_prompt_tokens", "prompts are never shortened: shorten the prompt"),
    Rule("refused", "return_tokens_as_token_ids return_token_strs", "use return_token_ids"),
    Rule("refused", "logprob_token_ids", "use logprobs, with top_logprobs in a chat"),
    Rule("refused", "return_prompt_text", "use /tokenize and /detokenize, which need no answer"),
    Rule(
        "refused",
        "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection watermarking return_weight_versions "
        "routed_experts_prompt_start",
        "nothing here has it",
    ),
)

KNOWN = (LABELS, *NO_EFFECT, *DEFAULTS, *NOT_SERVED)


def rules(other_fields: frozenset[str] = frozenset()) -> list[Rule]:
    """The rules for one kind of body, in the order in which they are tried.

    Args:
        other_fields: Fields that other addresses read and this one does not.
    """
    others, names = " ".join(sorted(other_fields)), " ".join(dict.fromkeys(" ".join(r.keys for r in KNOWN).split()))
    found = [Rule("harmless", names, "null asks for nothing", (None,)), *KNOWN]
    if others:
        found.append(Rule("harmless", others, "it is switched off", (None, False, [], "")))
        found.append(Rule("refused", others, "another address reads it"))
    return found


def without_unread(values: Mapping[str, Any], read: frozenset[str], other_fields: frozenset[str]) -> dict[str, Any]:
    """A body's fields that are read.

    Args:
        values: All fields.
        read: Names of those that are read.
        other_fields: See `rules`.

    Raises:
        RefusedFieldError: Another one is refused.
    """
    known = {name: value for name, value in values.items() if name in read}
    for name, value in values.items():
        if name not in read:
            try:
                judge("the body", {name: value}, rules(other_fields))
            except ValueError as problem:
                raise RefusedFieldError(name, str(problem)) from None
    return known


class RefusedFieldError(ValueError):
    """A field of a body is refused.

    Args:
        field: The field.
        message: The reason.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def as_properties(other_fields: frozenset[str]) -> dict[str, Any]:
    """The values that are accepted of each field, as properties of a JSON schema."""
    accepted: dict[str, list[Any] | None] = {}
    closed: set[str] = set()
    for rule in rules(other_fields):
        for name in set(rule.keys.split()) - closed:
            if rule.values is not None:
                accepted[name] = [*(accepted.get(name) or []), *rule.values]
                continue
            closed.add(name)
            if rule.verdict == "harmless":
                accepted[name] = None
    return {
        name: {"description": "Without effect."} | ({} if values is None else {"enum": values})
        for name, values in sorted(accepted.items())
    }
