"""The protocol of kernels of linear attention: what one device computes of one rank's rows."""

from __future__ import annotations

from typing import Protocol

import torch

from ..form import Form
from ..inputs import Cut, Inputs, Maps, Run


class LinearKernel(Protocol):
    """name: its entry in `registry.KERNELS`."""

    name: str

    def refusal(self, form: Form, inputs: Inputs) -> str | None:
        """Why these tensors cannot be served, or None. Only shape, dtype and device are read."""
        ...

    def run(self, form: Form, inputs: Inputs, cut: Cut) -> Run:
        """The maps of the pieces, and what makes outputs of the states that enter them."""
        ...


def no_maps(form: Form, inputs: Inputs, pieces: int, dtype: torch.dtype) -> Maps:
    """Maps of `pieces` pieces that nobody asks for: zeros."""
    _, b, h, w = inputs.v.shape
    d = inputs.k.shape[-1]
    zeros = inputs.v.new_zeros((pieces, b, h, d, w), dtype=dtype)
    if form.delta:
        return Maps(zeros.new_zeros((pieces, b, h, d, d)), zeros)
    rows = {"none": None, "scalar": (), "vector": (d,)}[form.decay]
    return Maps(None if rows is None else zeros.new_zeros((pieces, b, h, *rows)), zeros)
