"""The table of forms of linear attention, and which form the arguments of a call ask for.

`FORMS` has one line per form, `of` chooses one, and `run` has a kernel compute it.
"""

from __future__ import annotations

import warnings

import torch

from ..form import Form
from ..inputs import Cut, Inputs, Run
from ..kernels import registry
from . import delta_rule, gated_delta_rule, kda, linear, scalar_decay, vector_decay

FORMS: dict[str, Form] = {
    "linear": linear.FORM,
    "scalar_decay": scalar_decay.FORM,
    "vector_decay": vector_decay.FORM,
    "delta_rule": delta_rule.FORM,
    "gated_delta_rule": gated_delta_rule.FORM,
    "kda": kda.FORM,
}
WANTED = {
    "none": "decay=None",
    "scalar": "decay [s, b, h], or [h] where it is constant",
    "vector": "decay [s, b, h, d]",
}


def of(decay: torch.Tensor | None, beta: torch.Tensor | None, name: str = "auto") -> Form:
    """The form called `name`; "auto": the one that these arguments fit.

    decay: logarithms [s, b, h] or [h] (scalar), [s, b, h, d] (vector), or None; beta: [s, b, h], or
    None where values are added. Raises ValueError naming form, decay or beta, and what would work.
    """
    if not isinstance(name, str) or (name != "auto" and name not in FORMS):
        raise ValueError(f"form must be one of auto, {', '.join(FORMS)}, got {name!r}")
    kind = _kind(decay)
    if beta is not None and (not isinstance(beta, torch.Tensor) or beta.dim() != 3):
        raise ValueError(
            f"beta must be a tensor [s, b, h], or None for forms without it, got beta {_told(beta)}"
        )
    fitting = next(
        form for form in FORMS.values() if (form.decay, form.delta) == (kind, beta is not None)
    )
    if name == "auto":
        return fitting
    form, reasons = FORMS[name], []
    if form.decay != kind:
        reasons.append(f"takes {WANTED[form.decay]}, got decay {_told(decay)}")
    if form.delta != (beta is not None):
        wanted = "needs beta [s, b, h]" if form.delta else "takes beta=None"
        reasons.append(f"{wanted}, got beta {_told(beta)}")
    if reasons:
        raise ValueError(
            f"form {name} {' and '.join(reasons)}; with these arguments form='auto' takes "
            f"{fitting.name}"
        )
    return form


def run(form: Form, kernel: str, inputs: Inputs, cut: Cut) -> Run:
    """One rank's rows under the kernel called `kernel` ("auto": see `registry.automatic`).

    The result's maps and outputs are differentiable (once), with respect to every tensor of
    `inputs` and to the states that enter. Raises ValueError as `registry.make`. Warns (once, as
    Python shows a warning once) if a decay on the CPU makes states grow.
    """
    chosen = registry.make(kernel, form, inputs)
    _warn_if_growing(inputs.decay)
    return chosen.run(form, inputs, cut)


def _kind(decay: torch.Tensor | None) -> str:
    if decay is None:
        return "none"
    kinds = {1: "scalar", 3: "scalar", 4: "vector"}
    if not isinstance(decay, torch.Tensor) or decay.dim() not in kinds:
        raise ValueError(
            "decay must be a tensor of logarithms, [s, b, h], [h] where it is constant, or "
            f"[s, b, h, d], or None, got decay {_told(decay)}"
        )
    return kinds[decay.dim()]


def _warn_if_growing(decay: torch.Tensor | None) -> None:
    """On a GPU nobody looks: the host would wait for it."""
    if decay is None or decay.is_cuda or decay.numel() == 0:
        return
    if bool(decay.detach().amax() > 0):
        warnings.warn(
            "decay has positive logarithms: states grow, and may overflow in long sequences; "
            "decay is the logarithm of what a token keeps, -0.1 and not exp(-0.1)",
            stacklevel=2,
        )


def _told(given: object) -> str:
    if isinstance(given, torch.Tensor):
        return f"of shape {list(given.shape)}"
    return f"{given!r:.100}"
