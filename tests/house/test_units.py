"""How numbers with units are written, against the same by hand."""

import math

import pytest

from megatron_burst import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1 MiB"),
        (1.312 * 2**20, "1.312 MiB"),
        (80 * 2**30, "80 GiB"),
        (3 * 2**40, "3 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes(count, text):
    assert units.byte_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1e-7, "0.1 us"),
        (1e-4, "100 us"),
        (0.0415, "41.5 ms"),
        (1, "1 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min"),
        (60, "1 min"),
        (99, "1 min 39 s"),
        (117.4, "1 min 57 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (3630, "1 h"),  # half of a minute goes to the even one
        (3631, "1 h 1 min"),
        (7200, "2 h"),
        (18300, "5 h 5 min"),
        (3_600_000 + 60, "1,000 h 1 min"),
        (math.inf, "inf s"),
    ],
)
def test_durations(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (500, "500 B/s"),
        (1e3, "1 kB/s"),
        (12.5e6, "12.5 MB/s"),
        (25e9, "25 GB/s"),
        (9e14, "900 TB/s"),
    ],
)
def test_rates(value, text):
    assert units.rate(value, "B/s") == text
    assert units.rate(math.inf, "B/s") == "inf B/s"
