"""Every architecture of mlx-lm: its own fields are accepted at their defaults, and any other key is refused by name."""

import dataclasses
import importlib
import json

import pytest
from list_models import architectures
from tiny_configurations import COMMON, SPECIAL

from workbench.models.config_json import read_keys


def configuration(architecture):
    """All fields that the class of arguments declares, those without a default from the tests' tiny models."""
    arguments = importlib.import_module(f"mlx_lm.models.{architecture}").ModelArgs
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    config = {name: value for name, value in COMMON.items() if name in fields}
    config |= {"model_type": architecture} | SPECIAL.get(architecture, {})
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING:
            config.setdefault(name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            config.setdefault(name, field.default_factory())
    return json.loads(json.dumps(config))


@pytest.mark.parametrize("architecture", sorted(set(architectures()) - {"olmo"}))  # which needs a further package
def test_fields_of_the_architecture_are_accepted_and_others_refused(architecture):
    config = configuration(architecture)
    found = {finding.key: finding.verdict for finding in read_keys(architecture, config).findings}
    assert found and set(found.values()) <= {"read", "harmless"}
    for key, value in {"frobnicate": 3, "attention_wobble": [1], "is_causal": False}.items():
        with pytest.raises(ValueError, match=f"{architecture}: {key} .*is not supported"):
            read_keys(architecture, config | {key: value})
