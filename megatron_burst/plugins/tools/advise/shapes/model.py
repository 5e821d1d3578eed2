# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: the layers of a decoder and their parameters.

A layer has an attention half (softmax attention, or a mixer such as Mamba) and an MLP half, or only
one of them. `models` has shapes by name, `model_config` reads a `config.json`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from ..field_types import problem_of
from .layer_kinds import (
    CHUNKED,
    KINDS,
    MIXER,
    SOFTMAX,
    WINDOW,
    Indexer,
    Latent,
    LayerPart,
    Mixer,
)

NORMS = "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
# Flags that a description by sizes alone does not determine.
STRUCTURE = "--qk-layernorm and biases, if it has them"
POSITIONS = "--norm-epsilon, --rotary-base and rope scaling"


class Family(NamedTuple):
    """Properties of a model that change neither time nor memory, as flags of Megatron-LM.

    Attributes:
        flags: Flags of the architecture, such as `--qk-layernorm`.
        numerics: Flags for the epsilon of norms and for rotary positions.
        norms: Flags for the kind of norms, for biases and for the type of positions.
        gate: Flag of a gated MLP.
        lacking: Properties without a flag, in words.
        biases: Experts have biases, which Megatron does not split over tensor-parallel ranks.
        left: Flags that the description of the model does not determine, in words.
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
    """The shape of a decoder, in elements.

    Attributes:
        name: Its name, for output.
        layers: Number of layers.
        hidden: Width of hidden states.
        heads: Query heads.
        kv_heads: Key/value heads.
        ffn: Width of the MLP, or of one expert.
        vocabulary: Vocabulary with padding.
        head_dim: Width of a query or key head; 0: hidden / heads.
        gated: The MLP has three matrices.
        tied: The LM head is the embedding.
        experts: Number of experts, 0 for a dense model.
        top_k: Number of experts that process a token.
        shared: Width of the shared experts, which process every token.
        moe_layers: Number of layers with experts.
        dense_ffn: Width of the MLP of the other layers.
        value_dim: Width of a value head; 0: `head_dim`.
        latent: Latents of multi-head latent attention.
        output_gate: Attention's result is multiplied by a gate as wide as the queries.
        pattern: A letter of `KINDS` for each layer; "": all "F".
        window: Tokens that a query of a "W" layer attends to, itself included.
        mixer: The mixer of "L" and "M" layers.
        sinks: Attention has a learned sink per head.
        also: Parts outside the decoder that are not counted, in words.
        indexer: Indexer of sparse attention over latents. All layers have it, and all heads share
            the latents.
        family: Flags of the model; None if only its sizes are known.
        chunk: Tokens of a chunk of "C" layers. A query attends to the earlier tokens of its own
            chunk.
        expert_pattern: "1" or "0" for each layer with an MLP: it has experts or not. "": the last
            `moe_layers` have experts.

    Raises:
        ValueError: The sizes are impossible.
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
                f"model {self.name}: top_k must be 1 to {self.experts} experts, got {self.top_k}"
            )
        if self.indexer is not None and (self.latent is None or self.pattern):
            raise ValueError(f"model {self.name}: an indexer needs latent attention in all layers")
        self._check_pattern()

    def _check_kinds(self) -> None:
        """Raise ValueError for sizes, switches and texts of wrong types."""
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
                f"model {self.name}: pattern {self.pattern!r} needs a letter of {''.join(KINDS)} "
                f"for each of the {self.layers} layers"
            )
        if self.windows and self.window < 1:
            raise ValueError(f"model {self.name}: W layers require window >= 1, got {self.window}")
        if self.chunked and self.chunk < 1:
            raise ValueError(f"model {self.name}: C layers require chunk >= 1, got {self.chunk}")
        if self.mixers and self.mixer is None:
            raise ValueError(f"model {self.name}: L and M layers require a mixer")
        if not 0 <= self.moe_layers <= self.mlps or (self.moe_layers and not self.experts):
            raise ValueError(
                f"model {self.name}: moe_layers {self.moe_layers} of {self.mlps} layers with an "
                f"MLP and {self.experts} experts"
            )
        experts = self.expert_pattern
        if experts and (
            set(experts) - set("01")
            or len(experts) != self.mlps
            or experts.count("1") != self.moe_layers
        ):
            raise ValueError(
                f"model {self.name}: expert_pattern {experts!r} needs 0 or 1 for each of the "
                f"{self.mlps} layers with an MLP, and {self.moe_layers} ones"
            )

    # --- which layers there are --------------------------------------------------------------

    @property
    def letters(self) -> str:
        """A letter of `KINDS` for each layer."""
        return self.pattern or "F" * self.layers

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """The halves of each layer."""
        parts, mlps = [], 0
        for letter in self.letters:
            attention, mlp = KINDS[letter]
            parts.append(LayerPart(attention, mlp, mlp and self.experts_at[mlps]))
            mlps += mlp
        return tuple(parts)

    @cached_property
    def experts_at(self) -> tuple[bool, ...]:
        """True for each layer with an MLP that has experts."""
        if self.expert_pattern:
            return tuple(sign == "1" for sign in self.expert_pattern)
        return tuple(at >= self.mlps - self.moe_layers for at in range(self.mlps))

    @property
    def attentions(self) -> int:
        """Number of layers with softmax attention of any kind."""
        return sum(map(self.number_of, SOFTMAX))

    @property
    def windows(self) -> int:
        """Number of layers with window attention."""
        return self.number_of(WINDOW)

    @property
    def chunked(self) -> int:
        """Number of layers with chunked attention."""
        return self.number_of(CHUNKED)

    def window_of(self, kind: str | None, seq: int) -> int:
        """Return the window by which a kind of attention half is counted, 0 for full attention.

        Chunked attention counts as a window of half a chunk, which has as many pairs.

        Args:
            kind: Kind of attention half, None for a layer without attention.
            seq: Tokens of the whole sequence.
        """
        if kind == CHUNKED:
            return (self.chunk + 1) // 2 if self.chunk < seq else 0
        return self.window if kind == WINDOW else 0

    @property
    def kinds(self) -> dict[str, int]:
        """Number of layers by their attention half; "none": layers with an MLP alone."""
        count = Counter(part.attention or "none" for part in self.parts)
        return {kind: count[kind] for kind in (*SOFTMAX, MIXER, "none") if count[kind]}

    @property
    def mixers(self) -> int:
        """Number of layers with a mixer instead of attention."""
        return self.number_of(MIXER)

    def carried(self, tp: int, cp: int = 1) -> bool:
        """Return whether ranks can share the heads of its mixers, if it has any.

        Args:
            tp: Tensor-parallel ranks.
            cp: Context-parallel ranks of Megatron's exchange of heads.
        """
        return self.mixer is None or not self.mixers or self.mixer.shares(tp, cp)

    @property
    def mlps(self) -> int:
        """Number of layers with an MLP half, with experts or without."""
        return sum(self.letters.count(letter) for letter, (_, mlp) in KINDS.items() if mlp)

    def number_of(self, kind: str) -> int:
        """Return the number of layers with a kind of attention half."""
        return sum(self.letters.count(letter) for letter, (of, _) in KINDS.items() if of == kind)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Parts that neither time nor memory counts, in words."""
        mixers = ()
        if self.mixer is not None and self.mixers and not self.mixer.form:
            mixers = (f"scans and states of {self.mixers} {self.mixer.name} layers",)
        return (*mixers, *self.also)

    # --- parameters --------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention half of one layer, with the norms of both halves."""
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

    @property
    def mixer_parameters(self) -> int:
        """Parameters of the mixer of one layer, with the norms of both halves."""
        if self.mixer is None:
            return 0
        projections = self.hidden * (self.mixer.into + self.mixer.out)
        return projections + self.mixer.others + 2 * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Parameters of one layer's MLP; with experts, the router and the shared experts."""
        if self.experts:
            return self._mlp(self.shared) + self.hidden * self.experts
        return self._mlp(self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self._mlp(self.ffn)

    @cached_property
    def by_layer(self) -> tuple[tuple[int, int, int], ...]:
        """Parameters of each layer: those that tensor-parallel ranks share, norms, experts."""
        of = {part: self._of_part(part) for part in set(self.parts)}
        return tuple(of[part] for part in self.parts)

    def _of_part(self, part: LayerPart) -> tuple[int, int, int]:
        norms = 2 * self.hidden
        dense = self.mixer_parameters if part.attention == MIXER else self.attention_parameters
        dense = dense - norms if part.attention else 0
        experts = self.expert_parameters if part.sparse else 0
        dense += round(self.mlp_parameters(part)) - experts if part.mlp else 0
        halves = (part.attention is not None) + part.mlp
        return dense, halves * self.hidden, experts

    def mlp_parameters(self, part: LayerPart, ep: int = 1) -> float:
        """Return the parameters of the MLP half of a layer.

        Args:
            part: The layer.
            ep: Expert-parallel ranks, one of which is counted.
        """
        if part.sparse:
            return self.dense_parameters + self.expert_parameters / ep
        return self._mlp(self.dense_ffn if self.experts else self.ffn)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def parameters(self) -> int:
        """Parameters of the decoder without biases, norms of heads and sinks."""
        ends = self.hidden * (self.vocabulary * (1 if self.tied else 2) + 1)
        return ends + sum(map(sum, self.by_layer))

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply a token: only its experts, and no embedding."""
        unseen = (self.experts - self.top_k) * self.expert_parameters // max(1, self.experts)
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.parameters - self.moe_layers * unseen - embedding


def padded(model: Model, multiple: int) -> Model:
    """Return the model with its vocabulary padded to a multiple."""
    return replace(model, vocabulary=-(-model.vocabulary // multiple) * multiple)
