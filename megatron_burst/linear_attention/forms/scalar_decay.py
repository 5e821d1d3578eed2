"""A share of the state is kept, per head: retention, lightning, Mamba-2 (SSD, arXiv 2405.21060)."""

from __future__ import annotations

from ..form import Form

FORM = Form(
    "scalar_decay",
    decay="scalar",
    delta=False,
    fla="fla.ops.simple_gla.chunk_simple_gla",
    mamba=True,
)
