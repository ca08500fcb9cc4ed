"""From a configuration to a proposer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import EngineConfig
from workbench.engine.sampler import Sampler
from workbench.engine.speculation.custom import CustomProposer, DraftFunction
from workbench.engine.speculation.ngram import NgramProposer
from workbench.engine.speculation.proposer import Proposer
from workbench.engine.speculation.speculator import Speculator
from workbench.models.load import LoadedModel, load_model

if TYPE_CHECKING:
    ModelName = str | Path | LoadedModel


def with_method(config: EngineConfig, draft_model: ModelName | None, proposer: DraftFunction | None) -> EngineConfig:
    """The configuration with the method of speculation that the arguments of an engine ask for.

    Raises:
        ValueError: An argument has no use, or one that the method needs is missing; the message names it.
    """
    given = {name: value for name, value in (("draft_model", draft_model), ("proposer", proposer)) if value is not None}
    for name in given:
        if not config.num_speculative_tokens:
            raise ValueError(f"{name} needs num_speculative_tokens: set it to the number of drafts, such as 4")
    if len(given) > 1:
        raise ValueError("draft_model and proposer exclude each other: give one of them")
    methods = {"draft_model": "draft_model", "proposer": "custom"}
    if given and config.speculative is None:
        config = config.replace(speculative={"method": methods[next(iter(given))]})
    if not config.num_speculative_tokens:
        return config
    speculation = config.speculation
    for name, method in methods.items():
        if name in given and speculation.method != method:
            raise ValueError(f'{name} is for speculative={{"method": "{method}"}}, got "{speculation.method}"')
    if speculation.method == "custom" and proposer is None:
        raise ValueError('speculative={"method": "custom"} needs a function: Engine(..., proposer=...)')
    if speculation.method == "draft_model" and draft_model is None and speculation.num_layers is None:
        raise ValueError(
            'speculative={"method": "draft_model"} needs a model: Engine(..., draft_model=...), or "num_layers" '
            "for the first layers of the model itself"
        )
    return config


def make_speculator(
    config: EngineConfig,
    model: LoadedModel,
    sampler: Sampler,
    *,
    draft_model: ModelName | None = None,
    proposer: DraftFunction | None = None,
) -> Speculator | None:
    """The speculator that a configuration asks for, None without speculative decoding.

    Args:
        config: The configuration, with ``max_model_len`` resolved.
        model: The model whose tokens are drafted.
        sampler: The engine's sampler.
        draft_model: The model for method "draft_model".
        proposer: The function for method "custom".

    Raises:
        ValueError: The draft model does not fit the model.
    """
    if not config.num_speculative_tokens:
        return None
    speculation = config.speculation
    made: Proposer
    if speculation.method == "ngram":
        made = NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    elif speculation.method == "custom":
        assert proposer is not None  # with_method has checked it
        made = CustomProposer(proposer, model.vocab_size)
    else:
        made = _draft_model_proposer(config, model, sampler, draft_model)
    return Speculator(made, config.num_speculative_tokens, adaptive=speculation.adaptive)


def _draft_model_proposer(config: EngineConfig, model: LoadedModel, sampler: Sampler, draft_model: Any) -> Proposer:
    from workbench.engine.model_runner import ModelRunner
    from workbench.engine.speculation.draft_model import DraftModelProposer, first_layers

    speculation = config.speculation
    if speculation.num_layers is not None:
        draft_model = first_layers(model if draft_model is None else _loaded(draft_model), speculation.num_layers)
    draft_model = _loaded(draft_model)
    if draft_model.vocab_size != model.vocab_size:
        raise ValueError(
            f"draft_model {draft_model.name!r} has a vocabulary of {draft_model.vocab_size} tokens, {model.name!r} has "
            f"{model.vocab_size}: its drafts would mean other tokens"
        )
    if config.max_model_len is not None and draft_model.max_position < config.max_model_len:
        raise ValueError(
            f"draft_model {draft_model.name!r} has a context of {draft_model.max_position} tokens, max_model_len is "
            f"{config.max_model_len}: lower max_model_len"
        )
    runner = ModelRunner(draft_model, config.replace(kv_cache_groups=None))
    return DraftModelProposer(runner, sampler, at_random=speculation.draft_sample_method == "probabilistic")


def _loaded(model: ModelName) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load_model(model)
