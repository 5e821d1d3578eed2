# SPDX-License-Identifier: Apache-2.0
"""Output of `advise`: tables for the terminal (ranking, time, memory, flags), and JSON."""

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
from .settings import ENDS, Settings, selection_text, stage_layers
from .shapes.layer_kinds import CHUNKED, FULL, HYBRID, MIXER, WINDOW
from .shapes.model import Model

# Columns of the ranking that may be omitted on a narrow terminal, least important first.
LEAST = ("EP", "DP", "PP", "batches", "bottleneck", "MFU", "tokens/s/GPU", "GPU memory")
COLUMNS = (
    "TP", "PP", "EP", "CP = per node x nodes", "DP", "batches", "attention", "memory saved by",
    "step", "tokens/s/GPU", "MFU", "GPU memory", "bottleneck",
)  # fmt: skip


def show(advice: Advice, command: Sequence[str] = ()) -> None:
    """Print the advice.

    Args:
        advice: Result of `mb.advise`.
        command: Megatron command that described the model; empty if the model has a name.
    """
    console = wrapped()
    console.print(Text(headline(advice)))
    if set(advice.model.kinds) != {FULL}:
        console.print(Text(f"layers: {layers_text(advice.model)}"))
    console.print(Text(f"rates: {advice.cluster.described}"))
    console.print(Text(advice.kernel.described))
    table, left_out = fitting(ranking(advice), console)
    console.print(table)
    if left_out:
        console.print(Text(f"not shown in {console.width} columns: {', '.join(left_out)} (--json "
                           "has all)", style="dim"))  # fmt: skip
    console.print(Text("\nRecommended: row 1, the simplest of those within 1.5 % of the fastest; "
                       f"searched {advice.tried} of {advice.ways} parallel configurations"
                       + (" (the others cannot be among the fastest)." if advice.tried < advice.ways
                          else ".")))  # fmt: skip
    if "pp" not in advice.want.pinned and not advice.want.hybrid:
        sizes = stages_to_try(advice.model, advice.cluster, advice.want)
        tried = [str(pp) for pp in sizes if advice.model.layers % pp]
        but = (
            f" but with PP {' and '.join(tried)} and {BUSY} micro-batches per stage"
            if tried
            else ""
        )
        console.print(Text(f"Not tried: pipeline stages with different numbers of layers{but}."))
    if advice.want.carries:
        console.print(Text(
            "Not tried: --burst-attention-layout, a second layout for softmax attention. It halves "
            "the hops of linear-attention states, but ranks exchange rows around each softmax "
            "attention layer; --burst-layout auto compares the bytes of one and two layouts."
        ))  # fmt: skip
    console.print(Text(f"step {step_text(advice.best, advice.cluster)}"))
    _show_time(console, advice)
    console.print(Text(""), memory_table(advice.best.account, advice.cluster, "memory of row 1"))
    if advice.by_kind:
        console.print(Text(advice.by_kind))
    if selection := selection_text(advice.model, advice.best.run):
        console.print(Text(selection))
    _show_rivals(console, advice)
    _show_flags(console, advice, command)
    run = advice.best.run
    ring, shared = run.cp > 1, 1 < run.ulysses < run.cp
    has_effect = {"algorithm": ring, "side": ring, "layout": ring, "ulysses": ring, "wire": ring,
                  "linear": ring and advice.model.mixers, "placement": shared}  # fmt: skip
    idle = [name for name, has in has_effect.items() if name in advice.want.pinned and not has]
    if idle:
        selection = ", ".join(f"--{name}" for name in idle)
        console.print(Text(f"without effect in row 1: {selection}", style="yellow"))
    for part in advice.model.uncounted:
        console.print(Text(f"not counted: {part}", style="yellow"))
    console.print(Text("Analytical estimate from sizes and rates, not a measurement."))


