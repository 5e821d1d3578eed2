"""The account as a table by item, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from ...advisor.account.memory import Account, Fit
from ...advisor.account.remedies import does_not_fit, own_flag
from ...advisor.clusters import Cluster
from ...advisor.forecast.step_time import StepTime
from ...units import byte_size, duration
from ..console import wrapped


def show(
    found: Account, cluster: Cluster, left: Fit, time: StepTime | str, binds: str | None
) -> None:
    """Print the peak by item, what is left, and the time of a step."""
    console, run, peak = wrapped(), found.run, found.peak
    console.print(Text(_headline(found, cluster)))
    table = Table(box=None, pad_edge=False)
    table.add_column("item")
    table.add_column("bytes per GPU", justify="right")
    table.add_column("share", justify="right")
    for item, size in sorted(peak.items.items(), key=lambda each: -each[1]):
        table.add_row(Text(item), byte_size(size), f"{size / peak.bytes:.0%}")
    table.add_row(Text(f"peak, {peak.phase}", style="bold"), byte_size(peak.bytes), "")
    table.add_row(f"there is, less {byte_size(cluster.reserve)} for others",
                  byte_size(cluster.room), "")  # fmt: skip
    for item, size in found.host.items():
        table.add_row(Text(f"host: {item}"), byte_size(size), "")
    if found.host_bytes:
        table.add_row("host memory of each GPU", byte_size(cluster.host_per_rank), "")
    console.print(table)
    if binds is not None:
        console.print(Text(f"longest sequence: {run.seq:,} tokens; what binds: {binds}"))
    elif left.fits:
        console.print(Text(f"fits: {byte_size(left.device)} of every GPU left", style="green"))
    else:
        console.print(Text(does_not_fit(found, cluster, own_flag), style="bold red"))
    console.print(Text(_step(time, cluster)))
    console.print(Text("An account from the sizes of tensors, not a measurement on a GPU."))


def _step(time: StepTime | str, cluster: Cluster) -> str:
    if isinstance(time, str):
        return f"a step: no time predicted: {time}"
    taken = duration(time.seconds) if time.seconds < 120 else f"{time.seconds / 60:,.0f} min"
    share = time.parts[time.bottleneck] / time.seconds
    return (
        f"a step: {taken} predicted, MFU {time.mfu:.0%}, {share:.0%} of it {time.bottleneck}; "
        f"{cluster.described}"
    )


def facts(
    found: Account, cluster: Cluster, left: Fit, time: StepTime | str, binds: str | None
) -> dict[str, Any]:
    """The same as plain data: bytes, seconds."""
    run = found.run
    groups = {name: getattr(run, name) for name in ("tp", "cp", "pp", "vpp", "ep", "dp")}
    return {
        "model": found.model.name,
        "seq": run.seq,
        "groups": groups,
        "peak": {"bytes": found.peak.bytes, "phase": found.peak.phase,
                 "items": dict(found.peak.items)},
        "phases": [{"phase": p.phase, "bytes": p.bytes} for p in found.peaks],
        "host": dict(found.host),
        "room": cluster.room,
        "host_room": round(cluster.host_per_rank),
        "fits": left.fits,
        "not_counted": list(found.model.uncounted),
        "binds": binds,
        "seconds": None if isinstance(time, str) else time.seconds,
        "mfu": None if isinstance(time, str) else time.mfu,
    }  # fmt: skip


def _headline(found: Account, cluster: Cluster) -> str:
    run = found.run
    sizes = {"TP": run.tp, "CP": run.cp, "PP": run.pp, "EP": run.ep, "DP": run.dp}
    groups = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    how = [f"recompute {run.recompute}", f"store {run.store:g}", f"offload {run.offload:g}",
           f"{run.sequence_chunks} sequence chunks", f"{run.mlp_tiles} MLP tiles",
           f"gradients {run.gradients}"]  # fmt: skip
    how += [f"{run.ulysses} ranks share heads"] * (run.ulysses > 1) + ["FSDP"] * run.fsdp
    return (
        f"{found.model.name}, {run.seq:,} tokens on {cluster.gpus} x {cluster.gpu.name}: {groups}; "
        + ", ".join(how)
    )
