"""A step explained in a browser: it plays by itself, and the browser records it as a film."""

import pytest
from viz_traces import random_trace

from workbench import simulate

CLOCK = "globalThis.milliseconds = 0; performance.now = () => milliseconds;"
"""The page's time stands still until the test moves it: four seconds of a scene are not waited for."""


@pytest.fixture
def page_of_a_run(browser, tmp_path):
    random_trace(11).to_html(tmp_path / "run.html")
    context = browser.new_context(viewport={"width": 1100, "height": 900}, accept_downloads=True)
    page = context.new_page()
    page.add_init_script(CLOCK)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_function("() => document.querySelector('.wb-root')?.workbench?.store.numSteps > 0")
    yield page
    context.close()
    assert not problems


FILM = "document.querySelector('.wb-root').workbench.film"


def test_a_step_plays_in_five_scenes_and_the_browser_records_it(page_of_a_run, tmp_path):
    page = page_of_a_run
    page.get_by_role("button", name="Explain this step").click()
    page.wait_for_function(f"() => {FILM}.playing")  # by itself
    seen = []
    with page.expect_download(timeout=90_000) as download:
        page.locator(".wb-film button", has_text="Save film").click()
        page.wait_for_function(f"() => {FILM}.recorder && {FILM}.time === 0")
        for at in range(5):
            for moment in (0.5, 1.5, 2.5, 3.5):
                page.evaluate("(seconds) => milliseconds += 1000 * seconds", 1 if at or moment > 1 else 0.5)
                page.wait_for_function(f"(now) => {FILM}.time === now", arg=4 * at + moment)
            pressed = page.locator(".wb-film .wb-tab[aria-pressed=true]")
            seen.append((pressed.get_attribute("data-scene"), page.locator(".wb-film-sentence").text_content()))
        page.evaluate("() => milliseconds += 1000")
        page.wait_for_function(f"() => !{FILM}.playing")
    assert [name for name, _ in seen] == ["schedule", "blocks", "mask", "attention", "sample"]
    assert len({sentence for _, sentence in seen}) == 5
    painted = page.evaluate(f"() => new Set({FILM}.canvas.getContext('2d').getImageData(0, 140, 960, 360).data).size")
    assert painted > 3, "the last scene is painted"
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => {FILM}.playing && {FILM}.time < 4")  # another step, from its first scene
    page.locator(".wb-film button", has_text="Close").click()
    assert not page.locator(".wb-film").is_visible()
    page.keyboard.press("e")
    page.locator(".wb-film").wait_for()
    page.keyboard.press("Escape")
    assert not page.locator(".wb-film").is_visible()
    download.value.save_as(tmp_path / "step.webm")
    film = (tmp_path / "step.webm").read_bytes()
    assert download.value.suggested_filename.startswith("step-") and film[:4] == b"\x1a\x45\xdf\xa3"  # EBML
    player = page.context.new_page()  # a saved page may load no media
    size = player.evaluate(
        """async (bytes) => {
            const video = document.createElement("video");
            video.muted = true;
            video.src = URL.createObjectURL(new Blob([new Uint8Array(bytes)], { type: "video/webm" }));
            const seen = new Promise((resolve) => video.onerror = () => resolve(["refused", video.error?.message]));
            const read = new Promise((resolve) => {
                video.onloadeddata = () => resolve([video.videoWidth, video.videoHeight]);
            });
            return await Promise.race([seen, read]);
        }""",
        list(film),
    )
    assert size == [960, 540] and len(film) > 20_000


