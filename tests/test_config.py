"""A configuration accepts valid values and rejects others with a message that says why."""

import dataclasses
import inspect
import json
import math
from typing import get_args

import numpy as np
import pytest

from workbench import EngineConfig, SamplingParams
from workbench.analysis.fleet.routers import ROUTERS
from workbench.base.keyword_fields import ConfigChanges, ConfigFields, RouterName, SamplingFields
from workbench.viz.panel_names import PANELS, PanelName

BIG = 2**31 - 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be from 1 to 16777216, got 0"),
        ("max_num_batched_tokens", 2.5, "max_num_batched_tokens must be an integer from 1"),
        ("max_num_scheduled_tokens", 513, "max_num_scheduled_tokens must be from 1 to 512, got 513"),
        ("max_num_seqs", -1, f"max_num_seqs must be from 1 to {BIG}, got -1"),
        ("max_num_seqs", True, "max_num_seqs must be an integer"),
        ("max_num_active_seqs", 17, "max_num_active_seqs must be from 1 to 16, got 17"),
        ("block_size", 0, "block_size must be from 1 to 65536, got 0"),
        ("block_size", "16", "block_size must be an integer from 1 to 65536, got '16'"),
        ("num_blocks", "x", "num_blocks must be an integer from 2 to 4194304 or \"auto\" .*2 is one usable.*, got 'x'"),
        ("num_blocks", 1, "num_blocks must be from 2 .*block 0 is never handed out"),
        ("max_model_len", 0, "max_model_len must be from 1"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, got 1"),
        ("policy", "lifo", "policy must be one of 'fcfs', 'priority', got 'lifo'"),
        ("watermark", 1.0, r"watermark must be in \[0, 1\), got 1.0"),
        ("watermark", math.nan, r"watermark must be in \[0, 1\), got nan"),
        ("scheduler_reserve_full_isl", None, "scheduler_reserve_full_isl must be True or False"),
        ("long_prefill_token_threshold", -1, "long_prefill_token_threshold must be from 0"),
        ("long_prefill_token_threshold_adaptive", "yes", "long_prefill_token_threshold_adaptive must be"),
        ("attention_backend", "cuda2", "attention_backend must be one of 'auto'.*'msl', got 'cuda2'"),
        ("seed", -1, "seed must be from 0"),
    ],
)
def test_engine_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})
    with pytest.raises(ValueError, match=field):
        EngineConfig().replace(**{field: "nonsense"})


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [(EngineConfig, "max_num_seq", "max_num_seqs"), (SamplingParams, "temprature", "temperature")],
)
def test_a_misspelt_keyword_gets_a_suggestion(kind, name, meant):
    with pytest.raises(TypeError, match=rf"unknown {kind.__name__} field '{name}' \(did you mean {meant}\?\)"):
        kind(**{name: 1})
    with pytest.raises(
        TypeError,
        match=rf"unknown .* field 'zebra'; help\({kind.__name__}\) lists all {len(dataclasses.fields(kind))} fields$",
    ):
        kind(zebra=1)
    assert list(inspect.signature(kind).parameters) == [field.name for field in dataclasses.fields(kind)]


def test_a_threshold_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="long_prefill_token_threshold must be from 0 to 100, got 101"):
        EngineConfig(max_model_len=100, long_prefill_token_threshold=101)


