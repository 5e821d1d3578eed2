"""How a run cuts packed batches: its layout, and what a layout that is solved per pack goes by.

A run fixes its `Cut` once, from the first configuration that chooses BurstAttention, because data
path, rotary embedding and attention must cut alike, on every pipeline stage and every rank. What
costs a token therefore comes from the whole model, and never from the layers of one stage.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.layout.mixture import CAUSAL, Window
from megatron_burst.megatron.checks import translation
from megatron_burst.megatron.patching import registry

_NOTE = "cut"


@dataclass(frozen=True)
class Cut:
    """How packed batches are cut: the same for every batch, model and rank of a run.

    name: the layout. For "balanced" also per_node: ranks per node, None if nobody said; windows:
    what a token sees in each kind of layer, each as often as its share of the layers says;
    multiple: what has to divide the tokens of a rank.
    """

    name: str
    per_node: int | None = None
    windows: tuple[Window, ...] = (CAUSAL,)
    multiple: int = 1


def cut_for(config: Any, burst: BurstConfig) -> Cut:
    """The cut of a run with this ``TransformerConfig``.

    Layers count as causal. Without windows that is also the balance of models without causality,
    whose tokens see twice as much in every document alike.
    """
    if burst.layout != "balanced":
        return Cut(burst.layout)
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    split = getattr(config, "sequence_parallel", False)
    return Cut(
        burst.layout,
        per_node=sizes[0] if sizes else burst.intra_size,
        windows=layer_windows(config),
        multiple=config.tensor_model_parallel_size if split else 1,
    )


def layer_windows(config: Any) -> tuple[Window, ...]:
    """What a token sees in the kinds of layers of a model, in the smallest whole numbers of each.

    One windowed layer in three is ((None, 0), (None, 0), (left, 0)).
    """
    layers = range(1, getattr(config, "num_layers", 1) + 1)
    count = Counter(causal_window(config, layer) for layer in layers)
    common = math.gcd(*count.values())
    return tuple(window for window, n in count.items() for _ in range(n // common))


def causal_window(config: Any, layer_number: int) -> Window:
    """What a token sees in a layer that counts as causal."""
    left, _ = layer_window(config, layer_number) or CAUSAL
    return left, 0


def layer_window(config: Any, layer_number: int) -> Window | None:
    """(left, right) of a layer with a sliding window, None for no limit; None without a window.

    A query at p sees the keys from p - left to p + right; ``layer_number`` counts from 1.
    """
    # Late: this module is imported where there may be no Megatron-Core.
    from megatron.core.transformer.utils import is_layer_window_attention

    size = getattr(config, "window_size", None)
    skip: Any = getattr(config, "window_attn_skip_freq", None)
    if not size or not is_layer_window_attention(size, skip, layer_number):
        return None
    left, right = (None if limit == -1 else limit for limit in size)
    return left, right


def attention_cut(burst: BurstConfig) -> Cut | None:
    """How softmax attention cuts sequences, where that is not how the run cuts its batches."""
    apart = burst.attention_layout not in (None, burst.layout)
    return Cut(str(burst.attention_layout)) if apart else None


def settle_cut(patches: registry.PatchSet, cut: Cut) -> None:
    """Fix the cut of the run, unless an earlier configuration has."""
    patches.notes.setdefault(_NOTE, cut)


def cut_of_run(layout: str) -> Cut:
    """The cut of the run, whose layout is ``layout``.

    Raises ``ValueError`` for layout balanced before a configuration says what its tokens cost.
    """
    patches = registry.installed("burst")
    found = patches.notes.get(_NOTE) if patches else None
    if found is None and layout == "balanced":
        raise ValueError(
            "layout balanced before configure(): batches are cut by what a token of this model "
            "costs; configure the model first"
        )
    return found or Cut(layout)


def unpacked() -> ValueError:
    """The error for a batch without documents in a run with layout balanced."""
    return translation.user_error(
        "--burst-layout balanced cuts packed batches, and this batch names no documents: pass "
        "packed_seq_params, as --dataloader-inter-document-masking, --reset-attention-mask and "
        "--sft make them; for one document per sequence take --burst-layout zigzag, which is "
        "balanced for it"
    )
