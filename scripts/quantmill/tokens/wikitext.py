"""Where the documents of a text begin, and WikiText's own tokenization undone, for protocols that score documents.

WikiText is published with spaces around its punctuation and ` @-@ ` for a hyphen inside of a word. What undoes that,
what a page is and how words are counted are facts of lm-evaluation-harness's task `wikitext` (version 2.0,
lm_eval/tasks/wikitext/preprocess_wikitext.py) and of its data set, EleutherAI/wikitext_document_level.
"""

import re
from collections.abc import Sequence

MARKS = (" @-@ ", " @,@ ", " @.@ ")

# In this order: what is replaced, then white space inside of brackets and quotes, then what is replaced after that. The
# slashes around the harness's pattern of a quote before a digit are its own.
BEFORE = (
    ("s '", "s'"),
    *((f"/' {digit}/", "/'[0-9]/") for digit in "0123456789"),
    *((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
BRACKETS = ("()", "[]", "{}", '""', "''")
AFTER = (
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


def detokenize(page: str) -> str:
    """A page of WikiText as one would write it."""
    for old, new in BEFORE:
        page = page.replace(old, new)
    for marks in BRACKETS:
        page = strip_inside(page, marks[0], marks[1])
    for old, new in AFTER:
        page = page.replace(old, new)
    return page


def strip_inside(text: str, opening: str, closing: str) -> str:
    """A text without white space at the ends of what stands between two marks.

    The harness's regular expressions for it take 30 s for a bracket and 4,000 spaces behind it.
    """
    pieces, place = [], 0
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start + 1)) >= 0:
        pieces += [text[place : start + 1], text[start + 1 : end].strip(), closing]
        place = end + 1
    return "".join([*pieces, text[place:]])


def words(document: str) -> int:
    """Words of a document, before `detokenize`; one that begins or ends with a space has an empty word there."""
    return len(re.split(r"\s+", document))
