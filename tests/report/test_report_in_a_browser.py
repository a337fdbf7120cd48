"""Reports in a real browser: charts are drawn, clicks and searches act, nothing is asked of a network."""

import time
from functools import cache
from itertools import pairwise

import pytest

from agilerl.report import build_report
from tests.report.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    """Reports by the names of their runs, as they are asked for."""
    folder = tmp_path_factory.mktemp("pages")
    return cache(lambda *names: build_report([runs[name] for name in names], folder / f"{'-'.join(names)}.html"))


@pytest.fixture
def opened(browser, pages):
    """Open the report of runs by name, unless the last test did and left it as it was.

    At the end the page must have asked for nothing and complained of nothing.
    """
    addresses = []

    def open_page(*names):
        addresses.append(pages(*names).as_uri())
        if browser.run("location.href") != addresses[-1]:
            browser.requests.clear()
            browser.complaints.clear()
            browser.open(pages(*names))
        return browser

    yield open_page
    assert browser.complaints == []
    assert browser.requests == addresses


DIALOG = "document.getElementById('agent')"


@pytest.mark.parametrize("names", [("hostile",), ("whole", "other")])
def test_every_chart_is_drawn(opened, names):
    page = opened(*names)
    empty = "[...document.querySelectorAll('.chart')].filter(c => !c.querySelector('.trace, .point')).map(c => c.id)"
    assert page.run(empty) == []
    assert page.run("document.querySelectorAll('.chart').length") > 15
    assert page.run("window.hacked") is None
    assert page.run("document.images.length") == 0


def fits(page, width):
    assert page.run("innerWidth") == width  # a phone zooms out if something is wider
    assert page.run("document.documentElement.scrollWidth") <= width
    # What is wider stands in a box that scrolls.
    wide = (
        "[...document.querySelectorAll('.chart')].filter(c => !c.closest('.scroll') &&"
        " c.querySelector('.main-svg').getBoundingClientRect().right > innerWidth).map(c => c.id)"
    )
    assert page.run(wide) == []


def test_no_chart_is_wider_than_the_screen(opened):
    fits(opened("whole", "other"), 1200)


