"""The delta rule on a state whose rows decay: Kimi delta attention (arXiv 2510.26692)."""

from __future__ import annotations

from ..form import Form

FORM = Form("kda", decay="vector", delta=True, fla="fla.ops.kda.chunk_kda")
