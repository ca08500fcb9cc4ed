"""Every pair of features runs a small workload, is refused with the table's reason, or is switched off with it."""

import itertools
import logging
from pathlib import Path

import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, simulate
from workbench.base.compatibility import (
    ADAPTIVE,
    ASYNC,
    BELADY,
    CHUNK_CAP,
    DRAFT_MODEL,
    DRAFTS,
    EAGLE,
    ENGINE,
    EXCLUSIONS,
    FEATURES,
    GROUPS,
    LOCKSTEP,
    ONE_TABLE,
    PARTIAL_PREFILLS,
    PHASES,
    PREFIX_CACHING,
    RANKS,
    SECOND_TIER,
    SEVERAL_PARTIAL,
    SHADOW,
    STATES,
    WHOLE_PROMPTS,
)
from workbench.engine.model_runner import ModelRunner

LIMITS = Path(__file__).parents[1] / "docs" / "limits.md"
FULL, WINDOW, STATE = (
    {"kind": "full_attention"},
    {"kind": "sliding_window", "sliding_window": 6},
    {"kind": "mamba"},
)
SETTINGS = {
    ASYNC: {"async_scheduling": True},
    DRAFTS: {"num_speculative_tokens": 2},
    DRAFT_MODEL: {"num_speculative_tokens": 2, "speculative": {"method": "draft_model"}},
    EAGLE: {"num_speculative_tokens": 2, "speculative": {"method": "eagle"}},
    ADAPTIVE: {"num_speculative_tokens": 2, "speculative": {"adaptive": True}},
    PARTIAL_PREFILLS: {"max_long_partial_prefills": 1},
    SEVERAL_PARTIAL: {"max_num_partial_prefills": 2},
    PREFIX_CACHING: {"enable_prefix_caching": True},
    GROUPS: {"kv_cache_groups": [WINDOW, FULL]},
    STATES: {"kv_cache_groups": [STATE, FULL]},
    WHOLE_PROMPTS: {"enable_chunked_prefill": False},
    CHUNK_CAP: {"long_prefill_token_threshold": 3},
    BELADY: {"eviction": "belady"},
    SECOND_TIER: {
        "second_tier": {"num_blocks": 9, "kv_bytes_per_token": 1, "bandwidth": 1e6},
        "enable_prefix_caching": True,
    },
    SHADOW: {"shadow_metal": {"layer": 0, "every": 2}},
}
IMPLIED = {
    **{feature: {DRAFTS} for feature in (DRAFT_MODEL, EAGLE, ADAPTIVE)},
    SEVERAL_PARTIAL: {PARTIAL_PREFILLS},
    STATES: {GROUPS},
    PHASES: {ENGINE},
    RANKS: {ENGINE, ONE_TABLE},
    LOCKSTEP: {ENGINE, ONE_TABLE},
    ONE_TABLE: {ENGINE},
}
SITUATIONS = {ENGINE, PHASES, RANKS, LOCKSTEP, ONE_TABLE}
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if len({DRAFT_MODEL, EAGLE, ADAPTIVE}.intersection(pair)) < 2 and set(pair) != {GROUPS, STATES}  # one field
]
SMALL = {"max_num_batched_tokens": 12, "block_size": 4, "num_blocks": 64, "max_model_len": 12}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [5, 6, 7, 8, 9], [3]]


def names(pair):
    return [feature.name for feature in pair]


def settings_of(pair):
    settings = dict(SMALL, enable_prefix_caching=False)
    for feature in pair:
        settings |= SETTINGS.get(feature, {})
    return settings


def expected(pair, *effects):
    """The entries of the table for a pair."""
    on = set(pair).union(*(IMPLIED.get(feature, ()) for feature in pair))
    return [e for e in EXCLUSIONS if e.effect in effects and e.feature in on and e.other in on]


def assert_refused(exclusions, make):
    with pytest.raises(ValueError, match="does not work with") as refused:
        make()
    assert any(str(refused.value).endswith(_end(exclusion)) for exclusion in exclusions), refused.value


def _end(exclusion):
    return f": {exclusion.reason}; {exclusion.feature.advice or exclusion.other.advice}"


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not SITUATIONS.intersection(pair)], ids=names)
def test_a_simulation_runs_or_is_refused(pair):
    requests = [{"id": f"r{i}", "prompt": prompt, "max_tokens": 4} for i, prompt in enumerate(PROMPTS)]

    def run():
        model = {"cost_model": {"fixed": 0.01}} if SECOND_TIER in pair else {}  # it needs a clock
        return simulate({"config": settings_of(pair), "requests": requests} | model)

    if exclusions := expected(pair, "configuration"):
        assert_refused(exclusions, run)
    else:
        trace = run()
        assert trace.end == "done" and sum(len(step.finished) for step in trace) == len(PROMPTS)


class OneTable(Engine):
    """An engine with one block table per request, in one process."""

    def _make_runner(self):
        return ModelRunner(self.model, self.config)


class OverRanks(OneTable):
    _situations = (RANKS,)


class InLockstep(OneTable):
    _situations = (LOCKSTEP,)


@pytest.fixture(scope="module")
def models():
    return {name: tiny_loaded_model(name) for name in ("llama", "gemma3_text", "lfm2")}


@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_an_engine_runs_or_is_refused_or_says_what_it_switches_off(pair, models, monkeypatch, caplog):
    monkeypatch.setattr("workbench.engine.shadow.start_shadow", lambda config, runner: None)  # it has its own tests
    settings = settings_of(pair)
    settings.pop("kv_cache_groups", None)  # they follow from the model
    model = models["lfm2" if STATES in pair else "gemma3_text" if GROUPS in pair else "llama"]
    classes = {RANKS: OverRanks, LOCKSTEP: InLockstep, ONE_TABLE: OneTable}
    engine_class = next((classes[feature] for feature in pair if feature in classes), Engine)
    pair, draft_model = (*pair, ENGINE), models["llama"] if DRAFT_MODEL in pair else None

    def make():
        return engine_class(model, EngineConfig(**settings), draft_model=draft_model)

    of_model = [e for e in expected(pair, "configuration") if GROUPS in (e.feature, e.other)]
    if exclusions := [e for e in expected(pair, "configuration", "engine") if e not in of_model]:
        assert_refused(exclusions, make)
        return
    with caplog.at_level(logging.INFO, "workbench"), make() as engine:
        off = {exclusion.feature for exclusion in expected(pair, "off")}
        assert (GROUPS in off) <= ([group.kind for group in engine.config.cache_groups] == ["full_attention"])
        for exclusion in expected(pair, "off"):
            assert exclusion.reason in caplog.text
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        if PHASES in pair:
            if exclusions := expected(pair, "call"):
                assert_refused(exclusions, engine.step_into)
            else:
                assert engine.step_into()[0] == "schedule"
        assert [len(output.token_ids) for output in engine.run(progress=False)] == [4] * len(PROMPTS)


EFFECTS = {
    "configuration": "the configuration is refused",
    "engine": "the engine is refused",
    "call": "the call is refused",
    "off": "the first is switched off in engines",
}


def test_the_page_lists_the_table():
    rows = [f"| {e.feature.name} | {e.other.name} | {EFFECTS[e.effect]} | {e.reason} |" for e in EXCLUSIONS]
    page = LIMITS.read_text()
    begin = page.index("| feature | does not work with |")
    assert page[begin:].split("\n\n")[0].split("\n")[2:] == rows
