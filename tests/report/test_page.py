"""The page in a real browser, opened from disk."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from klimb.errors import MissingExtra
from klimb.report import page as page_module
from klimb.report.files import read_run
from klimb.report.page import build_page, plotly_source, to_json
from tests.browser import Open, until
from tests.report.folders import line, rows_of, sample, write_run

ATTACKS = (
    "<script>window.hit=1</script>",
    "</script><img src=x onerror=window.hit=1>",
    '"><svg onload=window.hit=1>',
    "{{ 7*7 }} <!-- <a href=javascript:window.hit=1>x</a>",
)


def page_of(folder: Path) -> str:
    """The URL of the written page."""
    path = folder / "report.html"
    path.write_text(build_page(read_run(folder)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def url(tmp_path: Path) -> str:
    samples = [sample(step, "eval", row) for step in (0, 10, 20) for row in (0, 1)]
    samples += [sample(i, row=i, reward=i / 120, correct=i > 60, num_tokens=i) for i in range(1, 121)]
    samples[2] |= {"response": "ones: 0+7\nanswer: wrong", "reward": "nan"}
    return page_of(write_run(tmp_path / "run", rows_of(20), samples))


def heads(page: Any) -> list[str]:
    page.wait_for_timeout(200)  # the search waits until somebody stops typing
    return page.locator(".head").all_inner_texts()


def overflows(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def drawn(page: Any) -> int:
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
    until(page, "[...document.querySelectorAll('.plot')].every((p) => p.dataset.drawn)")
    return page.locator(".plot .scatterlayer .js-line").count()


def test_it_opens_and_draws_every_curve(url: str, open_page: Open) -> None:
    page = open_page(url)
    assert page.title() == "tidy · klimb report"
    assert page.locator("#state").inner_text() == "finished"
    assert page.locator(".tile").count() == 6
    assert "37.5% → 77.5%" in page.locator("#tiles").inner_text()
    assert page.locator(".chart").count() == 11
    assert drawn(page) >= 25
    assert page.locator(".plot").first.get_attribute("aria-label").startswith("Reward over the steps. Last values: ")


@pytest.mark.slow
def test_values_stand_under_the_cursor_and_lines_can_be_hidden(url: str, open_page: Open) -> None:
    page = open_page(url)
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".hoverlayer .legendtext")
    assert "training reward" in plot.locator(".hoverlayer").text_content()
    button = page.get_by_role("button", name="training reward")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    until(page, "document.querySelector('.plot').querySelectorAll('.scatterlayer .js-line').length === 2")


@pytest.mark.slow
def test_zooming_one_panel_zooms_all(url: str, open_page: Open) -> None:
    page = open_page(url)
    ranges = "[...document.querySelectorAll('.js-plotly-plot')].map((p) => Math.round(p.layout.xaxis.range[1]))"
    box = page.locator(".plot").first.bounding_box()
    y, x = box["y"] + 150, box["x"] + 52
    page.mouse.move(x + 40, y)
    page.mouse.down()
    page.mouse.move(x + (box["width"] - 62) / 2, y, steps=5)
    page.mouse.up()
    until(page, f"{ranges}.slice(0, 2).every((end) => end === 10)")
    drawn(page)
    assert set(page.evaluate(ranges)) == {10}
    page.get_by_role("button", name="All steps").press("Enter")
    page.locator(".plot").last.scroll_into_view_if_needed()  # what is out of sight is drawn when it is seen
    until(page, f"{ranges}.slice(-2).every((end) => end === 20)")


@pytest.mark.slow
def test_samples_are_searched_filtered_sorted_and_paged(url: str, open_page: Open) -> None:
    page = open_page(url)
    assert len(heads(page)) == 50
    assert page.locator("#page").inner_text() == "page 1 of 3"
    page.get_by_role("button", name="Next").click()
    assert page.locator("#page").inner_text() == "page 2 of 3"
    page.get_by_label("Search").fill("ANSWER: wrong")
    assert [text.split("\n")[0] for text in heads(page)] == ["step 10"]
    assert page.locator(".head mark").inner_text() == "answer: wrong"
    assert page.locator("#found").inner_text() == "1 of 126 samples"
    page.get_by_label("Search").fill("")
    page.get_by_label("Kind").select_option("eval")
    assert len(heads(page)) == 6
    page.get_by_label("Kind").select_option("train")
    page.get_by_label("Verdict").select_option("wrong")
    page.get_by_label("Order").select_option("high")
    assert heads(page)[0].startswith("step 60\n")
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("Kind").select_option("")
    for order, first in (("low", "step 1\n"), ("long", "step 120\n"), ("oldest", "step 0\n"), ("short", "step 1\n")):
        page.get_by_label("Order").select_option(order)
        assert heads(page)[0].startswith(first)
    page.get_by_label("Search").fill("nowhere to be found")
    assert heads(page) == []
    assert "No sample fits" in page.locator("#list").inner_text()


@pytest.mark.slow
def test_a_prompt_over_time_with_its_changes(url: str, open_page: Open) -> None:
    page = open_page(url)
    page.get_by_label("Kind").select_option("eval")
    page.get_by_label("Order").select_option("oldest")
    page.locator(".head").first.click()
    assert "What is 100 + 7?" in page.locator(".detail pre").first.inner_text()
    assert "task" in page.locator(".parts").inner_text()
    page.get_by_role("button", name="This prompt over time (3 answers)").click()
    answers = page.locator("#answers li")
    assert [text.split("\n")[0] for text in answers.all_inner_texts()] == ["step 0", "step 10", "step 20"]
    assert (answers.nth(1).locator("ins").inner_text(), answers.nth(1).locator("del").inner_text()) == ("wrong", "107")
    assert "reward nan" in answers.nth(1).inner_text()


@pytest.mark.slow
def test_the_keyboard_reaches_everything(url: str, open_page: Open) -> None:
    page = open_page(url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the samples"
    page.keyboard.press("Enter")
    for _ in range(5):  # search, kind, verdict, order, the first sample
        page.keyboard.press("Tab")
    key = "document.activeElement.dataset.key"
    assert page.evaluate(key) == "120/train/120/0"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(key) == "119/train/119/0"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    for _ in range(4):  # prompt, response, reference answer, the button
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#history").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#history").is_hidden()
    assert page.evaluate("document.activeElement.textContent").startswith("This prompt over time")


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(tmp_path: Path, open_page: Open, width: int, scheme: str) -> None:
    long = "x" * 3000
    samples = [sample(i, prompt=long, response=long, parts={long[:80]: 1.0}) for i in range(3)]
    url = page_of(write_run(tmp_path / "run", rows_of(20), samples, name="a-name-without-any-space" * 4))
    page = open_page(url, viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=True)
    page.locator(".head").first.click()
    assert drawn(page) >= 25
    assert not overflows(page)
    page.locator(".detail button").click()
    assert not overflows(page)


@pytest.mark.slow
def test_dark_is_dark_and_the_curves_follow(url: str, open_page: Open) -> None:
    page = open_page(url, color_scheme="dark")
    stroke = "getComputedStyle(document.querySelector('.plot .js-line')).stroke"
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(stroke), page.evaluate(ground)
    assert dark[1] == "rgb(16, 20, 25)"
    page.emulate_media(color_scheme="light")
    until(page, f"{stroke} !== {json.dumps(dark[0])}")
    assert page.evaluate(stroke) == "rgb(31, 111, 180)"


def test_what_a_model_wrote_is_text_wherever_it_stands(tmp_path: Path, open_page: Open) -> None:
    bad = "".join(ATTACKS)
    samples = [
        sample(
            i, "eval", prompt=bad, response=bad + " \u2028 \ud800" + str(i), parts={bad: 1.0}, answer=bad, failure=bad
        )
        for i in (0, 1)
    ]
    folder = write_run(tmp_path / "run", rows_of(20), [], name=bad + "\ud800")
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (folder / "interventions.jsonl").write_text(line({"step": 5, "back_to": 3, "finding": bad, "overrides": [bad]}))
    (folder / "metrics.jsonl").write_text("".join(line(row | {f"time/{bad}": 1.0}) for row in rows_of(20)))
    page = open_page(page_of(folder))
    drawn(page)
    page.locator(".head").first.click()
    page.get_by_label("Search").fill("<script>")
    assert len(heads(page)) == 2
    for place in ("h1", ".head .words", ".parts", "#marks", ".detail pre"):
        for attack in ATTACKS[:2]:
            assert attack in page.locator(place).first.inner_text()
    page.locator(".detail button").click()
    assert bad in page.locator("#answers").inner_text()
    assert page.evaluate("document.querySelectorAll('img, [onload], [onerror]').length") == 0
    assert page.locator("script:not([type])").count() == 4
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None


def test_no_script_but_the_pages_own_can_run(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(url)
    page.evaluate(
        "window.seen = []; addEventListener('securitypolicyviolation', (e) => seen.push(e.effectiveDirective))"
    )
    make = "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)"
    page.evaluate(make)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=window.hit=1>')")
    until(page, "seen.length === 2")
    assert page.evaluate("seen") == ["script-src-elem", "script-src-attr"]
    assert page.evaluate("window.hit") is None
    page.close()


def test_to_json_cannot_end_its_element() -> None:
    text = to_json({"a": "</script><!--&\u2028\u2029", "b": float("nan"), "c": [float("-inf")]})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"a": "</script><!--&\u2028\u2029", "b": "nan", "c": ["-inf"]}


def test_the_page_names_nothing_to_fetch(url: str, tmp_path: Path) -> None:
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    own = html.unescape(text.replace(plotly_source(), ""))
    assert not re.search(r"(src|href)=[\"'](?!data:|#)", own)
    assert "url(" not in own
    assert "default-src 'none'" in own
    assert "connect-src" not in own


@pytest.mark.slow
@pytest.mark.parametrize("empty", [True, False])
def test_a_run_without_curves_says_so(tmp_path: Path, open_page: Open, empty: bool) -> None:
    folder = write_run(tmp_path / "run", [] if empty else [{"step": 0, "episodes": 0}], episodes=640)
    page = open_page(page_of(folder), wait=".nothing")
    state = "no step finished yet" if empty else "stopped before its end"
    assert page.locator("#state").inner_text() == state
    assert "nothing to draw" in page.locator("#charts").inner_text()
    assert "No samples in this run yet." in page.locator("#list").inner_text()


@pytest.mark.slow
def test_a_run_that_died_shows_what_there_is(tmp_path: Path, open_page: Open) -> None:
    folder = write_run(tmp_path / "run", rows_of(20), [sample(1)], episodes=6400)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')
    page = open_page(page_of(folder))
    assert page.locator("#state").inner_text() == "stopped before its end"
    assert "the last line is cut off" in page.locator("#notes").inner_text()
    assert page.locator(".head").count() == 1


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'klimb\[report\]'"):
        plotly_source()


def test_a_plotly_of_another_make_is_left_as_it_is() -> None:
    assert page_module._unwrapped("/* notice */ other") == "/* notice */ other"
    assert "MIT license" in plotly_source()[:300]


@pytest.mark.slow
def test_a_long_run_loads_quickly(tmp_path: Path, open_page: Open) -> None:
    """20,000 steps and 5,000 samples. Counted is the time in which the page's thread works: other work on the machine
    stretches the clock, not that."""
    answers = [f"{'word ' * 120}{i}" for i in range(5000)]
    samples = [sample(4 * i, row=i, reward=i / 5000, response=answer) for i, answer in enumerate(answers)]
    url = page_of(write_run(tmp_path / "run", rows_of(20_000, every=200), samples))
    assert os.path.getsize(tmp_path / "run" / "report.html") < 25e6
    page = open_page("about:blank", wait="")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(url)
    page.wait_for_selector(".plot[data-drawn=yes]")
    metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    assert metrics["ThreadTime"] < 3
    assert page.locator("#found").inner_text() == "5,000 samples"
    assert page.locator(".plot .js-line").count() >= 3
