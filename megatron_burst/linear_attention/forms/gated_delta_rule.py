"""The delta rule on a state that decays per head: gated delta net (arXiv 2412.06464)."""

from __future__ import annotations

from ..form import Form

FORM = Form(
    "gated_delta_rule",
    decay="scalar",
    delta=True,
    fla="fla.ops.gated_delta_rule.chunk_gated_delta_rule",
)
