"""docs/robustness.md agrees with the results of the soak under attack."""

import json

import make_robustness_page as robustness


def test_the_table_is_that_of_the_last_run():
    page = robustness.PAGE.read_text(encoding="utf-8")
    assert page == robustness.with_table(page, json.loads(robustness.RESULT.read_text()))
