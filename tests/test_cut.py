"""Consecutive parts under two limits."""

from hypothesis import given
from hypothesis import strategies as st

from klimb.cut import cut

limits = st.none() | st.integers(1, 40)


@given(st.lists(st.integers(1, 50)), limits, limits)
def test_parts_hold_all_rows_and_keep_both_limits(lengths: list[int], tokens: int | None, rows: int | None) -> None:
    sizes, start = cut(lengths, tokens, rows), 0
    assert sum(sizes) == len(lengths)
    for size in sizes:
        part = lengths[start : start + size]
        start += size
        assert rows is None or size <= rows
        assert tokens is None or sum(part) <= tokens or size == 1
        full = rows is not None and size == rows
        more = tokens is not None and start < len(lengths) and sum(part) + lengths[start] > tokens
        assert full or more or start == len(lengths), "no part ends without a reason"


def test_nothing_is_cut_into_nothing() -> None:
    assert cut([], 10, 2) == []