def test_no_chart_is_wider_than_the_screen_of_a_phone(pages, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        browser.resize(400, 900)
        browser.open(pages("whole", "other"))
        fits(browser, 400)
    finally:
        browser.close()


def test_a_click_on_a_circle_of_the_tree_tells_about_its_agent(opened):
    page = opened("whole")
    page.run("document.getElementById('tree-0').scrollIntoView()")
    # The first trace with points is that of the circles, the first circle the first agent's.
    x, y = page.run(
        "(() => { const r = document.querySelector('#tree-0 path.point').getBoundingClientRect();"
        " return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    page.click(x, y)
    end = time.monotonic() + 20
    while not page.run(f"{DIALOG}.open") and time.monotonic() < end:
        time.sleep(0.05)
    assert page.run(f"{DIALOG}.querySelector('h3').textContent") == "Agent 0"
    page.run(f"{DIALOG}.close()")


def search(page, text):
    page.run(
        f"(() => {{ const box = document.querySelector('input[type=search]'); box.value = {text!r};"
        " box.dispatchEvent(new Event('input')) })()"
    )


def test_completions_are_searched_in_all_steps(opened):
    page = opened("whole")
    steps = "[...document.querySelectorAll('.group > .soft:first-child')].map(e => e.textContent.split(',')[0])"
    assert set(page.run(steps)) == {"iteration 50"}
    search(page, "SPELL this")
    assert "iteration 1" in page.run(steps)
    marks = "[...document.querySelectorAll('mark')].map(e => e.textContent)"
    assert set(page.run(marks)) == {"Spell this"}
    search(page, "no such text")
    assert page.run("document.querySelector('.browser').innerText.includes('No group matches')")
    search(page, "")
    assert page.run(marks) == []


def test_the_winning_lineage_alone(opened):
    page = opened("whole")
    lines = "document.querySelectorAll('#fitness-0 .scatterlayer .trace').length"
    before = page.run(lines)
    page.run("document.querySelector('button[data-show=winning]').click()")
    assert 0 < page.run(lines) < before
    page.run("document.querySelector('button[data-show=all]').click()")
    assert page.run(lines) == before


def test_charts_over_tokens_and_hours_and_smoothed(opened):
    page = opened("whole")
    chart = "document.getElementById('curve0-0')"
    last = f"{chart}.data.at(-1)"
    steps, values = page.run(f"{last}.x"), page.run(f"{last}.y")
    page.run("document.querySelector('button[data-axis=tokens]').click()")
    clock = page.run("JSON.parse(document.getElementById('clock-0').textContent)")
    assert page.run(f"{last}.x") == [clock["tokens"][str(step)] for step in steps]
    assert page.run(f"{chart}.layout.xaxis.title.text") == "tokens that all agents trained on"
    assert max(page.run("document.getElementById('fitness-0').data.at(-1).x")) > max(steps)
    assert page.run("document.getElementById('hyper0-0').layout.xaxis.title.text") == "generation"
    page.run("document.querySelector('button[data-axis=iteration]').click()")
    assert page.run(f"{last}.x") == steps
    smooth = (
        "(() => {{ const box = document.getElementById('smoothing'); box.value = {};"
        " box.dispatchEvent(new Event('input')) }})()"
    )
    page.run(smooth.format(0.5))
    smoothed = page.run(f"{last}.y")
    assert smoothed[0] == pytest.approx(values[0])  # without bias from the start
    assert smoothed[1] == pytest.approx((0.25 * values[0] + 0.5 * values[1]) / 0.75)
    page.run(smooth.format(0))
    assert page.run(f"{last}.y") == values


def test_labels_of_logarithmic_axes_do_not_overlap(opened):
    page = opened("whole")
    boxes = page.run(
        "[...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.xtick text')]"
        ".filter(t => !/rotate\\((?!0)/.test(t.getAttribute('transform')))"
        ".map(t => t.getBoundingClientRect()).map(r => [r.left, r.right]))"
    )
    assert boxes
    for labels in boxes:
        assert all(right <= left for (_, right), (left, _) in pairwise(sorted(labels)))


def test_from_an_agent_to_its_parent_and_to_its_completions(opened):
    page = opened("whole")
    child, parent = page.run(
        "(() => { const found = JSON.parse(document.getElementById('agents-0').textContent)"
        ".find(a => a.parents.length && a.exams.length); return [found.agent, found.parents[0]] })()"
    )
    page.run(f"document.querySelector('button[data-agent=\"{child}\"]').click()")
    assert page.run(f"{DIALOG}.querySelector('h3').textContent").startswith(f"Agent {child}")
    assert f"born of {parent}" in page.run(f"{DIALOG}.innerText")
    page.run(f"{DIALOG}.querySelector('p button').click()")
    assert page.run(f"{DIALOG}.querySelector('h3').textContent").startswith(f"Agent {parent}")
    page.run(f"[...{DIALOG}.querySelectorAll('button')].at(-1).click()")
    assert page.run(f"{DIALOG}.open") is False
    shown = page.run("[...document.querySelectorAll('.group > .soft:first-child')].map(e => e.textContent)")
    assert shown
    assert all(f"agent {parent}, " in line for line in shown)
    page.visit("about:blank", charts=False)  # the filter stays


def test_a_live_page_loads_itself_anew_unless_somebody_reads(browser, runs, tmp_path):
    browser.open(build_report([runs["unfinished"]], tmp_path / "live.html", reload=1), charts=False)
    browser.run("window.before = true; document.querySelector('button[data-agent]').click()")
    time.sleep(1.5)
    assert browser.run("window.before") is True
    with browser.loading():
        browser.run(f"{DIALOG}.close()")
    assert browser.run("window.before") is None