def layers_text(model: Model) -> str:
    """Return the number of layers of each kind, such as "4 full attention, 20 window of 1,024"."""
    names = {FULL: "full attention", WINDOW: f"window of {model.window:,}",
             CHUNKED: f"chunks of {model.chunk:,}", "none": "MLP alone",
             **{kind: kind for kind in HYBRID},
             MIXER: model.mixer.name if model.mixer is not None else MIXER}  # fmt: skip
    return ", ".join(f"{count} {names[kind]}" for kind, count in model.kinds.items())


def headline(advice: Advice) -> str:
    """Return a line with the model, the tokens per sequence and step, and the cluster."""
    want, cluster = advice.want, advice.cluster
    packs = "packs of " if advice.lengths else "sequences of "
    return (
        f"{advice.model.name}, {packs}{want.seq:,} tokens, {want.seq * want.sequences:,} per step, "
        f"on {cluster.gpus} x {cluster.gpu.name}, {cluster.ranks_per_node} per node"
    )


def step_text(configuration: Configuration, cluster: Cluster) -> str:
    """Return the predicted time of a step as text, with the range of the prediction.

    The range is known only with context parallelism: all published measurements from which it was
    derived use context parallelism.
    """
    seconds = configuration.seconds
    if configuration.run.cp == 1:
        return f"{duration(seconds)} (no range is known without context parallelism)"
    low, high = cluster.band.around(seconds)
    rates, narrower = "published", "; `megatron-burst calibrate` narrows it"
    if cluster.kernels_measured:
        rates, narrower = "measured", ""
    return f"{duration(seconds)} ({duration(low)} to {duration(high)} at {rates} rates{narrower})"


def ranking(advice: Advice) -> Table:
    """Return the table of configurations, one per row."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        number = name in COLUMNS[8:12]
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    for index, configuration in enumerate(advice.ranked):
        run, time = configuration.run, configuration.time
        table.add_row(
            str(run.tp), stages_text(advice.model, run), str(run.ep),
            grid_text(run), str(run.dp), batches_text(run),
            attention_text(run, advice.cut),
            options_text(run), duration(time.seconds), f"{time.tokens_per_gpu(run.gpus):,.0f}",
            f"{time.mfu:.1%}", byte_size(configuration.account.peak.bytes), time.bottleneck,
            style="bold" if index == 0 else "",
        )  # fmt: skip
    return table


def stages_text(model: Model, run: Settings) -> str:
    """Return the pipeline stages as text.

    "4" means 4 stages, "4 x 2" means 4 stages with 2 virtual stages each, and "4 of 15, 2 x 16, 14"
    means 4 stages with 15, 16, 16 and 14 layers.
    """
    first, *middle, last = stage_layers(model, run) * (2 if run.pp == 1 else 1)
    if len({first, *middle, last}) > 1:
        between = f"{len(middle)} x {middle[0]}, " if middle else ""
        return f"{run.pp} of {first}, {between}{last}"
    return f"{run.pp} x {run.vpp}" if run.vpp > 1 else str(run.pp)


def fitting(table: Table, console: Console) -> tuple[Table, list[str]]:
    """Remove columns until a table fits the console.

    Columns whose cells are all equal are removed first, then the least important columns.

    Returns:
        The table, and the names of the removed columns.
    """

    def equal_cells(column: Column) -> bool:
        return len(set(column.cells)) < 2

    names = {str(column.header): column for column in table.columns}
    order = sorted(LEAST, key=lambda name: not equal_cells(names[name]))
    left_out = []
    while order and _least_width(table) > console.width:
        left_out.append(order.pop(0))
        table.columns.remove(names[left_out[-1]])
    return table, left_out


def _least_width(table: Table) -> int:
    """Return the minimum width of a table in characters. Left-aligned cells wrap at spaces."""
    widths = [
        max(len(word) for cell in (column.header, *column.cells)
            for word in (str(cell).split() if column.justify == "left" else [str(cell)]))
        for column in table.columns
    ]  # fmt: skip
    return sum(widths) + 2 * len(widths)


def grid_text(run: Settings) -> str:
    """Return the context-parallel size, such as "16 = 8 x 2" (ranks per node x nodes).

    If ranks share heads, the text also contains the number of these ranks and the size of the
    rings.
    """
    intra = run.intra or run.cp
    text = str(run.cp)
    if 1 < intra < run.cp:
        text += f" = {intra} x {run.cp // intra}"
    if run.ulysses > 1:
        text += f" ({run.ulysses} share heads, rings of {run.cp // run.ulysses})"
    return text


def batches_text(run: Settings) -> str:
    """Return a rank's micro-batches per step: "4", or "4 x 2" for 2 sequences per micro-batch."""
    count = str(run.micro_batches)
    return f"{count} x {run.micro_batch}" if run.micro_batch > 1 else count


