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


def test_a_long_table_continues_on_the_next_screens_under_its_head(tmp_path, browser):
    rows = "\n".join(f"| row {i} | {i * i} |" for i in range(40))
    table = f"# Sizes\n\n| name | square |\n|---|---|\n{rows}"
    file = notebook(tmp_path / "09_table.ipynb", ("slide", "text", table), ("slide", "text", "# Next"))
    assert main(["course", "slides", str(file)]) == 0
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(file.with_suffix(".html").as_uri())
    for height in (720, 500, 3000, 720):
        page.set_viewport_size({"width": 1280, "height": height})
        page.keyboard.press("Home")
        seen, screens = [], 0
        while page.locator("footer").text_content() == "1 of 2":
            assert page.locator("th:visible").all_inner_texts() == ["name", "square"]
            shown = page.locator("tbody tr:visible")
            boxes = [shown.nth(i).bounding_box() for i in (0, shown.count() - 1)]
            assert boxes[0]["y"] >= 0 and boxes[1]["y"] + boxes[1]["height"] <= height
            seen += shown.locator("td:first-child").all_inner_texts()
            screens += 1
            assert screens < 40
            page.keyboard.press("ArrowRight")
        assert seen == [f"row {i}" for i in range(40)]
        assert (screens == 1) == (height == 3000)
    page.close()


def test_a_key_opens_what_a_slide_hides_before_it_turns(tmp_path, browser):
    answer = "<details><summary>{}</summary>\n\n{}\n\n</details>"
    made = notebook(
        tmp_path / "questions.ipynb",
        ("slide", "text", f"# One\n\n{answer.format('Reveal', 'forty-two')}\n\n{answer.format('More', 'and why')}"),
        (
            "slide",
            "text",
            f"# Second\n\n{answer.format('Hint 1', 'look' + chr(10) * 2 + answer.format('Hint 2', 'closer'))}",
        ),
    )
    page = browser.new_page()
    assert main(["course", "slides", str(made)]) == 0
    page.goto(made.with_suffix(".html").as_uri())
    seen = []
    for _ in range(6):
        seen.append(
            [
                word
                for word in ("forty-two", "and why", "Second", "look", "closer")
                if page.get_by_text(word).is_visible()
            ]
        )
        page.keyboard.press("ArrowRight")
    one, two = ["forty-two", "and why"], ["Second", "look", "closer"]
    assert seen == [[], one[:1], one, two[:1], two[:2], two]
    page.keyboard.press("ArrowLeft")
    assert page.get_by_text("forty-two").is_visible(), "what was opened stays open"
    page.close()


@pytest.mark.parametrize("way", ["key", "click"])
def test_what_an_opened_answer_leaves_no_room_for_comes_with_the_next_key(tmp_path, browser, way):
    answer = "<details><summary>Reveal</summary>\n\n" + "\n\n".join(f"reason {n}" for n in range(8)) + "\n\n</details>"
    picture = "<svg id='drawn' viewBox='0 0 900 200'><rect width='900' height='200'/></svg>"
    long = "print(' '.join(f'word{n}' for n in range(60)))"
    made = notebook(
        tmp_path / "questions.ipynb",
        ("slide", "text", f"# One\n\n{answer}\n\nwords between"),
        (None, "code", f'from IPython.display import HTML\nHTML("""{picture}""")'),
        ("slide", "code", long),
    )
    assert main(["course", "slides", str(made)]) == 0
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(made.with_suffix(".html").as_uri())
    over = "document.documentElement.scrollHeight - innerHeight"
    drawn, seen = page.locator("#drawn"), []
    assert drawn.is_visible() and page.evaluate(over) <= 1
    if way == "key":
        page.keyboard.press("ArrowRight")
    else:
        page.get_by_text("Reveal").click()
    drawn.wait_for(state="hidden")
    assert page.get_by_text("reason 7").is_visible() and page.evaluate(over) <= 1, "the answer is in sight, whole"
    for _ in range(4):
        seen.append((drawn.is_visible(), page.locator("footer").text_content(), page.evaluate(over)))
        page.keyboard.press("ArrowRight")
    assert [visible for visible, *_ in seen[:3]] == [False, True, False] and seen[2][1] == "2 of 2"
    assert all(pixels <= 1 for *_, pixels in seen)
    assert page.locator("pre").last.evaluate("(e) => e.scrollWidth - e.clientWidth") <= 0, "a long line is wrapped"
    page.close()


