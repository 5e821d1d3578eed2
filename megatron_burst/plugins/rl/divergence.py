# SPDX-License-Identifier: Apache-2.0
"""KL divergence between a student and a teacher without materializing the full logits.

The module is for distillation over the whole vocabulary. For each row, let x be the student's
logits with softmax p, and t the teacher's logits with softmax q. Then

    forward  KL(q || p) = sum q (log q - log p),    d / d x_j = p_j - q_j
    reverse  KL(p || q) = sum p (log p - log q),    d / d x_j = p_j (log p_j - log q_j - KL)

Logits of student and teacher are computed tile by tile. Forward saves three numbers per row, and
backward recomputes the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...comm.consensus import Facts
from ...comm.operation import prepared
from ...kernels.autograd import first_order_only, outside_graphs, refuse_transforms
from ...linear_cross_entropy import checks
from ...linear_cross_entropy.checks import HeadOperation, LossOptions
from ...linear_cross_entropy.rows import LogitRows, divergence, divergence_gradient_, row_stats
from ...linear_cross_entropy.split import Split
from ...linear_cross_entropy.tiled_loop import GradientSum, Head, Tokens, tiles
from ...linear_cross_entropy.validate import head_of
from .logprobs import at_temperature, no_labels, temperature_reasons


@outside_graphs
def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """Return the KL divergence between student and teacher for each row of hidden states.

    The result is in nats, shaped like hidden without d, in float32 (float64 for float64 tensors).
    With `sequence_parallel` it covers the rows of all ranks. hidden and weight get gradients; the
    teacher does not. The result cannot be differentiated twice. Student and teacher may have
    different widths and dtypes; each dtype must be float64, float32 or bfloat16.

    Args:
        hidden: Hidden states of the student [..., d].
        weight: Weight of the student [v, d].
        teacher_hidden: Hidden states of the teacher [..., e].
        teacher_weight: Weight of the teacher [v, e].
        reverse: False for KL(teacher || student), which trains the student to cover the whole
            distribution of the teacher. True for KL(student || teacher), for data that the student
            sampled.
        temperature: Divisor of the logits of both models. To scale the logits of one model only,
            multiply the hidden states of this model.
        tp_group: Same as in `linear_cross_entropy`, for both models.
        sequence_parallel: Same as in `linear_cross_entropy`, for both models.
        logit_scale: Same as in `linear_cross_entropy`, for both models.
        logit_softcap: Same as in `linear_cross_entropy`, for both models.
        vocab_size: Same as in `linear_cross_entropy`, for both models.
        tile: Maximum bytes of the logits of both models that are in memory at a time.

    Raises:
        ValueError: Arguments are invalid or differ between ranks. The message lists all problems,
            and all ranks raise the error.
    """
    refuse_transforms("linear_kl")
    split = checks.split_of(tp_group, sequence_parallel)
    options = LossOptions(
        logit_scale=logit_scale, logit_softcap=logit_softcap, vocab_size=vocab_size, tile=tile
    )
    models = {"": (hidden, weight), "teacher_": (teacher_hidden, teacher_weight)}
    operation = DivergenceOperation(
        split=split,
        models=models,
        options=options,
        sequence_parallel=sequence_parallel,
        temperature=temperature,
        reverse=reverse,
    )
    options = prepared(operation).options

    if options.tile is not None:
        options = replace(options, tile=-(-options.tile // 2))
    heads = [at_temperature(head_of(*m, split, options), temperature) for m in models.values()]
    rows = min(head.tile_rows for head in heads)  # both models use the same tiles
    student, teacher = (replace(head, tile_rows=rows) for head in heads)
    shape = [split.parts * hidden.shape[0], *hidden.shape[1:-1]]
    flat = [x.reshape(-1, x.shape[-1]).contiguous() for x in (hidden, teacher_hidden.detach())]
    weights = weight.contiguous(), teacher_weight.detach().contiguous()
    pair = _DistillationHeads(student, teacher, flat[1], weights[1], reverse)
    return _LinearKL.apply(flat[0], weights[0], pair).view(shape)


class DivergenceRequest(NamedTuple):
    """Checked options of `linear_kl`, and the values (`facts`) that must be equal on all ranks."""

    options: LossOptions
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class DivergenceOperation(HeadOperation[DivergenceRequest]):
    """Call of `linear_kl` on one rank, with its arguments.

    Attributes:
        models: (hidden states, weight) of each model. The key is the prefix of the argument names:
            "" for the student, "teacher_" for the teacher.
    """

    split: Split
    models: dict[str, tuple[Any, Any]]
    options: LossOptions
    sequence_parallel: Any
    temperature: Any
    reverse: Any

    def check(self) -> DivergenceRequest:
        split, options = self.split, self.options
        reasons = [*temperature_reasons(self.temperature), *checks.flag("reverse", self.reverse)]
        plain, facts = options, {}
        for prefix, (hidden, weight) in self.models.items():
            labels = torch.zeros(0, dtype=torch.int64)  # placeholder that fits any number of rows
            if isinstance(hidden, torch.Tensor) and hidden.dim() >= 2:
                shape = [split.parts * hidden.shape[0], *hidden.shape[1:-1]]
                labels = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
            inputs = checks.LossInputs(hidden, weight, labels, None)
            try:
                request = checks.checked(inputs, options, self.sequence_parallel, split)
                plain = request.options
                facts |= {prefix + name: fact for name, fact in request.facts.items()}
            except ValueError as error:
                reasons.append(f"{prefix}hidden, {prefix}weight: {error}" if prefix else str(error))
        student, teacher = self.models.values()
        if not reasons and (
            student[0].shape[:-1] != teacher[0].shape[:-1] or len(student[1]) != len(teacher[1])
        ):
            reasons.append(
                "teacher_hidden and teacher_weight must have as many rows as hidden and weight, "
                f"got {[list(x.shape) for x in teacher]} for {[list(x.shape) for x in student]}"
            )
        if reasons:
            raise ValueError("; ".join(reasons))
        facts["temperature, reverse"] = float(self.temperature), self.reverse
        return DivergenceRequest(plain, facts)


class _DistillationHeads(NamedTuple):
    """LM heads of student and teacher, and the hidden states and LM-head weight of the teacher.

    Both heads are computed tile by tile (some rows at a time), with the same rows in each tile.
    """

    student: Head
    teacher: Head
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    reverse: bool

    def pairs(
        self, hidden: torch.Tensor, weight: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (rows, hidden states, student's products h.w, teacher's products h.w) of each tile.

        Args:
            hidden: Hidden states of the student [n, d].
            weight: Weight of the student [v, d].
        """
        empty_labels = torch.empty(0, dtype=torch.int64)
        of_student = tiles(self.student, Tokens(hidden, weight, empty_labels))
        of_teacher = tiles(
            self.teacher, Tokens(self.teacher_hidden, self.teacher_weight, empty_labels)
        )
        for (tile, h, z), (_, _, t) in zip(of_student, of_teacher, strict=True):
            yield tile, h, z, t

    def logits_of(self, z: torch.Tensor, t: torch.Tensor) -> tuple[LogitRows, LogitRows]:
        """Return `LogitRows` of student and teacher for the products z and t of a tile."""
        return (
            LogitRows(z, self.student.columns, self.student.formula),
            LogitRows(t, self.teacher.columns, self.teacher.formula),
        )