@pytest.mark.parametrize(("kind", "keywords"), [(EngineConfig, ConfigChanges), (SamplingParams, SamplingFields)])
def test_the_fields_as_keywords_have_the_types_of_the_configuration(kind, keywords):
    """A type checker and an editor offer what the configuration takes."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    offered = {name: reference.__forward_arg__ for name, reference in keywords.__annotations__.items()}
    if kind is EngineConfig:
        assert "policy" not in ConfigFields.__annotations__
        types["policy"] = "Any"  # functions that simulate also take an object
    assert offered == types


def test_words_that_a_type_checker_knows_are_those_that_are_taken():
    assert get_args(RouterName) == tuple(ROUTERS) and get_args(PanelName) == tuple(PANELS)


def test_engine_config_is_frozen_and_comparable():
    config = EngineConfig(num_blocks=np.int64(99))
    assert type(config.num_blocks) is int and config.num_usable_blocks == 98
    assert config == EngineConfig(num_blocks=99) != EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 5


def test_engine_config_goes_through_json():
    config = EngineConfig(max_num_seqs=3, policy="priority", watermark=0.25)
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert EngineConfig.from_dict({"max_num_seqs": None, "num_blocks": 7}) == EngineConfig(num_blocks=7)
    with pytest.raises(ValueError, match=r"'max_seqs' \(did you mean max_num_seqs\?\); similar ones are max_"):
        EngineConfig.from_dict({"max_seqs": 4})
    with pytest.raises(ValueError, match="unknown EngineConfig field 'max_seqs'"):
        config.replace(max_seqs=4)


def test_replace_checks_the_whole():
    config = EngineConfig(max_num_batched_tokens=64, max_num_scheduled_tokens=32)
    assert config.token_budget == 32
    assert config.replace(max_num_scheduled_tokens=None).token_budget == 64
    with pytest.raises(ValueError, match="max_num_scheduled_tokens must be from 1 to 16, got 32"):
        config.replace(max_num_batched_tokens=16)


def test_reprs_show_what_differs_from_the_defaults():
    assert repr(EngineConfig()) == "EngineConfig()"
    assert repr(EngineConfig(num_blocks=9, policy="priority")) == "EngineConfig(num_blocks=9, policy='priority')"
    assert repr(SamplingParams(top_k=-1, temperature=0.5)) == "SamplingParams(temperature=0.5)"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be from 1"),
        ("max_tokens", None, "max_tokens must be an integer"),
        ("temperature", math.nan, "temperature must be >= 0 and finite, got nan"),
        ("temperature", math.inf, "temperature must be >= 0 and finite, got inf"),
        ("temperature", -0.1, "temperature must be >= 0 and finite, got -0.1"),
        ("temperature", "hot", "temperature must be a number >= 0 and finite, got 'hot'"),
        ("top_k", -2, "top_k must be from -1"),
        ("top_p", 0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"top_p must be in \(0, 1\], got 1.5"),
        ("min_p", -0.5, r"min_p must be in \[0, 1\], got -0.5"),
        ("repetition_penalty", 0, "repetition_penalty must be > 0 and finite, got 0.0"),
        ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ("frequency_penalty", math.nan, r"frequency_penalty must be in \[-2, 2\], got nan"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {"a": 1}, "logit_bias token id must be an integer"),
        ("logit_bias", {5: 101}, r"logit_bias\[5\] must be in \[-100, 100\], got 101.0"),
        ("stop", ["ok", ""], r"stop\[1\] must be a string that is not empty, got ''"),
        ("stop", 5, "stop must be a list of strings, got 5"),
        ("stop_token_ids", [1, -1], r"stop_token_ids\[1\] must be from 0"),
        ("stop_token_ids", "12", "stop_token_ids must be a list of token ids, got '12'"),
        ("ignore_eos", 1, "ignore_eos must be True or False"),
        ("logprobs", -1, "logprobs must be from 0"),
        ("seed", 1.5, "seed must be an integer"),
        ("sampler", "greedy", "sampler must be callable"),
        ("logits_processors", [5], r"logits_processors\[0\] must be callable, got 5"),
    ],
)
def test_sampling_params_refuse(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_sampling_params_keep_one_form():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, logits_processors=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
    assert SamplingParams(logit_bias={np.int32(3): 1}).logit_bias == {3: 1.0}


def test_non_default_fields_as_json():
    params = SamplingParams(max_tokens=3, stop="x", logit_bias={7: -5}, sampler=max, logits_processors=[min, max])
    changed = params.non_default()
    assert json.loads(json.dumps(changed)) == changed
    assert changed["logit_bias"] == {"7": -5.0} and changed["stop"] == ["x"] and changed["max_tokens"] == 3
    assert changed["sampler"] == repr(max) and changed["logits_processors"] == [repr(min), repr(max)]
    assert SamplingParams().non_default() == {}
    assert params.replace(max_tokens=16).max_tokens == 16
