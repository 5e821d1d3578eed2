# SPDX-License-Identifier: Apache-2.0
"""Script and flags of Megatron-LM that build a model, and properties of models that have no flag.

`tools.model_arguments` parses these flags. Tests check that it returns the same model.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from ..shapes.layer_kinds import MIXER, Hybrid
from ..shapes.model import Family, Model

HYBRID = "M*-"  # letters of `Model.pattern` for layers with one half, as in Megatron's HybridModel
# Spec of Megatron's hybrid stack, which the script requires.
STACK = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
DELTA_NET, MAMBA = "gated delta net", "Mamba-2"  # mixers of Megatron
MAMBA_TAPS = 4  # width of Megatron's short convolution, which no flag sets


def is_hybrid(model: Model) -> bool:
    """Return whether Megatron-LM builds the model as a HybridModel, from a layer pattern."""
    return bool(set(model.letters) & set(HYBRID)) or _mamba_blocks(model)


def script_of(model: Model) -> str:
    """Return the script of Megatron-LM that builds the model."""
    return "pretrain_hybrid.py" if is_hybrid(model) else "pretrain_gpt.py"


def model_flags(model: Model, stages: int = 1) -> Iterator[str]:
    """Yield the flags for the model's shape, quoted for a shell.

    Each entry is one flag, or a few flags that belong together.

    Args:
        model: Shape of the model.
        stages: Total number of pipeline stages, including virtual ones. The layer pattern of a
            HybridModel marks them.
    """
    family = model.family or Family()
    hybrid, experts = is_hybrid(model), bool(model.experts)
    if not hybrid:
        yield f"--num-layers {model.layers}"
    yield f"--hidden-size {model.hidden}"
    yield f"--ffn-hidden-size {(model.dense_ffn or model.ffn) if experts else model.ffn}"
    yield f"--num-attention-heads {model.heads}"
    if model.hybrid is not None:
        yield from _hybrid_attention(model, model.hybrid)
    else:
        yield from _latent(model) if model.latent is not None else _heads(model)
    if model.gated:
        yield family.gate
    if not model.tied:
        yield "--untie-embeddings-and-output-weights"
    yield f"--vocab-size {model.vocabulary} --make-vocab-size-divisible-by 1"
    yield from hybrid_flags(model, stages) if hybrid else _layer_kinds(model)
    if experts:
        yield from _experts(model, hybrid)
    numerics = family.numerics
    own_positions = "--position-embedding-type" in numerics
    rope = " --position-embedding-type rope"
    yield family.norms.replace(rope, "") if own_positions else family.norms
    if family.flags:
        yield family.flags
    if numerics:
        yield numerics


def _heads(model: Model) -> Iterator[str]:
    if model.kv_heads != model.heads:
        yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    yield f"--kv-channels {model.head_dim}"
    if model.output_gate:
        yield "--attention-output-gate"
    if model.sinks:
        yield "--softmax-type learnable"


def _hybrid_attention(model: Model, of: Hybrid) -> Iterator[str]:
    yield f"--multi-latent-attention --q-lora-rank {of.q_rank} --v-head-dim {model.head_dim}"


def _latent(model: Model) -> Iterator[str]:
    low = model.latent
    assert low is not None
    query = f" --q-lora-rank {low.q_rank}" if low.q_rank else ""
    yield f"--multi-latent-attention{query} --kv-lora-rank {low.kv_rank}"
    yield (
        f"--qk-head-dim {model.head_dim - low.rope} --qk-pos-emb-head-dim {low.rope} "
        f"--v-head-dim {model.value_dim}"
    )
    if model.hidden % model.heads:  # Megatron requires a width that it does not use
        yield f"--kv-channels {model.value_dim}"
    if (index := model.indexer) is not None:
        yield (
            f"--experimental-attention-variant dsa --dsa-indexer-n-heads {index.heads} "
            f"--dsa-indexer-head-dim {index.width} --dsa-indexer-topk {index.top_k}"
        )


def _layer_kinds(model: Model) -> Iterator[str]:
    """Yield flags for sliding windows or linear-attention layers of a GPTModel."""
    if model.windows and not model.mixers:
        yield f"--window-size {model.window - 1},0"
        if model.windows < model.layers:
            windows = [letter == "W" for letter in model.letters]
            yield f"--window-attn-skip-freq {frequency(windows)}"
    if model.mixers and _name(model) == DELTA_NET:
        yield (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq "
            f"{frequency([letter == 'L' for letter in model.letters])}"
        )
        yield from _delta_net(model)


def _delta_net(model: Model) -> Iterator[str]:
    of = model.mixer
    assert of is not None
    yield (
        f"--linear-num-value-heads {of.heads} --linear-num-key-heads {of.key_heads} "
        f"--linear-key-head-dim {of.width} --linear-value-head-dim {of.value_width} "
        f"--linear-conv-kernel-dim {of.taps}"
    )


def hybrid_flags(model: Model, stages: int = 1) -> Iterator[str]:
    """Yield flags for the layer pattern of a HybridModel and the sizes of its mixers.

    Args:
        model: Shape of the model.
        stages: Total number of pipeline stages, including virtual ones. The pattern marks them,
            because Megatron accepts no flag for virtual stages together with a pattern.
    """
    per_stage = model.layers // stages
    signs = [_signs(model, index) for index in range(model.layers)]
    parts = ["".join(signs[at : at + per_stage]) for at in range(0, model.layers, per_stage)]
    yield f"--hybrid-layer-pattern {shlex.quote('|'.join(parts))} {STACK}"
    if model.mixers and _name(model) == DELTA_NET:
        yield from _delta_net(model)
    elif carries_state(model) and (of := model.mixer) is not None:
        yield (
            f"--mamba-num-heads {of.heads} --mamba-head-dim {of.value_width} "
            f"--mamba-state-dim {of.width} --mamba-num-groups {of.key_heads}"
        )


def _signs(model: Model, index: int) -> str:
    """Return Megatron's pattern letters for a layer: attention, then MLP, if it has them."""
    attention, mlp, sparse, _ = model.parts[index]
    first = ""
    if attention == MIXER:
        first = {DELTA_NET: "G", MAMBA: "M"}.get(_name(model), "*")
    elif attention is not None:
        first = "+" if model.latent is not None else "*"
    return first + ("E" if sparse else "-" * mlp)


