"""The columns of logs of requests: each is read, harmless for a stated reason, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.key_table import Rule, judge
from workbench.simulation.log_units import split_unit

ARRIVAL = "arrival arrival_time timestamp time start_time"
PROMPT = (
    "prompt_tokens num_prompt_tokens prompt_length input_length input_tokens contexttokens context_tokens "
    "request_tokens"
)
OUTPUT = (
    "output_tokens num_output_tokens output_length completion_tokens generatedtokens generated_tokens response_tokens"
)
COLUMNS = {"arrival": ARRIVAL.split(), "prompt tokens": PROMPT.split(), "output tokens": OUTPUT.split()}
"""Names of each column, in lower case, with words joined by ``_``."""

SESSION_COLUMNS = ("session", "session_id", "conversation_id")

RULES = (
    Rule("read", ARRIVAL, "the time of arrival"),
    Rule("read", PROMPT, "the length of the prompt"),
    Rule("read", OUTPUT, "the length of the output"),
    Rule("read", "hash_ids", "the blocks of the prompt, by which requests share prefixes"),
    Rule("read", " ".join(SESSION_COLUMNS), "the session, by which routers keep requests together"),
    Rule("read", "conversations", "the texts of a conversation of ShareGPT's"),
    Rule("harmless", "id index row request_id uuid trace_id span_id chat_id parent_chat_id turn round", "a number"),
    Rule(
        "harmless",
        "type category task dataset source log_type model* user* client* tenant* customer* account* organization "
        "department region zone host* ip address method path endpoint url route stream tag* label* level logger "
        "service name title comment* note* lang language views unnamed:*",
        "a label; requests of all models and users are taken together",
    ),
    Rule(
        "harmless",
        "total_tokens num_total_tokens total_length totaltokens",
        "the sum of two columns that are read",
    ),
    Rule(
        "harmless",
        "ttft* time_to_first_token* itl* tpot* e2e* latency* *_latency elapsed* duration* end end_time finish* "
        "completed* status* http_status code success error* cached_tokens num_cached_tokens queue* prefill* decode* "
        "cost price",
        "measured at the server of the log",
    ),
    Rule("harmless", "priority", "requests are served in order of arrival; a workload can have priorities"),
    Rule("harmless", "text text_input input output question answer response messages tools", "only lengths matter"),
    Rule(
        "refused",
        "delay think_time wait",
        "requests that wait for the answer to an earlier one arrive when the server has given it; give the times of "
        "arrival, or describe sessions in a workload",
    ),
    Rule(
        "refused",
        "prompt_token_ids token_ids block_hashes block_size prefix* shared_prefix*",
        "prefixes are read from hash_ids, numbers of which each stands for a block of the prompt",
    ),
    Rule("refused", "n best_of num_samples", "a request has one output here; write a line for each"),
    Rule("refused", "lora* adapter* cache_salt", "it decides which requests share prefixes; give a workload"),
)
"""The meaning of each column, by its name in lower case with words joined by ``_``."""


def check_columns(place: str, row: Mapping[str, Any], known: set[tuple[str, ...]]) -> None:
    """Check the columns of a row that have a value.

    Args:
        place: The row, for messages.
        row: Its values by column.
        known: Sets of columns that are checked already.

    Raises:
        ValueError: A column is refused; the message names it.
    """
    columns = tuple(name for name, value in row.items() if value is not None and value != "")
    if columns in known:
        return
    judge(
        place.removesuffix(":"),
        {split_unit(str(name))[0]: row[name] for name in columns},
        RULES,
        advice="; remove the column if it does not matter",
    )
    known.add(columns)
