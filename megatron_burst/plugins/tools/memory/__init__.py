# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst memory`: estimate the memory of one rank over one training step, item by item.

    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --seq 1M
    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --longest
    megatron-burst memory --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...
    megatron-burst memory --model llama3_8b_pretrain_8gpu_h100_256k --gpus 8    (a recipe)

The numbers are an analytical estimate from tensor sizes, not a measurement.
`tools.advise.account.memory` describes the items. Exit status: 0 if the run fits into memory, 1 if
it does not fit, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rich.text import Text

from ....autotune import clusters
from ....cli.console import progress, wrapped
from ....units import byte_size, duration, size_of, tokens_of
from .. import model_arguments
from ..advise import flags, settings
from ..advise.account.memory import Account, MemoryLeft, account, fit
from ..advise.forecast.step_time import StepTime, step_time
from ..advise.kernel import AssumedKernel, of_forecast
from ..advise.report import memory_table
from ..advise.search.attention_choice import CHOICE_OUTPUTS, AttentionForecast
from ..advise.search.longest import Longest, best, layouts_of, longest
from ..advise.search.packed import PackedForecast, cut_of, lengths_of, packed_pins
from ..advise.search.pasted import run_flags
from ..advise.search.remedies import does_not_fit
from ..advise.search.search_space import SEARCHED, TrainingGoal, of_model
from ..advise.shapes import models
from ..call_flags import add_out, check_out

