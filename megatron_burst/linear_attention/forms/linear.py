"""Plain linear attention: a state that keeps everything (arXiv 2006.16236)."""

from __future__ import annotations

from ..form import Form

FORM = Form("linear", decay="none", delta=False, fla="fla.ops.simple_gla.chunk_simple_gla")