def test_a_scene_that_is_chosen_while_the_film_stands_is_complete(page_of_a_run):
    page = page_of_a_run
    page.get_by_role("button", name="Explain this step").click()
    page.wait_for_function(f"() => {FILM}.playing")
    pixels = f"() => Array.from({FILM}.canvas.getContext('2d').getImageData(0, 140, 960, 360).data).join()"
    chosen = []
    for scene in ("attention", "blocks"):
        page.evaluate(f"{FILM}.playing = true")
        page.locator(f".wb-film [data-scene={scene}]").click()
        beginning = page.evaluate(pixels)  # it plays from there
        page.evaluate(f"{FILM}.playing = false")
        page.locator(f".wb-film [data-scene={scene}]").click()
        chosen.append(page.evaluate(pixels))
        page.evaluate(f"({FILM}.time = 4 * Math.floor({FILM}.time / 4) + 3.9, {FILM}.draw())")
        assert page.evaluate(pixels) == chosen[-1] != beginning
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_the_words_of_a_scene_are_large_enough_to_read(browser, tmp_path, width):
    """Letters as high on a phone as elsewhere, none outside the picture; a film that is saved keeps its size."""
    from runs_to_draw import run

    run("timed 3")[0].to_html(tmp_path / "run.html")
    context = browser.new_context(viewport={"width": width, "height": 844}, is_mobile=width < 500)
    page = context.new_page()
    page.add_init_script(CLOCK)
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_function("() => document.querySelector('.wb-root')?.workbench?.store.numSteps > 0")
    page.evaluate(f"({FILM}.view.cursor.seek(6), {FILM}.show())")
    letters = page.evaluate(rf"""() => {{
        const film = {FILM}, {{ canvas }} = film, context = canvas.getContext("2d"), found = [];
        const paint = context.fillText.bind(context);
        context.fillText = (words, x, y) => {{
            const {{ a }} = context.getTransform(), shown = canvas.clientWidth / canvas.width * a;
            const wide = context.measureText(words).width;
            const part = {{ left: 0, center: 0.5, right: 1 }}[context.textAlign];
            const left = (x - part * wide) * shown;
            found.push([words, parseFloat(/[\d.]+(?=px)/.exec(context.font)) * shown, left, left + wide * shown]);
            paint(words, x, y);
        }};
        film.playing = false;
        for (let at = 0; at < 5; at++) {{
            film.time = 4 * at + 3.9;
            film.draw();
        }}
        return found;
    }}""")
    assert len(letters) > 20
    shown = page.evaluate(f"{FILM}.canvas.clientWidth")
    for words, size, left, right in letters:
        assert size >= (8 if width == 320 else 10), words
        assert left >= 0 and right <= shown + 0.5, words
    page.evaluate(f"{FILM}.record()")
    page.evaluate(f"{FILM}.draw()")
    assert page.evaluate(f"[{FILM}.canvas.width, {FILM}.canvas.height]") == [960, 540]
    context.close()


@pytest.mark.parametrize("budget", [256, 2048])
def test_every_decode_has_a_piece_of_the_budget_that_is_seen(browser, tmp_path, budget):
    """A decode is one token of a budget as wide as the film: each has the hue that its reply has elsewhere."""
    requests = [{"id": f"r{n}", "prompt": {"len": 4}, "max_tokens": 9} for n in range(12)]
    config = {"max_num_batched_tokens": budget, "max_num_seqs": 32}
    simulate({"config": config, "requests": requests}).to_html(tmp_path / "run.html")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.add_init_script(CLOCK)
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_function("() => document.querySelector('.wb-root')?.workbench?.store.numSteps > 0")
    page.evaluate("() => document.querySelector('.wb-root').workbench.cursor.seek(4)")
    page.get_by_role("button", name="Explain this step").click()
    page.wait_for_function(f"() => {FILM}.playing")
    page.evaluate("() => milliseconds += 3500")
    page.wait_for_function(f"() => {FILM}.time === 3.5")
    found = page.evaluate(
        f"""() => {{
          const {{ canvas, view }} = {FILM}, context = canvas.getContext("2d");
          const row = context.getImageData(0, 175, canvas.width, 1).data, hues = new Map();
          const theme = document.createElement("canvas").getContext("2d");
          for (let r = 0; r < 12; r++) {{
            theme.fillStyle = view.theme.decode(r);
            theme.fillRect(0, 0, 1, 1);
            const [red, green, blue] = theme.getImageData(0, 0, 1, 1).data;
            let count = 0;
            for (let x = 0; x < row.length; x += 4)
              count += Math.abs(row[x] - red) + Math.abs(row[x + 1] - green) + Math.abs(row[x + 2] - blue) < 12;
            hues.set(`${{[red, green, blue]}}`, count);
          }}
          return [...hues.values()];
        }}"""
    )
    assert len(found) > 4 and min(found) >= 1, found
    page.close()
