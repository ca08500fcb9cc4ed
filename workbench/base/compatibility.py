"""The features that do not work together: one table, read by configurations, engines, the documentation and tests.

A pair that is not in EXCLUSIONS works: its workloads run to their end. docs/limits.md lists the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Effect = Literal["configuration", "engine", "call", "off"]
"""The place where an exclusion acts: an EngineConfig with both features is refused, an Engine is, the call is, or the
first of them is switched off, which the log says."""


class Feature(NamedTuple):
    """A feature, or the situation of an engine.

    Attributes:
        name: The words of the documentation.
        fields: The fields of EngineConfig that turn it on; none for a situation, which the caller names.
        is_on: Whether a configuration has it.
        advice: A setting that avoids it.
    """

    name: str
    fields: tuple[str, ...] = ()
    is_on: Callable[[Any], bool] = lambda config: False
    advice: str = ""

    def shown(self, config: Any) -> str:
        """The field that turns it on, with its value, or its name."""
        given = [f"{name}={value!r}" for name in self.fields if (value := getattr(config, name)) not in (None, 0)]
        return given[0] if given else self.name


def _has_several_tables(config: Any) -> bool:
    return [group.kind for group in config.cache_groups] != ["full_attention"]


def _drafts_with(method: str) -> Callable[[Any], bool]:
    return lambda config: config.num_speculative_tokens > 0 and config.speculation.method == method


ASYNC = Feature("async_scheduling", ("async_scheduling",), lambda c: c.async_scheduling, "set it to False")
DRAFTS = Feature(
    "drafts", ("num_speculative_tokens",), lambda c: c.num_speculative_tokens > 0, "set num_speculative_tokens to 0"
)
DRAFT_MODEL = Feature("a draft model", ("speculative",), _drafts_with("draft_model"), 'use the method "ngram"')
EAGLE = Feature("EAGLE drafts", ("speculative",), _drafts_with("eagle"), 'use the method "ngram" or "draft_model"')
ADAPTIVE = Feature(
    "adaptive drafts",
    ("speculative",),
    lambda c: c.num_speculative_tokens > 0 and c.speculation.adaptive,
    'leave "adaptive" out',
)
PARTIAL_PREFILLS = Feature(
    "limits on partial prefills",
    ("max_num_partial_prefills", "max_long_partial_prefills"),
    lambda c: c.max_num_partial_prefills is not None or c.max_long_partial_prefills is not None,
    "set it to None",
)
PREFIX_CACHING = Feature(
    "prefix caching",
    ("enable_prefix_caching",),
    lambda c: c.enable_prefix_caching,
    "set enable_prefix_caching to False",
)
GROUPS = Feature(
    "sliding windows or recurrent layers in groups",
    ("kv_cache_groups",),
    _has_several_tables,
    "leave kv_cache_groups out",
)
STATES = Feature("recurrent layers", (), lambda c: any(group.kind == "mamba" for group in c.cache_groups))
WHOLE_PROMPTS = Feature(
    "enable_chunked_prefill=False", (), lambda c: not c.enable_chunked_prefill, "set enable_chunked_prefill to True"
)
CHUNK_CAP = Feature(
    "long_prefill_token_threshold",
    ("long_prefill_token_threshold",),
    lambda c: c.long_prefill_token_threshold > 0,
    "set it to 0",
)
SEVERAL_PARTIAL = Feature(
    "several partial prefills",
    ("max_num_partial_prefills",),
    lambda c: (c.max_num_partial_prefills or 0) > 1,
    "use at most 1",
)
SHADOW = Feature("shadow_metal", ("shadow_metal",), lambda c: c.shadow_metal is not None, "leave it out")
BELADY = Feature('eviction="belady"', ("eviction",), lambda c: c.eviction == "belady", 'use "lru" or another word')
SECOND_TIER = Feature("second_tier", ("second_tier",), lambda c: c.second_tier is not None, "leave it out")
# Situations: they have no field.
ENGINE = Feature("an engine")
ADAPTERS = Feature("adapters (LoRA)", advice="merge the adapter into the model")
PHASES = Feature("step_into()", advice="call step()")
RANKS = Feature("several ranks", advice="run the model in one process")
LOCKSTEP = Feature("engines in lockstep", advice="run the engines apart")
ONE_TABLE = Feature(
    "one block table per request (several ranks, and a model that drafts for another)",
    advice="use another model there",
)

FEATURES = (
    *(ASYNC, DRAFTS, DRAFT_MODEL, EAGLE, ADAPTIVE, PARTIAL_PREFILLS, SEVERAL_PARTIAL, PREFIX_CACHING, GROUPS, STATES),
    *(WHOLE_PROMPTS, CHUNK_CAP, SHADOW, BELADY, SECOND_TIER, ADAPTERS, ENGINE, PHASES, RANKS, LOCKSTEP, ONE_TABLE),
)


class Exclusion(NamedTuple):
    """Two features that do not work together.

    Attributes:
        feature: The one that is refused, or switched off.
        other: The one that it does not work with.
        effect: The place where it acts.
        reason: The reason, as the end of a sentence.
    """

    feature: Feature
    other: Feature
    effect: Effect
    reason: str

    def sentence(self, config: Any) -> str:
        """The message for a configuration that has both."""
        pair = f"{self.feature.shown(config)} does not work with {self.other.shown(config)}: {self.reason}"
        return f"{pair}; {self.feature.advice or self.other.advice}" if self.effect != "off" else pair


_KEEP_ALL = "a request has one block table, and layers keep every token"

EXCLUSIONS = (
    Exclusion(PARTIAL_PREFILLS, ASYNC, "configuration", "they count prompts whose steps are complete"),
    Exclusion(PARTIAL_PREFILLS, DRAFTS, "configuration", "they share out a budget without rows for drafts"),
    Exclusion(PARTIAL_PREFILLS, GROUPS, "configuration", "they count the blocks of one table per request"),
    Exclusion(SEVERAL_PARTIAL, WHOLE_PROMPTS, "configuration", "they split prompts over steps"),
    Exclusion(CHUNK_CAP, WHOLE_PROMPTS, "configuration", "it splits prompts over steps"),
    Exclusion(EAGLE, ENGINE, "engine", "there is no EAGLE head to run; a simulation has it"),
    Exclusion(ADAPTIVE, ASYNC, "engine", "their rows are reserved before the drafts are made"),
    Exclusion(SHADOW, ASYNC, "engine", "it copies one step at a time"),
    Exclusion(BELADY, ENGINE, "engine", "it needs the requests to come, which simulations know"),
    Exclusion(SECOND_TIER, ENGINE, "engine", "it is simulated: there is no memory behind it"),
    Exclusion(SECOND_TIER, GROUPS, "configuration", "windows and states are not stored"),
    Exclusion(SECOND_TIER, PARTIAL_PREFILLS, "configuration", "they count the requests that may be admitted"),
    Exclusion(PHASES, ASYNC, "call", "the phases of two steps overlap"),
    Exclusion(ASYNC, RANKS, "engine", "the ranks take one step at a time"),
    Exclusion(DRAFT_MODEL, RANKS, "engine", "the ranks share one model"),
    Exclusion(ADAPTERS, RANKS, "call", "each rank has a part of the layers"),
    Exclusion(ADAPTERS, LOCKSTEP, "call", "the engines agree on a step without them"),
    Exclusion(ASYNC, LOCKSTEP, "engine", "the engines agree on one step at a time"),
    Exclusion(DRAFT_MODEL, LOCKSTEP, "engine", "the engines agree on the passes of one model"),
    Exclusion(DRAFT_MODEL, STATES, "engine", "it shares one block table with the model, and states have their own"),
    Exclusion(PARTIAL_PREFILLS, STATES, "engine", "they count the blocks of one table per request"),
    Exclusion(STATES, ONE_TABLE, "engine", "states have a table for themselves"),
    Exclusion(GROUPS, DRAFT_MODEL, "off", _KEEP_ALL),
    Exclusion(GROUPS, PARTIAL_PREFILLS, "off", _KEEP_ALL),
    Exclusion(GROUPS, ONE_TABLE, "off", _KEEP_ALL),
)
"""All pairs that do not work together; those with the effect "off" concern engines only."""


def excluded(config: Any, effect: Effect, *situations: Feature) -> Iterator[Exclusion]:
    """The exclusions that a configuration meets in these situations."""
    for exclusion in EXCLUSIONS:
        both = (exclusion.feature, exclusion.other)
        if exclusion.effect == effect and all(each in situations or each.is_on(config) for each in both):
            yield exclusion


def check_compatible(config: Any, effect: Effect, *situations: Feature) -> None:
    """Refuse features that do not work together.

    Args:
        config: An EngineConfig.
        effect: The place of the check.
        situations: Features that no field of the configuration shows.

    Raises:
        ValueError: The message names both, the reason, and what to do.
    """
    for exclusion in excluded(config, effect, *situations):
        raise ValueError(exclusion.sentence(config))
