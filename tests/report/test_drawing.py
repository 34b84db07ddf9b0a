"""Texts in place of plots that cannot be drawn."""

import resource
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import REPO

from quantmill.report import drawing


def test_a_limit_of_addresses_leaves_texts_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 * 10**9, -1) if kind == resource.RLIMIT_AS else None)
    drawn = drawing.draw([])
    assert drawn.refused == (
        "drawing reserves about 68 GB of addresses, and a limit (ulimit -v) allows 8 GB; make the page again without "
        "the limit"
    )
    assert drawn.plots == drawn.details == {}
    assert drawn.vega == ""
    told = " ".join(ElementTree.fromstring(drawn.svg).itertext())
    assert "The plot could not be drawn." in told
    assert "allows 8 GB" in told
    assert "no <b>glass</b>" in "".join(ElementTree.fromstring(drawing.placeholder("no <b>glass</b>")).itertext())
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


def test_vega_is_bundled_once_unless_damaged(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    result = call(tools_python, "-c", KEPT, tmp_path, PYTHONPATH=str(REPO / "scripts"), XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
