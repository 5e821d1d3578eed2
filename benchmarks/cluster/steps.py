"""Whole training steps over shaped links: packed documents, a small Llama of Megatron-Core.

Every method trains the same model on the same documents: forward, backward, reduction of gradients
and optimizer, all computed on the cores that the ranks share. So the benchmark shows the cost of
links, not the cost of imbalance. Megatron's own attention over several ranks needs Transformer
Engine and a GPU, so its schedules run on our code. Dynamic context parallelism follows its
scheduler's rule.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.packed import megatron
from benchmarks.report import Ratio, markdown

from .groups import placed
from .network import Network, Rates
from .problems import bounds
from .ranks import RankError, Ranks, State

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES, PER_NODE, VOCABULARY = 2, 2, 512
MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 "
    "--num-query-groups 4 --data-path none --init-method-std 0.06 --lr 1e-3 --min-lr 1e-4"
)
SAME = 1e-4  # relative difference between losses of two methods


class Way(NamedTuple):
    """Method of context parallelism to split a pack.

    Attributes:
        padded: Pad each document to a multiple of 2 x ranks, in zigzag order, as Megatron requires.
        dynamic: Put documents into micro-batches of groups of ranks by Megatron's rule. Otherwise
            each pack is a micro-batch of all ranks.
    """

    name: str
    algorithm: str
    layout: str = "zigzag"
    padded: bool = True
    side: str = "kv"
    dynamic: bool = False


OURS = "ours"
WAYS = (
    Way("Megatron p2p", "ring"),
    Way("Megatron a2a", "ulysses"),
    Way("Megatron dynamic CP", "ring", dynamic=True),
    Way(OURS, "auto", "balanced", False, "auto"),
)


class Pack(NamedTuple):
    """Documents one after another, with or without padding behind each.

    Attributes:
        ends, padded: Cumulative lengths without and with padding.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    counts: np.ndarray  # 1 if the label belongs to the same document
    ends: list[int]
    padded: list[int]

    def of(self, documents: Sequence[int]) -> Pack:
        """Return the pack of the numbered documents, in this order."""
        order, rooms = [*documents], list(pairwise(self.padded))
        rows = np.concatenate([np.arange(*rooms[number]) for number in order])
        ends, padded = (
            [0, *np.cumsum(np.diff(bounds)[order]).tolist()] for bounds in (self.ends, self.padded)
        )
        return Pack(*(x[rows] for x in self[:4]), ends, padded)

    @classmethod
    def joined(cls, packs: Sequence[Pack]) -> Pack:
        """Return the documents of several packs in one."""
        columns = [np.concatenate(column) for column in zip(*(p[:4] for p in packs), strict=True)]
        lengths = [np.concatenate([np.diff(p[i]) for p in packs]) for i in (4, 5)]
        return cls(*columns, *([0, *np.cumsum(pack_lengths).tolist()] for pack_lengths in lengths))


class Share(NamedTuple):
    """Work of a group of `ranks` ranks in a micro-batch."""

    ranks: int
    pack: Pack


class Step(NamedTuple):
    """One step: seconds from the first rank's begin to the last rank's end, and the loss."""

    seconds: float
    loss: float


