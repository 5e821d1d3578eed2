"""A share of each row of the state is kept: gated linear attention (arXiv 2312.06635)."""

from __future__ import annotations

from ..form import Form

FORM = Form("vector_decay", decay="vector", delta=False, fla="fla.ops.gla.chunk_gla")
