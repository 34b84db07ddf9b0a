"""Where the documents of a text begin, and WikiText's own tokenization undone, for protocols that score documents.

WikiText is published with spaces around its punctuation and ` @-@ ` for a hyphen inside of a word. What undoes that,
what a page is and how words are counted are facts of lm-evaluation-harness's task `wikitext` (version 2.0,
lm_eval/tasks/wikitext/preprocess_wikitext.py) and of its data set, EleutherAI/wikitext_document_level.
"""

import re
from collections.abc import Sequence

MARKS = (" @-@ ", " @,@ ", " @.@ ")

# In this order, as regular expressions. The slashes of the second are the harness's own, and match in no text.
RULES = (
    *(("s '", "s'"), ("/' [0-9]/", "/'[0-9]/")),
    *((" @-@ ", "-"), (" @,@ ", ","), (r" @\.@ ", ".")),
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *((r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}")),
    *((r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'")),
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)


def is_wikitext(text: str) -> bool:
    """Whether a text is in WikiText's form: its marks, and pages with headings."""
    return any(mark in text for mark in MARKS) and any(map(is_heading, text.split("\n")))


def is_heading(line: str) -> bool:
    """Whether a line of WikiText is the heading of a page: ` = Title = `, and not ` = = Section = = `."""
    return bool(re.fullmatch(r"= (?!= ).*(?<! =) =", line.strip()))


def pages(text: str) -> list[str]:
    """WikiText's pages, each from its heading on; what has no text is left out."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if is_heading(line):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


def split(parts: Sequence[str]) -> tuple[list[str], bool]:
    """The documents of a text that came in parts, and whether they are WikiText.

    Parts are documents, but lines of WikiText make pages: its data set has a line a row, and empty rows for the lines
    that hold a space.
    """
    if not is_wikitext("\n".join(parts)):
        return [part for part in parts if part.strip()], False
    if len(parts) > 1 and any("\n" in part[:-1] for part in parts):
        return [part for part in parts if part.strip()], True
    return pages("".join(part or " \n" for part in parts)), True


def detokenized(page: str) -> str:
    """A page of WikiText as one would write it."""
    for pattern, replacement in RULES:
        page = re.sub(pattern, replacement, page)
    return page


def words(document: str) -> int:
    """Words of a document, before it is detokenized; one that begins or ends with a space has an empty word there."""
    return len(re.split(r"\s+", document))
