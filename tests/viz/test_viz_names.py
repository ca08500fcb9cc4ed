"""A visitor's own question has one name in all words of the view."""

import re

from workbench import simulate


def test_a_question_has_one_name_in_all_words(deno_page):
    """In sentences, cards, lists and tables of this view, but not in a command for a shell."""
    requests = [{"id": name, "prompt": {"len": 30}, "max_tokens": 6} for name in ("r1", "r10", "r1-a", "long")]
    trace = simulate({"requests": requests, "config": {"max_num_seqs": 2}})
    deno_page.open(trace, status={"live": True, "state": "idle", "explains": False})
    deno_page("view.store.byId.get('r1').own = true, page.frame()")
    sentences = [deno_page("view.store.sentence(argument)", step) for step in range(len(trace))]
    pattern = r"(?<![\w-])r1(?![\w-])"
    assert any("you (r1)" in sentence for sentence in sentences)
    for sentence, record in zip(sentences, trace, strict=True):
        plain = deno_page("view.store.sentences[argument]", record.step)
        assert re.sub(pattern, "you (r1)", plain) == sentence and "you (r10)" not in sentence
    deno_page("view.inspector.pin({ kind: 'request', request: view.store.byId.get('r1').index }), page.frame()")
    assert deno_page("view.inspector.title.textContent") == "you (r1)"
    for panel in ("gantt", "packed", "tables", "pool", "events", "timeline"):
        if not deno_page("Boolean(view.panel(argument))", panel):
            continue
        words = str(deno_page.table(panel, 1))
        assert not re.search(rf"(?<!you \(){pattern}", words), (panel, words)
