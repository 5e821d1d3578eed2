# SPDX-License-Identifier: Apache-2.0
"""Advice as tables: the ranking, the best run's time and memory by item, flags; and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ....autotune.clusters import Cluster
from ....cli.console import wrapped
from ....units import byte_size, duration
from . import rivals
from .account.memory import Account
from .advice import Advice, nodes_and_gpus
from .search.model_flags import script_of
from .search.pasted import DOCUMENTS, left_to_the_user, run_flags
from .search.search import Configuration
from .search.search_space import BUSY, stages_to_try
from .settings import ENDS, Settings, selection_said, stage_layers
from .shapes.layer_kinds import CHUNKED, FULL, MIXER, WINDOW
from .shapes.model import Model

# Those that a narrow terminal can do without, least needed first.
LEAST = ("EP", "DP", "PP", "batches", "bottleneck", "MFU", "tokens/s/GPU", "GPU memory")
COLUMNS = (
    "TP", "PP", "EP", "CP = per node x nodes", "DP", "batches", "attention", "memory saved by",
    "step", "tokens/s/GPU", "MFU", "GPU memory", "bottleneck",
)  # fmt: skip


def show(found: Advice, command: Sequence[str] = ()) -> None:
    """Print the advice. command: the words of a Megatron command that described the model."""
    console = wrapped()
    console.print(Text(headline(found)))
    if set(found.model.kinds) != {FULL}:
        console.print(Text(f"layers: {layers_said(found.model)}"))
    console.print(Text(f"rates: {found.cluster.described}"))
    console.print(Text(found.kernel.described))
    table, left_out = fitting(ranking(found), console)
    console.print(table)
    if left_out:
        console.print(Text(f"not shown in {console.width} columns: {', '.join(left_out)} (--json "
                           "has all)", style="dim"))  # fmt: skip
    console.print(Text("\nRecommended: row 1, the simplest of those within 1.5 % of the fastest; "
                       f"searched {found.tried} of {found.ways} parallel configurations"
                       + (" (the others cannot be among the fastest)." if found.tried < found.ways
                          else ".")))  # fmt: skip
    if "pp" not in found.want.pinned and not found.want.hybrid:
        sizes = stages_to_try(found.model, found.cluster, found.want)
        tried = [str(pp) for pp in sizes if found.model.layers % pp]
        but = (
            f" but with PP {' and '.join(tried)} and {BUSY} micro-batches a stage" if tried else ""
        )
        console.print(Text(f"Not tried: pipeline stages of unequal numbers of layers{but}."))
    if found.want.carries:
        console.print(Text(
            "Not tried: --burst-attention-layout, which passes states of linear attention half as "
            "far and exchanges rows around softmax attention; --burst-layout auto compares bytes."
        ))  # fmt: skip
    console.print(Text(f"step {step_said(found.best, found.cluster)}"))
    _show_time(console, found)
    console.print(Text(""), memory_table(found.best.account, found.cluster, "memory of row 1"))
    if found.by_kind:
        console.print(Text(found.by_kind))
    if said := selection_said(found.model, found.best.run):
        console.print(Text(said))
    _show_rivals(console, found)
    _show_flags(console, found, command)
    run = found.best.run
    ring, shared = run.cp > 1, 1 < run.ulysses < run.cp
    has_effect = {"algorithm": ring, "side": ring, "layout": ring, "ulysses": ring, "wire": ring,
                  "linear": ring and found.model.mixers, "placement": shared}  # fmt: skip
    idle = [name for name, has in has_effect.items() if name in found.want.pinned and not has]
    if idle:
        said = ", ".join(f"--{name}" for name in idle)
        console.print(Text(f"without effect in row 1: {said}", style="yellow"))
    for part in found.model.uncounted:
        console.print(Text(f"not counted: {part}", style="yellow"))
    console.print(Text("Analytical estimate from sizes and rates, not a measurement."))


def layers_said(model: Model) -> str:
    """Return the number of layers of each kind, with windows and chunks in tokens."""
    names = {FULL: "full attention", WINDOW: f"window of {model.window:,}",
             CHUNKED: f"chunks of {model.chunk:,}", "none": "MLP alone",
             MIXER: model.mixer.name if model.mixer is not None else MIXER}  # fmt: skip
    return ", ".join(f"{count} {names[kind]}" for kind, count in model.kinds.items())


def headline(found: Advice) -> str:
    """What was asked."""
    want, cluster = found.want, found.cluster
    packs = "packs of " if found.lengths else "sequences of "
    return (
        f"{found.model.name}, {packs}{want.seq:,} tokens, {want.seq * want.sequences:,} per step, "
        f"on {cluster.gpus} x {cluster.gpu.name}, {cluster.ranks_per_node} per node"
    )


def step_said(found: Configuration, cluster: Cluster) -> str:
    """A step's time, and the range in which it is to be expected; none where all of a sequence is
    on one rank, as the published steps of which the range comes are not.
    """
    seconds = found.seconds
    if found.run.cp == 1:
        return f"{duration(seconds)} (no range is known without context parallelism)"
    low, high = cluster.band.around(seconds)
    rates, narrower = "published", "; `megatron-burst calibrate` narrows it"
    if cluster.kernels_measured:
        rates, narrower = "measured", ""
    return f"{duration(seconds)} ({duration(low)} to {duration(high)} at {rates} rates{narrower})"


def ranking(found: Advice) -> Table:
    """A row for each configuration."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        number = name in COLUMNS[8:12]
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    for index, one in enumerate(found.ranked):
        run, time = one.run, one.time
        table.add_row(
            str(run.tp), stages_said(found.model, run), str(run.ep),
            grid_said(run), str(run.dp), batches_said(run),
            attention_said(run, found.cut),
            options_said(run), duration(time.seconds), f"{time.tokens_per_gpu(run.gpus):,.0f}",
            f"{time.mfu:.1%}", byte_size(one.account.peak.bytes), time.bottleneck,
            style="bold" if index == 0 else "",
        )  # fmt: skip
    return table


