# SPDX-License-Identifier: Apache-2.0
"""How much longer published steps took than their forecast, by GPU: the range that advice states.

A band comes from published steps and attention calls of one generation of GPUs, each divided by its
forecast. It leaves out at most one in ten: the longest ones where all forecasts are too short, and
then begins at the forecast; otherwise as many of the longest as of the shortest. Its ends are
rounded outwards to a hundredth.

PUBLISHED is at published rates. A100 and A800: LoongTrain's tables 2 and 4 (58 steps, without the
four that repeat others, and 88 calls), BurstEngine's tables 2 and 5 (10 steps) and its attention
benchmark (14 calls), EasyContext's README (5 steps). H100: runs with context parallelism of
NVIDIA's NeMo (6), of torchtitan (6, at the rate of FlashAttention 2, which they are confined to)
and of TRL (1). B200: those of NVIDIA's NeMo (6). NVIDIA's and torchtitan's runs have their linear
layers in FP8, which no forecast counts, so steps in bf16 are off by more where these take much of
the time; and torchtitan's H100 have slower memory and a limit of 500 W. MEASURED is with rates
fitted to the same clusters (LoongTrain's tables 2 and 4, BurstEngine's tables 2 and 5): no run with
rates of `megatron-burst calibrate` was published.

`benchmarks/advise/band_cells.py` computes all ratios; a test holds the bands to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForecastBand:
    """Multiples of the forecast between which nine in ten steps were.

    low, high: the multiples. cells: how many published ones; gpus: on which GPUs, for messages;
    provided: what the forecasts were told, for messages.
    """

    low: float
    high: float
    cells: int
    gpus: str
    provided: str = ""

    def around(self, seconds: float) -> tuple[float, float]:
        """The shortest and the longest time that a forecast of these seconds stands for."""
        return self.low * seconds, self.high * seconds

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


AMPERE = ForecastBand(0.97, 1.18, 175, "A100 and A800")
HOPPER = ForecastBand(1.0, 1.67, 13, "H100", " at the rate of their kernel (`advise --kernel`)")
BLACKWELL = ForecastBand(1.0, 1.32, 6, "B200")
MEASURED = ForecastBand(0.97, 1.04, 146, "A100 and A800")

# By name in `gpus.GPUS`. Those that no table is of take the band of their generation.
PUBLISHED = {
    "a100-40g": AMPERE, "a100": AMPERE, "a800": AMPERE,
    "h100": HOPPER, "h800": HOPPER, "h200": HOPPER,
    "b200": BLACKWELL, "gb200": BLACKWELL,
}  # fmt: skip
_ALL = (AMPERE, HOPPER, BLACKWELL)
# For GPUs that nobody compared.
WIDEST = ForecastBand(
    min(each.low for each in _ALL),
    max(each.high for each in _ALL),
    sum(each.cells for each in _ALL),
    "A100 to B200",
)


def band_of(gpu: str, measured: bool) -> ForecastBand:
    """The band of a GPU's forecasts. gpu: its name; measured: whether the rates were."""
    return MEASURED if measured else PUBLISHED.get(gpu, WIDEST)