def _experts(model: Model, hybrid: bool) -> Iterator[str]:
    yield f"--num-experts {model.experts} --moe-router-topk {model.top_k}"
    yield f"--moe-ffn-hidden-size {model.ffn}"
    if model.shared:
        yield f"--moe-shared-expert-intermediate-size {model.shared}"
    if model.moe_layers < model.layers and not hybrid:
        yield f"--moe-layer-freq {layer_list(model.experts_at)}"
    yield "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"


def frequency(layers: Sequence[bool]) -> str:
    """Return selected layers (True) in Megatron's notation for layer frequencies.

    The result is N if all layers except every Nth are selected, otherwise `layer_list(layers)`.
    """
    for every in range(2, len(layers) + 1):
        if all(has == bool((i + 1) % every) for i, has in enumerate(layers)):
            return str(every)
    return layer_list(layers)


def layer_list(layers: Sequence[bool]) -> str:
    """Return selected layers (True) as ones in a quoted list, such as "'([1]*3+[0]*1)'"."""
    runs = [(int(has), len([*run])) for has, run in groupby(layers)]
    return shlex.quote("(" + "+".join(f"[{has}]*{count}" for has, count in runs) + ")")


def lacking(model: Model) -> list[str]:
    """Return a sentence for each property of the model that no flag of Megatron-LM sets."""
    sentences, mixer = [], _name(model)
    for words in model.family.lacking if model.family is not None else ():
        sentences.append(f"Megatron-LM has no flag for {words}.")
    if model.hybrid is not None:
        ratios = [model.hybrid.ratio_of(part.attention) for part in model.parts]
        sentences.append(
            "Megatron-LM has no flag for hybrid attention: build its layers with "
            f"mb.sparse_layer_spec(rule='csa', csa_compress_ratios={ratios}, ...) "
            "(docs/sparse.md)."
        )
    if model.chunked:
        sentences.append(
            f"Megatron-LM has no flag for attention in chunks of {model.chunk:,} tokens: these "
            f"flags build full attention in its {model.chunked} layers. For chunks, pass your own "
            "mask function as --burst-mask (docs/megatron-lm.md)."
        )
    if model.mixers and not carries_state(model):
        sentences.append(
            f"Megatron-LM has no flag for {mixer}: these flags build softmax attention in its "
            f"{model.mixers} layers."
        )
    if model.mixers and mixer == MAMBA and model.mixer and model.mixer.taps != MAMBA_TAPS:
        sentences.append(
            f"Megatron-LM has no flag for the width of Mamba-2's convolution: the model's width is "
            f"{model.mixer.taps} rows, Megatron-LM's is {MAMBA_TAPS}."
        )
    if model.windows and (is_hybrid(model) or model.mixers):
        sentences.append(
            f"Megatron-LM has no flag for windows in some attention layers together with {mixer} "
            "or in a hybrid pattern; these flags set no window."
        )
    if model.latent is None and model.value_dim != model.head_dim:
        sentences.append(
            f"Megatron-LM has no flag for values of width {model.value_dim} with keys of "
            f"width {model.head_dim} without latent attention."
        )
    if model.latent is not None and model.output_gate:
        sentences.append("Megatron-LM has no gate on the output of latent attention.")
    return sentences


def carries_state(model: Model) -> bool:
    """Return whether the flags build linear-attention or Mamba-2 layers, which carry a state."""
    return bool(model.mixers) and _name(model) in (DELTA_NET, MAMBA)


def _mamba_blocks(model: Model) -> bool:
    return bool(model.mixers) and _name(model) == MAMBA


def _name(model: Model) -> str:
    return model.mixer.name if model.mixer is not None else ""