def stages_said(model: Model, run: Settings) -> str:
    """Pipeline stages and virtual ones, or layers of each: "4 of 15, 2 x 16, 14"."""
    first, *middle, last = stage_layers(model, run) * (2 if run.pp == 1 else 1)
    if len({first, *middle, last}) > 1:
        between = f"{len(middle)} x {middle[0]}, " if middle else ""
        return f"{run.pp} of {first}, {between}{last}"
    return f"{run.pp} x {run.vpp}" if run.vpp > 1 else str(run.pp)


def fitting(table: Table, console: Console) -> tuple[Table, list[str]]:
    """The table, without the columns that the width of the console has no room for; and those, by
    name. Columns in which all rows are alike go first, then those that weigh least.
    """

    def alike(column: Column) -> bool:
        return len(set(column.cells)) < 2

    names = {str(column.header): column for column in table.columns}
    order = sorted(LEAST, key=lambda name: not alike(names[name]))
    left_out = []
    while order and _least_width(table) > console.width:
        left_out.append(order.pop(0))
        table.columns.remove(names[left_out[-1]])
    return table, left_out


def _least_width(table: Table) -> int:
    """Characters of the narrowest form that can be read: words of texts below one another."""
    widths = [
        max(len(word) for cell in (column.header, *column.cells)
            for word in (str(cell).split() if column.justify == "left" else [str(cell)]))
        for column in table.columns
    ]  # fmt: skip
    return sum(widths) + 2 * len(widths)


def grid_said(run: Settings) -> str:
    """ "16 = 8 x 2": ranks per node x nodes, where there are several nodes; heads shared apart."""
    intra = run.intra or run.cp
    said = str(run.cp)
    if 1 < intra < run.cp:
        said += f" = {intra} x {run.cp // intra}"
    if run.ulysses > 1:
        said += f" ({run.ulysses} share heads, rings of {run.cp // run.ulysses})"
    return said


def batches_said(run: Settings) -> str:
    """Micro-batches of a rank, and sequences of each."""
    count = str(run.micro_batches)
    return f"{count} x {run.micro_batch}" if run.micro_batch > 1 else count


