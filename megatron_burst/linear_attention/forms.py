# SPDX-License-Identifier: Apache-2.0
"""Table of the forms of linear attention, and the selection of a form by the arguments of a call.

A state S [d, w] per batch entry and value head changes with each token t:

    S_t = D_t S_{t-1} + k_t v_t^T                                            additive forms
    S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T             delta rules

with D_t = exp(decay_t). The output is o_t = scale * S_t^T q_t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

if TYPE_CHECKING:
    import torch

Decay = Literal["none", "scalar", "vector"]


class Form(NamedTuple):
    """Form of linear attention.

    Attributes:
        name: Key in `forms.FORMS`.
        decay: Decay of the state per token: "none", one factor ("scalar") or one factor per row of
            the state ("vector").
        delta: True for delta rules, which write the difference between the value and the state's
            output for the key. False for forms that add the value.
        fla: Module and function of flash-linear-attention that computes the form.
        mamba: True if mamba_ssm computes the form.
    """

    name: str
    decay: Decay
    delta: bool
    fla: str
    mamba: bool = False


_TABLE = (
    # Linear attention without decay (arXiv 2006.16236).
    Form("linear", decay="none", delta=False, fla="fla.ops.simple_gla.chunk_simple_gla"),
    # Retention, lightning, Mamba-2 (SSD, arXiv 2405.21060).
    Form("scalar_decay", "scalar", False, "fla.ops.simple_gla.chunk_simple_gla", mamba=True),
    # Gated linear attention (arXiv 2312.06635).
    Form("vector_decay", "vector", False, "fla.ops.gla.chunk_gla"),
    # Delta rule: a token replaces the state's output for its key (arXiv 2406.06484).
    Form("delta_rule", "none", True, "fla.ops.delta_rule.chunk_delta_rule"),
    # Gated delta net (arXiv 2412.06464).
    Form("gated_delta_rule", "scalar", True, "fla.ops.gated_delta_rule.chunk_gated_delta_rule"),
    # Kimi delta attention (arXiv 2510.26692).
    Form("kda", "vector", True, "fla.ops.kda.chunk_kda"),
)
FORMS: dict[str, Form] = {form.name: form for form in _TABLE}
DECAY_SHAPES = {
    "none": "decay=None",
    "scalar": "decay [s, b, h], or [h] if it is constant",
    "vector": "decay [s, b, h, d]",
}


def select_form(decay: torch.Tensor | None, beta: torch.Tensor | None, name: str = "auto") -> Form:
    """Return the form called `name`, or for "auto" the form that fits `decay` and `beta`.

    Args:
        decay: Logarithms of the decay, [s, b, h] or [h] (scalar), [s, b, h, d] (vector), or None.
        beta: Write strengths [s, b, h] of delta rules, or None for additive forms.
        name: Key in `FORMS`, or "auto".

    Raises:
        ValueError: The form is unknown, or decay or beta do not fit it.
    """
    if not isinstance(name, str) or (name != "auto" and name not in FORMS):
        raise ValueError(f"form must be one of auto, {', '.join(FORMS)}, got {name!r}")
    kind = _kind(decay)
    if beta is not None and (not _is_tensor(beta) or beta.dim() != 3):
        raise ValueError(
            "beta must be a tensor [s, b, h], or None for forms without it, got beta "
            f"{_described(beta)}"
        )
    fitting = next(
        form for form in FORMS.values() if (form.decay, form.delta) == (kind, beta is not None)
    )
    if name == "auto":
        return fitting
    form, reasons = FORMS[name], []
    if form.decay != kind:
        reasons.append(f"requires {DECAY_SHAPES[form.decay]}, got decay {_described(decay)}")
    if form.delta != (beta is not None):
        requirement = "requires beta [s, b, h]" if form.delta else "requires beta=None"
        reasons.append(f"{requirement}, got beta {_described(beta)}")
    if reasons:
        raise ValueError(
            f"form {name} {' and '.join(reasons)}; for these arguments use form='auto', which "
            f"selects {fitting.name}"
        )
    return form


def _kind(decay: torch.Tensor | None) -> str:
    if decay is None:
        return "none"
    kinds = {1: "scalar", 3: "scalar", 4: "vector"}
    if not _is_tensor(decay) or decay.dim() not in kinds:
        raise ValueError(
            "decay must be a tensor of logarithms, [s, b, h], [h] if it is constant, or "
            f"[s, b, h, d], or None, got decay {_described(decay)}"
        )
    return kinds[decay.dim()]


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    import torch  # imported late: users of the table alone need no torch

    return isinstance(value, torch.Tensor)


def _described(value: object) -> str:
    if _is_tensor(value):
        return f"of shape {list(value.shape)}"
    return f"{value!r:.100}"
