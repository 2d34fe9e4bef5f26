"""Numbers, durations and other values as text."""

import time

import pytest

from m1clip.format import ago, did_you_mean, duration, file_size, milliseconds, number, percent, printable


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1234.5, 3, "1,234"),
        (0.01234, 3, "0.0123"),
        (5.0, 3, "5.00"),
        (99.97, 3, "100"),
        (1e-9, 3, "1e-09"),
        (0.0, 3, "0"),
        (-0.5, 2, "-0.50"),
        (float("nan"), 3, "–"),
        (None, 3, "–"),
    ],
)
def test_a_number_has_significant_digits_and_thousands_separators(value, digits, text):
    assert number(value, digits) == text


def test_a_unit_follows_the_number():
    assert number(480.3, unit="ms") == "480 ms"
    assert number(None, unit="ms") == "–"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.7, "1 min 00 s"), (119.7, "2 min 00 s"), (3599.9, "1 h 00 min"), (5e5, "5.8 days"), (None, "–")],
)
def test_a_duration_is_rounded_before_it_is_divided(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (1.0, "100.0 %"),
        (0.99966, "99.96 %"),
        (0.999999, "99.99 %"),
        (0.5, "50.0 %"),
        (0.0002, "0.02 %"),
        (0.0, "0.0 %"),
        (None, "–"),
    ],
)
def test_a_fraction_below_one_is_never_rounded_to_100_percent(fraction, text):
    assert percent(fraction) == text


@pytest.mark.parametrize(("ms", "text"), [(0.123, "0.123 ms"), (480.4, "480 ms"), (12_345, "12.35 s"), (7.2e6, "2 h")])
def test_milliseconds_become_seconds_and_hours(ms, text):
    assert milliseconds(ms) == text


def test_an_age_has_one_unit():
    now = time.time()
    assert [ago(now - age) for age in (3, 150, 7300, 2e5)] == ["3 s ago", "2 min ago", "2 h ago", "2 d ago"]
    assert ago(None) == "–"


def test_a_size_is_in_megabytes_or_gigabytes():
    assert [file_size(size) for size in (3_180_544, 1.5e9)] == ["3.2 MB", "1.50 GB"]


def test_control_characters_are_not_printed():
    assert printable("a\x1b[2Jb\tc\n→") == "a?[2Jb?c\n→"


def test_a_misspelled_name_gets_a_suggestion():
    assert did_you_mean("nanoo", ["nano", "tiny"]) == "did you mean nano?"
    assert did_you_mean("xyz", ["nano", "tiny"]) == "choose from nano, tiny"
