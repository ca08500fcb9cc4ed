"""Modules that have moved can still be imported by their old names, with a warning that says where they are."""

import importlib
import subprocess
import sys

import pytest

from workbench._moved import MOVED
from workbench.scheduler.block_pool import BlockPool


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module_and_warns(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}") as caught:
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__name__ == module.__spec__.name == MOVED[old]
    assert old not in {warning.filename for warning in caught}
    sys.modules.pop(old)


def test_the_table_is_loaded_for_an_old_name_alone():
    program = """
import sys, workbench.scheduler.scheduler
assert "workbench._moved" not in sys.modules
import workbench.engine.config
assert "workbench._moved" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("workbench.engine.nothing")


def test_the_warning_points_at_the_import():
    program = (
        "import warnings, workbench\nwarnings.simplefilter('error')\nfrom workbench.engine.config import EngineConfig"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 1 and 'File "<string>", line 3' in finished.stderr, finished.stderr


def test_a_method_is_found_by_its_old_name_with_a_warning():
    pool = BlockPool(5)
    with pytest.warns(DeprecationWarning, match="BlockPool.num_free is num_free_blocks now"):
        assert pool.num_free == 4
    assert pool.copy().num_free_blocks == 4
