"""Terms explain themselves when they are pointed at or tapped, and the keyboard reaches all of them."""

from workbench.viz.glossary import TERMS


def test_a_term_explains_itself(page_of, long_trace):
    page = page_of(long_trace)
    term = page.root.locator("[data-panel=timeline] .wb-term").first
    tooltip = page.page.locator(".wb-tooltip")
    for act in (term.hover, term.click):
        page.page.mouse.move(1, 1)
        act()
        word = term.get_attribute("data-term")
        assert TERMS[word] in tooltip.text_content() and tooltip.is_visible()
    page.page.mouse.move(1, 1)
    assert not tooltip.is_visible()
    assert page.root.locator(".wb-sentence .wb-term").count() > 0


def test_the_keyboard_reaches_every_term(page_of, long_trace):
    page = page_of(long_trace)
    page.page.keyboard.press("?")
    page.root.get_by_text("Words, and what they mean").focus()
    page.page.keyboard.press("Enter")
    words = page.root.locator(".wb-terms dt")
    assert words.first.is_visible() and words.all_text_contents() == list(TERMS)
    assert page.root.locator(".wb-terms dd").all_text_contents() == list(TERMS.values())