def attention_said(run: Settings, cut: str = "") -> str:
    """Algorithm, side, layout (cut: that of packs), algorithms of some layers, head chunks,
    placement.
    """
    if run.cp == 1:
        return "on one rank"
    said = [run.algorithm, run.side, cut or run.layout]
    said += [f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items()]
    if run.head_chunks > 1:
        said.append(f"{run.head_chunks} head chunks")
    if 1 < run.ulysses < run.cp:
        said.append(run.placement.replace("_", " "))
    return ", ".join(said)


def options_said(run: Settings) -> str:
    """Describe what a run recomputes and moves to save memory."""
    said = ["no recompute"] if run.recompute == "none" else [f"store {run.store:g}"]
    if run.offload:
        said.append(f"offload {run.offload:g}")
    if run.sequence_chunks > 1:
        said.append(f"{run.sequence_chunks} sequence chunks")
    if run.mlp_tiles > 1:
        said.append(f"{run.mlp_tiles} MLP tiles")
    if run.optimizer_offload:
        said.append(f"optimizer offload {run.optimizer_offload:g}")
    return ", ".join(said)


def _show_time(console: Console, found: Advice) -> None:
    time = found.best.time
    table = Table(box=None, pad_edge=False)
    table.add_column("step of row 1")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, taken in sorted(time.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, duration(taken), f"{taken / time.seconds:.1%}")
    console.print(Text(""), table)


def memory_table(account: Account, cluster: Cluster, title: str) -> Table:
    """Return the peak of an account by item, with what the cluster has."""
    peak = account.peak
    table = Table(Column(title), Column("bytes per GPU", justify="right"),
                  Column("share", justify="right"), box=None, pad_edge=False)  # fmt: skip
    for item, size in sorted(peak.items.items(), key=lambda each: -each[1]):
        if size:
            table.add_row(Text(item), byte_size(size), f"{size / peak.bytes:.0%}")
    table.add_row(Text(f"peak, {peak.phase}", style="bold"), byte_size(peak.bytes), "")
    reserved = f"available ({byte_size(cluster.reserve)} reserved for CUDA and NCCL)"
    table.add_row(reserved, byte_size(cluster.room), "")
    for item, size in account.host.items():
        table.add_row(Text(f"host: {item}"), byte_size(size), "")
    if account.host_bytes:
        table.add_row("host memory of each GPU", byte_size(cluster.host_per_rank), "")
    return table


def _show_rivals(console: Console, found: Advice) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("Megatron's own attention", "step", "over row 1", "GPU memory", ""):
        table.add_column(name, justify="right" if name in COLUMNS or "1" in name else "left")
    if (own := found.fastest_rival) is not None and own.run is not None:
        run = own.run
        sizes = f"TP {run.tp}, PP {run.pp}, CP {run.cp}, DP {run.dp}"
        table.add_row(*_rival_said(found, own, f"fastest that fits: {sizes}"), style="bold")
    for one in found.rivals:
        table.add_row(*_rival_said(found, one, "sizes of row 1"))
    console.print(Text(""), table)


def _rival_said(found: Advice, one: rivals.Rival, sizes: str) -> list[str]:
    if one.time is None or one.run is None:
        return [one.kind, "-", "-", "", f"not possible: {one.refused}"]
    recompute = f"{one.recompute} recompute" if one.recompute != "none" else "no recompute"
    return [
        one.kind if one.run.cp > 1 else "any (no CP)", duration(one.time.seconds),
        f"{one.time.seconds / found.best.seconds:.2f}x" if one.fits else "-", byte_size(one.bytes),
        f"{sizes}, {recompute}" + ", does not fit" * (not one.fits),
    ]  # fmt: skip


