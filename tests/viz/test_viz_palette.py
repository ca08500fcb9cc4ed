"""The palette: hues that differ under every kind of colour vision, and text with enough contrast."""

import itertools

import numpy as np
import pytest

from workbench.viz.palette import DARK, EVENT_MARKS, FOCUS_HUES, LIGHT, OWN_HUE, ink_on, luminance, mix

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanope": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(colour, vision):
    rgb = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(VISION[vision] @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (to_xyz @ linear) / [0.95047, 1.0, 1.08883]
    f = [v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(a, b, vision):
    """CIE76."""
    return float(np.linalg.norm(lab(a, vision) - lab(b, vision)))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISION)
def test_focus_hues_differ(vision):
    least = min(difference(a, b, vision) for a, b in itertools.combinations((*FOCUS_HUES, OWN_HUE), 2))
    assert least >= 15, f"two focus hues differ by only {least:.1f} for {vision} vision"


def test_the_measure_sees_a_bad_palette():
    purple_added = (*FOCUS_HUES, "#8C6BB1")
    assert min(difference(a, b, "protanope") for a, b in itertools.combinations(purple_added, 2)) < 5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_focus_hues_differ_from_the_greys_of_the_pool(theme, vision):
    for hue in (*FOCUS_HUES, OWN_HUE):
        assert min(difference(hue, grey, vision) for grey in (theme.free, theme.cached)) >= 15


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_phases_differ_in_lightness_for_every_request(theme):
    pairs = [(theme.prefill, theme.decode), *((hue, mix(hue, theme.background, 0.45)) for hue in FOCUS_HUES)]
    for prefill, decode in pairs:
        assert difference(prefill, decode, "normal") >= 15


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(theme):
    assert contrast(theme.text, theme.background) >= 7
    for colour in (theme.muted, theme.bad, theme.good, theme.cursor):
        assert contrast(colour, theme.background) >= 4.5
    assert contrast(theme.muted, theme.surface) >= 4.5
    for mark in (theme.prefill, theme.owned, theme.outline, theme.cursor):
        assert contrast(mark, theme.background) >= 3
    for fill in (*FOCUS_HUES, OWN_HUE, theme.prefill, theme.decode, theme.owned):
        assert contrast(ink_on(fill), fill) >= 4.5


def test_shapes_alone_tell_events_apart():
    shapes = [shape for shape, _ in EVENT_MARKS.values()]
    assert len(set(shapes)) == len(shapes)


def test_mix_is_opaque_and_between():
    assert mix("#000000", "#FFFFFF", 0.0) == "#000000" and mix("#000000", "#FFFFFF", 1.0) == "#FFFFFF"
    assert mix("#000000", "#FF8000", 0.5) == "#804000"
