"""A walk with the Tab key over the controls of a page."""

CONTROLS = (
    "button, input, select, textarea, a[href], summary, canvas[tabindex], [role=button], [role=tab], [role=option]"
)

WATCH = """(css) => {
  const walk = (node) => [...node.querySelectorAll("*")].flatMap((each) =>
    [...(each.matches(css) ? [each] : []), ...(each.shadowRoot ? walk(each.shadowRoot) : [])]);
  window.stops = new Set();
  window.stop = () => {
    let found = document.activeElement;
    while (found?.shadowRoot?.activeElement) found = found.shadowRoot.activeElement;
    const isNew = !stops.has(found);
    stops.add(found);
    return isNew;
  };
  window.left = () => walk(document).filter((each) => !stops.has(each) && !each.disabled
    && each.getClientRects().length && each.checkVisibility({ visibilityProperty: true })
    && !(each.type === "radio" && !each.checked));
}"""


def unreached(page, most=200):
    """The visible controls at which Tab does not stop, as the beginnings of their HTML."""
    page.evaluate(WATCH, CONTROLS)
    for _ in range(most):
        page.keyboard.press("Tab")
        if not page.evaluate("() => stop()"):
            break
    assert page.evaluate("() => stops.size") > 3
    return page.evaluate("() => left().map((each) => each.outerHTML.slice(0, 120))")
