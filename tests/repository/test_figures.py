"""The documentation's figures agree with the views, and its reference with the docstrings."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


SCRIPTS_WITH_CHECK = [
    "make_figures.py",
    "make_reference.py",
    "make_command_page.py",
    "make_api_page.py",
    "make_request_table.py",
    "make_log_tables.py",
]


@pytest.mark.parametrize("script", SCRIPTS_WITH_CHECK)
def test_what_is_made_by_a_script_is_up_to_date(script):
    done = subprocess.run([sys.executable, SCRIPTS / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
