"""The hooks that make pages of the site: terms that explain themselves, live parts, and the navigation."""

import re
from html import escape
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed, so there is no site")

import docs_hooks
from docs_playground import HERE, after_definition
from mkdocs.exceptions import PluginError

from workbench.viz.glossary import TERMS

ROOT = Path(__file__).parents[2]


def explained_terms(html):
    return re.findall(r'<abbr title="([^"]*)">([^<]*)</abbr>', docs_hooks.explained(html))


def test_a_term_is_explained_once_and_only_in_running_text():
    html = (
        '<h2 title="a slot">The slot</h2><p>A <code>slot</code> and <a href="/slot">a slot</a>: two slots, a slot.</p>'
        "<p>The prefix caching of a KV cache.</p>"
    )
    found = explained_terms(html)
    assert found[0] == (escape(TERMS["slot"]), "slots") and [word for _, word in found].count("slot") == 0
    assert found[1][1] == "prefix caching"
    shown = docs_hooks.explained(html)
    assert re.sub(r"</?abbr[^>]*>", "", shown) == html


def test_words_that_only_contain_a_term_are_left_alone():
    assert explained_terms("<p>A blockade in one-step steps-ahead browser stepping.</p>") == []


@pytest.mark.parametrize(
    ("page", "place"),
    [
        ("# T\n\nOne.\n\nTwo.", "# T\n\nOne.\n\nLIVE\n\nTwo."),
        ("# T\n\nThese:\n\n- a\n- b\n\nTwo.", "# T\n\nThese:\n\n- a\n- b\n\nLIVE\n\nTwo."),
        (f"# T\n\nOne.\n\nTwo.\n\n{HERE}", "# T\n\nOne.\n\nTwo.\n\nLIVE"),
    ],
)
def test_a_live_part_comes_after_the_definition(page, place):
    assert after_definition(page, "\nLIVE\n") == place


def test_every_notebook_is_in_the_navigation():
    navigation = [{"Home": "index.md"}, {"Course": [{"The course": "course.md"}]}]
    docs_hooks.on_config({"nav": navigation})
    listed = navigation[1]["Course"][-1]["Notebooks"]
    assert listed == [f"source/notebooks/{path.name}.md" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]


def test_the_workflow_builds_a_site_that_lacks_nothing():
    """With STRICT, no line of the recipe may fail; without it, the first three may."""
    assert "make docs STRICT=1" in (ROOT / ".github/workflows/docs.yml").read_text()
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.startswith("\t$(if $(STRICT),,-)") for line in recipe] == [True, True, True, False]


SIGNATURE = (
    '<div class="highlight"><pre><code><span class="n">{}</span>(<span class="n">Row</span>)</code></pre></div>\n'
)


def test_the_types_of_a_signature_are_links():
    """They come from the line below it, which mkdocs resolves and checks."""
    line = '<p>Types: <a href="../b/#row"><code>Row</code></a></p>'
    shown = docs_hooks.linked(SIGNATURE.format("f") + line + "\n<p>Row.</p>")
    assert (
        shown
        == SIGNATURE.format("f").strip().replace(">Row<", '><a class="wb-type" href="../b/#row">Row</a><')
        + "\n<p>Row.</p>"
    )
    with pytest.raises(PluginError, match="Row is not in the signature"):
        docs_hooks.linked(SIGNATURE.replace("Row", "Line").format("f") + line)
    prose = "<p>Types: words, chunks.</p>"
    assert docs_hooks.linked(prose) == prose


def test_each_type_of_a_signature_has_a_link_to_its_own_heading():
    """Of all classes with a heading: a name that two modules have is not mistaken for the other."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
    headings = {page: set(re.findall(r"^##+ `([\w.]+)`$", text, re.M)) for page, text in pages.items()}
    names = {name for found in headings.values() for name in found if name[0].isupper() and "." not in name}
    linked = missing = 0
    for page, text in pages.items():
        for code, line in re.findall(r"```py\n[\w.]+(.*?)\n```\n\n?(Types: [^\n]*)?", text, re.S):
            links = dict(re.findall(r"\[`(\w+)`\]\(([^)]*)\)", line))
            for name, address in links.items():
                target, _, anchor = address.partition("#")
                assert re.search(rf"\b{name}\b", code), (page, name)
                assert anchor in {each.lower().replace(".", "") for each in headings[target or page]}, (page, address)
            found = set(re.findall(r"\b[A-Z]\w+", code)) & names
            linked += len(found & links.keys())
            missing += len(found - links.keys())
    assert linked > 200 and not missing, (linked, missing)


def test_a_signature_shows_the_values_that_a_parameter_takes():
    text = (ROOT / "docs" / "api" / "engine.md").read_text()
    signature = text.split("## `Engine`\n")[1].split("```")[1]
    assert "device: Literal['auto', 'cpu', 'gpu'] = 'auto'" in signature
    for path in (ROOT / "docs" / "api").glob("*.md"):
        for code in re.findall(r"```py\n(.*?)\n```", path.read_text(), re.S):
            assert not re.search(r": (Device|Weights|Activations|Theme|RouterName|PanelName)\b", code), path.name