EPILOG = """\
K and M are 1,024 and 1,048,576 tokens. Without --tp the command selects the
tensor-parallel size with the least memory, makes all remaining ranks context-parallel,
and sets the largest expert-parallel size that divides the experts of the model. Without
--micro-batches (or --global-batch-size of a command) the number of micro-batches is the
smallest that fills the pipeline. --longest searches all settings that are not set, with
the values that `advise` tries. The model and the run can also be read from a Megatron
command after --:
  megatron-burst memory --gpus 64 --gpu h100 -- \\
      pretrain_gpt.py --num-layers 32 --seq-length 131072 ...

exit status: 0 if the run fits, 1 if it does not fit, 2 for invalid input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `memory`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    flags.add_run(parser)
    add = parser.add_argument
    add(
        "--reserve",
        default="4GiB",
        metavar="SIZE",
        help="memory per GPU reserved for CUDA and NCCL (4GiB)",
    )
    flags.add_packed(parser)
    flags.add_fields(parser, flags.FIELDS)
    add("--longest", action="store_true", help="find the longest sequence that fits")
    add_out(parser, "draw the memory over one step")
    add(
        "megatron",
        nargs=argparse.REMAINDER,
        metavar="[--] COMMAND",
        help="Megatron command that describes the model and the run",
    )


class MemoryEstimate(NamedTuple):
    """Result of the command `memory`.

    Attributes:
        account: Memory of the run, by items and phases.
        cluster: Cluster of the run.
        binds: Memory that limits the longest sequence, as in `MemoryLeft.binds`; None without
            `--longest`.
        chosen_by: Criterion by which the command chose parallel sizes, as text; "" if the user
            set them.
        searched: Whether the command searched all settings that the user did not set.
        packs: Forecast of packed documents; None without packed documents.
    """

    account: Account
    cluster: clusters.Cluster
    binds: str | None
    chosen_by: str
    searched: bool = False
    packs: PackedForecast | None = None

    @property
    def left(self) -> MemoryLeft:
        return fit(self.account, self.cluster)

    def time(self) -> StepTime | str:
        """Return the predicted time of a step, or the reason why there is no prediction.

        There is no prediction if the run does not fit into memory, or if the ranks of a ring cannot
        be divided equally among nodes.
        """
        if not self.left.fits:
            return "the run does not fit"
        try:
            return self.step_on(self.cluster)
        except ValueError as error:
            return str(error)

    def step_on(self, cluster: clusters.Cluster) -> StepTime:
        """Return the predicted time of a step on a cluster."""
        run = self.account.run
        if self.packs is not None:
            return self.packs.on(cluster).step(run)
        return step_time(self.account.model, cluster, run)

    def kernel(self) -> AssumedKernel:
        """Return the attention kernel that the predicted time of a step assumes."""
        return of_forecast(
            self.cluster, lambda cluster: self.step_on(cluster).seconds, self.packs is not None
        )


def run(arguments: argparse.Namespace) -> int:
    """Estimate the memory and print it.

    Returns:
        The exit status: 0 if the run fits into memory, otherwise 1.

    Raises:
        ValueError: Flags are invalid.
    """
    if arguments.longest and arguments.seq is not None:
        raise ValueError("--longest and --seq both set the sequence length; use only one of them")
    if arguments.longest and arguments.packed is not None:
        raise ValueError(
            "--longest does not support packed documents; remove --packed, or use --seq"
        )
    check_out(arguments.out)
    cluster, model, base, sized, free, packs = _read(arguments)
    documents = packs.lengths if packs is not None and packs.cut == "zigzag" else ()
    runs = [base]
    if not sized and not (arguments.longest and free is not None):
        runs = layouts_of(model, cluster, base, arguments.ep, documents)
    if arguments.longest:
        with progress("searching the longest sequence"):
            most = best(model, cluster, runs) if free is None else _searched(model, cluster, free)
        chosen_by = "" if sized else "longest sequence"
        # A search assumes one micro-batch if the number is not set.
        run = most.run if free is None or arguments.micro_batches else filled(most.run)
        estimate = MemoryEstimate(
            account(model, run), cluster, most.binds, chosen_by, free is not None
        )
    else:
        if packs is None:
            runs = [_settled(model, cluster, run) for run in runs]
        account_of = partial(account, model)
        if packs is not None:
            account_of = partial(packs.account_of, every=True)
        smallest = min(map(account_of, runs), key=lambda candidate: candidate.peak.bytes)
        chosen_by = "" if sized else "smallest peak"
        estimate = MemoryEstimate(smallest, cluster, None, chosen_by, packs=packs)
    if arguments.out:
        from . import picture

        picture.draw(estimate.account, cluster, arguments.out)
    if arguments.json:
        print(json.dumps(facts(estimate), indent=1))
    else:
        show(estimate)
    return 0 if estimate.left.fits else 1


def filled(run: settings.Settings) -> settings.Settings:
    """Return the run with the smallest number of micro-batches that keeps all pipeline stages busy.

    More micro-batches need no more memory. With interleaved stages, up to pp * vpp + pp - 1 forward
    passes of model chunks wait for their backward, and micro-batches run in rounds of pp.
    """
    return replace(run, micro_batches=run.pp if run.vpp == 1 else 2 * run.pp)


def _settled(
    model: models.Model, cluster: clusters.Cluster, run: settings.Settings
) -> settings.Settings:
    """Return the run with the attention settings that are predicted to be fastest.

    Only a run with algorithm "auto" is changed. Parallel sizes are kept. Each kind of layer may get
    its own algorithm.
    """
    if run.algorithm != "auto":
        return run
    if run.cp == 1:
        return replace(run, algorithm="burst")
    pinned: dict[str, Any] = {"ulysses": run.ulysses, "placement": run.placement}
    if run.side != "auto":
        pinned["side"] = run.side
    if run.head_chunks > 1:
        pinned["head_chunks"] = run.head_chunks
    forecast = AttentionForecast(model, cluster, pinned)
    return forecast.by_kind(forecast.settled(run))


def _searched(model: models.Model, cluster: clusters.Cluster, free: dict[str, Any]) -> Longest:
    """Return the longest sequence over all settings that the user did not set.

    Args:
        model: The model.
        cluster: The cluster.
        free: Fields of `Settings` that the user set; the search does not change them.
    """
    fixed = {name: value for name, value in free.items() if name != "micro_batches"}
    goal = TrainingGoal(1, 1, fixed, **of_model(model))
    forecast = AttentionForecast(model, cluster, fixed)
    return longest(model, cluster, goal, forecast, free.get("micro_batches"))


def _read(
    arguments: argparse.Namespace,
) -> tuple[
    clusters.Cluster, models.Model, settings.Settings, bool, dict[str, Any] | None,
    PackedForecast | None,
]:  # fmt: skip
    """Read the flags.

    Returns:
        Six values: the cluster; the model; the settings; True if the user set the parallel sizes;
            the fields of `Settings` that the user set and a search must keep, or None if settings
            cannot be searched (because a command or recipe sets them, or because a flag sets a
            field that a search does not vary); the forecast of packed documents, or None.
    """
    model, described = model_arguments.find(arguments.model, arguments.megatron)
    batch = described.pop("global_batch", None)
    fixed = described | flags.given_fields(arguments, flags.FIELDS)
    if arguments.seq is not None:
        fixed["seq"] = tokens_of(arguments.seq, "--seq")
    if "seq" not in fixed and not arguments.longest:
        raise ValueError("--seq is required, for example --seq 1M; or use --longest")
    if arguments.gpus is None:
        raise ValueError("--gpus is required: the number of GPUs, for example --gpus 8")
    cluster = flags.cluster_of(arguments)
    cluster = replace(cluster, reserve=size_of(arguments.reserve, "--reserve"))
    base = settings.Settings(**{"seq": 1, "one_queue": cluster.gpu.one_queue, **fixed})
    base = replace(base, intra=max(1, cluster.ranks_per_node // base.tp))
    free = None if described or not fixed.keys() <= {*SEARCHED, "micro_batches"} else fixed
    base, sized = _groups(base, fixed, cluster)
    if "micro_batches" not in fixed:
        base = filled(base) if batch is None else _with_batch(base, batch)
    if problem := settings.uneven_rounds(base):
        raise ValueError(problem)
    if base.algorithm == "auto" and (arguments.packed is not None or arguments.longest):
        base = replace(base, algorithm="burst")  # auto needs a length and schedules
    packs = None
    if arguments.packed is not None:
        packed_pins(fixed)
        lengths = lengths_of(arguments.packed, base.seq)
        pinned = {name: getattr(base, name) for name in CHOICE_OUTPUTS if name != "placement"}
        packs = PackedForecast(model, cluster, pinned, lengths, cut_of(fixed))
    elif arguments.layout == "balanced":
        raise ValueError("--layout balanced requires --packed; add it, or use --layout zigzag")
    if base.layout == "balanced":  # `packs` has the layout of packed documents
        base = replace(base, layout="zigzag")
    return cluster, model, base, sized, free, packs


def _with_batch(run: settings.Settings, batch: int) -> settings.Settings:
    """Return the run with as many micro-batches as a global batch of `batch` sequences has.

    Raises ValueError if `batch` is not a multiple of micro-batch size x data-parallel size.
    """
    unit = run.micro_batch * run.dp
    if batch % unit or batch < 1:
        near = max(1, -(-batch // unit)) * unit
        raise ValueError(
            f"a global batch of {batch} sequences is not a multiple of {unit} (micro-batch size "
            f"{run.micro_batch} x {run.dp} data-parallel ranks); use {near} (--global-batch-size, "
            "or train.global_batch_size of a recipe), or set --micro-batches"
        )
    return replace(run, micro_batches=batch // unit)


def _groups(
    base: settings.Settings, fixed: dict[str, Any], cluster: clusters.Cluster
) -> tuple[settings.Settings, bool]:
    """Compute the parallel size (cp or dp) that the user did not set, from the number of GPUs.

    Args:
        base: Settings of the run.
        fixed: Fields of `Settings` that the user set.
        cluster: The cluster.

    Returns:
        The settings with this size, and True if the user set tp or cp. Otherwise (`base`, False).
    """
    if "tp" not in fixed and "cp" not in fixed:
        return base, False
    ranks = base.tp * base.pp * (base.cp if "cp" in fixed else base.dp)
    if cluster.gpus % ranks:
        last = f"--cp {base.cp}" if "cp" in fixed else f"--dp {base.dp}"
        raise ValueError(
            f"--gpus {cluster.gpus} is not a multiple of the {ranks} ranks of --tp {base.tp} x "
            f"--pp {base.pp} x {last}; use {-(-cluster.gpus // ranks) * ranks} GPUs, or smaller "
            "parallel sizes"
        )
    size = cluster.gpus // ranks
    if "cp" in fixed and "dp" in fixed and size != base.dp:
        raise ValueError(
            f"--gpus {cluster.gpus} differs from --tp x --pp x --cp x --dp, {ranks * base.dp}; "
            "remove --dp"
        )
    return replace(base, **({"dp": size} if "cp" in fixed else {"cp": size})), True


# --- output ------------------------------------------------------------------------------------


def show(estimate: MemoryEstimate) -> None:
    """Print the peak of memory by items, the free memory, and the predicted time of a step."""
    (shown, cluster, binds, _, searched, packs), left = estimate, estimate.left
    console, run = wrapped(), shown.run
    console.print(Text(_headline(shown, cluster)))
    console.print(Text(_batch(run, estimate.chosen_by)))
    if packs is not None:
        console.print(Text(_packs(packs, run)))
    console.print(memory_table(shown, cluster, "item"))
    if selection := settings.selection_text(shown.model, run):
        console.print(Text(selection))
    if binds is not None:
        console.print(Text(f"longest sequence: {run.seq:,} tokens; limited by {binds}"))
        if searched:
            words = " ".join(run_flags(shown.model, run))
            console.print(Text(f"flags, in addition to the model flags: {words}"))
        else:
            console.print(
                Text("with these settings; `megatron-burst advise --longest` searches all settings")
            )
    elif left.fits:
        console.print(Text(f"fits: {byte_size(left.device)} free on every GPU", style="green"))
    else:
        account_of = None if packs is None else packs.account_of
        console.print(Text(does_not_fit(shown, cluster, account_of), style="bold red"))
    if left.fits:
        console.print(Text(_step(time := estimate.time(), cluster)))
        if not isinstance(time, str):
            console.print(Text(estimate.kernel().described))
    console.print(Text("Analytical estimate from tensor sizes, not a measurement on a GPU."))


def _step(time: StepTime | str, cluster: clusters.Cluster) -> str:
    if isinstance(time, str):
        return f"predicted step time: none ({time})"
    share = time.parts[time.bottleneck] / time.seconds
    return (
        f"predicted step time: {duration(time.seconds)} ({share:.0%} {time.bottleneck}), MFU "
        f"{time.mfu:.0%}; {cluster.described}"
    )


def facts(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the output of `show` as a dict for JSON, in bytes and seconds."""
    shown, packs, time = estimate.account, estimate.packs, estimate.time()
    run = shown.run
    groups = {name: getattr(run, name) for name in ("tp", "cp", "pp", "vpp", "ep", "dp")}
    return {
        "model": shown.model.name,
        "seq": run.seq,
        "documents": None if packs is None else list(packs.lengths),
        "groups": groups,
        "peak": {"bytes": shown.peak.bytes, "phase": shown.peak.phase,
                 "items": dict(shown.peak.items)},
        "phases": [{"phase": p.phase, "bytes": p.bytes} for p in shown.peaks],
        "host": dict(shown.host),
        "room": estimate.cluster.room,
        "host_room": round(estimate.cluster.host_per_rank),
        "fits": estimate.left.fits,
        "not_counted": list(shown.model.uncounted),
        "binds": estimate.binds,
        "flags": run_flags(shown.model, run) if estimate.searched else None,
        "seconds": None if isinstance(time, str) else time.seconds,
        "mfu": None if isinstance(time, str) else time.mfu,
        "kernel": None if isinstance(time, str) else estimate.kernel().facts(),
    }  # fmt: skip


