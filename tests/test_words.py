"""Numbers as people say them."""

import pytest

from m1clip.format import duration, percent


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.7, "1 min 00 s"),
        (119.7, "2 min 00 s"),
        (3599.9, "1 h 00 min"),
        (5e5, "5.8 days"),
        (None, "–"),
    ],
)
def test_a_clock_has_no_sixtieth_second(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (1.0, "100.0 %"),
        (0.99966, "99.96 %"),
        (0.999999, "99.99 %"),
        (0.5, "50.0 %"),
        (0.0002, "0.02 %"),
        (None, "–"),
    ],
)
def test_nearly_all_is_not_all(part, words):
    assert percent(part) == words
