# SPDX-License-Identifier: Apache-2.0
"""`mb.rl.logprobs`: trajectories over micro-batches, data-parallel ranks and pipeline stages.

Megatron's own schedule runs forward and backward, whatever the parallel sizes. The loss is the
caller's function of whole trajectories, and gradients are those of its sum over all micro-batches
and data-parallel ranks, however trajectories were distributed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from ...comm.consensus import agree, attempt
from ...config import OFF
from ...linear_attention.request import OVER_TREES
from ...megatron import patching
from ...megatron.data.cut import gather_from_all
from ...megatron.lm_head.fused_loss import check_output
from ...megatron.model_shape import ModelShape
from ...megatron.packing.step import ReadyBatches, work_of
from ...megatron.patching import log
from . import trees
from .batch import TrajectoryBatch, rows_multiple
from .logprobs import temperature_reasons
from .trajectories import cut_trajectories

_TOLD = "mb.rl was logged"


@dataclass(frozen=True)
class TrajectoryLogProbs:
    """What is known of the trajectories that this rank's model computed.

    index: which of the trajectories that were given, ascending; () on pipeline stages before the
    last. logprobs: float32 (float64 of a float64 model) [n - 1] for each, of n tokens: entry i is
    the log-probability of token i + 1. entropies: likewise, in nats, of the distribution that
    token i + 1 was taken from; None if not asked for. tokens, rows: of the micro-batches of this
    rank, as they were given and as they were computed, without padding. loss: the sum of what
    `loss` returned on this rank, None without it and on pipeline stages before the last.
    """

    index: tuple[int, ...]
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor] | None
    tokens: int = 0
    rows: int = 0
    loss: torch.Tensor | None = None


def logprobs(
    model: Any,
    trajectories: Sequence[Any],
    *,
    loss: Callable[[TrajectoryLogProbs], torch.Tensor] | None = None,
    temperature: float = 1.0,
    entropy: bool = True,
    tree: bool = True,
    max_tokens: int | None = None,
    vocab_size: int | None = None,
) -> TrajectoryLogProbs:
    """Log-probabilities and entropies of trajectories; with `loss` also the gradients of a model.

    model: a GPTModel or HybridModel of Megatron, or the list of its chunks, configured with
    `mb.megatron.configure`; on one context-parallel rank with `BurstConfig(pack="trees")`.
    trajectories: token ids of each (lists, arrays, host tensors), the same on every rank of the
    job: they are distributed here, neighbours with shared prefixes together, so that the busiest
    micro-batch has the least work.

    loss: called on the last pipeline stage once per micro-batch, with its trajectories; returns a
    scalar. It must depend on nothing that differs between tensor- and context-parallel ranks. Its
    sum over all micro-batches and data-parallel ranks is differentiated, by Megatron's schedule:
    gradients are where Megatron's optimizer expects them, so zero them before (`zero_grad_buffer`,
    `optimizer.zero_grad`). The model must then be wrapped in Megatron's `DistributedDataParallel`.
    A router's auxiliary loss weighs as in Megatron's own steps, which divide it by micro-batches,
    or by rows with `calculate_per_token_loss`; it counts a shared token once, and rows of padding.
    Without `loss` nothing is differentiated.
    temperature: logits are divided by it. entropy: False saves a pass over the logits.
    tree: False computes every trajectory by itself, as packed documents.
    max_tokens: of a micro-batch, over all context-parallel ranks, shared ones counted once; by
    default there is one micro-batch per data-parallel rank. vocab_size: rows of the LM head that
    are no padding, which then takes no part in the softmax; default: all.

    A collective of all ranks. Returns what the last pipeline stage of this rank's model computed,
    in no order of ranks; every tensor- and context-parallel rank has the same. Raises ValueError on
    every rank for what cannot be honoured.
    """
    trajectories = list(trajectories) if isinstance(trajectories, Iterable) else trajectories
    chunks = list(model) if isinstance(model, (list, torch.nn.ModuleList)) else [model]
    asked = _Asked(loss, temperature, entropy, tree, max_tokens, vocab_size)
    planned = attempt(lambda: _planned(chunks, trajectories, asked))
    agree(planned if isinstance(planned, ValueError) else planned.facts, gather_from_all)
    assert not isinstance(planned, ValueError)
    if patching.notes().setdefault(_TOLD, planned) is planned:
        log(planned.line)
    config = get_model_config(chunks[0])
    device = next(chunks[0].parameters()).device
    batches = list(_batches(planned, config, device, tree))

    # Megatron divides gradients by what micro-batches count, over all ranks. Routers expect tokens
    # there where it divides by tokens, else it divides by micro-batches.
    def count(batch: TrajectoryBatch) -> int:
        return batch.tokens.shape[1] if config.calculate_per_token_loss else 1

    total = torch.tensor(sum(count(batch) for _, batch in batches), dtype=torch.int, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def undivided(value: torch.Tensor) -> torch.Tensor:
        """Cancel the division of Megatron's schedule and `finalize_model_grads`."""
        if not config.calculate_per_token_loss:
            return value * total
        # Megatron multiplies gradients by 1.0 / total, which torch rounds to float32. Divide by the
        # same rounded number: value * total leaves a relative error of up to 6e-8 in float64.
        return value / (1.0 / total)

    def forward_step(batches: Any, stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        index, batch = next(batches)
        output = batch.run(stage, temperature, entropy, vocab_size)

        def reported(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            found = _found(index, batch, values)
            value = values[:, :0].sum()  # 0, and every rank takes part in backward
            if loss is not None and index:
                value = value + _scalar(loss(found))
            seen = replace(
                found,
                logprobs=[x.detach() for x in found.logprobs],
                entropies=found.entropies and [x.detach() for x in found.entropies],
                loss=None if loss is None else value.detach().clone(),
            )
            counted = torch.tensor(count(batch), dtype=torch.int, device=value.device)
            return undivided(value), counted, seen

        return output, reported

    finalizing = patching.instead(config, "finalize_model_grads_func", _finalizing(config))
    with finalizing, torch.set_grad_enabled(loss is not None):
        reports = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=cast(Any, [ReadyBatches(batches) for _ in chunks]),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(len(batch.tree.tokens) for _, batch in batches),
            micro_batch_size=1,
            forward_only=loss is None,
        )
    return _joined(reports, entropy)


def _scalar(value: Any) -> Any:
    """What `loss` returned, if it is one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, (int, float)):
        return value
    shown = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(
        f"mb.rl.logprobs: loss must return a scalar, the sum of a micro-batch, got {shown!s:.60}"
    )


class _Asked(NamedTuple):
    loss: Any
    temperature: Any
    entropy: Any
    tree: Any
    max_tokens: Any
    vocab_size: Any


class _Planned(NamedTuple):
    """The micro-batches of this data-parallel rank: parts, (indices, tokens) of their trajectories,
    and the rows that these take. facts: what all ranks agree on. line: for the log.
    """

    parts: list[tuple[tuple[int, ...], list[np.ndarray]]]
    rows: list[int]
    facts: dict[str, object]
    line: str


def _planned(chunks: list[Any], trajectories: Sequence[Any], asked: _Asked) -> _Planned:
    reasons, found = [*_reasons(chunks, asked)], attempt(lambda: trees.neighbours(trajectories))
    if reasons or isinstance(found, ValueError):
        reasons += [str(found)] if isinstance(found, ValueError) else []
        raise ValueError("mb.rl.logprobs: " + "; ".join(reasons))
    order, shared = found
    tokens = [np.asarray(each, dtype=np.int64) for each in trajectories]
    # Only the ranks that hold a wrong token would notice it, and the others wait for them.
    vocabulary = asked.vocab_size or get_attr_wrapped_model(chunks[0], "vocab_size")
    places = None
    if get_attr_wrapped_model(chunks[0], "position_embedding_type") == "learned_absolute":
        places = get_attr_wrapped_model(chunks[0], "max_sequence_length")
    for i, each in enumerate(tokens):
        if len(each) and each.max() >= vocabulary:
            raise ValueError(
                f"mb.rl.logprobs: trajectories[{i}] has token {each.max()}, and the vocabulary "
                f"{vocabulary} tokens"
            )
        if places is not None and len(each) > places:
            raise ValueError(
                f"mb.rl.logprobs: trajectories[{i}] has {len(each):,} tokens, and the model "
                f"learned {places:,} positions"
            )
    config, size = get_model_config(chunks[0]), parallel_state.get_data_parallel_world_size()
    shared = shared if asked.tree else [0] * len(order)
    runs = cut_trajectories(
        [len(tokens[i]) for i in order],
        shared,
        work_of(config),
        ranks=size,
        capacity=asked.max_tokens,
        multiple=config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1,
    )
    rows = [
        [sum(len(tokens[order[i]]) for i in run) - sum(shared[i] for i in run[1:]) for run in each]
        for each in runs
    ]
    rank, given = parallel_state.get_data_parallel_rank(), sum(map(len, tokens))
    parts = [tuple(sorted(order[i] for i in run)) for run in runs[rank]]
    line = (
        f"mb.rl: {len(tokens)} trajectories of {given:,} tokens as {sum(map(sum, rows)):,} rows in "
        f"{len(parts)} micro-batches on each of {size} data-parallel ranks"
    )
    digest = hashlib.blake2b(digest_size=8)
    for each in tokens:
        digest.update(len(each).to_bytes(8, "little") + each.tobytes())
    facts: dict[str, object] = {
        "trajectories": f"{len(tokens)} of {given} tokens, {digest.hexdigest()}",
        "loss": asked.loss is not None,
        **{name: getattr(asked, name) for name in _Asked._fields[1:]},
    }
    return _Planned([(part, [tokens[i] for i in part]) for part in parts], rows[rank], facts, line)


def _reasons(chunks: list[Any], asked: _Asked) -> Iterator[str]:
    """All that is wrong with a model and what is asked of it."""
    yield from temperature_reasons(asked.temperature)
    if asked.loss is not None and not callable(asked.loss):
        yield f"loss must be a function or None, got {type(asked.loss).__name__}"
    if asked.loss is not None and not torch.is_grad_enabled():
        yield "loss= differentiates, and gradients are off (torch.no_grad, inference_mode)"
    for name in ("entropy", "tree"):
        if type(getattr(asked, name)) is not bool:
            yield f"{name} must be True or False, got {getattr(asked, name)!r:.60}"
    for name in ("max_tokens", "vocab_size"):
        value = getattr(asked, name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} must be an integer from 1 on or None, got {value!r:.60}"
    try:
        config: Any = get_model_config(chunks[0])
    except (RuntimeError, IndexError):
        shown = type(chunks[0]).__name__ if chunks else "an empty list"
        yield f"model must be a model of Megatron, or the list of its chunks, got {shown}"
        return
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if len(chunks) != virtual:
        yield f"model: this rank has {virtual} chunks of it, got {len(chunks)}"
    burst = getattr(config, "burst", None)
    if burst is None or burst.algorithm == OFF:
        yield (
            "model: BurstAttention is off in its configuration; call mb.megatron.install() and "
            "mb.megatron.configure() before it is built"
        )
        return
    if config.context_parallel_size == 1 and burst.pack != "trees":
        yield (
            "model: on one context-parallel rank Megatron's own attention was built, which knows "
            'no trees: configure it with BurstConfig(pack="trees")'
        )
    if asked.loss is not None and not hasattr(chunks[0], "ddp_config"):
        yield (
            "model: loss= leaves gradients where Megatron's optimizer takes them: wrap every chunk "
            "in megatron.core.distributed.DistributedDataParallel"
        )
    if getattr(config, "mtp_num_layers", None):
        yield "model: --mtp-num-layers: further heads predict tokens that branches do not share"
    if any(chunk.training for chunk in chunks):
        dropout = [
            name for name in ("hidden_dropout", "attention_dropout") if getattr(config, name)
        ]
        for name in dropout:
            yield f"model: --{name.replace('_', '-')} must be 0, got {getattr(config, name)}"
    for chunk in chunks:
        if get_attr_wrapped_model(chunk, "post_process"):
            try:
                check_output(get_attr_wrapped_model(chunk, "output_layer"), "mb.rl")
            except ValueError as error:
                yield f"model: {error}"
    if asked.tree is True:
        yield from tree_reasons(config)


def tree_reasons(config: Any) -> Iterator[str]:
    """What of a model takes no prefix tree, by its configuration after `configure`."""
    layers, linear = ModelShape.of(config).linear_setting, config.burst.linear
    if layers is not None and (config.context_parallel_size == 1 or linear not in OVER_TREES):
        yield (
            f"tree: {layers} pass states along a tree on two or more context-parallel ranks, with "
            f"--burst-linear {' or '.join(OVER_TREES)}, got {config.context_parallel_size} and "
            f"{linear}: tree=False"
        )
    if config.burst.mask is not None:
        yield f"tree: --burst-mask {config.burst.mask} counts rows, not tokens of a path"
    if config.apply_rope_fusion:
        yield "tree: fused rope takes positions of documents: --no-rope-fusion, or tree=False"
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        yield f"tree: --cuda-graph-impl {config.cuda_graph_impl}: every pack has another length"


def _batches(
    planned: _Planned, config: Any, device: torch.device, merged: bool
) -> Iterator[tuple[tuple[int, ...], TrajectoryBatch]]:
    """Micro-batches; of one length where stages of a pipeline expect equally many rows."""
    rows = 0
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        need = rows_multiple(config, config.context_parallel_size, merged)
        rows = -(-max(1, *planned.rows) // need) * need
    for index, part in planned.parts:
        yield index, TrajectoryBatch(part, config, device, merged=merged, rows=rows)


def _found(
    index: tuple[int, ...], batch: TrajectoryBatch, values: torch.Tensor
) -> TrajectoryLogProbs:
    first, *others = (batch.of_trajectories(each) for each in values)
    tree = batch.tree
    tokens, rows = (tree.trajectory_tokens, tree.rows) if index else (0, 0)
    return TrajectoryLogProbs(index, first, others[0] if others else None, tokens, rows)


def _joined(reports: list[TrajectoryLogProbs], entropy: bool) -> TrajectoryLogProbs:
    """The reports of all micro-batches as one; none on a stage before the last."""
    at = [(i, each, place) for each in reports for place, i in enumerate(each.index)]
    at.sort(key=lambda found: found[0])
    entropies = [e.entropies[place] for _, e, place in at if e.entropies is not None]
    losses = [each.loss for each in reports if each.loss is not None]
    return TrajectoryLogProbs(
        tuple(i for i, *_ in at),
        [each.logprobs[place] for _, each, place in at],
        entropies if entropy else None,
        sum(each.tokens for each in reports),
        sum(each.rows for each in reports),
        torch.stack(losses).sum() if losses else None,
    )


def _finalizing(config: Any) -> Any:
    """What sums gradients over data-parallel ranks: the script's own, or Megatron's."""
    own = config.finalize_model_grads_func
    return finalize_model_grads if own is None else own