def test_a_notebook_that_does_not_run_or_has_no_slides_is_refused(tmp_path, capsys):
    broken = notebook(tmp_path / "broken.ipynb", ("slide", "code", "1 / 0"))
    with pytest.raises(ValueError, match=r"broken\.ipynb does not run, so it has no pictures: ZeroDivisionError"):
        slides_page(broken)
    with pytest.raises(ValueError, match=r"broken\.ipynb has no saved outputs, .* leave --saved out"):
        slides_page(broken, run=False)
    saved = nbformat.read(broken, as_version=4)
    saved.cells[0].outputs = [NEW.new_output("stream", text="kept from another day")]
    nbformat.write(saved, broken)
    assert "kept from another day" in slides_page(broken, run=False)
    texts = notebook(tmp_path / "texts.ipynb", ("slide", "text", "words alone"))
    assert "words alone" in slides_page(texts, run=False)
    plain = notebook(tmp_path / "plain.ipynb", (None, "text", "words"))
    with pytest.raises(ValueError, match="marks no cell as a slide"):
        slides_page(plain, run=False)
    (tmp_path / "text.ipynb").write_text("{")
    assert main(["course", "slides", str(tmp_path / "text.ipynb"), "--saved"]) == 2
    assert "text.ipynb is not a notebook that can be read" in capsys.readouterr().err


TYPE = """() => {
  const shown = [...document.querySelectorAll("section *")].filter((e) => e.checkVisibility());
  const own = (e) => [...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const texts = shown.filter((e) => own(e) && !e.matches("style")).map((e) => parseFloat(getComputedStyle(e).fontSize));
  const pictures = shown.filter((e) => e.localName === "img");
  const sizes = pictures.map((e) => {
    const fonts = [...atob(e.src.split(",")[1]).matchAll(/font:([\\d.]+)px/g)].map(([, size]) => Number(size));
    const scale = Math.min(e.clientWidth / e.naturalWidth, e.clientHeight / e.naturalHeight);
    return scale * Math.min(...fonts.filter((size) => size < 13));
  });
  return { texts, sizes, over: document.documentElement.scrollHeight - innerHeight };
}"""
"""Sizes of the type that is shown, in texts and in pictures, and the pixels by which the slide is too high."""


@pytest.mark.parametrize("width, height", [(1280, 720), (1920, 1080)])
def test_a_step_fits_its_slides_in_type_for_the_last_row(tmp_path, browser, width, height):
    step = (
        "from workbench import simulate\n"
        "requests = [{'id': f'r{n}', 'prompt': {'len': 20 + 9 * n}, 'max_tokens': 4} for n in range(8)]\n"
        "trace = simulate({'requests': requests, 'config': {'max_num_batched_tokens': 96}})\n"
        "trace[1]"
    )
    made = notebook(
        tmp_path / "steps.ipynb",
        ("slide", "text", "# A step\n\n- one\n- two"),
        ("fragment", "code", step),
        ("slide", "code", "trace"),
        ("fragment", "code", "print(1)"),
    )
    assert main(["course", "slides", str(made)]) == 0
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark")
    page.goto(made.with_suffix(".html").as_uri())
    screens, drawn, before = 0, 0, None
    while (now := page.url) != before:
        found = page.evaluate(TYPE)
        assert found["over"] <= 1 and min(found["texts"]) >= 17.9 and all(size >= 17.5 for size in found["sizes"]), (
            found
        )
        screens, drawn, before = screens + 1, drawn + len(found["sizes"]), now
        page.keyboard.press("ArrowRight")
    assert screens >= 4 and drawn >= 4, "a step takes several screens"
    page.set_viewport_size({"width": height, "height": width})
    page.keyboard.press("Home")
    assert "A step" in page.locator("main").inner_text()
    page.close()
