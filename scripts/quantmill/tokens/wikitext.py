"""Split a text into documents and detokenize WikiText, for protocols that score documents.

WikiText is published with spaces around its punctuation and ` @-@ ` for a hyphen inside a word. Detokenization, pages
and counts of words follow lm-evaluation-harness's task `wikitext` (version 2.0,
lm_eval/tasks/wikitext/preprocess_wikitext.py) and its data set, EleutherAI/wikitext_document_level.
"""

import re
from collections.abc import Sequence

MARKS = (" @-@ ", " @,@ ", " @.@ ")

# In this order: replacements, then white space inside brackets and quotes, then more replacements. The slashes around
# the pattern of a quote before a digit are the harness's.
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
    """Return whether a text has WikiText's marks and headings."""
    return any(mark in text for mark in MARKS) and any(map(is_heading, text.split("\n")))


def is_heading(line: str) -> bool:
    """Return whether a line of WikiText is the heading of a page, ` = Title = `, not ` = = Section = = `."""
    return bool(re.fullmatch(r"= (?!= ).*(?<! =) =", line.strip()))


def pages(text: str) -> list[str]:
    """Return WikiText's pages, each from its heading on, without blank ones."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if is_heading(line):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


def split(parts: Sequence[str]) -> tuple[list[str], bool]:
    """Return the documents of a text that came in parts, and whether they are WikiText.

    Parts are documents, except that lines of WikiText are joined to pages: its data set has a row per line, and empty
    rows for lines with a space.
    """
    if not is_wikitext("\n".join(parts)):
        return [part for part in parts if part.strip()], False
    if len(parts) > 1 and any("\n" in part[:-1] for part in parts):
        return [part for part in parts if part.strip()], True
    return pages("".join(part or " \n" for part in parts)), True


def detokenize(page: str) -> str:
    """Return a page of WikiText in ordinary spelling."""
    for old, new in BEFORE:
        page = page.replace(old, new)
    for marks in BRACKETS:
        page = strip_inside(page, marks[0], marks[1])
    for old, new in AFTER:
        page = page.replace(old, new)
    return page


def strip_inside(text: str, opening: str, closing: str) -> str:
    """Strip the text between each pair of marks.

    The harness's regular expressions take 30 s for a bracket followed by 4,000 spaces.
    """
    pieces, place = [], 0
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start + 1)) >= 0:
        pieces += [text[place : start + 1], text[start + 1 : end].strip(), closing]
        place = end + 1
    return "".join([*pieces, text[place:]])


def words(document: str) -> int:
    """Count the words of a document before `detokenize`; a space at its beginning or end adds an empty word."""
    return len(re.split(r"\s+", document))
