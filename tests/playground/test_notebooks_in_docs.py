"""Pages of the documentation show the outputs of notebooks that were run after their last change."""

import json
import os

import docs_notebooks

PICTURE = "<div><svg></svg></div>"


def cell(*outputs):
    return {"cell_type": "code", "source": "", "outputs": list(outputs)}


def shown(**data):
    return {"output_type": "display_data", "data": data}


def test_pictures_and_texts_are_shown_and_scripts_are_not():
    printed = [{"output_type": "stream", "name": "stdout", "text": [text]} for text in ("1 < 2", " & 3")]
    warned = {"output_type": "stream", "name": "stderr", "text": ["a warning"]}
    found = docs_notebooks.outputs(
        cell(
            *printed,
            warned,
            shown(**{"text/html": [PICTURE], "text/plain": "Picture"}),
            shown(**{"text/html": "<script>x</script>", "text/plain": "plain"}),
        )
    )
    assert found == [
        '<pre class="wb-output">1 &lt; 2 &amp; 3</pre>',
        f'<div class="wb-output">{PICTURE}</div>',
        '<pre class="wb-output">plain</pre>',
    ]
    assert docs_notebooks.outputs({"cell_type": "code", "source": ""}) == []


def test_the_title_of_an_output_is_no_heading_of_the_page():
    output = shown(**{"text/html": "<div><h4>A</h4><p>b</p><h5>C &amp; D</h5></div>"})
    (found,) = docs_notebooks.outputs(cell(output))
    assert "<strong>A</strong>" in found and "<strong>C &amp; D</strong>" in found
    assert not any(f"h{level}>" in found for level in range(1, 7))


def test_outputs_of_an_older_notebook_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(docs_notebooks, "EXECUTED", tmp_path / "run")
    for folder, cells in (("notebooks", [cell()]), ("run", [cell(shown(**{"text/html": PICTURE}))])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.ipynb").write_text(json.dumps({"cells": cells}))
    for age, count in ((0, 1), (100, 0)):
        os.utime(tmp_path / "run" / "a.ipynb", (1000 - age, 1000 - age))
        os.utime(tmp_path / "notebooks" / "a.ipynb", (1000, 1000))
        assert len(docs_notebooks.cells("notebooks/a.ipynb")[0]["outputs"]) == count
