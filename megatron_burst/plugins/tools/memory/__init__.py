# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst memory`: memory of one rank, item by item, over one training step.

    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --seq 1M
    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --longest
    megatron-burst memory --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...
    megatron-burst memory --model llama3_8b_pretrain_8gpu_h100_256k --gpus 8    (a recipe)

Analytical estimate from tensor sizes, not a measurement; `tools.advise.account.memory` says what is
counted.
Exit status: 0 it fits, 1 it does not, 2 bad input.
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
K and M are 1,024 and 1,048,576 tokens. Without --tp the tensor-parallel size that
takes least memory is chosen, all remaining ranks are context-parallel, and as many
of them as divide the experts of a model are expert-parallel. Without --micro-batches
(or --global-batch-size of a command) there are as many as fill the pipeline. With
--longest all settings that are not given are searched, as `advise` has them. The
model and the run can also be read from a Megatron command after --:
  megatron-burst memory --gpus 64 --gpu h100 -- \\
      pretrain_gpt.py --num-layers 32 --seq-length 131072 ...

exit status: 0 it fits, 1 it does not, 2 bad input
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
        help="memory of a GPU kept for CUDA and NCCL (4GiB)",
    )
    flags.add_packed(parser)
    flags.add_fields(parser, flags.FIELDS)
    add("--longest", action="store_true", help="find the longest sequence that fits")
    add_out(parser, "draw the memory over one step")
    add(
        "megatron",
        nargs=argparse.REMAINDER,
        metavar="[--] COMMAND",
        help="a Megatron command that describes model and run",
    )


class Found(NamedTuple):
    """What is shown: the account of a run, the cluster it is on, what limits the longest sequence,
    None where that was not asked for, by what parallel sizes were chosen, "" where given, whether
    all settings that are not given were searched, and what is known of packed documents.
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
        """The time of a step; or why none is predicted: the run does not fit, or rings need equally
        many ranks on each node.
        """
        if not self.left.fits:
            return "the run does not fit"
        try:
            return self.step_on(self.cluster)
        except ValueError as error:
            return str(error)

    def step_on(self, cluster: clusters.Cluster) -> StepTime:
        """The time of a step on a cluster."""
        run = self.account.run
        if self.packs is not None:
            return self.packs.on(cluster).step(run)
        return step_time(self.account.model, cluster, run)

    def kernel(self) -> AssumedKernel:
        """The attention kernel that the time of a step assumes."""
        return of_forecast(
            self.cluster, lambda other: self.step_on(other).seconds, self.packs is not None
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the account. Returns the exit status."""
    if arguments.longest and arguments.seq is not None:
        raise ValueError("--longest looks for --seq: give one of them")
    if arguments.longest and arguments.packed is not None:
        raise ValueError("--longest finds the length of one sequence: leave --packed out")
    check_out(arguments.out)
    cluster, model, base, given, free, packs = _read(arguments)
    documents = packs.lengths if packs is not None and packs.cut == "zigzag" else ()
    runs = [base]
    if not given and not (arguments.longest and free is not None):
        runs = layouts_of(model, cluster, base, arguments.ep, documents)
    if arguments.longest:
        with progress("searching the longest sequence"):
            most = best(model, cluster, runs) if free is None else _searched(model, cluster, free)
        chosen_by = "" if given else "longest sequence"
        # A search counts one micro-batch where nobody said how many.
        run = most.run if free is None or arguments.micro_batches else filled(most.run)
        found = Found(account(model, run), cluster, most.binds, chosen_by, free is not None)
    else:
        if packs is None:
            runs = [_settled(model, cluster, each) for each in runs]
        held = partial(account, model) if packs is None else partial(packs.account_of, every=True)
        smallest = min(map(held, runs), key=lambda one: one.peak.bytes)
        found = Found(smallest, cluster, None, "" if given else "smallest peak", packs=packs)
    if arguments.out:
        from . import picture

        picture.draw(found.account, cluster, arguments.out)
    if arguments.json:
        print(json.dumps(facts(found), indent=1))
    else:
        show(found)
    return 0 if found.left.fits else 1


