"""The tables of docs/models.md about configurations: the rows of a few architectures, and the rules of the readers."""

import importlib.metadata

import list_config_forms
import pytest

PAGE = list_config_forms.PAGE.read_text()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "kimi_linear", "internlm2"])
def test_a_row_is_measured(architecture):
    version = importlib.metadata.version("transformers")
    if f"With transformers {version}:" not in PAGE:
        pytest.skip(f"the table is not about transformers {version}: run python scripts/list_config_forms.py")
    row = list_config_forms.try_architecture(architecture)
    assert f"| {row.architecture} | {row.result} |" in PAGE


def test_the_rules_on_the_page_are_those_of_the_readers():
    assert list_config_forms.keys_table() in PAGE, "run python scripts/list_config_forms.py"


def test_every_architecture_has_a_row():
    rows = PAGE.split(list_config_forms.BEGIN)[1].split(list_config_forms.END)[0]
    assert all(f"\n| {name} |" in rows for name in list_config_forms.architectures())


def test_a_wrong_rotation_would_be_found(monkeypatch):
    """A control: RoPE that is left as mlx-lm's default gives other logits than the older form."""
    from workbench.models import config_json

    monkeypatch.setattr(config_json, "fold", lambda *_: {})
    monkeypatch.setattr(config_json, "match_rope", lambda *_: [])
    with pytest.raises(AssertionError, match="llama"):
        list_config_forms.try_architecture("llama")
