"""docs/benchmarks.md agrees with benchmarks/results."""

import json
import shutil
import sys

import benchmark_tables
import make_benchmark_page
import pytest


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["make_benchmark_page.py", *arguments])
    return make_benchmark_page.main()


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """The script, working on a copy of the page, its figures and the results."""
    shutil.copytree(benchmark_tables.RESULTS, tmp_path / "results")
    shutil.copytree(make_benchmark_page.IMAGES, tmp_path / "images")
    for name in ("PAGE", "MODELS_PAGE", "PREDICTIONS_PAGE"):
        page = getattr(make_benchmark_page, name)
        monkeypatch.setattr(make_benchmark_page, name, tmp_path / page.name)
        shutil.copy(page, tmp_path)
    monkeypatch.setattr(benchmark_tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(make_benchmark_page, "IMAGES", tmp_path / "images")
    return tmp_path


def test_page_and_figures_are_up_to_date(monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 0, capsys.readouterr().err


def test_a_result_that_changed_makes_page_and_figure_stale(monkeypatch, capsys, copied):
    file = copied / "results" / "serving_random_small.json"
    result = json.loads(file.read_text())
    result["arms"]["workbench"]["duration_s"]["median"] *= 2
    file.write_text(json.dumps(result))
    assert run(monkeypatch, "--check") == 1
    stale = capsys.readouterr().err
    assert "benchmarks.md" in stale and "bench-serving.svg" in stale and "bench-watched.svg" not in stale
    assert run(monkeypatch) == 0 and run(monkeypatch, "--check") == 0


def test_a_page_without_a_place_for_a_table_is_refused(monkeypatch, copied):
    page = copied / "benchmarks.md"
    page.write_text(page.read_text().replace("<!-- end watched -->", ""))
    with pytest.raises(ValueError, match="end watched"):
        run(monkeypatch, "--check")


@pytest.mark.parametrize("value, text", [(0.0123456, "0.0123"), (12.3456, "12.3"), (1234.5, "1,234"), (3, "3")])
def test_numbers_have_three_digits(value, text):
    assert benchmark_tables.number(value) == text
