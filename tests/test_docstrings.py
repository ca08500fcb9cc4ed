"""Every example in a docstring runs, and shows what it says it shows."""

import doctest
import importlib
from pathlib import Path

import pytest

import workbench
from workbench import Engine, EngineConfig
from workbench.models import load_model, remembered
from workbench.models.bundled import BundledModelError

ROOT = Path(workbench.__file__).parent
PROMPT = "The capital of France is"


def modules_with_examples():
    paths = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text()]
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def own_examples(module):
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.fixture(scope="module")
def model():
    """SmolLM2 with the findings of earlier checks: no example breaks what these are there for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(remembered.VARIABLE, "remembered")
        try:
            return load_model("smollm2")
        except BundledModelError as problem:
            pytest.skip(f"the bundled model is not here: {problem}")


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name, request, tmp_path, monkeypatch):
    """In an empty folder; ``engine``, where an example does not make its own, has one request queued."""
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE)
    tests = own_examples(importlib.import_module(name))
    assert tests, f"{name} mentions an example that doctest does not find"
    complaints = []
    for test in tests:
        source = "".join(example.source for example in test.examples)
        assert not any(doctest.SKIP in example.options for example in test.examples), f"{test.name} is never run"
        if "ngine" in source:
            model = request.getfixturevalue("model")
            monkeypatch.setattr("workbench.engine.engine.load_model", lambda _, model=model: model)
        if "engine." in source and "engine =" not in source:
            test.globs["engine"] = Engine("smollm2", EngineConfig(num_blocks=32))
            test.globs["engine"].add_request(PROMPT, max_tokens=4)
        runner.run(test, out=complaints.append, clear_globs=False)
        for value in test.globs.values():
            if isinstance(value, Engine):
                value.close()
    assert runner.failures == 0, "".join(complaints)


def test_a_wrong_example_is_noticed():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(wrong, out=lambda text: None).failed == 1