def filled(run: settings.Settings) -> settings.Settings:
    """The run with no more micro-batches than fill its pipeline: more take as much memory, and
    longer. Interleaved stages hold pp * vpp + pp - 1 chunks of layers, and take rounds of pp
    micro-batches.
    """
    return replace(run, micro_batches=run.pp if run.vpp == 1 else 2 * run.pp)


def _settled(
    model: models.Model, cluster: clusters.Cluster, run: settings.Settings
) -> settings.Settings:
    """Return the run with what `--context-parallel-algo auto` is predicted to choose for each kind
    of layers; the run itself if it names an algorithm. Groups are those of the run.
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
    """Return the longest sequence with everything searched that is not given."""
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
    """The cluster, the model, the run, whether its groups are given, what is fixed where a
    search is left the rest: None where a command or a recipe says all, or what it cannot vary; and
    what is known of packed documents, None without them.
    """
    model, described = model_arguments.find(arguments.model, arguments.megatron)
    batch = described.pop("global_batch", None)
    given = described | flags.given_fields(arguments, flags.FIELDS)
    if arguments.seq is not None:
        given["seq"] = tokens_of(arguments.seq, "--seq")
    if "seq" not in given and not arguments.longest:
        raise ValueError("--seq is needed, such as --seq 1M, or --longest")
    if arguments.gpus is None:
        raise ValueError("--gpus is needed, such as --gpus 8")
    cluster = flags.cluster_of(arguments)
    cluster = replace(cluster, reserve=size_of(arguments.reserve, "--reserve"))
    base = settings.Settings(**{"seq": 1, **given})
    base = replace(base, intra=max(1, cluster.ranks_per_node // base.tp))
    free = None if described or not given.keys() <= {*SEARCHED, "micro_batches"} else given
    base, sized = _groups(base, given, cluster)
    if "micro_batches" not in given:
        base = filled(base) if batch is None else _shared_out(base, batch)
    if said := settings.uneven_rounds(base):
        raise ValueError(said)
    if base.algorithm == "auto" and (arguments.packed is not None or arguments.longest):
        base = replace(base, algorithm="burst")  # no length, or no schedules, to choose it by
    packs = None
    if arguments.packed is not None:
        packed_pins(given)
        lengths = lengths_of(arguments.packed, base.seq)
        pinned = {name: getattr(base, name) for name in CHOICE_OUTPUTS if name != "placement"}
        packs = PackedForecast(model, cluster, pinned, lengths, cut_of(given))
    elif arguments.layout == "balanced":
        raise ValueError("--layout balanced is for packed documents: give --packed, or zigzag")
    if base.layout == "balanced":  # of packs, which have it apart
        base = replace(base, layout="zigzag")
    return cluster, model, base, sized, free, packs


def _shared_out(run: settings.Settings, batch: int) -> settings.Settings:
    """The run with the micro-batches of a step of so many sequences. ValueError where ranks cannot
    have equally many.
    """
    each = run.micro_batch * run.dp
    if batch % each or batch < 1:
        near = max(1, -(-batch // each)) * each
        raise ValueError(
            f"a global batch of {batch} sequences is not a multiple of {each}, micro-batches of "
            f"{run.micro_batch} x {run.dp} data-parallel ranks: take {near} (--global-batch-size, "
            "train.global_batch_size of a recipe), or give --micro-batches"
        )
    return replace(run, micro_batches=batch // each)


def _groups(
    base: settings.Settings, given: dict[str, Any], cluster: clusters.Cluster
) -> tuple[settings.Settings, bool]:
    """The run with all GPUs in its groups; False where the tensor-parallel size is left open."""
    if "tp" not in given and "cp" not in given:
        return base, False
    others = base.tp * base.pp * (base.cp if "cp" in given else base.dp)
    if cluster.gpus % others:
        last = f"--cp {base.cp}" if "cp" in given else f"--dp {base.dp}"
        raise ValueError(
            f"--gpus {cluster.gpus} is not a multiple of the {others} ranks of --tp {base.tp} x "
            f"--pp {base.pp} x {last}"
        )
    rest = cluster.gpus // others
    if "cp" in given and "dp" in given and rest != base.dp:
        raise ValueError(
            f"--gpus {cluster.gpus} is not --tp x --pp x --cp x --dp, {others * base.dp}: leave "
            "--dp out"
        )
    return replace(base, **({"dp": rest} if "cp" in given else {"cp": rest})), True


# --- what is printed ---------------------------------------------------------------------------


def show(found: Found) -> None:
    """Print the peak by item, what is left, and the time of a step."""
    (shown, cluster, binds, _, searched, packs), left = found, found.left
    console, run = wrapped(), shown.run
    console.print(Text(_headline(shown, cluster)))
    console.print(Text(_batch(run, found.chosen_by)))
    if packs is not None:
        console.print(Text(_packs(packs, run)))
    console.print(memory_table(shown, cluster, "item"))
    if said := settings.selection_text(shown.model, run):
        console.print(Text(said))
    if binds is not None:
        console.print(Text(f"longest sequence: {run.seq:,} tokens; limited by {binds}"))
        if searched:
            words = " ".join(run_flags(shown.model, run))
            console.print(Text(f"flags, besides those of the model: {words}"))
        else:
            console.print(Text("with these settings; `megatron-burst advise --longest` varies all"))
    elif left.fits:
        console.print(Text(f"fits: {byte_size(left.device)} free on every GPU", style="green"))
    else:
        held = None if packs is None else packs.account_of
        console.print(Text(does_not_fit(shown, cluster, held), style="bold red"))
    if left.fits:
        console.print(Text(_step(time := found.time(), cluster)))
        if not isinstance(time, str):
            console.print(Text(found.kernel().described))
    console.print(Text("Analytical estimate from tensor sizes, not a measurement on a GPU."))


def _step(time: StepTime | str, cluster: clusters.Cluster) -> str:
    if isinstance(time, str):
        return f"predicted step time: none ({time})"
    share = time.parts[time.bottleneck] / time.seconds
    return (
        f"predicted step time: {duration(time.seconds)} ({share:.0%} {time.bottleneck}), MFU "
        f"{time.mfu:.0%}; {cluster.described}"
    )


def facts(found: Found) -> dict[str, Any]:
    """The same as plain data: bytes, seconds."""
    (shown, cluster, binds, _, searched, packs), time, run = found, found.time(), found.account.run
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
        "room": cluster.room,
        "host_room": round(cluster.host_per_rank),
        "fits": found.left.fits,
        "not_counted": list(shown.model.uncounted),
        "binds": binds,
        "flags": run_flags(shown.model, run) if searched else None,
        "seconds": None if isinstance(time, str) else time.seconds,
        "mfu": None if isinstance(time, str) else time.mfu,
        "kernel": None if isinstance(time, str) else found.kernel().facts(),
    }  # fmt: skip


def _batch(run: settings.Settings, chosen_by: str) -> str:
    """Sequences per step, and which sizes nobody gave."""
    count = run.micro_batch * run.micro_batches * run.dp
    said = f"{count} sequence{'s' * (count > 1)} per step"
    if chosen_by:
        experts = f", EP {run.ep}" * (run.ep > 1)
        said += f"; sizes chosen: TP {run.tp}, CP {run.cp}{experts} ({chosen_by})"
    return said


def _packs(packs: PackedForecast, run: settings.Settings) -> str:
    """How many documents there are, how they are cut, and what padding they get."""
    count, padding = len(packs.lengths), run.seq - sum(packs.lengths)
    said = f"packs of {count} document{'s' * (count > 1)}, layout {packs.cut}"
    return said + f", {padding:,} tokens of padding" * (padding > 0)


def _headline(found: Account, cluster: clusters.Cluster) -> str:
    run = found.run
    sizes = {"TP": run.tp, "CP": run.cp, "PP": run.pp, "EP": run.ep, "DP": run.dp}
    groups = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    how = [f"recompute {run.recompute}", f"store {run.store:g}", f"offload {run.offload:g}",
           f"{run.sequence_chunks} sequence chunks", f"{run.mlp_tiles} MLP tiles",
           f"gradients {run.gradients}"]  # fmt: skip
    if run.by_kind:
        own = [f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items()]
        how.append(", ".join([f"--context-parallel-algo auto: {run.algorithm}", *own]))
    if run.ulysses > 1:
        how.append(f"{run.ulysses} ranks share heads")
    if run.fsdp:
        how.append("FSDP")
    return (
        f"{found.model.name}, {run.seq:,} tokens on {cluster.gpus} x {cluster.gpu.name}: {groups}; "
        + ", ".join(how)
    )
