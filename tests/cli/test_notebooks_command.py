"""`workbench notebooks`: the course in a folder of the reader's, whose changes are kept."""

import shlex
from pathlib import Path

import pytest

from workbench.cli import main

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CONTENTS = {
    str(path.relative_to(NOTEBOOKS)): path.read_bytes()
    for path in [*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("data/*")]
}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_course_and_its_data_are_copied_and_the_way_to_open_them_is_printed(tmp_path, capsys):
    folder = tmp_path / "my course"
    assert main(["notebooks", str(folder)]) == 0
    assert contents(folder) == CONTENTS
    printed = capsys.readouterr()
    jupyter, *arguments = shlex.split(printed.out.splitlines()[-1])
    assert Path(jupyter).name == "jupyter" and arguments == ["lab", str(folder / "00_tour.ipynb")]
    assert (folder / "00_tour.ipynb").exists() and printed.err == ""


def test_without_a_folder_they_are_copied_into_one_beside_the_reader(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["notebooks"]) == 0
    assert contents(tmp_path / "workbench-notebooks") == CONTENTS
    assert capsys.readouterr().out.rstrip().endswith("lab workbench-notebooks/00_tour.ipynb")


def test_a_changed_notebook_is_kept_and_named_and_a_missing_one_is_copied(tmp_path, capsys):
    main(["notebooks", str(tmp_path)])
    (tmp_path / "01_packed_prefill.ipynb").write_text("my answers")
    (tmp_path / "02_paged_kv.ipynb").unlink()
    (tmp_path / "mine.ipynb").write_text("mine")
    capsys.readouterr()
    assert main(["notebooks", str(tmp_path)]) == 0
    changed = {"01_packed_prefill.ipynb": b"my answers", "mine.ipynb": b"mine"}
    assert contents(tmp_path) == CONTENTS | changed
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == "kept your version of 01_packed_prefill.ipynb (--force replaces it)"


def test_force_replaces_a_changed_notebook_and_nothing_of_the_readers_own(tmp_path, capsys):
    main(["notebooks", str(tmp_path)])
    (tmp_path / "01_packed_prefill.ipynb").write_text("my answers")
    (tmp_path / "mine.ipynb").write_text("mine")
    capsys.readouterr()
    assert main(["notebooks", str(tmp_path), "--force"]) == 0
    assert contents(tmp_path) == CONTENTS | {"mine.ipynb": b"mine"}
    assert "kept" not in capsys.readouterr().out


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_way_is_one_line(tmp_path, capsys, below):
    (tmp_path / "file").write_text("")
    assert main(["notebooks", str(tmp_path / "file" / below)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and str(tmp_path / "file") in printed.err


def test_a_package_without_its_notebooks_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("workbench.cli.notebooks.COURSE", tmp_path / "nothing")
    assert main(["notebooks", str(tmp_path / "course")]) == 2
    assert "holds no notebooks" in capsys.readouterr().err and not (tmp_path / "course").exists()
