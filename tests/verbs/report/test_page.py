"""The report's page as a file: what it may load, how large it is, and what it says of itself."""

import base64
import gzip
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from support.report_data import HOSTILE, report, run

from lathe.errors import UserError
from lathe.verbs.report.page import page, write_page


def test_the_policy_runs_two_scripts_by_their_hash_and_loads_nothing() -> None:
    text = page(report(1))
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', text)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy
    assert "unsafe" not in policy.partition("style-src")[0]
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    (plotly,) = re.findall(r'id="plotly">(.*?)</script>', text)
    for content in (script.encode(), gzip.decompress(base64.b64decode(plotly))):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'" in policy
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nothing loads


def test_names_of_strangers_are_no_html_and_no_marks_of_the_template() -> None:
    text = page(report(1, title=f"{HOSTILE} __PLOTLY__", runs=[run(0, name=HOSTILE)]))
    assert text.count("<script") == page(report(1)).count("<script")
    assert "<img" not in text
    assert "&lt;/script&gt;" in text
    assert "&amp;amp; __PLOTLY__" in text


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page(report(2), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(report(2))
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match=r"^the report's page: plotly can't be imported: pip install -e '.\[report\]'"):
        write_page(report(1), tmp_path / "other.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_more_curves_than_fit_are_thinned_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = report(40)
    whole = page(data)
    monkeypatch.setattr("lathe.verbs.report.page.LIMIT", len(whole) - 1000)
    small = page(data)
    assert len(small) <= len(whole) - 1000
    (packed,) = re.findall(r'id="data">(.*?)</script>', small)
    told = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert told["thinned"] == "So that it stays small, curves have at most 100 points and 200 levels."
