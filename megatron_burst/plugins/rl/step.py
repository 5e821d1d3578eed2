# SPDX-License-Identifier: Apache-2.0
"""Public function `mb.rl.logprobs`, which distributes trajectories over micro-batches and ranks.

Megatron's own schedule runs forward and backward, with all types of parallelism. The caller passes
the loss as a function of complete trajectories. The result has the gradient of the loss, summed
over all micro-batches and data-parallel ranks. The gradient does not depend on the distribution of
trajectories over micro-batches and ranks.
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
from ...megatron.packing.step import PackedBatchIterator, work_of
from ...megatron.selection import burst_of
from . import trees
from .batch import TrajectoryBatch, rows_multiple
from .logprobs import temperature_reasons
from .trajectories import cut_trajectories


@dataclass(frozen=True)
class TrajectoryLogProbs:
    """Results for the trajectories that this rank's model computed.

    Attributes:
        index: Index of each result's trajectory in the argument `trajectories`, ascending. () on
            pipeline stages before the last.
        logprobs: Log-probabilities of each trajectory of n tokens, [n - 1] in float32 (float64 for
            a float64 model). Entry i belongs to token i + 1.
        entropies: Entropies in nats, shaped like `logprobs`: entry i is the entropy of the
            distribution that predicts token i + 1. None if not requested.
        tokens: Number of tokens in this rank's micro-batches before prefixes are merged, without
            padding.
        rows: Number of rows in this rank's micro-batches after prefixes are merged, without
            padding.
        loss: Sum of the loss over this rank's micro-batches. None if the caller passed no loss, and
            on pipeline stages before the last.
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
    """Compute log-probabilities and entropies of trajectories; with `loss`, also gradients.

    All ranks must call this function. With `loss`, Megatron's schedule differentiates the sum of
    the loss over all micro-batches and data-parallel ranks. Gradients are added to Megatron's
    gradient buffers, so set the buffers to zero before the call (`zero_grad_buffer`,
    `optimizer.zero_grad`). The auxiliary loss of a router has the same weight as in Megatron's own
    steps: Megatron divides it by the number of micro-batches or, with `calculate_per_token_loss`,
    by the number of rows. This number of rows counts a shared token once, and includes padding.

    Args:
        model: GPTModel or HybridModel of Megatron, or the list of its chunks, after
            `mb.megatron.configure`. On one context-parallel rank, the configuration must have
            `BurstConfig(pack="trees")`. With `loss`, the model must be wrapped in Megatron's
            `DistributedDataParallel`.
        trajectories: Token ids of each trajectory (lists, arrays, host tensors). Every rank of the
            training job must pass the same trajectories. This function distributes them: it keeps
            trajectories with shared prefixes together, and minimizes the work of the busiest
            micro-batch.
        loss: Function of the results for a micro-batch, a `TrajectoryLogProbs`, that returns a
            scalar. The last pipeline stage calls the function once per micro-batch. The scalar must
            be the same on all tensor- and context-parallel ranks. None for no gradients.
        temperature: Divisor of the logits.
        entropy: True to compute entropies. False saves a pass over the logits.
        tree: True to compute shared prefixes once. False computes every trajectory separately, as
            packed documents.
        max_tokens: Largest number of distinct tokens of a micro-batch, in total over its
            context-parallel ranks. None for one micro-batch per data-parallel rank.
        vocab_size: Rows of the LM head without padding; padding rows are not in the softmax. None
            for all rows.

    Returns:
        The results of the last pipeline stage of this rank's model. Every tensor- and
        context-parallel rank has the same results. Each data-parallel rank has the results of its
        own trajectories.

    Raises:
        ValueError: The model or an argument is not supported. Every rank raises the error.
    """
    trajectories = list(trajectories) if isinstance(trajectories, Iterable) else trajectories
    chunks = list(model) if isinstance(model, (list, torch.nn.ModuleList)) else [model]
    arguments = _LogProbsArguments(loss, temperature, entropy, tree, max_tokens, vocab_size)
    plan = attempt(lambda: _plan_step(chunks, trajectories, arguments))
    agree(plan if isinstance(plan, ValueError) else plan.facts, gather_from_all)
    assert not isinstance(plan, ValueError)
    patching.log_once(patching.run_state(), plan.line, "mb.rl")
    config = get_model_config(chunks[0])
    device = next(chunks[0].parameters()).device
    batches = list(_batches(plan, config, device, tree))

    # Megatron divides gradients by the sum of these counts over all micro-batches and ranks. With
    # calculate_per_token_loss, routers expect the number of tokens; otherwise the sum is the number
    # of micro-batches.
    def count(batch: TrajectoryBatch) -> int:
        return batch.tokens.shape[1] if config.calculate_per_token_loss else 1

    total = torch.tensor(sum(count(batch) for _, batch in batches), dtype=torch.int, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def undivided(value: torch.Tensor) -> torch.Tensor:
        """Scale a loss, to cancel Megatron's later division of the gradients."""
        if not config.calculate_per_token_loss:
            return value * total
        # Megatron multiplies gradients by 1.0 / total, which torch rounds to float32. Divide by the
        # same rounded number: value * total leaves a relative error of up to 6e-8 in float64.
        return value / (1.0 / total)

    def forward_step(batches: Any, stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        index, batch = next(batches)
        output = batch.run(stage, temperature, entropy, vocab_size)

        def reported(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            results = _results_of(index, batch, values)
            value = values[:, :0].sum()  # 0; with it, every rank takes part in backward
            if loss is not None and index:
                value = value + _scalar(loss(results))
            report = replace(
                results,
                logprobs=[x.detach() for x in results.logprobs],
                entropies=results.entropies and [x.detach() for x in results.entropies],
                loss=None if loss is None else value.detach().clone(),
            )
            counted = torch.tensor(count(batch), dtype=torch.int, device=value.device)
            return undivided(value), counted, report

        return output, reported

    finalize = patching.instead(config, "finalize_model_grads_func", _finalize_function(config))
    with finalize, torch.set_grad_enabled(loss is not None):
        reports = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=cast(Any, [PackedBatchIterator(batches) for _ in chunks]),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(len(batch.tree.tokens) for _, batch in batches),
            micro_batch_size=1,
            forward_only=loss is None,
        )
    return _merged(reports, entropy)


def _scalar(value: Any) -> Any:
    """Return the result of the caller's `loss` as a scalar. Raise ValueError for other results."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, (int, float)):
        return value
    shown = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(
        "mb.rl.logprobs: loss must return a scalar, the loss summed over a micro-batch, got "
        f"{shown!s:.60}"
    )


class _LogProbsArguments(NamedTuple):
    """Keyword arguments of `logprobs`."""

    loss: Any
    temperature: Any
    entropy: Any
    tree: Any
    max_tokens: Any
    vocab_size: Any


class _StepPlan(NamedTuple):
    """Micro-batches of this data-parallel rank, values that ranks compare, and the log line.

    Attributes:
        parts: Indices and tokens of the trajectories of each micro-batch.
        rows: Number of rows of each micro-batch after prefixes are merged.
        facts: Values that must be the same on all ranks.
        line: Line for the log.
    """

    parts: list[tuple[tuple[int, ...], list[np.ndarray]]]
    rows: list[int]
    facts: dict[str, object]
    line: str


def _plan_step(
    chunks: list[Any], trajectories: Sequence[Any], arguments: _LogProbsArguments
) -> _StepPlan:
    reasons, ordering = (
        [*_reasons(chunks, arguments)],
        attempt(lambda: trees.neighbours(trajectories)),
    )
    if reasons or isinstance(ordering, ValueError):
        reasons += [str(ordering)] if isinstance(ordering, ValueError) else []
        raise ValueError("mb.rl.logprobs: " + "; ".join(reasons))
    order, shared = ordering
    tokens = [np.asarray(trajectory, dtype=np.int64) for trajectory in trajectories]
    # Check here: only the ranks that hold a wrong token would fail, and the others would wait.
    vocabulary = arguments.vocab_size or get_attr_wrapped_model(chunks[0], "vocab_size")
    positions = None
    if get_attr_wrapped_model(chunks[0], "position_embedding_type") == "learned_absolute":
        positions = get_attr_wrapped_model(chunks[0], "max_sequence_length")
    for i, trajectory in enumerate(tokens):
        if len(trajectory) and trajectory.max() >= vocabulary:
            raise ValueError(
                f"mb.rl.logprobs: trajectories[{i}] has token {trajectory.max()}, but the "
                f"vocabulary has {vocabulary} tokens"
            )
        if positions is not None and len(trajectory) > positions:
            raise ValueError(
                f"mb.rl.logprobs: trajectories[{i}] has {len(trajectory):,} tokens, but the "
                f"model has learned embeddings of {positions:,} positions"
            )
    config, size = get_model_config(chunks[0]), parallel_state.get_data_parallel_world_size()
    shared = shared if arguments.tree else [0] * len(order)
    runs = cut_trajectories(
        [len(tokens[i]) for i in order],
        shared,
        work_of(config),
        ranks=size,
        capacity=arguments.max_tokens,
        multiple=config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1,
    )
    rows = [
        [sum(len(tokens[order[i]]) for i in run) - sum(shared[i] for i in run[1:]) for run in part]
        for part in runs
    ]
    rank, total = parallel_state.get_data_parallel_rank(), sum(map(len, tokens))
    parts = [tuple(sorted(order[i] for i in run)) for run in runs[rank]]
    line = (
        f"mb.rl: {len(tokens)} trajectories with {total:,} tokens in total become "
        f"{sum(map(sum, rows)):,} rows in {len(parts)} micro-batches on each of {size} "
        "data-parallel ranks"
    )
    digest = hashlib.blake2b(digest_size=8)
    for trajectory in tokens:
        digest.update(len(trajectory).to_bytes(8, "little") + trajectory.tobytes())
    facts: dict[str, object] = {
        "trajectories": f"{len(tokens)} of {total} tokens, {digest.hexdigest()}",
        "loss": arguments.loss is not None,
        **{name: getattr(arguments, name) for name in _LogProbsArguments._fields[1:]},
    }
    return _StepPlan([(part, [tokens[i] for i in part]) for part in parts], rows[rank], facts, line)


def _reasons(chunks: list[Any], arguments: _LogProbsArguments) -> Iterator[str]:
    """Yield an error message for each problem of the model and of the arguments."""
    yield from temperature_reasons(arguments.temperature)
    if arguments.loss is not None and not callable(arguments.loss):
        yield f"loss must be a function or None, got {type(arguments.loss).__name__}"
    if arguments.loss is not None and not torch.is_grad_enabled():
        yield (
            "loss requires gradients, but torch.no_grad or inference_mode is active; call "
            "mb.rl.logprobs outside of it"
        )
    for name in ("entropy", "tree"):
        if type(getattr(arguments, name)) is not bool:
            yield f"{name} must be True or False, got {getattr(arguments, name)!r:.60}"
    for name in ("max_tokens", "vocab_size"):
        value = getattr(arguments, name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} must be an integer >= 1 or None, got {value!r:.60}"
    try:
        config: Any = get_model_config(chunks[0])
    except (RuntimeError, IndexError):
        shown = type(chunks[0]).__name__ if chunks else "an empty list"
        yield f"model must be a Megatron model, or the list of its model chunks, got {shown}"
        return
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if len(chunks) != virtual:
        yield f"model: pass all {virtual} model chunks of this rank, got {len(chunks)}"
    burst = burst_of(config)
    if burst is None or burst.algorithm == OFF:
        yield (
            "model: BurstAttention is off in the model's configuration; call mb.megatron.install() "
            "and mb.megatron.configure() before building the model"
        )
        return
    if config.context_parallel_size == 1 and burst.pack != "trees":
        yield (
            "model: Megatron's own attention, which is built for one context-parallel rank, does "
            'not support trees; configure the model with BurstConfig(pack="trees")'
        )
    if arguments.loss is not None and not hasattr(chunks[0], "ddp_config"):
        yield (
            "model: loss requires gradient buffers of Megatron; wrap every model chunk in "
            "megatron.core.distributed.DistributedDataParallel"
        )
    if getattr(config, "mtp_num_layers", None):
        yield "model: --mtp-num-layers (multi-token prediction) is not supported; remove it"
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
    if arguments.tree is True:
        yield from tree_reasons(config)


def tree_reasons(config: Any) -> Iterator[str]:
    """Yield an error message for each property of a model that does not support prefix trees.

    Args:
        config: `TransformerConfig` of the model, after `configure`.
    """
    layers, linear = ModelShape.of(config).linear_setting, config.burst.linear
    if layers is not None and (config.context_parallel_size == 1 or linear not in OVER_TREES):
        yield (
            f"tree: {layers} require two or more context-parallel ranks and --burst-linear "
            f"{' or '.join(OVER_TREES)}, got {config.context_parallel_size} ranks and "
            f"{linear}; use tree=False"
        )
    if config.burst.mask is not None:
        yield (
            f"tree: --burst-mask {config.burst.mask} applies to row indices, which differ from "
            "positions on a path of the tree; use tree=False"
        )
    if config.apply_rope_fusion:
        yield "tree: fused rope does not support trees; add --no-rope-fusion, or use tree=False"
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        yield (
            f"tree: --cuda-graph-impl {config.cuda_graph_impl} requires packs of equal length, but "
            "packs of trees differ in length; use tree=False"
        )


def _batches(
    plan: _StepPlan, config: Any, device: torch.device, merged: bool
) -> Iterator[tuple[tuple[int, ...], TrajectoryBatch]]:
    """Yield the micro-batches of `plan`, each with the indices of its trajectories.

    If pipeline stages expect equal numbers of rows, all micro-batches are padded to the same
    length. `merged` is True to merge common prefixes.
    """
    rows = 0
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        need = rows_multiple(config, config.context_parallel_size, merged)
        rows = -(-max(1, *plan.rows) // need) * need
    for index, part in plan.parts:
        yield index, TrajectoryBatch(part, config, device, merged=merged, rows=rows)


def _results_of(
    index: tuple[int, ...], batch: TrajectoryBatch, values: torch.Tensor
) -> TrajectoryLogProbs:
    logprobs, *entropies = (batch.of_trajectories(row) for row in values)
    tree = batch.tree
    tokens, rows = (tree.trajectory_tokens, tree.rows) if index else (0, 0)
    return TrajectoryLogProbs(index, logprobs, entropies[0] if entropies else None, tokens, rows)


def _merged(reports: list[TrajectoryLogProbs], entropy: bool) -> TrajectoryLogProbs:
    """Merge the results of all micro-batches. `reports` is empty on stages before the last."""
    at = [(i, report, place) for report in reports for place, i in enumerate(report.index)]
    at.sort(key=lambda entry: entry[0])
    entropies = [e.entropies[place] for _, e, place in at if e.entropies is not None]
    losses = [report.loss for report in reports if report.loss is not None]
    return TrajectoryLogProbs(
        tuple(i for i, *_ in at),
        [report.logprobs[place] for _, report, place in at],
        entropies if entropy else None,
        sum(report.tokens for report in reports),
        sum(report.rows for report in reports),
        torch.stack(losses).sum() if losses else None,
    )


def _finalize_function(config: Any) -> Any:
    """Return the function with which Megatron sums gradients over data-parallel ranks."""
    own = config.finalize_model_grads_func
    return finalize_model_grads if own is None else own
