"""The page of a comparison in a real browser, and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from klimb.comparison.page import build_data, build_page, joint_rows
from klimb.comparison.picture import draw
from klimb.comparison.side_by_side import Comparison
from klimb.comparison.table import KL, ArmRows, table
from klimb.comparison.verdict import verdict
from tests.browser import Open, until
from tests.report.folders import rows_of

ATTACK = "</script><img src=x onerror=window.hit=1>"


def comparison(folder: Path, seeds: int = 2, label: str = "use_pf_ppo=false") -> Comparison:
    arms = [
        ArmRows(label="use_pf_ppo=true", runs={s: rows_of(40, seed=s) for s in range(seeds)}, target=0.02),
        ArmRows(label=label, runs={s: rows_of(40, seed=10 + s) for s in range(seeds)}, target=None),
    ]
    return Comparison(
        folder=folder,
        title="two postures",
        arms=arms,
        varied=["algorithm.use_pf_ppo"],
        implied=[f"algorithm.lam: 0.95 (use_pf_ppo=true), 0.9 ({label})"],
        every=20,
        rows=table(arms, 20),
        sentences=verdict(arms),
        notes=["something was left out"],
        finished=True,
    )


def url_of(done: Comparison) -> str:
    path = done.folder / "compare.html"
    path.write_text(build_page(done), encoding="utf-8")
    return path.as_uri()


def test_it_shows_table_sentences_and_a_curve_for_every_arm(tmp_path: Path, open_page: Open) -> None:
    done = comparison(tmp_path)
    page = open_page(url_of(done))
    assert page.locator("#table tbody tr").count() == 3
    assert page.locator("#table th").all_inner_texts()[1:3] == ["KL, use_pf_ppo=true", "KL, use_pf_ppo=false"]
    assert page.locator("#sentences li").all_inner_texts() == list(done.sentences)
    assert not page.locator("#samples").is_visible()
    first = page.locator(".plot").first
    assert first.locator(".js-line").count() >= 2 * 3  # a mean and two seeds for each arm
    assert "algorithm.lam: 0.95 (use_pf_ppo=true), 0.9 (use_pf_ppo=false)" in page.locator("#config").text_content()


@pytest.mark.slow
def test_a_phone_in_the_dark_needs_no_sideways_scrolling(tmp_path: Path, open_page: Open) -> None:
    size = {"width": 390, "height": 844}
    page = open_page(url_of(comparison(tmp_path)), wait="", viewport=size, color_scheme="dark")
    assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
    until(page, "[...document.querySelectorAll('.plot')].every((p) => p.dataset.drawn)")


@pytest.mark.slow
def test_labels_are_text(tmp_path: Path, open_page: Open) -> None:
    page = open_page(url_of(comparison(tmp_path, label=ATTACK)))
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None
    assert ATTACK in page.locator("#table").inner_text()


def test_one_seed_has_no_lines_of_seeds(tmp_path: Path) -> None:
    kl = build_data(comparison(tmp_path, seeds=1))["charts"][0]
    names = [trace["name"] for trace in kl["figure"]["data"] if "name" in trace]
    assert not any("seed" in name for name in names)


def test_joint_rows_hold_the_mean_over_seeds(tmp_path: Path) -> None:
    done = comparison(tmp_path)
    rows = joint_rows(done.arms)
    runs = done.arms[1].runs
    assert rows[7]["step"] == 8
    assert rows[7][f"{KL}|1"] == pytest.approx((runs[0][8][KL] + runs[1][8][KL]) / 2)  # row 0 is no step
    assert rows[7]["kl/target"] == 0.02


def test_arms_with_targets_of_their_own_have_no_common_band(tmp_path: Path) -> None:
    arms = [ArmRows(label=str(t), runs={0: rows_of(40)}, target=t) for t in (0.01, 0.05)]
    assert "kl/target" not in joint_rows(arms)[0]


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(comparison(tmp_path, label=r"$\frac$ $x^$"), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