def attention_text(run: Settings, cut: str = "") -> str:
    """Return the attention settings of a run as text.

    Args:
        run: Settings of the run.
        cut: Layout of packed documents; "" without packed documents.
    """
    if run.cp == 1:
        return "on one rank"
    parts = [run.algorithm, run.side, cut or run.layout]
    parts += [f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items()]
    if run.head_chunks > 1:
        parts.append(f"{run.head_chunks} head chunks")
    if 1 < run.ulysses < run.cp:
        parts.append(run.placement.replace("_", " "))
    return ", ".join(parts)


def options_text(run: Settings) -> str:
    """Return the settings that save memory (recompute, offload, chunks, tiles) as text."""
    parts = ["no recompute"] if run.recompute == "none" else [f"store {run.store:g}"]
    if run.offload:
        parts.append(f"offload {run.offload:g}")
    if run.sequence_chunks > 1:
        parts.append(f"{run.sequence_chunks} row chunks")
    if run.mlp_tiles > 1:
        parts.append(f"{run.mlp_tiles} MLP tiles")
    if run.optimizer_offload:
        parts.append(f"optimizer offload {run.optimizer_offload:g}")
    return ", ".join(parts)


def _show_time(console: Console, advice: Advice) -> None:
    time = advice.best.time
    table = Table(box=None, pad_edge=False)
    table.add_column("step of row 1")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, taken in sorted(time.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, duration(taken), f"{taken / time.seconds:.1%}")
    console.print(Text(""), table)


def memory_table(account: Account, cluster: Cluster, title: str) -> Table:
    """Return a table of the memory at an account's peak.

    The rows are the bytes of each item, the sum, the available GPU memory, and host memory.
    """
    peak = account.peak
    table = Table(Column(title), Column("bytes per GPU", justify="right"),
                  Column("share", justify="right"), box=None, pad_edge=False)  # fmt: skip
    for item, size in sorted(peak.items.items(), key=lambda entry: -entry[1]):
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


def _show_rivals(console: Console, advice: Advice) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("Megatron's own attention", "step", "over row 1", "GPU memory", ""):
        table.add_column(name, justify="right" if name in COLUMNS or "1" in name else "left")
    if (own := advice.fastest_rival) is not None and own.run is not None:
        run = own.run
        sizes = f"TP {run.tp}, PP {run.pp}, CP {run.cp}, DP {run.dp}"
        table.add_row(*_rival_row(advice, own, f"fastest that fits: {sizes}"), style="bold")
    for rival in advice.rivals:
        table.add_row(*_rival_row(advice, rival, "sizes of row 1"))
    console.print(Text(""), table)


def _rival_row(advice: Advice, rival: rivals.Rival, sizes: str) -> list[str]:
    if rival.time is None or rival.run is None:
        return [rival.kind, "-", "-", "", f"not possible: {rival.refused}"]
    recompute = f"{rival.recompute} recompute" if rival.recompute != "none" else "no recompute"
    return [
        rival.kind if rival.run.cp > 1 else "any (no CP)", duration(rival.time.seconds),
        f"{rival.time.seconds / advice.best.seconds:.2f}x" if rival.fits else "-",
        byte_size(rival.bytes),
        f"{sizes}, {recompute}" + ", does not fit" * (not rival.fits),
    ]  # fmt: skip


