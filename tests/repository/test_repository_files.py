"""Files for visitors of the repository: they agree with the package, and what reads them can."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import workbench

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so the files cannot be read")

ROOT = Path(__file__).parents[2]


def test_the_citation_names_the_version_and_the_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == workbench.__version__
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_forms_and_the_container_can_be_read():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for form in forms:
        read = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} == set(read)
        assert [part["attributes"]["label"] for part in read["body"]]
    assert yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["version"] == 2
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"])
def test_links_of_a_page_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
        assert (ROOT / link).exists(), link
