"""All tables at published rates and the ranges that `advise` prints (`autotune.bands`)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.advise.band_cells import (
    BandCell,
    at_fitted_rates,
    at_published_rates,
    nemo_h100,
)
from benchmarks.advise.fitting import Errors, errors
from benchmarks.advise.section import Figure, Section
from megatron_burst.autotune.bands import ForecastBand, band_of


def off(cells: Sequence[BandCell]) -> Errors:
    """Return the errors of the forecasts."""
    return errors([1 / cell.ratio for cell in cells], [1.0] * len(cells))


def within(cells: Sequence[BandCell], band: ForecastBand | None = None) -> int:
    """Return the number of cells within the band of their GPU, or within `band`."""
    bands = [band or band_of(cell.gpu, measured=False) for cell in cells]
    return sum(
        band_of_cell.low <= cell.ratio <= band_of_cell.high
        for band_of_cell, cell in zip(bands, cells, strict=True)
    )


def by_table(cells: Sequence[BandCell]) -> dict[str, list[BandCell]]:
    """Group the cells by table, in the order of the tables."""
    groups: dict[str, list[BandCell]] = {}
    for cell in cells:
        groups.setdefault(cell.table, []).append(cell)
    return groups


def run(fit: bool = False) -> Section:
    """Return the section; nothing is fitted."""
    cells = at_published_rates()
    counted = [cell for cell in cells if cell.counts]
    share, fitted = within(counted) / len(counted), at_fitted_rates()
    kept = within(fitted, band_of("a100", measured=True)) / len(fitted)
    recomputed = [cell.ratio - 1 for cell in nemo_h100("full") if cell.counts]
    return Section(
        name="not-fitted",
        title="All published times",
        intro=(
            "Times at published rates, which `advise` uses if nothing was measured. Four constants "
            "were fitted to LoongTrain's table 4, none to the other tables.",
        ),
        columns=("table", "times", "fitted to it", "median error", "90 % of rows", "worst",
                 "forecast too short", "band", "in the band"),
        rows=_by_table(cells),
        figures=(
            Figure("At published rates, within the range of their GPU",
                   f"{within(counted)} of {len(counted)}", "90 %", share >= 0.9),
            Figure(f"At fitted rates, within {band_of('a100', measured=True)} of the forecast",
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


def _by_table(cells: Sequence[BandCell]) -> list[list[str]]:
    rows = []
    for name, of_table in by_table(cells).items():
        counted, errors_of_table = [cell for cell in of_table if cell.counts], off(of_table)
        too_short = sum(cell.ratio > 1 for cell in of_table)
        rows.append([
            name, str(len(of_table)), "yes" if of_table[0].fitted else "no",
            f"{errors_of_table.median:.1%}", f"{errors_of_table.p90:.1%}",
            f"{errors_of_table.worst:.1%}", f"{too_short} of {len(of_table)}",
            f"{band_of(of_table[0].gpu, measured=False)}", f"{within(counted)} of {len(counted)}",
        ])  # fmt: skip
    return rows
