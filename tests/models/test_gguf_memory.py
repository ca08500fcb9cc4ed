"""Memory while a GGUF file is loaded, as counts that do not depend on the machine."""

import mlx.core as mx
import pytest
from gguf_files import random_model, tiny_config, write_model

from workbench.models import load
from workbench.models.gguf import packed_tensors
from workbench.models.gguf.file import GGUFFile
from workbench.models.load import load_model
from workbench.models.packed.pack_model import why_not_packed

PACKS = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_config("llama")
    write_model(path, "llama", config, random_model(config), matrix_type="Q8_0")
    return path


@PACKS
def test_stored_rows_are_let_go_block_by_block(path, monkeypatch):
    """Blocks of a few rows, also of q and k, whose rows change places, give the same model as whole matrices."""
    token_ids = mx.array([[3, 1, 4, 1, 5]])
    whole = load_model(path).model(token_ids)
    forgotten = []
    forget = GGUFFile.forget
    monkeypatch.setattr(GGUFFile, "forget", lambda file, data: forgotten.append(data.nbytes) or forget(file, data))
    monkeypatch.setattr(packed_tensors, "_BLOCK_BYTES", 500)
    assert mx.array_equal(load_model(path).model(token_ids), whole)
    matrices = [tensor.raw.nbytes for tensor in GGUFFile(path).tensors.values() if tensor.type_name == "Q8_0"]
    blocks = [size for size in forgotten if size <= 500]
    assert sum(blocks) == sum(matrices)
    assert sorted(size for size in forgotten if size > 500) == sorted(matrices)  # what the checks have read


@PACKS
def test_stored_experts_are_let_go_one_by_one(tmp_path, monkeypatch):
    """The experts of a layer are most of a file with few layers."""
    config = tiny_config("olmoe")
    write_model(tmp_path / "m.gguf", "olmoe", config, random_model(config), matrix_type="Q8_0")
    forgotten = []
    forget = GGUFFile.forget
    monkeypatch.setattr(GGUFFile, "forget", lambda file, data: forgotten.append(data.nbytes) or forget(file, data))
    load_model(tmp_path / "m.gguf")
    packed = [tensor.raw for tensor in GGUFFile(tmp_path / "m.gguf").tensors.values() if tensor.raw.ndim > 1]
    assert sum(forgotten) == 2 * sum(raw.nbytes for raw in packed)  # in blocks, and what the checks have read
    experts = [raw[0].nbytes for raw in packed if raw.ndim == 3]
    assert len([size for size in forgotten if size in experts]) == sum(len(raw) for raw in packed if raw.ndim == 3)


def test_the_tokenizers_metadata_is_gone_before_weights_are_read(path, monkeypatch):
    keys = []
    build = load.load_gguf_model
    monkeypatch.setattr(load, "load_gguf_model", lambda file, **kw: keys.extend(file.metadata) or build(file, **kw))
    assert load_model(path).tokenizer.encode("the")
    assert "general.architecture" in keys
    assert not [key for key in keys if key.startswith("tokenizer.")]