def _show_flags(console: Console, advice: Advice, command: Sequence[str]) -> None:
    lines, after = _flags(advice, command), left_to_the_user(advice.model)
    if command:
        head = "Flags that replace flags of your command"
        after = _vocabulary(advice, command)
    else:
        head = "Command to start it, on every node"
    console.print(Text(f"\n{head}", style="bold"))
    if not command:
        lines = [*launched(advice.cluster, script_of(advice.model)), *lines]
        if advice.best.run.sets_one_queue:
            console.print("  export CUDA_DEVICE_MAX_CONNECTIONS=1  # required before Blackwell")
    for index, line in enumerate(lines):
        continuation = " \\" if index < len(lines) - 1 else ""
        console.print(Text(f"  {line}{continuation}"), soft_wrap=True)  # for pasting
    if after:
        console.print(Text(after))
    for sentence in [] if command else advice.no_flag_for:
        console.print(Text(sentence, style="yellow"))
    if advice.cut:
        console.print(Text(f"  {DOCUMENTS[advice.cut]}"))


def launched(cluster: Cluster, script: str) -> list[str]:
    """Return the first lines of the shell command that starts training.

    The command must be started on every node of the cluster.

    Args:
        cluster: Cluster of GPUs.
        script: Script of Megatron-LM.
    """
    nodes, per_node = nodes_and_gpus(cluster)
    rendezvous = [f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"] * (nodes > 1)
    return [
        f"torchrun --nproc-per-node {per_node}",
        *rendezvous,
        f"-m megatron_burst pretrain {script}",
    ]


def _vocabulary(advice: Advice, command: Sequence[str]) -> str:
    """Return a note on the assumed vocabulary size; "" if the command has --vocab-size."""
    if any(word.split("=")[0] == "--vocab-size" for word in command):
        return ""
    return (
        f"your command has no --vocab-size: a vocabulary of {advice.model.vocabulary:,} was assumed"
    )


def facts(advice: Advice, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return the advice as a dict for JSON, in bytes and seconds.

    Args:
        advice: Result of `mb.advise`.
        command: Megatron command that described the model; empty if the model has a name.
    """
    cluster = advice.cluster
    return {
        "model": advice.model.name,
        "parameters": advice.model.parameters,
        "layers": advice.model.kinds,
        "seq": advice.want.seq,
        "tokens_per_step": advice.want.seq * advice.want.sequences,
        "cluster": {"gpu": cluster.gpu.name, "gpus": cluster.gpus,
                    "per_node": cluster.ranks_per_node, "rates": cluster.described,
                    "band": asdict(cluster.band)},
        "kernel": advice.kernel.facts(),
        "ways": advice.ways,
        "tried": advice.tried,
        "ranked": [configuration_facts(configuration, cluster) for configuration in advice.ranked],
        "megatron": [rivals.facts(rival) for rival in advice.rivals],
        "megatron_fastest": advice.fastest_rival and rivals.facts(advice.fastest_rival),
        "flags": _flags(advice, command),
        "no_flag_for": [] if command else advice.no_flag_for,
        "uncounted": list(advice.model.uncounted),
    }  # fmt: skip


def _flags(advice: Advice, command: Sequence[str]) -> list[str]:
    """Return the recommended flags. Flags of the model are omitted if `command` describes it."""
    if command:
        return run_flags(advice.model, advice.best.run, advice.cut)
    return advice.flags()


def configuration_facts(configuration: Configuration, cluster: Cluster) -> dict[str, Any]:
    """Return one configuration as a dict for JSON, in bytes and seconds."""
    run, time, peak = configuration.run, configuration.time, configuration.account.peak
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
                   "left": round(configuration.fit.device),
                   "host": dict(configuration.account.host)},
    }  # fmt: skip
