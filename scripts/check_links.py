"""Open every link of the pages to other sites: `python scripts/check_links.py`; the status is 1 if some fail."""

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATTEMPTS = 3


def links() -> dict[str, Path]:
    """Each address, with a page that links to it."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    return {
        link: page
        for page in pages
        for link in re.findall(r"\]\((https://[^)\s]+)\)", page.read_text(encoding="utf-8"))
    }


def problem_of(link: str) -> str:
    """The problem with an address; "" if it opens. A site that asks robots to stay away (403, 429) counts as open."""
    problem = ""
    for _ in range(ATTEMPTS):
        headers = {"User-Agent": "workbench-check-links"}
        request = urllib.request.Request(link, headers=headers)  # noqa: S310 - https alone, see links()
        try:
            with urllib.request.urlopen(request, timeout=30):  # noqa: S310 - https alone, see links()
                return ""
        except urllib.error.HTTPError as error:
            if error.code in (403, 429):
                return ""
            problem = f"status {error.code}"
        except OSError as error:
            problem = str(error)
    return problem


if __name__ == "__main__":
    found = [(page.relative_to(ROOT), link, problem_of(link)) for link, page in links().items()]
    problems = [f"{page}: {link}: {problem}" for page, link, problem in found if problem]
    print("\n".join(problems))
    sys.exit(bool(problems))
