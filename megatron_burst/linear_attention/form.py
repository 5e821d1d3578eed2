"""What sets one form of linear attention apart: its decay, its way of writing, its packages' names.

A state S [d, w] per batch and value head takes token t as

    S_t = D_t S_{t-1} + k_t v_t^T                                            additive forms
    S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T             delta rules

with D_t = exp(decay_t), and answers o_t = scale * S_t^T q_t.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Decay = Literal["none", "scalar", "vector"]


class Form(NamedTuple):
    """name: its entry in `forms.FORMS`. decay: what a token keeps of the state before it: all
    ("none"), a share of it ("scalar") or a share of each of its d rows ("vector"). delta: does a
    token write what the state does not yet answer for its key (True), or its value (False)? fla:
    the function of flash-linear-attention that computes it, with its module; mamba: does mamba_ssm
    compute it?"""

    name: str
    decay: Decay
    delta: bool
    fla: str
    mamba: bool = False
