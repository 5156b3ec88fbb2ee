"""Text that is cut into pieces of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stickymoe.runtime.streaming import StopStrings

STRINGS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), strings=STRINGS)
def test_a_text_ends_before_the_string_that_is_complete_first(pieces, strings):
    text = "".join(pieces)
    ends = [(end, end - len(s)) for s in strings for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    expected = text[: min(ends)[1]] if ends else text

    stop, shown = StopStrings(strings), ""
    for piece in pieces:
        shown += stop.push(piece)
        assert expected.startswith(shown)
    shown += stop.end()
    assert stop.found == bool(ends)
    assert shown == expected
