"""Attention calls and runs on Hopper at the published rate of each kernel.

`ring-flash-attention` calls FlashAttention 2. Its settings were read first, then forecasts at the
rate of `--gpu h800` were made, then its results were read (zigzag ring: 32.6 calls per second
predicted, 17.4 published). The rates by kernel are from other publications.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.advise.band_cells import RING
from benchmarks.advise.fitting import errors
from benchmarks.advise.published_tables import table
from benchmarks.advise.section import Figure, Section
from megatron_burst.autotune.clusters import GPUS, Cluster
from megatron_burst.autotune.gpus import KERNELS, Gpu, with_kernel
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model

RANKS, ROWS = 8, 8192  # GPUs of a node, rows of each
MODEL = Model("attention of Llama-3.1-8B", 1, 4096, 32, 8, 14336, 128256)
LAYOUTS = {"ring": "contiguous", "zigzag": "zigzag", "striped": "striped"}
APART = "striped"  # in the table, but not in the figures


class RingCall(NamedTuple):
    """Calls per second of a ring.

    Attributes:
        fastest: Forecast at the rate of the fastest kernel.
    """

    gpu: str
    label: str
    published: float
    predicted: float
    fastest: float

    @property
    def error(self) -> float:
        """Return predicted time / published time, minus one."""
        return self.published / self.predicted - 1


def ring_calls() -> Iterator[RingCall]:
    """Yield all batch rows of the README."""
    for row in table("ring_flash_attention"):
        fastest = GPUS[row["gpu"]]
        own = with_kernel(fastest, "aten") if fastest.name in KERNELS else fastest
        for way in LAYOUTS:
            label = f"{fastest.name}, {way}, {row['pass'].replace('_', ' + ')}"
            speeds = (_per_second(gpu, way, row["pass"] == "fwd") for gpu in (own, fastest))
            yield RingCall(fastest.name, label, float(row[way]), *speeds)


def _per_second(gpu: Gpu, way: str, forward: bool) -> float:
    run = Settings(RANKS * ROWS, cp=RANKS, layout=LAYOUTS[way], **RING)
    time = attention_time(MODEL, Cluster(gpu, RANKS), run)
    return 1 / (time.forward if forward else time.seconds)


def run(fit: bool = False) -> Section:
    """Return the section; nothing is fitted."""
    calls = list(ring_calls())
    balanced = [call for call in calls if APART not in call.label]
    off = errors([1 / call.predicted for call in balanced], [1 / c.published for c in balanced])
    ratios = [call.fastest / call.published for call in balanced if call.gpu == "h800"]
    return Section(
        name="kernel-rates",
        title="Rates by attention kernel on H100 and H800",
        intro=(
            "Calls per second of a ring of 8 GPUs (zhuzilin/ring-flash-attention, README): 8K rows "
            "of each, 32 heads of 128 and 8 of keys, causal. The kernel is FlashAttention 2, so "
            "calls on H800 are forecast with `--kernel aten`; nothing was fitted. A positive error "
            "is a forecast that is too long.",
        ),
        columns=("call", "published", "predicted", "error", "at the fastest kernel's rate"),
        rows=[
            [c.label, f"{c.published:g}", f"{c.predicted:.1f}", f"{c.error:+.1%}",
             f"{c.fastest:.1f}"] for c in calls
        ],
        figures=(
            Figure("Rings and zigzag rings", str(off)),
            Figure("The same on H800 at the fastest kernel's rate",
                   f"predicted {min(ratios):.2f} to {max(ratios):.2f} times as fast as published"),
        ),
        notes=(
            "NVIDIA's runs on H100 take longer than forecast the longer they are, at the same rows "
            "and heads of a rank. So a kernel's rate is taken as published for all rows, with "
            "`half_rows` for short ones. NVIDIA does not name the kernel of its runs. Why striped "
            "rings take longer than forecast is unknown.",
        ),
    )  # fmt: skip
