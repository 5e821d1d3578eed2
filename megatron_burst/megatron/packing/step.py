# SPDX-License-Identifier: Apache-2.0
"""Repacking of the documents of each training step, between the data loader and the schedule.

A step reads the same samples as without repacking and keeps no samples for the next step. So the
count of consumed samples, the sampler and checkpoints do not change. Only the number of
micro-batches of the step changes. Evaluation uses the batches of the data loader, because some
evaluation losses are means per micro-batch.
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
from ..selection import burst_of
from . import documents
from .documents import documents_of, micro_batch, names_of

_LOGGED = "packing"


def packs_steps(burst: BurstConfig) -> bool:
    """Return whether steps are packed with these options."""
    return burst.pack == "documents" and burst.algorithm != OFF


def patch(patches: PatchSet) -> None:
    """Wrap Megatron's schedules, so that training steps use packed micro-batches."""
    wrap_steps(patches, functools.partial(_packed, patches))


def _packed(patches: PatchSet, run: Callable, named: dict[str, Any]) -> Any:
    chunks = named["model"] if isinstance(named["model"], list) else [named["model"]]
    config = get_model_config(chunks[0])
    burst = burst_of(config)
    packs = patches.run.packs_documents and burst is not None and packs_steps(burst)
    iterators, several = named["data_iterator"], isinstance(named["data_iterator"], list)
    ready = isinstance(iterators[0] if several else iterators, PackedBatchIterator)
    if not packs or ready or named.get("forward_only"):
        return run(**named)
    multiple = config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    packed, packing = step(
        iterators if several else [iterators],
        named["num_microbatches"], named["seq_length"], work_of(config), multiple,
    )  # fmt: skip
    if packing is not None and _LOGGED not in patches.run.logged:
        patches.run.logged.add(_LOGGED)
        log(_summary(packing, named["num_microbatches"]))
    named["num_microbatches"] = _agreed(packing.count if packing else 0)
    named["data_iterator"] = packed if several else packed[0]
    return run(**named)


class PackedBatchIterator:
    """An iterator over micro-batches that are already packed."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._left = iter(batches)

    def __next__(self) -> Any:
        return next(self._left)


def _summary(packing: Packing, count: int) -> str:
    return (
        f"--burst-pack documents: in the first step {packing.count} micro-batches on each of "
        f"{len(packing.places)} data-parallel ranks ({count} before packing); the busiest rank has "
        f"{packing.imbalance:.3f} times the mean work"
    )


def step(
    iterators: Sequence[Any], count: int, total: int, work: Work, multiple: int
) -> tuple[list[Any], Packing | None]:
    """Return iterators over packed micro-batches in place of the data loader's iterators.

    Args:
        iterators: one per model chunk; all yield the same batches. An entry is None if the chunk
            reads no data.
        count: number of batches in a step.
        total: tokens of a micro-batch.
        work: the cost of a token and of a query-key pair.
        multiple: the number of micro-batches must be a multiple of this number.

    Returns:
        The iterators, and the packing (None on a rank that reads no data).

    Raises:
        ValueError: Batches or documents cannot be packed; raised on every rank that reads.
    """
    present = [iterator for iterator in iterators if iterator is not None]
    read = [[next(iterator) for _ in range(count)] for iterator in present]
    if not read:
        return list(iterators), None
    try:
        packing, batches = _repacked(read[0], total, work, multiple)
    except ValueError:
        with contextlib.suppress(ValueError):
            _agreed(_FAILED)  # ranks that read nothing wait for the number of micro-batches
        raise
    # Scripts change the batches that they get, so every chunk gets its own copies.
    packed = [
        None if iterator is None else iter([dict(batch) for batch in batches])
        for iterator in iterators
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
        numbers_by_rank = documents.gather(None if problem else _numbers(samples), group)
    except ValueError as error:
        raise problem or error from None
    lengths = [[number >> 1 for number in numbers] for numbers in numbers_by_rank]
    flat = [length for lengths_of_rank in lengths for length in lengths_of_rank]
    packing = pack(
        flat,
        work,
        ranks=group.size(),
        capacity=total,
        multiple=multiple,
        original=_samples(numbers_by_rank),
    )
    homes = [[number for bin in places for number in bin] for places in packing.places]
    own = [document for sample in samples for document in sample]
    like = names_of(batches[0])
    routed = documents.route(own, homes, lengths, like, group)
    return packing, [
        micro_batch([routed[number] for number in bin], like, total)
        for bin in packing.places[group.rank()]
    ]


def _numbers(samples: Iterable[Iterable[dict[str, torch.Tensor]]]) -> list[int]:
    """Encode each document as 2 x length, plus 1 if it is the first document of a sample."""
    return [
        2 * len(document["tokens"]) + (index == 0)
        for sample in samples
        for index, document in enumerate(sample)
    ]


def _samples(numbers_by_rank: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the document numbers of each sample. Documents are numbered over all ranks.

    Args:
        numbers_by_rank: results of `_numbers`, by rank.
    """
    samples: list[list[int]] = []
    for index, number in enumerate(number for numbers in numbers_by_rank for number in numbers):
        if number & 1:
            samples.append([])
        samples[-1].append(index)
    return samples