def pack(documents: str, seed: int, length: int, multiple: int) -> Pack:
    """Return the documents of `bounds`, each padded to a multiple, equal on all ranks.

    Their tokens do not depend on the padding.
    """
    ends = bounds(documents, seed, length)
    lengths = np.diff(ends)
    drawn_tokens = np.random.default_rng((seed, 1)).integers(0, VOCABULARY, length)
    room = -(-lengths // multiple) * multiple
    padded = [0, *np.cumsum(room).tolist()]
    inside = np.concatenate([np.arange(document_length) for document_length in lengths])
    slots = np.repeat(padded[:-1], lengths) + inside
    tokens, labels, positions, counts = np.zeros((4, padded[-1]), dtype=np.int64)
    tokens[slots], positions[slots] = drawn_tokens, inside
    has_next = inside < np.repeat(lengths, lengths) - 1
    labels[slots], counts[slots] = np.where(has_next, np.roll(drawn_tokens, -1), 0), has_next
    return Pack(tokens, labels, positions, counts, ends, padded)


def dynamic(pack_of_step: Pack, tokens: int, size: int, rank: int) -> list[Share]:
    """Return the work of `rank`'s group in each micro-batch, by the rule of Megatron's scheduler.

    The rule sees documents with padding.

    Args:
        tokens: Maximum per rank, unless the longest document needs more.
    """
    lengths = np.diff(pack_of_step.padded).tolist()
    max_tokens = max(tokens, -(-max(lengths) // size))
    return [
        Share(part.size, pack_of_step.of(part.documents))
        for parts in placed(megatron.dynamic(lengths, size, max_tokens), lengths)
        for part in parts
        if part.first <= rank < part.first + part.size
    ]


def start(state: State) -> None:
    """Start Megatron on the CPU and create the smaller groups, once per rank."""
    from megatron_burst.plugins.testing import cpu

    os.environ["WORLD_SIZE"] = str(dist.get_world_size())  # as a launcher sets it
    cpu.enable()
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt  # noqa: F401  the slow import

    size, state["groups"] = 2, {}
    while size < dist.get_world_size():
        state["groups"][size], _ = dist.new_subgroups(size)
        size *= 2


def train(
    state: State, way: Way, documents: str, tokens: int, steps: Sequence[Sequence[int]]
) -> list[tuple[float, float, float]]:
    """Train on the packs of these seeds; return begin, end and loss of each step. Collective."""
    import arguments
    import model as example
    import pretrain_gpt
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    size = dist.get_world_size()
    words = f"{MODEL} --seq-length {tokens * size} --vocab-size {VOCABULARY}"
    words += f" --context-parallel-size {size} --burst-layout {way.layout}"
    words += f" --hierarchical-context-parallel-sizes {PER_NODE} {size // PER_NODE}"
    args = arguments.parse_args(words.split())
    burst.install(layout=way.layout)
    try:
        config = example.model_config(args)
        choice = mb.BurstConfig(algorithm=way.algorithm, layout=way.layout, side=way.side)
        burst.configure(config, choice)
        if "megatron" not in state:
            pretrain_gpt.make_groups(args)
            state["megatron"] = True
        torch.manual_seed(args.seed)
        stages = example.build_model(args, config)
        optimizer, _ = example.build_optimizer(args, config, stages)
        optimizer.param_groups[0]["lr"] = args.lr
        step_results = []
        for seeds in steps:
            multiple = 2 * size if way.padded else 1
            packs = [pack(documents, seed, tokens * size, multiple) for seed in seeds]
            dist.barrier()
            begin = time.perf_counter()
            shares = [Share(size, step_pack) for step_pack in packs]
            if way.dynamic:
                shares = dynamic(Pack.joined(packs), tokens, size, state["rank"])
            stages[0].zero_grad_buffer()
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=pretrain_step, data_iterator=[batches(shares, state["groups"])],
                model=stages, num_microbatches=len(shares), seq_length=len(shares[0].pack.tokens),
                micro_batch_size=1,
            )  # fmt: skip
            optimizer.step()
            end = time.perf_counter()
            step_results.append((begin, end, pretrain_gpt.mean_over_all_tokens(reports)))
        return step_results
    finally:
        burst.uninstall()


def batches(shares: Sequence[Share], groups: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """Return this rank's part of each micro-batch.

    Args:
        groups: Groups of ranks by size, except groups of one rank and of all ranks.
    """
    import megatron_burst.megatron as burst
    from megatron_burst.megatron.data.packed import params_of

    for ranks, whole in shares:
        ends, padded = (torch.tensor(x, dtype=torch.int32) for x in (whole.ends, whole.padded))
        room = padded if whole.ends != whole.padded else None
        params = params_of(ends, int(ends.diff().max()), room)
        params.cp_group, params.local_cp_size = groups.get(ranks), ranks
        names = ("tokens", "labels", "position_ids", "loss_mask")
        shards = {
            name: burst.shard_sequence(torch.from_numpy(x)[None], params)
            for name, x in zip(names, whole[:4], strict=True)
        }
        yield shards | {"loss_mask": shards["loss_mask"].float(), "packed_seq_params": params}


def pretrain_step(data: Iterator[dict[str, Any]], model: torch.nn.Module) -> Any:
    """Run one micro-batch, as Megatron's schedules call it."""
    from functools import partial

    import pretrain_gpt

    batch = next(data)
    losses = model(
        batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"],
        loss_mask=batch["loss_mask"], packed_seq_params=batch["packed_seq_params"],
    )  # fmt: skip
    return losses, partial(pretrain_gpt.sum_of_losses, batch["loss_mask"])


def measured(
    rates: str, documents: Sequence[str], tokens: int, packs: int, rounds: int, steps: int, say: Any
) -> str:
    """Run all methods in turn, `rounds` times, each with one warm-up step and `steps` timed steps.

    Args:
        packs: Packs per step.
    """
    from .bench import built

    network, lines = Network(NODES, PER_NODE, Rates.parse(rates)), []
    with built(network), Ranks(network) as ranks:
        ranks.run(start)
        for kind in documents:
            by_way: dict[str, list[Step]] = {way.name: [] for way in WAYS}
            for number in range(rounds):
                first = number * (steps + 1)
                round_steps = range(first, first + steps + 1)
                seeds = [range(step * packs, (step + 1) * packs) for step in round_steps]
                for way in WAYS:
                    say(f"documents {kind}, {way.name} ({number + 1}/{rounds})")
                    runs = ranks.run(train, way, kind, tokens, seeds)
                    by_way[way.name] += stepped(runs)[1:]
            agree(by_way)
            lines += table(kind, by_way, packs * tokens * network.size)
    heads = ["documents", "way", "seconds of a step", "real tokens per second",
             "tokens per second of ours over it"]  # fmt: skip
    return markdown(heads, lines)


def stepped(runs: Sequence[Sequence[tuple[float, float, float]]]) -> list[Step]:
    """Join the steps of all ranks; all share one clock and one loss."""
    return [
        Step(
            max(end for _, end, _ in of_ranks) - min(begin for begin, _, _ in of_ranks),
            of_ranks[0][2],
        )
        for of_ranks in zip(*runs, strict=True)
    ]


def agree(by_way: dict[str, list[Step]]) -> None:
    """Raise RankError unless all methods have the same losses."""
    names = list(by_way)
    for name in names[1:]:
        for first, step in zip(by_way[names[0]], by_way[name], strict=True):
            if not abs(first.loss - step.loss) <= SAME * abs(first.loss):
                raise RankError(f"{name}: the loss is {step.loss}, {names[0]}'s {first.loss}")


def table(kind: str, steps_by_way: dict[str, list[Step]], tokens: int) -> list[list[str]]:
    """Return a table with a row per method; `tokens` are the real tokens of a step."""
    times = {name: [step.seconds for step in way_steps] for name, way_steps in steps_by_way.items()}
    return [
        [kind, name, f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
         f"{tokens / median(seconds):,.0f}", str(Ratio.of(seconds, times[OURS]))]
        for name, seconds in times.items()
    ]  # fmt: skip
