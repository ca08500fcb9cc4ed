"""The columns of logs of requests: each is read, harmless for a stated reason, or refused by name."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from workbench.base.key_table import RowCheck, Rule
from workbench.simulation.log_units import split_unit

ARRIVAL = "arrival arrival_time timestamp time start_time"
PROMPT = (
    "prompt_tokens num_prompt_tokens prompt_length input_length input_tokens contexttokens context_tokens "
    "request_tokens"
)
OUTPUT = (
    "output_tokens num_output_tokens output_length completion_tokens generatedtokens generated_tokens response_tokens"
)
TOTAL = "total_tokens num_total_tokens total_length totaltokens"
COLUMNS = {"arrival": ARRIVAL.split(), "prompt tokens": PROMPT.split(), "output tokens": OUTPUT.split()}
"""Names of each column, in lower case, with words joined by ``_``."""

SESSION_COLUMNS = ("session", "session_id", "conversation_id")

RULES = (
    Rule("read", ARRIVAL, "the time of arrival"),
    Rule("read", PROMPT, "the length of the prompt"),
    Rule("read", OUTPUT, "the length of the output"),
    Rule("read", "hash_ids", "the blocks of the prompt, by which requests share prefixes"),
    Rule("read", " ".join(SESSION_COLUMNS), "the session, by which routers keep requests together"),
    Rule("refused", "conversations", "a file holds conversations, or times and lengths"),
    Rule("harmless", "id index row request_id uuid trace_id span_id chat_id parent_chat_id turn round", "a number"),
    Rule(
        "harmless",
        "type category task dataset source log_type model* user* client* tenant* customer* account* organization "
        "department region zone host* ip address method path endpoint url route stream tag* label* level logger "
        "service name title comment* note* lang language views unnamed:*",
        "a label; requests of all models and users are taken together",
    ),
    Rule(
        "read",
        TOTAL,
        "the sum of the lengths, with which it is compared",
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

CONVERSATION_RULES = (
    Rule("read", "conversations", "the texts of a conversation of ShareGPT's"),
    Rule("harmless", " ".join(SESSION_COLUMNS), "one request of each conversation is taken"),
    Rule(
        "refused",
        f"{ARRIVAL} {PROMPT} {OUTPUT} hash_ids",
        "the requests of conversations arrive together, and four characters of their texts count as a token",
    ),
    *(rule for rule in RULES if rule.verdict != "read" and rule.keys != "conversations"),
)
"""The meaning of each key of a conversation."""

TURN_RULES = (
    Rule("read", "from role", "whose turn it is"),
    Rule("read", "value content", "its text"),
    Rule("harmless", "markdown text id index model* lang* language timestamp time date* weight loss *feedback* tag*",
         "only whose turn it is and its text matter"),
)  # fmt: skip
"""The keys of a turn of a conversation."""

QUESTIONS = ("human", "user", "system", "tool", "function", "observation")
ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "function_call")


def column_check(ignored: Collection[str] = ()) -> RowCheck:
    """A check of the rows of a log, for `RULES`.

    Args:
        ignored: Columns that the user leaves out.
    """
    return RowCheck(ignored, lambda column: split_unit(column)[0])


def is_refused(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column that is refused by a rule, and not because nobody knows it."""
    keys = [split_unit(str(name))[0] for name in row]
    return any(rule.verdict == "refused" and rule.holds(key, row) for rule in RULES for key in keys)


def find_columns(place: Any, row: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The name of each column that is needed, and the unit that the name of the times says.

    Args:
        place: The file, for messages.
        row: A row of it.

    Raises:
        ValueError: A column is missing, or two columns can be the same.
    """
    known = {str(name): split_unit(str(name)) for name in row}
    names, unit = {}, None
    for what, known_names in COLUMNS.items():
        found = [name for name, (plain, _) in known.items() if plain in known_names]
        if not found:
            raise ValueError(
                f"{place} has no column with the {what}: name it one of {', '.join(known_names)}; "
                f"{'it has ' + ', '.join(map(str, row)) if row else 'no column is left'}"
            )
        if len(found) > 1:
            options = " or ".join(f"--ignore-columns {shlex.quote(name)}" for name in found)
            raise ValueError(f"{place} has {len(found)} columns with the {what}, {', '.join(found)}: give {options}")
        names[what] = found[0]
        unit = known[found[0]][1] if what == "arrival" else unit
    return names, unit
