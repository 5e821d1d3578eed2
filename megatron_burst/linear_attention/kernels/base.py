"""The protocol of kernels of linear attention: what one device computes of one rank's rows."""

from __future__ import annotations

from typing import Protocol

from ..form import Form
from ..inputs import Cut, Inputs, Run


class LinearKernel(Protocol):
    """name: its entry in `registry.KERNELS`."""

    name: str

    def refusal(self, form: Form, inputs: Inputs) -> str | None:
        """Why these tensors cannot be served, or None. Only shape, dtype and device are read."""
        ...

    def run(self, form: Form, inputs: Inputs, cut: Cut) -> Run:
        """The maps of the pieces, and what makes outputs of the states that enter them."""
        ...
