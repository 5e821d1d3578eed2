# SPDX-License-Identifier: Apache-2.0
"""The forms of linear attention in one table, and which form the arguments of a call ask for.

A state S [d, w] per batch and value head takes token t as

    S_t = D_t S_{t-1} + k_t v_t^T                                            additive forms
    S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T             delta rules

with D_t = exp(decay_t), and answers o_t = scale * S_t^T q_t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

if TYPE_CHECKING:
    import torch

Decay = Literal["none", "scalar", "vector"]


class Form(NamedTuple):
    """name: its entry in `forms.FORMS`. decay: what a token keeps of the state before it: all
    ("none"), a share of it ("scalar") or a share of each of its d rows ("vector"). delta: does a
    token write what the state does not yet answer for its key (True), or its value (False)? fla:
    the function of flash-linear-attention that computes it, with its module; mamba: does mamba_ssm
    compute it?
    """

    name: str
    decay: Decay
    delta: bool
    fla: str
    mamba: bool = False


_TABLE = (
    # Keeps everything (arXiv 2006.16236).
    Form("linear", decay="none", delta=False, fla="fla.ops.simple_gla.chunk_simple_gla"),
    # Retention, lightning, Mamba-2 (SSD, arXiv 2405.21060).
    Form("scalar_decay", "scalar", False, "fla.ops.simple_gla.chunk_simple_gla", mamba=True),
    # Gated linear attention (arXiv 2312.06635).
    Form("vector_decay", "vector", False, "fla.ops.gla.chunk_gla"),
    # A token replaces what its key finds in the state (arXiv 2406.06484).
    Form("delta_rule", "none", True, "fla.ops.delta_rule.chunk_delta_rule"),
    # Gated delta net (arXiv 2412.06464).
    Form("gated_delta_rule", "scalar", True, "fla.ops.gated_delta_rule.chunk_gated_delta_rule"),
    # Kimi delta attention (arXiv 2510.26692).
    Form("kda", "vector", True, "fla.ops.kda.chunk_kda"),
)
FORMS: dict[str, Form] = {form.name: form for form in _TABLE}
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
        reasons.append(f"takes {WANTED[form.decay]}, got decay {_described(decay)}")
    if form.delta != (beta is not None):
        wanted = "needs beta [s, b, h]" if form.delta else "takes beta=None"
        reasons.append(f"{wanted}, got beta {_described(beta)}")
    if reasons:
        raise ValueError(
            f"form {name} {' and '.join(reasons)}; with these arguments form='auto' takes "
            f"{fitting.name}"
        )
    return form


def _kind(decay: torch.Tensor | None) -> str:
    if decay is None:
        return "none"
    kinds = {1: "scalar", 3: "scalar", 4: "vector"}
    if not _is_tensor(decay) or decay.dim() not in kinds:
        raise ValueError(
            "decay must be a tensor of logarithms, [s, b, h], [h] where it is constant, or "
            f"[s, b, h, d], or None, got decay {_described(decay)}"
        )
    return kinds[decay.dim()]


def _is_tensor(given: Any) -> TypeGuard[torch.Tensor]:
    import torch  # those who ask for the table do not need it

    return isinstance(given, torch.Tensor)


def _described(given: object) -> str:
    if _is_tensor(given):
        return f"of shape {list(given.shape)}"
    return f"{given!r:.100}"
