from __future__ import annotations

from typing import Any

from klimb.doctor.finding import Facts
from klimb.watch import Watch, sentence
from tests.doctor.tables import ramp

FACTS = Facts(target_kl=0.02, lr=1e-4)


def rows(kl: list[float]) -> list[dict[str, Any]]:
    return [{"step": i + 1, "kl/k3": value} for i, value in enumerate(kl)]


def test_a_finding_is_news_once_and_again_when_it_gets_worse() -> None:
    watch = Watch(FACTS)
    news: list[tuple[int, str]] = []
    for row in rows([*ramp(0.02, 0.1, 10, 20), *[0.5] * 10]):
        news += [(row["step"], f.severity) for f in watch.news(watch.see(row))]
    assert [severity for _, severity in news] == ["warning", "alarm"]
    assert 10 < news[0][0] < 20 < news[1][0] <= 24


def test_an_alarm_that_has_passed_is_not_current() -> None:
    watch = Watch(FACTS)
    current = [bool(watch.current_alarms(watch.see(row))) for row in rows([0.02] * 10 + [1.0] * 6 + [0.02] * 14)]
    assert not any(current[:10])
    assert any(current[10:16])
    assert not any(current[19:])


def test_it_remembers_a_log_as_if_it_had_seen_it() -> None:
    table = rows([*ramp(0.02, 1.0, 10, 20)])
    one, other = Watch(FACTS), Watch(FACTS)
    for row in table:
        seen = one.see(row)
    other.see({"step": 1, "kl/k3": 99.0})
    other.remember([*table[:-1][:5], *table[5:-1]], FACTS)
    assert other.see(table[-1]) == seen


def test_names_of_numbers_that_are_none_are_read() -> None:
    watch = Watch(FACTS)
    watch.remember([{"step": 1, "kl/k3": "nan", "note": "text"}], FACTS)
    (finding,) = watch.see({"step": 2, "kl/k3": 0.0})
    assert finding.code == "nonfinite"
    assert sentence(finding) == (
        "ALARM nonfinite: kl/k3 was nan at 1 step, first at step 1. First to try: training.lr=2.5e-05"
    )
