# SPDX-License-Identifier: Apache-2.0
"""Kernel "reference": computes the recurrence of each form token by token.

This kernel computes in the accumulation dtype and is slow. Other kernels are tested against it.
"""

from __future__ import annotations

import torch

from ...kernels.online_softmax import accumulation_dtype
from ..forms import Form
from .base import LinearInputs, Maps, RankPieces, no_maps


class RecurrenceKernel:
    """Kernel "reference": computes the recurrence token by token."""

    name = "reference"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        return None

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> RecurrenceRun:
        return RecurrenceRun(form, inputs, cut)


class RecurrenceRun:
    """`base.PieceRun` that computes the recurrence. It computes the maps of all pieces."""

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces):
        self.form, self.cut, self.dtype = form, cut, inputs.v.dtype
        wide = accumulation_dtype(inputs.v.dtype)
        groups = inputs.v.shape[2] // inputs.k.shape[2]
        q, k = (x.to(wide).repeat_interleave(groups, 2) for x in (inputs.q, inputs.k))
        v = inputs.v.to(wide)
        decay, beta = (None if x is None else x.to(wide) for x in (inputs.decay, inputs.beta))
        self.inputs = LinearInputs(q, k, v, decay, beta, inputs.scale)
        ends, transitions = [], []
        for piece in self._pieces():
            zero_state = v.new_zeros((*v.shape[1:3], k.shape[-1], v.shape[-1]))
            ends.append(_run(self.form, piece, zero_state)[1])
            transitions.append(_transition(self.form, piece))
        self.maps = no_maps(form, self.inputs, len(ends), wide)
        if ends:
            has_transition = self.maps.transition is not None
            self.maps = Maps(
                torch.stack(transitions) if has_transition else None, torch.stack(ends)
            )

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        states = entering.to(self.inputs.v.dtype).unbind()
        outs = [
            _run(self.form, piece, state)[0]
            for piece, state in zip(self._pieces(), states, strict=True)
        ]
        return torch.cat([self.inputs.v[:0], *outs]).to(self.dtype)

    def _pieces(self) -> list[LinearInputs]:
        def split(x: torch.Tensor | None) -> list:
            lengths = self.cut.lengths
            return [None] * len(lengths) if x is None else list(x.split(lengths))

        *tensors, scale = self.inputs
        pieces = zip(*map(split, tensors), strict=True)
        return [LinearInputs(q, k, v, decay, beta, scale) for q, k, v, decay, beta in pieces]


def _run(form: Form, piece: LinearInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence from `state` [b, h, d, x]; return outputs [s, b, h, x] and last state."""
    outs = [piece.v[:0]]
    for t in range(piece.v.shape[0]):
        key, value = piece.k[t], piece.v[t]
        if piece.decay is not None:
            decay = piece.decay[t].exp()
            state = state * (decay.unsqueeze(-1) if decay.dim() == 3 else decay[..., None, None])
        if form.delta:
            assert piece.beta is not None
            current_output = torch.einsum("bhdx,bhd->bhx", state, key)
            value = piece.beta[t].unsqueeze(-1) * (value - current_output)
        state = state + torch.einsum("bhd,bhx->bhdx", key, value)
        outs.append(piece.scale * torch.einsum("bhdx,bhd->bhx", state, piece.q[t])[None])
    return torch.cat(outs), state


def _transition(form: Form, piece: LinearInputs) -> torch.Tensor | None:
    if form.delta:
        b, h, d = piece.k.shape[1:]
        unit = torch.eye(d, dtype=piece.k.dtype, device=piece.k.device).expand(b, h, d, d)
        empty = piece.v.new_zeros((piece.v.shape[0], b, h, d))
        return _run(form, piece._replace(v=empty), unit)[1]
    return None if piece.decay is None else piece.decay.sum(0).exp()