_FAILED = -1


def _agreed(number: int) -> int:
    """Return the number of micro-batches on which all model-parallel ranks agree.

    This is a collective of the model-parallel group.

    Args:
        number: the number on this rank; 0 if it reads no data, `_FAILED` after an error.

    Raises:
        ValueError: Ranks have different numbers, or a rank passed `_FAILED`.
    """
    group: Any = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return number
    # The largest number and the negated smallest number. A rank without data (0) changes neither.
    bounds = torch.tensor([number, -number or -_NO_BOUND], device=documents.device_of(group))
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return int(bounds[0])
    raise ValueError(
        "--burst-pack: ranks of one model have different numbers of micro-batches, or a rank "
        "cannot pack; see the errors of other ranks"
    )


_NO_BOUND = 2**40


def _data_group() -> Any:
    """Return the data-parallel group, with backend gloo if Megatron made such a group.

    Ranks of the group read different data and hold the same positions of a sequence.
    """
    with contextlib.suppress(AssertionError):
        return parallel_state.get_data_parallel_group_gloo()
    return parallel_state.get_data_parallel_group()


def work_of(config: Any) -> Work:
    """Return the work of a model per token and per visible pair, without the LM head.

    Args:
        config: a `TransformerConfig`.
    """
    heads, width = config.num_attention_heads, config.hidden_size
    key_width, value_width = head_sizes(config)
    groups = getattr(config, "num_query_groups", None) or heads
    projections = width * (heads + groups) * (key_width + value_width)
    token = 2 * (config.num_layers * projections + width * _mlp_widths(config))
    windows = [causal_window(config, number) for number in range(1, config.num_layers + 1)]
    return Work.of(
        token_flops=token, pair_flops=2 * heads * (key_width + value_width), windows=windows
    )


def _mlp_widths(config: Any) -> int:
    """Return the sum over layers of the number of matrices of an MLP times its hidden width.

    In a layer with experts, the hidden width is that of all experts that a token uses.
    """
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    layers, with_experts, of_experts = config.num_layers, 0, 0
    if getattr(config, "num_moe_experts", None):
        of_experts = config.moe_router_topk * config.moe_ffn_hidden_size
        of_experts += getattr(config, "moe_shared_expert_intermediate_size", None) or 0
        frequency = getattr(config, "moe_layer_freq", 1)
        # As in Megatron: every frequency-th layer from the first, or a list with 1 for experts.
        with_experts = (
            -(-layers // frequency) if isinstance(frequency, int) else sum(frequency[:layers])
        )
    dense = (layers - with_experts) * config.ffn_hidden_size
    return matrices * (with_experts * of_experts + dense)
