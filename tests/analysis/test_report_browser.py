"""The report in a real browser: it opens from disk, shows the measurements, obeys the mouse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from analysis.head_files import read_patterns
from analysis.report import write_report
from tests.analysis.browser import CHROMIUM, Browser
from tests.analysis.synthetic_run import Synthetic, write_run

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")

HOSTILE = ["<script>alert(1)</script>", "<b>bold</b>", "\"'&amp;", "%{x}", "</script>", "$x$"]
CHARTS = ["history", "heads", "sinks", "logits", "null", "detectors", "values", "patterns"]
MADE = Synthetic(
    tokens=[*HOSTILE, *"ROMEO:\nWhat light"],
    notes='"<script>window.hurt = 1</script>',
    null_mass=True,  # takes a column of its own
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A report with hostile text, open in a browser."""
    run = write_run(tmp_path_factory.mktemp("run") / "2026-01-31_12-00-00-synthetic", MADE)
    path = write_report(run)
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(path)
        for chart in CHARTS:
            browser.wait_for(f"document.querySelector('#chart-{chart} .main-svg')")
        yield browser


def plotted(page: Browser, chart: str) -> list[Any]:
    """The values of every trace of a map, as it stands now."""
    graph = f"document.getElementById('chart-{chart}')"
    return list(json.loads(page.run(f"JSON.stringify({graph}.data.map(trace => trace.z))")))


def wait_for_change(page: Browser, chart: str, before: list[Any]) -> list[Any]:
    """The values of a map once they are others: charts follow their controls with a delay."""
    graph = f"document.getElementById('chart-{chart}')"
    old = json.dumps(json.dumps(before, separators=(",", ":")))
    page.wait_for(f"JSON.stringify({graph}.data.map(trace => trace.z)) != {old}")
    return plotted(page, chart)


def hover(page: Browser, chart: str, x: float, y: float, plot: str = ".xy") -> str:
    """The text beside the mouse at a point of a chart, in shares of a plot's width and height."""
    page.mouse("mouseMoved", 1, 1)
    layer = f"document.querySelector('#chart-{chart} .hoverlayer')"
    page.wait_for(f"!{layer}.textContent")
    left, top, width, height = page.place_of(f"#chart-{chart} {plot} .nsewdrag")
    page.mouse("mouseMoved", left + x * width - 2, top + y * height)
    page.mouse("mouseMoved", left + x * width, top + y * height)
    return str(page.wait_for(f"{layer}.textContent"))


def test_the_page_opens_without_a_network_and_without_complaints(page):
    assert page.requests() == []
    assert page.complaints() == []
    # Plotly's default buttons include one that sends the chart to a server.
    titles = page.run("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert set(titles) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_text_of_the_run_is_shown_letter_by_letter_and_never_run(page):
    assert page.run("window.hurt") is None
    assert page.run("[...document.scripts].filter(s => s.text.includes('hurt')).length") == 0
    assert '"<script>window.hurt' in page.run("document.querySelector('pre').textContent")
    labels = page.run(
        "[...document.querySelectorAll('#chart-patterns .ytick')].map(t => t.textContent)"
    )
    assert labels[:6] == ["<script>alert…", *HOSTILE[1:]]


@pytest.mark.parametrize("width", [1200, 700])
def test_charts_fit_the_page(page, width):
    page.resize(width, 900)
    page.wait_for(f"document.querySelector('#chart-heads .main-svg').clientWidth < {width}")
    assert page.run("document.documentElement.scrollWidth") <= width


def test_the_slider_moves_every_map_to_its_step(page):
    last = plotted(page, "heads")
    left, top, width, height = page.place_of("#chart-heads .slider-rail-touch-rect")
    page.click(left + 3, top + height / 2)
    first = wait_for_change(page, "heads", last)
    assert first[0] == first[1] == [[None] * 4] * 4  # training is measured from step 1 on
    assert np.abs(np.subtract(first[2], last[2])).max() > 0.3
    shown = "[...document.querySelectorAll('#chart-heads .annotation')].map(a => a.textContent)"
    titles = page.run(shown)
    assert titles[0] == "entropy_normtraining, not measured yet"
    assert titles[2] == "alpha_0probe, step 0"
    page.click(left + width - 3, top + height / 2)
    assert wait_for_change(page, "heads", first) == last
    assert page.run(shown)[0] == "entropy_normtraining, step 1,000"


def test_hovering_a_map_names_the_head_its_value_and_the_baseline(page):
    value = plotted(page, "heads")[1][1][2]
    text = hover(page, "heads", 0.62, 0.4, plot=".x2y2")
    assert text == f"layer 1, head 2sink_mass_1 {value:.3f}uniform head 0.035"


def test_hovering_a_pattern_names_query_key_and_weight(page):
    (z,), size = plotted(page, "patterns"), len(MADE.tokens)
    row, column = 9, 2
    text = hover(page, "patterns", (column + 0.5) / (size + 1), (row + 0.5) / size)
    assert text == f"query: E (9)key: <b>bold</b> (1)weight {z[row][column]:.3f}"


def test_the_list_shows_another_head(page):
    before = plotted(page, "patterns")
    page.click_on("#chart-patterns .updatemenu-header")
    page.wait_for("document.querySelector('#chart-patterns .updatemenu-dropdown-button')")
    page.click_on("#chart-patterns .updatemenu-dropdown-button:nth-child(3)")
    (after,) = wait_for_change(page, "patterns", before)
    chosen = page.run("document.querySelector('#chart-patterns .updatemenu-header').textContent")
    layer, head = map(int, re.match(r"layer (\d+), head (\d+): ", chosen).groups())
    weights = read_patterns(page.path.parent).weights[layer, head]
    for row, shown in enumerate(after):
        np.testing.assert_allclose(shown[1:], weights[row, : row + 1], atol=5.1e-4)
