"""The delta rule: a token replaces what its key finds in the state (arXiv 2406.06484)."""

from __future__ import annotations

from ..form import Form

FORM = Form("delta_rule", decay="none", delta=True, fla="fla.ops.delta_rule.chunk_delta_rule")
