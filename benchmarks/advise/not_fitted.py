"""The tables that no constant was fitted to, row by row, and all tables at published rates beside
the bands that advice states (`autotune.bands`)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.advise.band_cells import (
    TABLE_4,
    BandCell,
    at_fitted_rates,
    at_published_rates,
    nemo_h100,
)
from benchmarks.advise.fitting import Errors, errors
from benchmarks.advise.section import Figure, Section
from benchmarks.report import markdown
from megatron_burst.autotune.bands import ForecastBand, band_of

SEEN = ("LoongTrain, table 2", "BurstEngine, tables 2 and 5", "BurstEngine's attention (calls)",
        TABLE_4)  # fmt: skip


def off(cells: Sequence[BandCell]) -> Errors:
    """How far forecasts are off the published times."""
    return errors([1 / cell.ratio for cell in cells], [1.0] * len(cells))


def within(cells: Sequence[BandCell], band: ForecastBand | None = None) -> int:
    """How many are in the band of their GPU, or in this one."""
    bands = [band or band_of(cell.gpu, measured=False) for cell in cells]
    return sum(each.low <= cell.ratio <= each.high for each, cell in zip(bands, cells, strict=True))


def by_table(cells: Sequence[BandCell]) -> dict[str, list[BandCell]]:
    """In the order of the tables."""
    found: dict[str, list[BandCell]] = {}
    for cell in cells:
        found.setdefault(cell.table, []).append(cell)
    return found


def run(fit: bool = False) -> Section:
    """The section of the page; nothing is fitted."""
    cells = at_published_rates()
    counted = [cell for cell in cells if cell.counts]
    share, fitted = within(counted) / len(counted), at_fitted_rates()
    kept = within(fitted, band_of("a100", measured=True)) / len(fitted)
    recomputed = [cell.ratio - 1 for cell in nemo_h100("full") if cell.counts]
    unseen = [cell for cell in cells if cell.table not in SEEN]
    return Section(
        name="not-fitted",
        title="Tables that no constant was fitted to",
        intro=(
            "Steps at published rates, as `advise` takes them where nothing was measured. The "
            "first table has all published times; of the last line four constants were fitted to "
            "the table itself. The second has the rows of the tables that were added after all "
            "constants were stated. A positive error is a forecast that is too long.",
            _summary(cells),
        ),
        columns=("table", "row", "published over forecast", "error", "in the band"),
        rows=[
            [c.table, c.label, f"{c.ratio:.2f}", f"{c.error:+.1%}",
             ("yes" if within([c]) else "no") if c.counts else "not counted"]
            for c in unseen
        ],
        figures=(
            Figure("Times within the band of their GPU",
                   f"{within(counted)} of {len(counted)}", "90 %", share >= 0.9),
            Figure("At fitted rates, within the band of measured ones",
                   f"{within(fitted, band_of('a100', measured=True))} of {len(fitted)}", "90 %",
                   kept >= 0.9),
        ),
        notes=(
            "Not counted are runs on H100 and B200 without context parallelism: on short "
            "sequences their linear layers, in FP8, which forecasts do not know, take most of the "
            "time; nor are MagiAttention's calls, which are no steps. TFLOP/s of NVIDIA's runs are "
            "taken to count all of attention, as the code of "
            "the same repository does, and nothing to be recomputed; if everything was, the "
            f"counted runs on H100 took {min(recomputed):+.0%} to {max(recomputed):+.0%} more or "
            "less than their forecast instead. Torchtitan's H100 have slower memory (2.4 TB/s) "
            "and a limit of 500 W.",
        ),
    )  # fmt: skip


def _summary(cells: Sequence[BandCell]) -> str:
    rows = []
    for name, some in by_table(cells).items():
        counted, found = [cell for cell in some if cell.counts], off(some)
        fast = sum(cell.ratio > 1 for cell in some)
        rows.append([
            name, str(len(some)), "yes" if some[0].fitted else "no", f"{found.median:.1%}",
            f"{found.p90:.1%}", f"{found.worst:.1%}", f"{fast} of {len(some)}",
            f"{band_of(some[0].gpu, measured=False)}", f"{within(counted)} of {len(counted)}",
        ])  # fmt: skip
    head = ("table", "times", "fitted to it", "median error", "90 % of rows", "worst",
            "forecast too short", "band", "in the band")  # fmt: skip
    return markdown(head, rows)
