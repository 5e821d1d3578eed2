# SPDX-License-Identifier: Apache-2.0
"""Shape of a decoder model: kinds of layers, sizes of layers, and numbers of parameters.

A layer has an attention half (softmax attention, or a mixer such as Mamba), an MLP half, or both.
`models` contains shapes by name; `model_config` reads a `config.json`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from ..field_types import problem_of
from .layer_kinds import (
    CHUNKED,
    HYBRID,
    KINDS,
    MIXER,
    SOFTMAX,
    WINDOW,
    Hybrid,
    Indexer,
    Latent,
    LayerPart,
    Mixer,
)

NORMS = "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
# Flags that cannot be derived from sizes alone.
STRUCTURE = "--qk-layernorm and biases, if the model has them"
POSITIONS = "--norm-epsilon, --rotary-base and rope scaling"


class Family(NamedTuple):
    """Flags of Megatron-LM for properties of a model that affect neither time nor memory.

    Attributes:
        flags: Flags of the architecture, such as `--qk-layernorm`.
        numerics: Flags for the epsilon of norms and for rotary positions.
        norms: Flags for the type of norms, for biases and for the type of position embeddings.
        gate: Flag of a gated MLP.
        lacking: Descriptions of properties that no flag sets.
        biases: Whether experts have biases, which Megatron does not split over tensor-parallel
            ranks.
        left: Names of flags that the user must set, because the description of the model does not
            determine them; "" if there are none.
    """

    flags: str = ""
    numerics: str = ""
    norms: str = NORMS
    gate: str = "--swiglu"
    lacking: tuple[str, ...] = ()
    biases: bool = False
    left: str = ""


@dataclass(frozen=True)
class Model:
    """Shape of a decoder; widths are in elements.

    Attributes:
        name: Name for output.
        layers: Number of layers.
        hidden: Width of hidden states.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        ffn: Width of the MLP, or of one expert.
        vocabulary: Size of the vocabulary, including padding.
        head_dim: Width of a query or key head; 0 for hidden / heads.
        gated: Whether the MLP is gated (three matrices).
        tied: Whether embedding and LM head share weights.
        experts: Number of experts; 0 for a dense model.
        top_k: Number of experts that process a token.
        shared: Total width of the shared experts.
        moe_layers: Number of layers with experts.
        dense_ffn: MLP width of layers without experts, in a model with experts.
        value_dim: Width of a value head; 0 for `head_dim`.
        latent: Sizes of multi-head latent attention; None for other attention.
        output_gate: Whether attention's result is multiplied by a gate as wide as the queries.
        pattern: One letter per layer (`layer_kinds.KINDS`); "" for "F" in all layers. Letters with
            attention and an MLP: "F" full attention, "W" sliding window, "C" chunked attention, "L"
            a mixer such as linear attention, "V", "S" and "H" hybrid attention (window keys only,
            CSA, HCA). Letters with one of them: "*" full attention, "M" a mixer, "-" an MLP.
        window: Tokens that a query of a "W" layer attends to, including itself.
        mixer: Mixer of "L" and "M" layers.
        sinks: Whether attention has a learned sink per head.
        also: Names of parts outside the decoder, which are not counted in any number.
        indexer: Indexer of sparse attention over latents, in all layers; None for dense attention.
        family: Megatron flags of the model that affect neither time nor memory; None if only sizes
            are known.
        chunk: Tokens of a chunk of "C" layers. A query attends to itself and the earlier tokens of
            its chunk.
        expert_pattern: "1" (experts) or "0" (dense) for each layer with an MLP; "" if the last
            `moe_layers` of these layers have experts.
        hybrid: Sizes of hybrid attention; None if the model has no such layers.

    Raises:
        ValueError: Sizes are impossible or inconsistent.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    moe_layers: int = 0
    dense_ffn: int = 0
    value_dim: int = 0
    latent: Latent | None = None
    output_gate: bool = False
    pattern: str = ""
    window: int = 0
    mixer: Mixer | None = None
    sinks: bool = False
    also: tuple[str, ...] = ()
    indexer: Indexer | None = None
    family: Family | None = None
    chunk: int = 0
    expert_pattern: str = ""
    hybrid: Hybrid | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, default in (
            ("head_dim", self.hidden // max(1, self.heads)),
            ("value_dim", self.head_dim or self.hidden // max(1, self.heads)),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model {self.name}: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: {self.heads} query heads are not a multiple of the "
                f"{self.kv_heads} key/value heads"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"model {self.name}: top_k must be from 1 to {self.experts} (the number of "
                f"experts), got {self.top_k}"
            )
        if self.indexer is not None and (self.latent is None or self.pattern):
            raise ValueError(
                f"model {self.name}: indexer requires latent attention (set latent) and full "
                "attention in all layers (pattern '')"
            )
        self._check_pattern()

    def _check_kinds(self) -> None:
        """Raise ValueError if a field has a value of a wrong type."""
        kinds = {"int": int, "bool": bool, "str": str}
        wrong = []
        for field in fields(self):
            if (kind := kinds.get(str(field.type))) is not None:
                problem = problem_of(kind, getattr(self, field.name))
                wrong += [f"{field.name} {problem}"] if problem else []
        if wrong:
            raise ValueError(f"model {self.name}: {'; '.join(wrong)}")

    def _check_pattern(self) -> None:
        if set(self.letters) - set(KINDS) or len(self.letters) != self.layers:
            raise ValueError(
                f"model {self.name}: pattern {self.pattern!r} must have one of the letters "
                f"{''.join(KINDS)} for each of the {self.layers} layers"
            )
        if self.windows and self.window < 1:
            raise ValueError(f"model {self.name}: W layers require window >= 1, got {self.window}")
        if self.chunked and self.chunk < 1:
            raise ValueError(f"model {self.name}: C layers require chunk >= 1, got {self.chunk}")
        if self.mixers and self.mixer is None:
            raise ValueError(f"model {self.name}: L and M layers require a mixer")
        if (self.hybrid is not None) != (set(self.letters) <= set("VSH")):
            raise ValueError(
                f"model {self.name}: V, S and H layers require hybrid, and cannot be combined with "
                "other layers"
            )
        if not 0 <= self.moe_layers <= self.mlps or (self.moe_layers and not self.experts):
            raise ValueError(
                f"model {self.name}: moe_layers is {self.moe_layers}. It must be at most "
                f"{self.mlps} (the number of layers with an MLP), and 0 if the model has no "
                f"experts (experts is {self.experts})"
            )
        experts = self.expert_pattern
        if experts and (
            set(experts) - set("01")
            or len(experts) != self.mlps
            or experts.count("1") != self.moe_layers
        ):
            raise ValueError(
                f"model {self.name}: expert_pattern {experts!r} must have 0 or 1 for each of the "
                f"{self.mlps} layers with an MLP, with {self.moe_layers} ones (moe_layers)"
            )

    # --- kinds of layers ---------------------------------------------------------------------

    @property
    def letters(self) -> str:
        """One letter per layer; see `pattern`."""
        return self.pattern or "F" * self.layers

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """For each layer, the kinds of its attention half and its MLP half."""
        parts, mlps = [], 0
        for letter in self.letters:
            attention, mlp = KINDS[letter]
            parts.append(LayerPart(attention, mlp, mlp and self.experts_at[mlps]))
            mlps += mlp
        return tuple(parts)

    @cached_property
    def experts_at(self) -> tuple[bool, ...]:
        """For each layer with an MLP, whether it has experts."""
        if self.expert_pattern:
            return tuple(sign == "1" for sign in self.expert_pattern)
        return tuple(at >= self.mlps - self.moe_layers for at in range(self.mlps))

    @property
    def attentions(self) -> int:
        """Number of layers with softmax attention of any kind."""
        return sum(map(self.number_of, SOFTMAX))

    @property
    def selects(self) -> bool:
        """True if attention is sparse or hybrid. Ranks then send keys and do not share heads."""
        return self.indexer is not None or self.hybrid is not None

    @property
    def key_rows(self) -> int:
        """Maximum rows of a compressed key over all layers; 1 without hybrid attention."""
        return max(1, *map(self.hybrid.ratio_of, self.kinds)) if self.hybrid else 1

    @property
    def windows(self) -> int:
        """Number of layers with sliding-window attention."""
        return self.number_of(WINDOW)

    @property
    def chunked(self) -> int:
        """Number of layers with chunked attention."""
        return self.number_of(CHUNKED)

    def window_of(self, kind: str | None, seq: int) -> int:
        """Return the window in tokens with which a kind of attention is predicted; 0 for none.

        Chunked attention is predicted with a window of half a chunk, which has about as many
        visible pairs.

        Args:
            kind: Kind of the attention half; None for a layer without attention.
            seq: Tokens of the whole sequence.
        """
        if kind == CHUNKED:
            return (self.chunk + 1) // 2 if self.chunk < seq else 0
        return self.window if kind == WINDOW else 0

    @property
    def kinds(self) -> dict[str, int]:
        """Kind of the attention half -> number of layers; "none" for layers with only an MLP."""
        count = Counter(part.attention or "none" for part in self.parts)
        return {kind: count[kind] for kind in (*SOFTMAX, MIXER, "none") if count[kind]}

    @property
    def mixers(self) -> int:
        """Number of layers with a mixer instead of softmax attention."""
        return self.number_of(MIXER)

    def carried(self, tp: int, cp: int = 1) -> bool:
        """Return whether ranks can share the heads of the mixer equally; True without a mixer.

        Args:
            tp: Tensor-parallel ranks.
            cp: Context-parallel ranks that exchange heads; 1 if they exchange states.
        """
        return self.mixer is None or not self.mixers or self.mixer.shares(tp, cp)

    @property
    def mlps(self) -> int:
        """Number of layers with an MLP half (dense or with experts)."""
        return sum(self.letters.count(letter) for letter, (_, mlp) in KINDS.items() if mlp)

    def number_of(self, kind: str) -> int:
        """Return the number of layers whose attention half has this kind."""
        return sum(self.letters.count(letter) for letter, (of, _) in KINDS.items() if of == kind)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Descriptions of parts of the model that predictions do not count."""
        mixers = ()
        if self.mixer is not None and self.mixers and not self.mixer.form:
            mixers = (f"scans and states of {self.mixers} {self.mixer.name} layers",)
        return (*mixers, *self.also)

    # --- parameters --------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of softmax attention in one layer, plus all norms of the layer.

        For hybrid attention, compressed keys are not counted; see `hybrid_parameters`.
        """
        if self.hybrid is not None:
            return self.hybrid_parameters(None) + 2 * self.hidden
        q, out = self.heads * self.head_dim, self.heads * self.value_dim
        if (low := self.latent) is not None:
            query = self.hidden * low.q_rank + low.q_rank + low.q_rank * q
            down = self.hidden * (low.kv_rank + low.rope) + low.kv_rank
            up = low.kv_rank * self.heads * (self.head_dim - low.rope + self.value_dim)
            query = query if low.q_rank else self.hidden * q
            if (index := self.indexer) is not None:
                query += (low.q_rank or self.hidden) * index.heads * index.width
                query += self.hidden * (index.width + index.heads) + 2 * index.width
            return query + down + up + self.hidden * out + 2 * self.hidden
        kv = self.kv_heads * (self.head_dim + self.value_dim)
        return self.hidden * (q * (1 + self.output_gate) + kv + out) + 2 * self.hidden

    def hybrid_parameters(self, kind: str | None) -> int:
        """Return the number of parameters of hybrid attention in one layer of this kind."""
        of, width = self.hybrid, self.head_dim
        assert of is not None
        ratio, index, q = of.ratio_of(kind), of.index_of(kind), self.heads * width
        count = self.hidden * (of.q_rank + width) + of.q_rank * (1 + q) + width
        count += of.out_rank * (q + of.groups * self.hidden)
        for columns in of.compressors(kind, width):
            count += columns * (2 * self.hidden + ratio)
        if index is not None:
            count += of.q_rank * index.heads * index.width + self.hidden * index.heads
        return count + (ratio > 0) * width + (index.width if index else 0)  # norms of keys

    @property
    def mixer_parameters(self) -> int:
        """Number of parameters of the mixer in one layer, plus all norms of the layer."""
        if self.mixer is None:
            return 0
        projections = self.hidden * (self.mixer.into + self.mixer.out)
        return projections + self.mixer.others + 2 * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of one layer's MLP, or of its router and shared experts."""
        if self.experts:
            return self._mlp(self.shared) + self.hidden * self.experts
        return self._mlp(self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts of one layer."""
        return self.experts * self._mlp(self.ffn)

    @cached_property
    def by_layer(self) -> tuple[tuple[int, int, int], ...]:
        """For each layer, the numbers of parameters in dense matrices, in norms and in experts."""
        of = {part: self._of_part(part) for part in set(self.parts)}
        return tuple(of[part] for part in self.parts)

    def _of_part(self, part: LayerPart) -> tuple[int, int, int]:
        norms = 2 * self.hidden
        dense = self.mixer_parameters if part.attention == MIXER else self.attention_parameters
        dense = dense - norms if part.attention else 0
        dense = self.hybrid_parameters(part.attention) if part.attention in HYBRID else dense
        experts = self.expert_parameters if part.sparse else 0
        dense += round(self.mlp_parameters(part)) - experts if part.mlp else 0
        halves = (part.attention is not None) + part.mlp
        return dense, halves * self.hidden, experts

    def mlp_parameters(self, part: LayerPart, ep: int = 1) -> float:
        """Return the number of parameters of the MLP half of a layer on one expert-parallel rank.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            ep: Expert-parallel size, by which experts are divided.
        """
        if part.sparse:
            return self.dense_parameters + self.expert_parameters / ep
        return self._mlp(self.dense_ffn if self.experts else self.ffn)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def parameters(self) -> int:
        """Number of parameters of the decoder, without biases, sinks and norms of heads."""
        ends = self.hidden * (self.vocabulary * (1 if self.tied else 2) + 1)
        return ends + sum(map(sum, self.by_layer))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that process a token, without the embedding.

        Of the experts, only `top_k` are counted.
        """
        unseen = (self.experts - self.top_k) * self.expert_parameters // max(1, self.experts)
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.parameters - self.moe_layers * unseen - embedding


def padded(model: Model, multiple: int) -> Model:
    """Return the model with its vocabulary padded to a multiple of `multiple`."""
    return replace(model, vocabulary=-(-model.vocabulary // multiple) * multiple)
