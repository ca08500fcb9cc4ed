"""Every kind of token in a listing of code can be read: a contrast of 4.5 with the background, on slides and pages."""

import colorsys
import re
from pathlib import Path

import pytest

from workbench.apps.course import slides

ROOT = Path(__file__).parents[2]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def rgb(text):
    """#abc or #aabbcc as three shares of 1."""
    digits = text.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    return [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]


def test_tokens_of_slides_can_be_read():
    formatter = pytest.importorskip("pygments.formatters.html").HtmlFormatter()
    (background,) = re.findall(r"^pre \{\{[^}]*background: (#\w+);", slides._PAGE, re.MULTILINE)
    tokens = re.findall(r"\.highlight \.(\w+) \{[^}]*(?<!-)color: (#\w{3,6})", formatter.get_style_defs(".highlight"))
    assert len(tokens) > 30
    pale = [name for name, colour in tokens if name != "w" and contrast(rgb(colour), rgb(background)) < 4.5]
    assert pale == [], "w is white space"


@pytest.mark.parametrize(("scheme", "background"), [("default", rgb("#f5f5f5")), ("slate", None)])
def test_tokens_of_pages_can_be_read(scheme, background):
    """The theme's colours, and those that replace them."""
    theme = Path(pytest.importorskip("material").__file__).parent / "templates/assets/stylesheets"
    background = background or list(colorsys.hls_to_rgb(225 / 360, 0.18, 0.15))
    own = (ROOT / "docs/stylesheets/tables.css").read_text(encoding="utf-8")
    sheets = sorted(path for path in theme.glob("*.css") if path.name.startswith(("main", "palette")))
    colours = {}
    for source in [path.read_text(encoding="utf-8") for path in sheets] + [own]:
        for selector, body in re.findall(r"([^{}]+)\{([^{}]*--md-code-hl[^{}]*)\}", source):
            if (scheme == "slate") == ("slate" in selector):
                colours |= dict(re.findall(r"--md-code-hl-(\w+)-color:\s*(#\w{6})\b", body))
    assert len(colours) >= 8, colours
    assert [name for name, colour in colours.items() if contrast(rgb(colour), background) < 4.5] == []


def test_a_page_loads_the_picture_of_its_theme_alone():
    """A picture of the other theme is hidden, and is not loaded if it is lazy."""
    front = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pictures = re.findall(r"#gh-(?:light|dark)-mode-only\)(.*)", front)
    assert len(pictures) == 2 and all("loading=lazy" in attributes for attributes in pictures)
