"""Checks of a model that are remembered from one start to the next, and starts that check again."""

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from gguf_files import random_model, tiny_config, write_model

import workbench
from workbench import Engine
from workbench.base.cache_folder import cached, make_folder
from workbench.kernels.cpu.kernels import product_kernel
from workbench.models import load_model
from workbench.models import preflight_once as once_module
from workbench.models import remembered as remembered_module
from workbench.models.layer_cache import LayerKV
from workbench.models.packed import check, matrix, step_check
from workbench.models.preflight_once import from_json, to_json
from workbench.models.preflight_result import PreflightResult
from workbench.models.remembered import NOTHING, VARIABLE, entries, is_on, remembered, sources_digest
from workbench.models.state_cache import LayerState

PACKAGE = Path(workbench.__file__).parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder with compiled code alone, and remembering turned on."""
    (tmp_path / "cache").mkdir()
    make_folder(cached("compiled"))
    (tmp_path / "cache" / "compiled").symlink_to(cached("compiled"))
    monkeypatch.setenv(VARIABLE, "remembered")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "m.gguf"
    write_model(path, "llama", config, random_model(config), matrix_type="Q4_0")
    return path


@pytest.fixture
def ran(monkeypatch):
    """Names of the checks that ran."""
    names = set()

    def watch(module, name):
        function = getattr(module, name)

        def watched(*args, **kwargs):
            names.add(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(check, "check_products")
    watch(once_module, "preflight")
    watch(step_check._Trial, "logits_by_layer")
    return names


ALL = {"check_products", "preflight", "logits_by_layer"}


def start(path):
    """Load the file and serve a request; the loaded model and the tokens."""
    loaded = load_model(path)
    engine = Engine(loaded, num_blocks=16)
    tokens = engine.generate([[1, 2, 3, 4, 5]], max_tokens=6)[0].token_ids
    assert engine.runner.not_taken.get("compiled", "") == ("" if loaded.quantized else "its weights are not packed")
    return loaded, tokens


def test_the_second_start_checks_nothing_and_serves_the_same(cache, file, ran, monkeypatch):
    _, tokens = start(file)
    assert ran == ALL
    ran.clear()
    assert start(file)[1] == tokens
    assert ran == set()
    monkeypatch.setenv(VARIABLE, "always")
    assert start(file)[1] == tokens
    assert ran == ALL


@pytest.mark.parametrize("mode", ["always", "remembered"])
def test_a_second_engine_over_a_model_checks_what_has_changed(cache, file, ran, monkeypatch, mode):
    monkeypatch.setenv(VARIABLE, mode)
    loaded = load_model(file)
    paths, tokens = [], []

    def serve():
        ran.clear()
        with Engine(loaded, num_blocks=16) as engine:
            paths.append(engine.runner.path.name)
            tokens.append(engine.generate([[1, 2, 3, 4, 5]], max_tokens=6)[0].token_ids)
        return set(ran)

    assert serve() == ALL and serve() == set()
    assert tokens[0] == tokens[1] and set(paths) == {"compiled"}
    norm = loaded.model.model.norm
    norm.weight = 2 * norm.weight
    mx.eval(norm.weight)
    assert serve() >= {"preflight", "logits_by_layer"}
    assert "logits_by_layer" in serve(), "control: nothing is known about a model that is not as it was loaded"


def test_nothing_remembers_nothing():
    NOTHING.put("products", True)
    assert NOTHING.get("products") is None


def test_another_file_is_checked(cache, file, ran):
    start(file)
    ran.clear()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    start(file)
    assert ran == ALL
    assert len(entries()) == 2


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-20], lambda text: text.replace("kernel", "gather", 1), str.upper]
)
def test_a_damaged_entry_is_ignored(cache, file, ran, damage):
    start(file)
    ran.clear()
    (entry,) = entries()
    entry.write_text(damage(entry.read_text()))
    start(file)
    assert ran == ALL


def test_a_changed_source_is_noticed(tmp_path):
    copy = tmp_path / "workbench"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.pyc", "static"))
    before = sources_digest(copy)
    for name in (
        "kernels/cpu/emitter.py",
        "models/preflight.py",
        "kernels/cpu/attention/decode.py",
        "kernels/cpu/threads.py",
        "base/text.py",
    ):
        source = copy / name
        text = source.read_text()
        changed = text.replace("+", "-", 1)
        assert changed != text
        source.write_text(changed)
        assert sources_digest(copy) != before
        source.write_text(text)
    assert sources_digest(copy) == before == sources_digest(PACKAGE)


def test_a_wrong_kernel_never_passes(cache, file, monkeypatch, caplog):
    """A kernel that is wrong is one whose source differs, so the entry of the right one does not stand for it."""
    start(file)
    monkeypatch.setattr(matrix, "product_kernel", lambda form, *how: product_kernel(form._replace(offset=7), *how))
    loaded, _ = start(file)
    assert loaded.quantized, "control: an entry with the same sources stands for the check"
    monkeypatch.setattr(remembered_module, "sources_digest", lambda package: "of the changed source")
    for _ in range(2):  # and a check that failed is not remembered
        loaded, _ = start(file)
        assert loaded.quantized == ""
        assert 'weights="packed" becomes weights="float32": the product with' in caplog.text
        caplog.clear()


def test_a_model_that_is_not_as_loaded_has_no_entry(cache, file):
    loaded = load_model(file)
    assert loaded.remembered is not NOTHING
    norm = loaded.model.model.norm
    weight = norm.weight
    norm.weight = 2 * weight
    assert loaded.remembered is NOTHING
    norm.weight = weight
    assert loaded.remembered is not NOTHING
    loaded.model.model.layers[0].mlp.down_proj = loaded.model.model.layers[1].mlp.down_proj
    assert loaded.remembered is NOTHING


def test_a_result_is_the_same_after_it_was_written():
    kv = LayerKV(2, 16, 8, mx.bfloat16, window=5, mask_excess=1)
    state = LayerState(((3, 4), (5,)), (mx.float32, mx.int32), ("layers.0.mixer",))
    result = PreflightResult("gather", (kv,), 0, None, 1e-6, 0.5, "a reason", 4, (kv, (state, kv)))
    assert from_json(to_json(result)) == result


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "remembered")
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file"))
    memory = remembered([], weights="packed")
    memory.put("products", [])
    assert memory.get("products") == []


def test_the_newest_entries_are_kept(cache, monkeypatch):
    monkeypatch.setattr(remembered_module, "MAX_ENTRIES", 2)
    for number in range(4):
        remembered([], weights=str(number)).put("products", [])
    assert len(entries()) == 2


def test_an_unknown_value_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="WORKBENCH_PREFLIGHT is 'sometimes'; it must be"):
        is_on()


def test_a_start_with_kept_code_does_not_import_numba(cache, file):
    """The first process may compile, and the second one only loads."""
    program = (
        "import sys\n"
        "from workbench import Engine\n"
        f"with Engine({str(file)!r}) as engine:\n"
        "    print([one.text for one in engine.generate([3, 1, 4], max_tokens=3)], engine.runner.path.name, end=' ')\n"
        "print(*sorted({'numba', 'numba.core', 'gguf', 'transformers'} & set(sys.modules)))\n"
    )

    def ran() -> tuple[str, str]:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found, _, imported = done.stdout.strip().partition("] ")
        return found, imported

    first, second = ran(), ran()
    assert first[0] == second[0]
    assert second[1] == "compiled"  # and none of the modules
