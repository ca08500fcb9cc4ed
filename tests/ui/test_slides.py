"""A notebook as slides: one page, turned with keys, that asks the network for nothing."""

import re

import nbformat
import pytest

from workbench.apps.cli import main
from workbench.apps.course.slides import slides_page

NEW = nbformat.v4


def notebook(path, *cells):
    """A notebook of (slide type, kind, source)."""
    made = [(NEW.new_markdown_cell if kind == "text" else NEW.new_code_cell)(source) for _, kind, source in cells]
    for cell, (slide_type, *_) in zip(made, cells, strict=True):
        if slide_type is not None:
            cell.metadata["slideshow"] = {"slide_type": slide_type}
    nbformat.write(NEW.new_notebook(cells=made), path)
    return path


@pytest.fixture
def lecture(tmp_path):
    return notebook(
        tmp_path / "07_words.ipynb",
        ("skip", "text", "not for the class"),
        ("slide", "text", "# First\n\nWhat is 6 times 7?"),
        ("fragment", "code", "print(6 * 7)"),
        ("skip", "code", "assert 'check'"),
        (None, "code", "print('it', 'continues')"),
        ("slide", "text", "# Second"),
        ("fragment", "code", "from IPython.display import HTML\nHTML('<b id=\"drawn\">drawn</b>')"),
        ("notes", "text", "for the lecturer"),
    )


def test_slides_are_turned_with_keys_and_need_no_network(lecture, browser):
    assert main(["course", "slides", str(lecture)]) == 0
    page_file = lecture.with_suffix(".html")
    context = browser.new_context(offline=True)
    page, asked, problems = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(page_file.as_uri())
    seen = []
    for _ in range(5):
        seen.append((page.locator("footer").text_content(), page.locator("main").inner_text()))
        page.keyboard.press("ArrowRight")
    texts = [text for _, text in seen]
    assert [place for place, _ in seen] == ["1 of 2", "1 of 2", "2 of 2", "2 of 2", "2 of 2"]
    assert "What is 6 times 7?" in texts[0] and "42" not in texts[0], "the question comes before its answer"
    assert "42" in texts[1] and "it continues" in texts[1]
    assert "Second" in texts[2] and "drawn" not in texts[2] and "drawn" in texts[3]
    assert not any("not for the class" in text or "check" in text or "lecturer" in text for text in texts)
    page.keyboard.press("Home")
    page.mouse.click(400, 300)
    assert "42" in page.locator("main").inner_text()
    page.reload()
    assert "42" in page.locator("main").inner_text(), "a reload stays at its place"
    page.emulate_media(media="print")
    assert "drawn" in page.locator("main").inner_text(), "paper shows everything"
    assert not problems and all(url.startswith("file:") for url in asked)
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page_file.read_text())
    context.close()


def test_a_notebook_that_does_not_run_or_has_no_slides_is_refused(tmp_path, capsys):
    broken = notebook(tmp_path / "broken.ipynb", ("slide", "code", "1 / 0"))
    with pytest.raises(ValueError, match=r"broken\.ipynb does not run, so it has no pictures: ZeroDivisionError"):
        slides_page(broken)
    assert "1" in slides_page(broken, run=False)
    plain = notebook(tmp_path / "plain.ipynb", (None, "text", "words"))
    with pytest.raises(ValueError, match="marks no cell as a slide"):
        slides_page(plain, run=False)
    (tmp_path / "text.ipynb").write_text("{")
    assert main(["course", "slides", str(tmp_path / "text.ipynb"), "--saved"]) == 2
    assert "text.ipynb is not a notebook that can be read" in capsys.readouterr().err
