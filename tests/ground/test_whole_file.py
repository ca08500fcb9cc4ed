"""Files that appear complete or not at all, of every kind that is written."""

import os

import pytest

from workbench import simulate
from workbench.base.whole_file import replace_text
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.formats.export import to_chrome_trace
from workbench.trace.formats.otlp import to_otlp

REQUESTS = {"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]}
WRITERS = {
    "a text": (lambda path: replace_text(path, "new"), "x.txt"),
    "a trace": (lambda path: simulate(REQUESTS).save(path), "x.jsonl"),
    "a page": (lambda path: simulate(REQUESTS).to_html(path), "x.html"),
    "a Chrome trace": (lambda path: to_chrome_trace(simulate(REQUESTS), path), "x.json"),
    "spans": (lambda path: to_otlp(simulate(REQUESTS, cost_model=CostModel(fixed=0.1)), path), "x.json"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_leaves_the_old_one(name, tmp_path, monkeypatch):
    write, file = WRITERS[name]
    target = tmp_path / file
    target.write_text("old")

    def full(*paths):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            write(target)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    write(target)
    assert target.read_bytes() != b"old" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("where", ["no folder", "a folder of that name"])
def test_an_error_names_the_file_and_not_the_one_beside_it(name, where, tmp_path):
    write, file = WRITERS[name]
    target = tmp_path / "none" / file if where == "no folder" else tmp_path / file
    if where != "no folder":
        target.mkdir()
    with pytest.raises(OSError, match="No such file" if where == "no folder" else "directory") as caught:
        write(target)
    assert (caught.value.filename, caught.value.filename2) == (str(target), None)
    assert str(caught.value).endswith(f": {str(target)!r}"), "one file, and no arrow to another"
    assert list(tmp_path.iterdir()) == ([] if where == "no folder" else [target])


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.write_text("old")
    link.symlink_to(theirs)
    replace_text(link, "new")
    assert not link.is_symlink() and (theirs.read_text(), link.read_text()) == ("old", "new")
