# SPDX-License-Identifier: Apache-2.0
"""Shapes of models: what a decoder's layers are made of, and how many parameters they have.

A layer is an attention half (softmax attention, or a mixer such as Mamba) and an MLP half, or only
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

    name: for output. layers, hidden, heads (of queries), kv_heads: as in a config.json. head_dim:
    width of a query or key head (0: hidden / heads); value_dim: of a value head (0: the same); ffn:
    of the MLP, or of one expert; vocabulary: with padding; gated: the MLP has three matrices.
    tied: the LM head is the embedding. experts: 0 for a dense model; top_k of them see a token, and
    `shared` wide is what every token sees besides. moe_layers: number of layers with experts; the
    others have an MLP `dense_ffn` wide. expert_pattern: "1" or "0" for each layer with an MLP: it
    has experts or not ("" means that the last `moe_layers` have experts).
    latent: of multi-head latent attention; indexer: of sparse attention over its latents, which all
    heads share then, in all layers. output_gate: attention's result is multiplied by a gate
    as wide as the queries. pattern: a letter of `KINDS` for each layer ("" means all "F"); window:
    tokens that a query of a "W" layer sees, itself included; chunk: tokens of a chunk of "C"
    layers, whose queries see the earlier tokens of their own chunk; mixer: of "L" and "M" layers.
    sinks: attention has a learned sink per head. also: parts outside the decoder that nothing here
    counts, in words. family: None if nothing but sizes is known.

    Raises ValueError for sizes that no model could have.
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
                raise ValueError(f"model {self.name}: {name} must be from 1, {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: {self.kv_heads} key/value heads do not divide {self.heads} "
                "query heads"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"model {self.name}: top_k must be 1 to {self.experts} experts, got {self.top_k}"
            )
        if self.indexer is not None and (self.latent is None or self.pattern):
            raise ValueError(f"model {self.name}: an indexer needs latent attention in all layers")
        self._check_pattern()

    def _check_kinds(self) -> None:
        """Raise ValueError for all sizes, switches and texts of wrong types."""
        kinds = {"int": int, "bool": bool, "str": str}
        wrong = []
        for each in fields(self):
            if (kind := kinds.get(str(each.type))) is not None:
                problem = problem_of(kind, getattr(self, each.name))
                wrong += [f"{each.name} {problem}"] if problem else []
        if wrong:
            raise ValueError(f"model {self.name}: {'; '.join(wrong)}")

    def _check_pattern(self) -> None:
        if set(self.letters) - set(KINDS) or len(self.letters) != self.layers:
            raise ValueError(
                f"model {self.name}: pattern {self.pattern!r} needs a letter of {''.join(KINDS)} "
                f"for each of the {self.layers} layers"
            )
        if self.windows and self.window < 1:
            raise ValueError(f"model {self.name}: layers W need a window from 1, {self.window}")
        if self.chunked and self.chunk < 1:
            raise ValueError(f"model {self.name}: layers C need a chunk from 1, {self.chunk}")
        if self.mixers and self.mixer is None:
            raise ValueError(f"model {self.name}: layers L and M need a mixer")
        if not 0 <= self.moe_layers <= self.mlps or (self.moe_layers and not self.experts):
            raise ValueError(
                f"model {self.name}: moe_layers {self.moe_layers} of {self.mlps} layers with an "
                f"MLP and {self.experts} experts"
            )
        where = self.expert_pattern
        if where and (
            set(where) - set("01") or len(where) != self.mlps or where.count("1") != self.moe_layers
        ):
            raise ValueError(
                f"model {self.name}: expert_pattern {where!r} needs 0 or 1 for each of the "
                f"{self.mlps} layers with an MLP, and {self.moe_layers} ones"
            )

    # --- which layers there are --------------------------------------------------------------

    @property
    def letters(self) -> str:
        """A letter of `KINDS` for each layer."""
        return self.pattern or "F" * self.layers

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """What each layer is made of."""
        found, mlps = [], 0
        for letter in self.letters:
            attention, mlp = KINDS[letter]
            found.append(LayerPart(attention, mlp, mlp and self.experts_at[mlps]))
            mlps += mlp
        return tuple(found)

    @cached_property
    def experts_at(self) -> tuple[bool, ...]:
        """For each layer with an MLP: whether it has experts."""
        if self.expert_pattern:
            return tuple(sign == "1" for sign in self.expert_pattern)
        return tuple(at >= self.mlps - self.moe_layers for at in range(self.mlps))

    @property
    def attentions(self) -> int:
        """Layers with softmax attention of any kind."""
        return sum(map(self.number_of, SOFTMAX))

    @property
    def windows(self) -> int:
        """Layers whose attention sees a window."""
        return self.number_of(WINDOW)

    @property
    def chunked(self) -> int:
        """Layers whose attention sees a chunk."""
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
        found = Counter(part.attention or "none" for part in self.parts)
        return {kind: found[kind] for kind in (*SOFTMAX, MIXER, "none") if found[kind]}

    @property
    def mixers(self) -> int:
        """Layers with a mixer instead of attention."""
        return self.number_of(MIXER)

    def carried(self, tp: int, cp: int = 1) -> bool:
        """Whether ranks can share the heads of its mixers, if it has any.

        tp: tensor-parallel ranks; cp: context-parallel ranks of Megatron's exchange of heads.
        """
        return self.mixer is None or not self.mixers or self.mixer.shares(tp, cp)

    @property
    def mlps(self) -> int:
        """Layers with an MLP half, with experts or without."""
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
        """Parameters of the attention half of one layer, and both its norms."""
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
        """Parameters of the mixer of one layer, and both its norms."""
        if self.mixer is None:
            return 0
        projections = self.hidden * (self.mixer.into + self.mixer.out)
        return projections + self.mixer.others + 2 * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Parameters of one layer's MLP; with experts, those of the router and the shared part."""
        if self.experts:
            return self._mlp(self.shared) + self.hidden * self.experts
        return self._mlp(self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self._mlp(self.ffn)

    @cached_property
    def by_layer(self) -> tuple[tuple[int, int, int], ...]:
        """Parameters of each layer: those that tensor-parallel ranks share, of norms, of
        experts.
        """
        of = {part: self._of_part(part) for part in set(self.parts)}
        return tuple(of[part] for part in self.parts)

    def _of_part(self, part: LayerPart) -> tuple[int, int, int]:
        norms = 2 * self.hidden
        found = self.mixer_parameters if part.attention == MIXER else self.attention_parameters
        found = found - norms if part.attention else 0
        experts = self.expert_parameters if part.sparse else 0
        found += round(self.mlp_parameters(part)) - experts if part.mlp else 0
        halves = (part.attention is not None) + part.mlp
        return found, halves * self.hidden, experts

    def mlp_parameters(self, part: LayerPart, ep: int = 1) -> float:
        """Parameters of the MLP half of a layer. part: the layer's; ep: expert-parallel ranks, of
        which this counts one.
        """
        if part.sparse:
            return self.dense_parameters + self.expert_parameters / ep
        return self._mlp(self.dense_ffn if self.experts else self.ffn)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def parameters(self) -> int:
        """Parameters of the whole decoder; small ones (biases, norms of heads, sinks) left out."""
        ends = self.hidden * (self.vocabulary * (1 if self.tied else 2) + 1)
        return ends + sum(map(sum, self.by_layer))

    @property
    def active_parameters(self) -> int:
        """That multiply a token: of experts only those that see it, and no embedding."""
        unseen = (self.experts - self.top_k) * self.expert_parameters // max(1, self.experts)
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.parameters - self.moe_layers * unseen - embedding


def padded(model: Model, multiple: int) -> Model:
    """The same with a vocabulary that `multiple` divides."""
    return replace(model, vocabulary=-(-model.vocabulary // multiple) * multiple)