def _show_flags(console: Console, found: Advice, command: Sequence[str]) -> None:
    lines, after = _flags(found, command), left_to_the_user(found.model)
    if command:
        head, after = "Flags, to put in place of those of your command", _vocabulary(found, command)
    else:
        head = "Command to start it, on every node"
    console.print(Text(f"\n{head}", style="bold"))
    if not command:
        lines = [*launched(found.cluster, script_of(found.model)), *lines]
        if not found.best.run.fsdp:  # which Megatron refuses with it
            console.print("  export CUDA_DEVICE_MAX_CONNECTIONS=1  # required before Blackwell")
    for index, line in enumerate(lines):
        more = " \\" if index < len(lines) - 1 else ""
        console.print(Text(f"  {line}{more}"), soft_wrap=True)  # as it is pasted
    if after:
        console.print(Text(after))
    for sentence in [] if command else found.no_flag_for:
        console.print(Text(sentence, style="yellow"))
    if found.cut:
        console.print(Text(f"  {DOCUMENTS[found.cut]}"))


def launched(cluster: Cluster, script: str) -> list[str]:
    """The beginning of the command that starts a run on all GPUs of a cluster, line by line.
    script: of Megatron-LM.
    """
    nodes, per_node = nodes_and_gpus(cluster)
    where = [f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"] * (nodes > 1)
    return [
        f"torchrun --nproc-per-node {per_node}",
        *where,
        f"-m megatron_burst pretrain {script}",
    ]


def _vocabulary(found: Advice, command: Sequence[str]) -> str:
    """Which vocabulary was counted with, where the command has none."""
    if any(word.split("=")[0] == "--vocab-size" for word in command):
        return ""
    return (
        f"your command has no --vocab-size: a vocabulary of {found.model.vocabulary:,} was assumed"
    )


def facts(found: Advice, command: Sequence[str] = ()) -> dict[str, Any]:
    """The same as plain data: bytes, seconds."""
    cluster = found.cluster
    return {
        "model": found.model.name,
        "parameters": found.model.parameters,
        "layers": found.model.kinds,
        "seq": found.want.seq,
        "tokens_per_step": found.want.seq * found.want.sequences,
        "cluster": {"gpu": cluster.gpu.name, "gpus": cluster.gpus,
                    "per_node": cluster.ranks_per_node, "rates": cluster.described,
                    "band": asdict(cluster.band)},
        "kernel": found.kernel.facts(),
        "ways": found.ways,
        "tried": found.tried,
        "ranked": [one_of(each, cluster) for each in found.ranked],
        "megatron": [rivals.facts(one) for one in found.rivals],
        "megatron_fastest": found.fastest_rival and rivals.facts(found.fastest_rival),
        "flags": _flags(found, command),
        "no_flag_for": [] if command else found.no_flag_for,
        "uncounted": list(found.model.uncounted),
    }  # fmt: skip


def _flags(found: Advice, command: Sequence[str]) -> list[str]:
    """Flags to paste: of the run alone beside a command."""
    if command:
        return run_flags(found.model, found.best.run, found.cut)
    return found.flags()


def one_of(each: Configuration, cluster: Cluster) -> dict[str, Any]:
    """One configuration as plain data."""
    run, time, peak = each.run, each.time, each.account.peak
    names = ("tp", "pp", *ENDS, "vpp", "ep", "cp", "dp", "micro_batch", "micro_batches")
    return {
        "groups": {name: getattr(run, name) for name in names},
        "attention": {name: getattr(run, name) for name in (
            "algorithm", "window_algorithm", "chunk_algorithm", "kernel", "side", "layout",
            "linear", "ulysses", "placement", "head_chunks", "intra")},
        "options": {name: getattr(run, name) for name in (
            "recompute", "store", "offload", "sequence_chunks", "mlp_tiles", "optimizer_offload",
            "lm_head_loss", "gradients")},
        "seconds": time.seconds,
        "seconds_range": list(cluster.band.around(time.seconds)) if run.cp > 1 else None,
        "tokens_per_second_per_gpu": time.tokens_per_gpu(run.gpus),
        "mfu": time.mfu,
        "bottleneck": time.bottleneck,
        "parts": dict(time.parts),
        "memory": {"bytes": peak.bytes, "phase": peak.phase, "items": dict(peak.items),
                   "left": round(each.fit.device), "host": dict(each.account.host)},
    }  # fmt: skip
