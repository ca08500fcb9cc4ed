"""Names of repositories: small files are judged before weights are fetched, and a wrong name gets advice."""

import json
import shutil
from fnmatch import fnmatch

import pytest
from door_folders import fields_of, write_folder

from workbench.models import load_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository, "owner/tiny", and the names of the files that were fetched from it."""
    origin = write_folder(tmp_path / "origin", fields_of("llama"))
    fetched = []

    def snapshot_download(name, allow_patterns):
        if name != "owner/tiny":
            raise FileNotFoundError(f"404 for {name}")
        folder = tmp_path / "cache"
        folder.mkdir(exist_ok=True)
        for path in origin.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, folder)
                fetched.append(path.name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: [path.name for path in origin.iterdir()])
    return origin, fetched


def change(path, **keys):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | keys))


def test_a_repository_is_read_as_a_folder(hub):
    origin, fetched = hub
    (origin / "adapter.gguf").write_bytes(b"another file")
    from_name, from_folder = load_model("owner/tiny"), load_model(origin)
    assert (from_name.name, from_name.source) == ("tiny", "owner/tiny") and "adapter.gguf" not in fetched
    assert from_name.findings == from_folder.findings and from_name.eos_token_ids == from_folder.eos_token_ids
    assert from_name.max_position == from_folder.max_position


REFUSED = {
    "a key": ("config.json", {"embedding_multiplier": 3.0}, r"owner/tiny: config.json: embedding_multiplier 3.0"),
    "an unknown key": ("config.json", {"frobnicate": 3}, r"frobnicate 3 is not .*--ignore-config-key frobnicate"),
    "an activation": ("config.json", {"hidden_act": "relu"}, "owner/tiny: config.json: hidden_act 'relu'"),
    "RoPE": ("config.json", {"rope_parameters": {"rope_type": "new", "rope_theta": 9.0}}, "config.json: .*'new'"),
    "generation": (
        "generation_config.json",
        {"suppress_tokens": [5]},
        r"generation_config.json: suppress_tokens \[5\]",
    ),
    "a tokenizer": ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens True"),
    "an architecture": (
        "config.json",
        {"model_type": "frob"},
        "cannot load model_type 'frob', so its weights were not",
    ),
    "no architecture": ("config.json", {"model_type": None}, "owner/tiny: config.json: model_type is None"),
    "code": ("config.json", {"model_type": "frob", "auto_map": {"AutoConfig": "mine.Mine"}}, "needs Python code.*mine"),
    "a file of code": ("config.json", {"model_file": "mine.py"}, "needs Python code.*mine.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_folder_may_not_say_is_refused_before_weights_are_fetched(hub, name):
    origin, fetched = hub
    file, keys, words = REFUSED[name]
    change(origin / file, **keys)
    with pytest.raises(ValueError, match=words):
        load_model("owner/tiny")
    assert "config.json" in fetched and not any(file.endswith(".safetensors") for file in fetched)


@pytest.mark.parametrize("key", ["embedding_multiplier", "frobnicate"])
def test_an_accepted_key_of_a_repository(hub, key):
    change(hub[0] / "config.json", **{key: 3.0})
    loaded = load_model("owner/tiny", ignore_config_keys=[key])
    assert any(finding.because == "ignored as asked" for finding in loaded.findings["config.json"])


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"model.safetensors": "pytorch_model.bin"}, "no weights that mlx-lm reads: .*only pytorch_model.bin"),
        (
            {"model.safetensors": "q4.gguf", "config.json": "c"},
            "no config.json, .*GGUF files .q4.gguf. and give its path",
        ),
        ({"tokenizer.json": "tekken.json", "tokenizer_config.json": "x.json"}, "no tokenizer that transformers reads"),
    ],
)
def test_a_repository_that_lacks_files(hub, rename, words):
    origin, fetched = hub
    for old, new in rename.items():
        (origin / old).rename(origin / new)
    with pytest.raises(ValueError, match=words):
        load_model("owner/tiny")
    assert set(fetched) <= {"config.json", "generation_config.json", "tokenizer_config.json"}


def test_a_repository_without_a_list_of_its_files(hub, monkeypatch):
    """As without a connection, if it was fetched earlier."""

    def fail(name):
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    assert load_model("owner/tiny").name == "tiny"


@pytest.mark.parametrize("name", ["owner/other", "tinny", "folder/tinny", "two words", "owner/tiny!"])
def test_a_name_that_is_nothing(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("tiny", "folder/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(
        OSError, match=r"is neither a folder nor a file here, and cannot be fetched.*Check its name"
    ) as raised:
        load_model(name)
    if name.endswith("tinny"):
        assert f"Did you mean {name.replace('tinny', 'tiny')!r}?" in str(raised.value)
