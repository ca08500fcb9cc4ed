"""Memory while a GGUF file is loaded, as counts that do not depend on the machine."""

import mlx.core as mx
import pytest
from gguf_files import random_model, tiny_config, write_model

from workbench.models.gguf import loader
from workbench.models.gguf.file import GGUFFile
from workbench.models.load import load_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_config("llama")
    write_model(path, "llama", config, random_model(config), matrix_type="Q8_0")
    return path


def test_stored_rows_are_let_go_block_by_block(path, monkeypatch):
    """Blocks of a few rows, also of q and k, whose rows change places, give the same model as whole matrices."""
    token_ids = mx.array([[3, 1, 4, 1, 5]])
    whole = load_model(path).model(token_ids)
    forgotten = []
    forget = GGUFFile.forget
    monkeypatch.setattr(GGUFFile, "forget", lambda file, data: forgotten.append(data.nbytes) or forget(file, data))
    monkeypatch.setattr(loader, "_BLOCK_BYTES", 500)
    assert mx.array_equal(load_model(path).model(token_ids), whole)
    matrices = [tensor.raw for tensor in GGUFFile(path).tensors.values() if tensor.type_name == "Q8_0"]
    assert max(forgotten) <= 500
    assert sum(forgotten) == sum(raw.nbytes for raw in matrices)
