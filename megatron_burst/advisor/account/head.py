"""Memory of the LM head and its loss: fused, tile by tile, or with full logits."""

from __future__ import annotations

from ...units import LOGITS_TILE
from ..settings import Settings
from ..shapes.models import Model
from .sizes import B, F


def head_bytes(model: Model, run: Settings) -> dict[str, float]:
    """Of the LM head and its loss: while they run, and what waits for backward then."""
    rows, columns = run.rows, model.vocabulary / run.tp
    hidden = rows / run.tp * model.hidden * B
    if run.lm_head_loss == "off":
        each = run.logits_bytes
        return {"while": rows * columns * each, "kept": rows * columns * (each - F)}
    tile = min(LOGITS_TILE["cpu" if run.path == "cpu" else "cuda"], rows * columns * B)
    gathered = tile / (columns * B) * model.hidden * B
    gradients = hidden + columns * model.hidden * F
    if run.lm_head_loss == "single_pass":
        return {"while": tile + 2 * gathered + gradients, "kept": gradients}
    return {"while": tile + 2 * gathered, "kept": 0.0, "back": tile + 2 * gathered + gradients}
