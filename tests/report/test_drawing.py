"""What stands in place of the plots where they cannot be drawn."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import REPO

from quantmill.report import drawing

ABORT = (
    "\n#\n# Fatal process out of memory: Oilpan: CagedHeap reservation.\n#\n==== C stack trace ====\n  /a.so(+0x1)\n"
)


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (-5, ABORT, "ended by SIGTRAP: Fatal process out of memory: Oilpan: CagedHeap reservation."),
        (-9, "", "ended by SIGKILL: it said nothing"),
        (1, "Traceback\n  File x\nValueError: no such mark\n", "ended with status 1: ValueError: no such mark"),
    ],
)
def test_how_the_process_that_draws_ended_is_said_in_its_own_words(status: int, said: str, why: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert drawing.refusal(status, said) == f"what draws {why}"


def test_whatever_ends_the_process_that_draws_the_report_has_texts_for_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no <b>glass</b> & no pencil' >&2\nkill -ABRT $$\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    drawn = drawing.draw([])
    assert drawn.refused == "what draws ended by SIGABRT: no <b>glass</b> & no pencil"
    assert drawn.plots == drawn.details == {}
    assert drawn.vega == ""
    told = " ".join(ElementTree.fromstring(drawn.svg).itertext())
    assert "The plot could not be drawn." in told
    assert "no <b>glass</b> & no pencil" in told  # as text
    assert drawn.sizes == drawn.svg
    assert drawn.png[:8] == b"\x89PNG\r\n\x1a\n"


KEPT = r"""
import os, sys
from pathlib import Path
import vl_convert
from quantmill.report import plot
made = plot.program()
(kept,) = Path(sys.argv[1], "quantmill").glob("vega-*.js")
assert "vega" in made and kept.read_text() == made
vl_convert.javascript_bundle = lambda **_: "again"
assert plot.program() == made
for damaged in (b"", b"\xff" + made.encode(), made.encode()[:1000]):
    kept.write_bytes(damaged)
    assert plot.program() == "again"
os.environ["XDG_CACHE_HOME"] = str(kept)  # where there can be no folder
assert plot.program() == "again"
"""


def test_vega_is_bundled_once_for_the_user_unless_it_is_damaged_or_cannot_be_kept(
    tmp_path: Path, call: Callable, tools_python: Path
) -> None:
    result = call(tools_python, "-c", KEPT, tmp_path, PYTHONPATH=str(REPO / "scripts"), XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
