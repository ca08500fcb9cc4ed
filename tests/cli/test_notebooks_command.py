"""`workbench notebooks`: the course in a folder of the reader's, whose changes are kept."""

import json
import re
import shlex
import shutil
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest

from workbench.apps.cli import main
from workbench.apps.cli.notebooks import docs_from, with_links

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FILES = [*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("data/*")]


def course(folder):
    """The course as it is copied into a folder."""
    docs = docs_from(folder)
    return {
        str(path.relative_to(NOTEBOOKS)): with_links(path.read_bytes(), docs)
        if path.suffix == ".ipynb"
        else path.read_bytes()
        for path in FILES
    }


def links(folder):
    """Targets of all links in the notebooks of a folder, without those to the web."""
    for notebook in folder.glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                for target in re.findall(r"\]\(([^)#]+)[^)]*\)", "".join(cell["source"])):
                    if not target.startswith("https:"):
                        yield unquote(target)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_course_and_its_data_are_copied_and_the_way_to_open_them_is_printed(tmp_path, capsys):
    folder = tmp_path / "my course"
    assert main(["notebooks", str(folder)]) == 0
    assert contents(folder) == course(folder)
    printed = capsys.readouterr()
    jupyter, *arguments = shlex.split(printed.out.splitlines()[-1])
    assert Path(jupyter).name == "jupyter" and arguments == ["lab", str(folder / "00_tour.ipynb")]
    assert (folder / "00_tour.ipynb").exists() and printed.err == ""


def test_links_to_the_documentation_lead_there_from_the_copy(tmp_path, monkeypatch, capsys):
    docs = tmp_path / "checkout" / "docs"
    shutil.copytree(NOTEBOOKS.parent / "docs", docs, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    monkeypatch.setattr("workbench.apps.cli.notebooks.DOCS", docs)
    folder = tmp_path / "a (new) place"
    main(["notebooks", str(folder)])
    _, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert arguments[1] == f"--ServerApp.root_dir={tmp_path}", "JupyterLab follows no link out of what it serves"
    targets = list(links(folder))
    assert len(targets) > 10
    for target in targets:
        assert (folder / target).exists(), target


def test_links_lead_to_the_address_of_the_documentation_of_a_release(tmp_path, monkeypatch):
    released = metadata.metadata("inference-workbench")
    released["Project-URL"] = "Documentation, https://example.org/docs/index.md"
    monkeypatch.setattr(metadata, "metadata", lambda name: released)
    main(["notebooks", str(tmp_path)])
    assert "(https://example.org/docs/concepts/step.md)" in (tmp_path / "00_tour.ipynb").read_text()
    assert not [target for target in links(tmp_path) if "docs" in target]


def test_links_that_only_the_whole_disk_could_serve_become_the_names_of_their_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("workbench.apps.cli.notebooks.os.path.commonpath", lambda paths: tmp_path.anchor)
    main(["notebooks", str(tmp_path / "course")])
    assert "A step (docs/concepts/step.md)" in (tmp_path / "course" / "00_tour.ipynb").read_text()
    assert "root_dir" not in capsys.readouterr().out


def test_without_documentation_a_link_becomes_the_name_of_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.apps.cli.notebooks.DOCS", tmp_path / "none")
    main(["notebooks", str(tmp_path / "course")])
    assert "A step (docs/concepts/step.md)" in (tmp_path / "course" / "00_tour.ipynb").read_text()
    assert not [target for target in links(tmp_path / "course") if "docs" in target]


def test_without_a_folder_they_are_copied_into_one_beside_the_reader(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["notebooks"]) == 0
    assert contents(tmp_path / "workbench-notebooks") == course(tmp_path / "workbench-notebooks")
    assert capsys.readouterr().out.rstrip().endswith("lab workbench-notebooks/00_tour.ipynb")


def test_a_changed_notebook_is_kept_and_named_and_a_missing_one_is_copied(tmp_path, capsys):
    main(["notebooks", str(tmp_path)])
    (tmp_path / "01_packed_prefill.ipynb").write_text("my answers")
    (tmp_path / "02_paged_kv.ipynb").unlink()
    (tmp_path / "mine.ipynb").write_text("mine")
    capsys.readouterr()
    assert main(["notebooks", str(tmp_path)]) == 0
    changed = {"01_packed_prefill.ipynb": b"my answers", "mine.ipynb": b"mine"}
    assert contents(tmp_path) == course(tmp_path) | changed
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == "kept your version of 01_packed_prefill.ipynb (--force replaces it)"


def test_force_replaces_a_changed_notebook_and_nothing_of_the_readers_own(tmp_path, capsys):
    main(["notebooks", str(tmp_path)])
    (tmp_path / "01_packed_prefill.ipynb").write_text("my answers")
    (tmp_path / "mine.ipynb").write_text("mine")
    capsys.readouterr()
    assert main(["notebooks", str(tmp_path), "--force"]) == 0
    assert contents(tmp_path) == course(tmp_path) | {"mine.ipynb": b"mine"}
    assert "kept" not in capsys.readouterr().out


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_way_is_one_line(tmp_path, capsys, below):
    (tmp_path / "file").write_text("")
    assert main(["notebooks", str(tmp_path / "file" / below)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and str(tmp_path / "file") in printed.err


def test_a_package_without_its_notebooks_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("workbench.apps.cli.notebooks.COURSE", tmp_path / "nothing")
    assert main(["notebooks", str(tmp_path / "course")]) == 2
    assert "holds no notebooks" in capsys.readouterr().err and not (tmp_path / "course").exists()
