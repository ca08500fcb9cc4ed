"""The page's modules as bytecode: made by Pyodide, kept in the cache folder, left as they are without node."""

import io
import shutil
import zipfile

import pytest
from pyodide_node import need_pyodide

from workbench.apps.playground import bytecode


def archive(**sources):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as target:
        for name, source in sources.items():
            target.writestr(f"{name}.py", source)
        target.writestr("data.txt", "kept")
    return content.getvalue()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pyodide = need_pyodide()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path, pyodide


def test_modules_are_compiled_once_by_the_python_of_the_page(cache, monkeypatch):
    folder, pyodide = cache
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    source = archive(a="x = 1")
    made = bytecode.compiled(source, "/package.zip", pyodide)
    with zipfile.ZipFile(io.BytesIO(made)) as files:
        assert sorted(files.namelist()) == ["a.pyc", "data.txt"] and files.read("data.txt") == b"kept"
        assert b"/package.zip/a.py" in files.read("a.pyc")
    assert len(list((folder / "playground").iterdir())) == 1
    monkeypatch.setattr(bytecode.subprocess, "run", None)  # a second compilation would fail
    assert bytecode.compiled(source, "/package.zip", pyodide) == made


def test_a_compilation_that_fails_is_an_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=r"page's modules: .*nowhere/pyodide\.mjs"):
        bytecode.compiled(archive(a="x = 1"), "/package.zip", tmp_path / "nowhere")
    assert not list((tmp_path / "playground").iterdir())


def test_without_node_the_page_gets_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(bytecode.shutil, "which", lambda name: None)
    source = archive(a="x = 1")
    assert bytecode.compiled(source, "/package.zip", tmp_path) == source
