# SPDX-License-Identifier: Apache-2.0
"""KL divergence of a student from a teacher, both given by hidden states and a weight, without
holding all logits of either: for distillation over the whole vocabulary.

With x and t the logits of a row of student and teacher, p and q their softmax,

    forward  KL(q || p) = sum q (log q - log p),    d / d x_j = p_j - q_j
    reverse  KL(p || q) = sum p (log p - log q),    d / d x_j = p_j (log p_j - log q_j - KL)

Tiles of both lie side by side. Forward keeps three numbers per row; backward makes the logits
again.
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
from ...linear_cross_entropy.rows import RowsOfLogits, divergence, divergence_gradient_, row_stats
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
    """KL divergence of each row in nats, [...] in float32 (float64 for float64).

    hidden [..., d] and weight [v, d] of the student, teacher_hidden [..., e] and teacher_weight
    [v, e] of the teacher, in one of float64, float32, bfloat16; the two may have different dtypes
    and widths. Gradients reach hidden and weight; the teacher gets none.

    reverse: False: KL(teacher || student), which covers what the teacher does; True: KL(student ||
        teacher), for data that the student sampled.
    temperature, logit_scale, logit_softcap: of the logits of both; multiply a hidden state to scale
        one only. tile: bytes of logits of both alive at once. tp_group, sequence_parallel,
        vocab_size: as of `linear_cross_entropy`, for both.

    Raises ValueError, with all reasons, on all ranks alike. Cannot be differentiated twice.
    """
    refuse_transforms("linear_kl")
    split = checks.group(tp_group, sequence_parallel)
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
    rows = min(head.tile_rows for head in heads)  # of both side by side
    student, teacher = (replace(head, tile_rows=rows) for head in heads)
    shape = [split.parts * hidden.shape[0], *hidden.shape[1:-1]]
    flat = [x.reshape(-1, x.shape[-1]).contiguous() for x in (hidden, teacher_hidden.detach())]
    weights = weight.contiguous(), teacher_weight.detach().contiguous()
    both = _Both(student, teacher, flat[1], weights[1], reverse)
    return _LinearKL.apply(flat[0], weights[0], both).view(shape)


class DivergenceRequest(NamedTuple):
    """A checked call of `linear_kl`: options as Python numbers, and facts of all ranks."""

    options: LossOptions
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class DivergenceOperation(HeadOperation[DivergenceRequest]):
    """A call of `linear_kl` on one rank; its arguments.

    models: prefix of the names -> hidden and weight, of student and teacher.
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
            labels = torch.zeros(0, dtype=torch.int64)  # there are none; these fit any rows
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


class _Both(NamedTuple):
    """The heads of student and teacher, which have equal tiles, and the teacher's tensors."""

    student: Head
    teacher: Head
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    reverse: bool

    def pairs(
        self, hidden: torch.Tensor, weight: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(rows, hidden of the tile, its logits of the student, and of the teacher)."""
        none = torch.empty(0, dtype=torch.int64)
        of_student = tiles(self.student, Tokens(hidden, weight, none))
        of_teacher = tiles(self.teacher, Tokens(self.teacher_hidden, self.teacher_weight, none))
        for (tile, h, z), (_, _, t) in zip(of_student, of_teacher, strict=True):
            yield tile, h, z, t

    def logits_of(self, z: torch.Tensor, t: torch.Tensor) -> tuple[RowsOfLogits, RowsOfLogits]:
        """Both as what `rows` works on, in the student's accumulation dtype."""
        return (
            RowsOfLogits(z, self.student.columns, self.student.formula),
            RowsOfLogits(t, self.teacher.columns, self.teacher.formula),
        )


class _LinearKL(torch.autograd.Function):
    """hidden [n, d], weight [v, d] of the student -> KL [p n]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, both: _Both) -> torch.Tensor:
        split, dtype = both.student.split, both.student.dtype
        shape = split.parts, len(hidden)
        kl, lse, teacher_lse = hidden.new_zeros((3, *shape), dtype=dtype)
        for tile, _, z, t in both.pairs(hidden, weight):
            found = []
            for x, head in ((z, both.student), (t, both.teacher)):
                own = row_stats(x, no_labels(x), head.columns, head.formula, dtype)
                found.append(split.merge(own).lse)
            student, teacher = both.logits_of(z, t)
            own = divergence(student, teacher, found[0], found[1], both.reverse)
            for into, value in zip((kl, lse, teacher_lse), (own, *found), strict=True):
                into[:, tile] = value.view(split.parts, -1)
        kl = split.total(kl)
        ctx.both = both
        ctx.save_for_backward(hidden, weight, kl, lse, teacher_lse)
        return kl.view(-1)

    @staticmethod
    @first_order_only("linear_kl")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        both, (hidden, weight, kl, lse, teacher_lse) = ctx.both, ctx.saved_tensors
        dh = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.zeros_like(weight, dtype=both.student.dtype)
        found = GradientSum(both.student, Tokens(hidden, weight, kl), dh, dw)
        upstream = upstream.view_as(kl)
        for tile, h, z, t in both.pairs(hidden, weight):
            student, teacher = both.logits_of(z, t)
            lses = [x[:, tile].reshape(-1) for x in (lse, teacher_lse)]
            own, weights = (x[:, tile].reshape(-1) for x in (kl, upstream))
            divergence_gradient_(student, teacher, lses[0], lses[1], own, weights, both.reverse)
            found.put(tile, h, z, weights == 0)
        found.finish()
        return dh, None if dw is None else dw.to(weight.dtype), None