def _batch(run: settings.Settings, chosen_by: str) -> str:
    """Return the output line with the sequences per step and the parallel sizes.

    Parallel sizes are included only if the command chose them; `chosen_by` is the criterion.
    """
    count = run.micro_batch * run.micro_batches * run.dp
    text = f"{count} sequence{'s' * (count > 1)} per step"
    if chosen_by:
        experts = f", EP {run.ep}" * (run.ep > 1)
        text += f"; sizes chosen: TP {run.tp}, CP {run.cp}{experts} ({chosen_by})"
    return text


def _packs(packs: PackedForecast, run: settings.Settings) -> str:
    """Return the output line about packed documents: number of documents, layout and padding."""
    count, padding = len(packs.lengths), run.seq - sum(packs.lengths)
    text = f"packs of {count} document{'s' * (count > 1)}, layout {packs.cut}"
    return text + f", {padding:,} tokens of padding" * (padding > 0)


def _headline(shown: Account, cluster: clusters.Cluster) -> str:
    run = shown.run
    sizes = {"TP": run.tp, "CP": run.cp, "PP": run.pp, "EP": run.ep, "DP": run.dp}
    groups = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    details = [f"recompute {run.recompute}", f"store {run.store:g}", f"offload {run.offload:g}",
           f"row chunks {run.sequence_chunks}", f"MLP tiles {run.mlp_tiles}",
           f"gradients {run.gradients}"]  # fmt: skip
    if run.by_kind:
        kinds = [f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items()]
        details.append(", ".join([f"--context-parallel-algo auto: {run.algorithm}", *kinds]))
    if run.ulysses > 1:
        details.append(f"{run.ulysses} ranks share heads")
    if run.fsdp:
        details.append("FSDP")
    return (
        f"{shown.model.name}, {run.seq:,} tokens on {cluster.gpus} x {cluster.gpu.name}: {groups}; "
        + ", ".join(details)
    )
