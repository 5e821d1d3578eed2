"""Longest sequences on three clusters by the account, and published lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.report import markdown
from megatron_burst.autotune import clusters
from megatron_burst.plugins.tools.advise.forecast.step_time import step_time
from megatron_burst.plugins.tools.advise.search.longest import (
    Longest,
    best,
    layouts_of,
    longest_of,
)
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models

MODEL = "llama3-8b"
HOST = 2 * 10**12  # bytes per node; 80 % of them are used
CHUNKED = Settings(seq=1, sequence_chunks=32, mlp_tiles=64, offload=1.0)


class Published(NamedTuple):
    """Published tokens with Llama 3 8B or a model of its size; "" if none."""

    fpdt: str
    alst: str
    upipe: str
    goal: float


# FPDT: table 1 of arXiv 2408.16978, A100-80G, "+" marks the longest length that was tried. ALST and
# UPipe: from their papers, H100-80G.
PUBLISHED = {
    4: Published("2M (A100)", "", "", 2.5e6),
    8: Published("4M (A100)", "3.7M", "5M", 5e6),
    32: Published("8M+ (A100)", "15M", "", 20e6),
}
WAYS = {
    "as it is": {"offload": 0.0, "sequence_chunks": 1, "mlp_tiles": 1},
    "+ offload": {"sequence_chunks": 1, "mlp_tiles": 1},
    "+ chunks and tiles": {},
    "+ bf16 gradients": {"gradients": "bf16"},
    "+ optimizer on the host": {"gradients": "bf16", "optimizer_offload": 1.0},
}


def table_rows() -> list[dict[str, Any]]:
    """Return one row per cluster and combination of settings."""
    model, rows = models.named(MODEL), []
    for gpus, published in PUBLISHED.items():
        cluster = clusters.Cluster(clusters.GPUS["h100"], gpus, 8, host_memory=int(0.8 * HOST))
        for way, fields in WAYS.items():
            longest = best(model, cluster, layouts_of(model, cluster, replace(CHUNKED, **fields)))
            rows.append(_row(model, cluster, longest, way) | published._asdict())
    return rows


def _row(
    model: models.Model, cluster: clusters.Cluster, longest: Longest, way: str
) -> dict[str, Any]:
    run = longest.run
    return {
        "gpus": cluster.gpus,
        "way": way,
        "seq": run.seq,
        "tp": run.tp,
        "cp": run.cp,
        "gradients": run.gradients,
        "binds": longest.binds,
        "peak": longest.account.peak.bytes,
        "host": longest.account.host_bytes * cluster.ranks_per_node,
        "minutes": step_time(model, cluster, run).seconds / 60,
        "store": _largest_store(model, cluster, run),
    }


def _largest_store(model: models.Model, cluster: clusters.Cluster, run: Settings) -> float:
    """Return the largest attention store that fits at 90 % of the length `run.seq`."""
    for store in (1.0, 0.75, 0.5, 0.25):
        kept = replace(run, store=store)
        try:
            if longest_of(model, cluster, kept).run.seq >= 0.9 * run.seq:
                return store
        except ValueError:
            continue
    return 0.0


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    cells = []
    for row in rows:
        last = row["way"] == list(WAYS)[-1]
        cells.append([
            str(row["gpus"]), row["way"], f"**{row['seq'] / 1e6:.2f}M**",
            f"{row['tp']} x {row['cp']}", row["gradients"], f"{row['store']:g}", row["binds"],
            f"{row['peak'] / 1e9:.1f}", f"{row['host'] / 1e12:.2f}", f"{row['minutes']:,.0f}",
            *((row["fpdt"], row["alst"] or "-", row["upipe"] or "-") if last else ("", "", "")),
        ])  # fmt: skip
    heads = ["H100-80G", "settings", "longest", "TP x CP", "gradients", "store that fits at 0.9",
             "limited by", "GB per GPU", "TB of host per node", "minutes per step", "FPDT",
             "ALST", "UPipe"]  # fmt: skip
    return markdown(heads, cells)
