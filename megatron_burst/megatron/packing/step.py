# SPDX-License-Identifier: Apache-2.0
"""Packs the documents of each training step anew, between the data loader and the schedule.

A step reads exactly the samples that it would have read without, so consumed samples, the sampler
and checkpoints know nothing of it: nothing is carried from step to step. Only the number of
micro-batches that Megatron's schedule runs is another. Evaluation keeps the batches of the data
loader, because some of its losses are means per micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ...config import OFF, BurstConfig
from ...packing import Packing, Work, pack
from ..data.cut import head_sizes
from ..model_shape import causal_window
from ..patching import PatchSet, log, wrap_steps
from . import documents
from .documents import documents_of, micro_batch, names_of

ASKED = "packing"  # note: a configuration of this run asked for it
_TOLD = "packing was logged"


def asked(burst: BurstConfig) -> bool:
    """Whether steps are packed with these choices."""
    return burst.pack == "documents" and burst.algorithm != OFF


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what gives Megatron's schedules packed micro-batches."""
    wrap_steps(patches, functools.partial(_packed, patches))


def _packed(patches: PatchSet, run: Callable, named: dict[str, Any]) -> Any:
    chunks = named["model"] if isinstance(named["model"], list) else [named["model"]]
    config = get_model_config(chunks[0])
    burst = getattr(config, "burst", None)
    wanted = patches.notes.get(ASKED) and burst is not None and asked(burst)
    iterators, several = named["data_iterator"], isinstance(named["data_iterator"], list)
    ready = isinstance(iterators[0] if several else iterators, ReadyBatches)
    if not wanted or ready or named.get("forward_only"):
        return run(**named)
    multiple = config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    packed, packing = step(
        iterators if several else [iterators],
        named["num_microbatches"], named["seq_length"], work_of(config), multiple,
    )  # fmt: skip
    if packing is not None and not patches.notes.setdefault(_TOLD, False):
        patches.notes[_TOLD] = True
        log(_summary(packing, named["num_microbatches"]))
    named["num_microbatches"] = _agreed(packing.count if packing else 0)
    named["data_iterator"] = packed if several else packed[0]
    return run(**named)


class ReadyBatches:
    """An iterator over micro-batches that were packed already."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._left = iter(batches)

    def __next__(self) -> Any:
        return next(self._left)


def _summary(packing: Packing, count: int) -> str:
    return (
        f"--burst-pack documents: in the first step {packing.count} micro-batches on each of "
        f"{len(packing.places)} data-parallel ranks, {count} as the data loader made them; the "
        f"busiest {packing.imbalance:.3f} of their mean"
    )


def step(
    iterators: Sequence[Any], count: int, total: int, work: Work, multiple: int
) -> tuple[list[Any], Packing | None]:
    """Iterators over packed micro-batches for those over the batches of the data loader.

    iterators: one per model chunk, all over the same batches; None where nothing is read. count:
    batches of a step; total: tokens of a micro-batch. Also returns the packing, None on a rank
    that reads nothing. Raises ValueError, on every rank that reads, for batches or documents that
    cannot be packed.
    """
    read = [[next(one) for _ in range(count)] for one in iterators if one is not None]
    if not read:
        return list(iterators), None
    try:
        packing, batches = _repacked(read[0], total, work, multiple)
    except ValueError:
        with contextlib.suppress(ValueError):
            _agreed(_FAILED)  # ranks that read nothing wait for the number of micro-batches
        raise
    # Scripts change the batches that they are given, so every chunk has its own.
    packed = [
        None if one is None else iter([dict(batch) for batch in batches]) for one in iterators
    ]
    return packed, packing


def _repacked(
    batches: Sequence[dict[str, Any]], total: int, work: Work, multiple: int
) -> tuple[Packing, list[dict[str, Any]]]:
    group, problem, samples = _data_group(), None, []
    try:
        samples = [documents_of(batch) for batch in batches]
    except ValueError as error:
        problem = error
    try:
        of_ranks = documents.gather(None if problem else _numbers(samples), group)
    except ValueError as error:
        raise problem or error from None
    lengths = [[number >> 1 for number in numbers] for numbers in of_ranks]
    flat = [length for one in lengths for length in one]
    packing = pack(
        flat, work, ranks=group.size(), capacity=total, multiple=multiple, original=_given(of_ranks)
    )
    homes = [[number for bin in places for number in bin] for places in packing.places]
    own = [document for sample in samples for document in sample]
    like = names_of(batches[0])
    here = documents.route(own, homes, lengths, like, group)
    return packing, [
        micro_batch([here[number] for number in bin], like, total)
        for bin in packing.places[group.rank()]
    ]


def _numbers(samples: Iterable[Iterable[dict[str, torch.Tensor]]]) -> list[int]:
    """Lengths of documents, doubled, and one more for the first of a sample."""
    return [
        2 * len(document["tokens"]) + (index == 0)
        for sample in samples
        for index, document in enumerate(sample)
    ]


def _given(of_ranks: Iterable[Iterable[int]]) -> list[list[int]]:
    """The documents of each sample, by their numbers in the batch."""
    samples: list[list[int]] = []
    for index, number in enumerate(number for numbers in of_ranks for number in numbers):
        if number & 1:
            samples.append([])
        samples[-1].append(index)
    return samples


_FAILED = -1


def _agreed(number: int) -> int:
    """The number of micro-batches, from the tensor- and pipeline-parallel ranks that read data."""
    group: Any = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return number
    # Nothing is known of 0: such a rank leaves both to the others.
    bounds = torch.tensor([number, -number or -_MANY], device=documents.device_of(group))
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return int(bounds[0])
    raise ValueError(
        "--burst-pack: ranks of one model found different micro-batches, or no way to pack: "
        "another rank says why"
    )


_MANY = 2**40


def _data_group() -> Any:
    """Ranks with other data and the same part of each sequence, on the CPU if Megatron has it."""
    with contextlib.suppress(AssertionError):
        return parallel_state.get_data_parallel_group_gloo()
    return parallel_state.get_data_parallel_group()


def work_of(config: Any) -> Work:
    """FLOPs of attention and of linear layers of a `TransformerConfig`; the LM head aside."""
    heads, width = config.num_attention_heads, config.hidden_size
    of_query, of_value = head_sizes(config)
    groups = getattr(config, "num_query_groups", None) or heads
    projections = width * (heads + groups) * (of_query + of_value)
    token = 2 * config.num_layers * (projections + width * _mlp_width(config))
    windows = [causal_window(config, number) for number in range(1, config.num_layers + 1)]
    return Work.of(token_flops=token, pair_flops=2 * heads * (of_query + of_value), windows=windows)


def _mlp_width(config: Any) -> int:
    """Columns of an MLP's matrices together; of all experts that a token goes to."""
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    hidden = config.ffn_hidden_size
    if getattr(config, "num_moe_experts", None):
        hidden = config.moe_router_topk * config.moe_ffn_hidden_size
        hidden += getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    return matrices * hidden
