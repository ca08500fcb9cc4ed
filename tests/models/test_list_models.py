"""The table of architectures in docs/models.md agrees with the installed mlx-lm."""

import importlib.metadata
import os
import random
import time

import list_models
import pytest
from tiny_configurations import NOT_TRIED, SPECIAL
from tiny_models import SERVED_AS

PAGE = list_models.PAGE.read_text()
ROWS = list_models.rows_of(PAGE)


@pytest.fixture(autouse=True)
def same_version():
    version = importlib.metadata.version("mlx-lm")
    if f" of mlx-lm {version}," not in PAGE:
        pytest.skip(f"the table is not about mlx-lm {version}: run python scripts/list_models.py")


def test_it_names_every_architecture_once():
    assert list(ROWS) == list_models.architectures()
    assert PAGE.count(list_models.BEGIN) == 1 and list_models.table(ROWS.values()) in PAGE
    assert {"llama", "gemma3_text", "solar_open", "mamba", "olmo"} <= ROWS.keys()
    assert not {"base", "cache", "rope_utils", "switch_layers"} & ROWS.keys()


def test_it_agrees_with_the_preflights_tests():
    for name, mode in SERVED_AS.items():
        assert (ROWS[name].served == "refused") == (mode == "refused"), name
        assert bool(ROWS[name].reason) == (ROWS[name].served not in ("kernel", "state")), name


def test_every_configuration_is_of_an_architecture():
    assert SPECIAL.keys() <= ROWS.keys()
    assert [name for name, row in ROWS.items() if row.served == "not tried"] == list(NOT_TRIED)


def test_rows_agree_with_a_new_trial():
    names = random.Random(PAGE).sample(sorted(ROWS), 4)  # other ones after every change of the page
    for row in list_models.try_all(names):  # reasons hold figures, which depend on the processor's rounding
        assert row._replace(reason="") == ROWS[row.architecture]._replace(reason="")
        assert bool(row.reason) == bool(ROWS[row.architecture].reason)


def answer(pipe):
    """End, hang or answer as the name says."""
    while (name := pipe.recv()) is not None:
        if name == "ends":
            os._exit(3)
        if name == "hangs":
            time.sleep(600)
        pipe.send(f"{name} fails" if name == "wrong" else list_models.Row(name, "", "kernel", ""))


def test_an_architecture_that_ends_the_process_does_not_end_the_trial():
    served, ended, after = list_models.try_all(["a", "ends", "b"], serve=answer)
    assert (served.architecture, after.architecture) == ("a", "b") and {served.served, after.served} == {"kernel"}
    assert ended.served == "not tried" and "ends the process (status 3)" in ended.reason


def test_an_architecture_that_hangs_does_not_stop_the_trial():
    rows = list(list_models.try_all(["hangs", "hangs"], 0.2, answer))
    assert [(row.served, row.reason) for row in rows] == [("not tried", "no answer in 0.2 s")] * 2


def test_wrong_tokens_end_the_trial():
    with pytest.raises(RuntimeError, match="wrong fails"):
        list(list_models.try_all(["a", "wrong"], serve=answer))
