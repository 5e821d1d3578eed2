# SPDX-License-Identifier: Apache-2.0
"""Forecast bands by GPU: the range of published times, as multiples of their forecasts.

A band covers the published steps and attention calls of one GPU generation. It excludes at most one
tenth of the ratios (published time / forecast). If all ratios are above 1, the band begins at 1 and
excludes the largest ratios. Otherwise it excludes equally many of the largest and of the smallest
ratios. The ends of a band are rounded outwards to a hundredth.

PUBLISHED has the bands of forecasts from published rates. A100 and A800: LoongTrain's tables 2 and
4 (58 steps, without four duplicates, and 88 calls), BurstEngine's tables 2 and 5 (10 steps) and its
attention benchmark (14 calls), EasyContext's README (5 steps). H100: runs with context parallelism
of NVIDIA's NeMo (6), of torchtitan (6, at the rate of FlashAttention 2, the only kernel that these
runs can use) and of TRL (1). B200: runs of NVIDIA's NeMo (6). The runs of NVIDIA and torchtitan
have linear layers in FP8, which forecasts do not include, so steps in bf16 deviate more if these
layers need much of the time. Torchtitan's H100 GPUs also have slower memory and a limit of 500 W.

MEASURED is the band of forecasts from rates fitted to the same clusters (LoongTrain's tables 2 and
4, BurstEngine's tables 2 and 5). No run with rates of `megatron-burst calibrate` is published.

`benchmarks/advise/band_cells.py` computes all ratios, and a test compares the bands with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForecastBand:
    """The range of published time / forecast that contains 90 % of the published times.

    Attributes:
        low: Lower end, as a multiple of the forecast.
        high: Upper end, as a multiple of the forecast.
        cells: Number of published times.
        gpus: Text for messages that names the GPUs of the published times.
        provided: Text for messages with the condition under which the band applies; empty if it
            always applies.
    """

    low: float
    high: float
    cells: int
    gpus: str
    provided: str = ""

    def around(self, seconds: float) -> tuple[float, float]:
        """Return the two ends of the band in seconds, for a forecast of `seconds`."""
        return self.low * seconds, self.high * seconds

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


AMPERE = ForecastBand(0.97, 1.18, 175, "A100 and A800")
HOPPER = ForecastBand(1.0, 1.67, 13, "H100", " if `advise --kernel` names the kernel that runs")
BLACKWELL = ForecastBand(1.0, 1.32, 6, "B200")
MEASURED = ForecastBand(0.97, 1.04, 146, "A100 and A800")

# By name in `gpus.GPUS`. GPUs without published times have the band of their generation.
PUBLISHED = {
    "a100-40g": AMPERE, "a100": AMPERE, "a800": AMPERE,
    "h100": HOPPER, "h800": HOPPER, "h200": HOPPER,
    "b200": BLACKWELL, "gb200": BLACKWELL,
}  # fmt: skip
_ALL = (AMPERE, HOPPER, BLACKWELL)
# For GPUs of other generations.
WIDEST = ForecastBand(
    min(band.low for band in _ALL),
    max(band.high for band in _ALL),
    sum(band.cells for band in _ALL),
    "A100 to B200",
)


def band_of(gpu: str, measured: bool) -> ForecastBand:
    """Return the band of forecasts for a GPU.

    Args:
        gpu: Name of the GPU.
        measured: True if the forecast uses measured rates; False for published rates.
    """
    return MEASURED if measured else PUBLISHED.get(gpu, WIDEST)