class _LinearKL(torch.autograd.Function):
    """Autograd function that returns the KL divergence of each row.

    Inputs are hidden [n, d] and weight [v, d] of the student. The output is [p * n] for p slices of
    the sequence (see `tiled_loop`).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, pair: _DistillationHeads
    ) -> torch.Tensor:
        split, dtype = pair.student.split, pair.student.dtype
        shape = split.parts, len(hidden)
        kl, lse, teacher_lse = hidden.new_zeros((3, *shape), dtype=dtype)
        for tile, _, z, t in pair.pairs(hidden, weight):
            row_lses = []
            for x, head in ((z, pair.student), (t, pair.teacher)):
                own = row_stats(x, no_labels(x), head.columns, head.formula, dtype)
                row_lses.append(split.merge(own).lse)
            student, teacher = pair.logits_of(z, t)
            own = divergence(student, teacher, row_lses[0], row_lses[1], pair.reverse)
            for target, value in zip((kl, lse, teacher_lse), (own, *row_lses), strict=True):
                target[:, tile] = value.view(split.parts, -1)
        kl = split.total(kl)
        ctx.pair = pair
        ctx.save_for_backward(hidden, weight, kl, lse, teacher_lse)
        return kl.view(-1)

    @staticmethod
    @first_order_only("linear_kl")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pair, (hidden, weight, kl, lse, teacher_lse) = ctx.pair, ctx.saved_tensors
        dh = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.zeros_like(weight, dtype=pair.student.dtype)
        sums = GradientSum(pair.student, Tokens(hidden, weight, kl), dh, dw)
        upstream = upstream.view_as(kl)
        for tile, h, z, t in pair.pairs(hidden, weight):
            student, teacher = pair.logits_of(z, t)
            lses = [x[:, tile].reshape(-1) for x in (lse, teacher_lse)]
            own, weights = (x[:, tile].reshape(-1) for x in (kl, upstream))
            divergence_gradient_(student, teacher, lses[0], lses[1], own, weights, pair.reverse)
            sums.put(tile, h, z, weights == 0)
        sums.finish()
        return dh, None if dw is None else dw.to(weight.dtype), None
