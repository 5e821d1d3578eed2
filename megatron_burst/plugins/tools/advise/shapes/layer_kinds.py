# SPDX-License-Identifier: Apache-2.0
"""Kinds of decoder layers, and sizes of latent attention, indexers and mixers.

A mixer is linear attention or a state-space model. The functions return the mixers of known models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .....linear_attention.forms import FORMS

# Letter of `Model.pattern` -> (kind of the attention half, whether there is an MLP half).
FULL, WINDOW, CHUNKED, MIXER = "full", "window", "chunked", "mixer"
KEY_WINDOW, CSA, HCA = "window keys", "CSA", "HCA"  # DeepSeek-V4's hybrid attention
HYBRID = KEY_WINDOW, CSA, HCA
SOFTMAX = FULL, WINDOW, CHUNKED, *HYBRID  # attention halves with softmax attention
CSA_RATIO = 4  # rows from which a compressed key of CSA is computed
KINDS: dict[str, tuple[str | None, bool]] = {
    "F": (FULL, True),
    "W": (WINDOW, True),
    "C": (CHUNKED, True),
    "V": (KEY_WINDOW, True),
    "S": (CSA, True),
    "H": (HCA, True),
    "L": (MIXER, True),
    "*": (FULL, False),
    "M": (MIXER, False),
    "-": (None, True),
}


class LayerPart(NamedTuple):
    """Kinds of the attention half and the MLP half of one layer.

    Attributes:
        attention: Kind of the attention half: one of `SOFTMAX`, "mixer" or None.
        mlp: Whether the layer has an MLP half, dense or with experts.
        sparse: Whether the MLP half has experts.
        algorithm: Attention algorithm of layers of this kind; None for `Settings.algorithm`.
    """

    attention: str | None
    mlp: bool
    sparse: bool
    algorithm: str | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention with expanded heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        kv_rank: Width of the latent from which keys and values are projected.
        rope: Width of the rotary part of a head. All heads share the rotary part of a key.
        q_rank: Width of the latent from which queries are projected; 0 if queries are projected
            from hidden states.
    """

    kv_rank: int
    rope: int
    q_rank: int = 0


@dataclass(frozen=True)
class Indexer:
    """Indexer that selects keys in sparse latent attention (DeepSeek-V3.2).

    Attributes:
        heads: Number of index heads, which compute a score for each visible key.
        width: Width of an index head, and of the single index key per row.
        top_k: Number of keys that a query attends to.
    """

    heads: int
    width: int
    top_k: int


@dataclass(frozen=True)
class Hybrid:
    """DeepSeek-V4's hybrid attention: one softmax over window keys and compressed keys.

    All heads share one key head, and values are the keys. Names in Megatron are in parentheses.

    Attributes:
        index: Indexer of CSA layers (`dsa_indexer_*`); None if queries attend to all compressed
            keys (`csa_dense_mode`).
        window: Number of window keys of a query, including its own key (`csa_window_size`).
        ratio: Number of rows from which a compressed key of an HCA layer is computed
            (`csa_compress_ratios`).
        q_rank: Width of the latent from which queries are projected (`q_lora_rank`).
        groups: Number of groups of heads, each with its own output projection (`o_groups`).
        out_rank: Width of the output of a group (`o_lora_rank`).
    """

    index: Indexer | None
    window: int = 128
    ratio: int = 128
    q_rank: int = 1024
    groups: int = 8
    out_rank: int = 1024

    def ratio_of(self, kind: str | None) -> int:
        """Return the number of rows per compressed key in a kind of layer; 0 if it has none."""
        return {CSA: CSA_RATIO, HCA: self.ratio}.get(kind or "", 0)

    def index_of(self, kind: str | None) -> Indexer | None:
        """Return the indexer of a kind of layer; None if it has none."""
        return self.index if kind == CSA else None

    def compressors(self, kind: str | None, width: int) -> list[int]:
        """Return the widths of the rows that a layer compresses: for keys, then for index keys.

        In CSA layers the width is doubled: a compressed key is computed from its own window and
        from the previous one, with separate columns for each.

        Args:
            kind: Kind of the layer.
            width: Width of a key.
        """
        if kind == HCA:
            return [width]
        index = self.index_of(kind)
        return [2 * w for w in (width, *([index.width] if index else []))] if kind == CSA else []

    def seen(self, kind: str | None, seq: int) -> float:
        """Return the average number of keys that a query attends to in a causal sequence."""
        ratio, index = self.ratio_of(kind), self.index_of(kind)
        compressed = seq / ratio / 2 if ratio else 0.0
        if index is not None and seq / ratio > (most := index.top_k):
            compressed = most * (1 - most * ratio / (2 * seq))
        return min(self.window, seq) + compressed


@dataclass(frozen=True)
class Mixer:
    """Sizes of a layer's linear attention or state-space model (Mamba-2, gated delta net, ...).

    Attributes:
        name: Name for output.
        into: Total width of the projections from hidden states.
        out: Input width of the output projection.
        heads: Number of value heads, which are split over tensor-parallel ranks.
        others: Number of parameters outside the projections (convolution, decay).
        form: Form of linear attention, one of `FORMS`; "" to count only the projections.
        key_heads: Number of heads of queries and keys, each shared by several value heads.
        width: Width of a key head. The state of a head has shape [width, value_width].
        value_width: Width of a value head.
        taps: Width of the short convolution of queries, keys and values, in rows; 0 for no
            convolution.

    Raises:
        ValueError: The form does not exist, or sizes are inconsistent.
    """

    name: str
    into: int
    out: int
    heads: int
    others: int = 0
    form: str = ""
    key_heads: int = 0
    width: int = 0
    value_width: int = 0
    taps: int = 0

    def __post_init__(self) -> None:
        if not self.form:
            return
        if self.form not in FORMS:
            raise ValueError(
                f"mixer {self.name}: form {self.form!r} must be one of {', '.join(FORMS)}"
            )
        if min(self.key_heads, self.width, self.value_width) < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"mixer {self.name}: form {self.form} requires key_heads that divide the "
                f"{self.heads} heads, got {self.key_heads}, and a width and a value_width >= 1, "
                f"got {self.width} and {self.value_width}"
            )

    def on_rank(self, tp: int) -> Mixer:
        """Return the mixer with its sizes on one of `tp` tensor-parallel ranks."""
        keys = max(1, self.key_heads // tp) if self.form else 0
        return replace(
            self, into=self.into // tp, out=self.out // tp, heads=self.heads // tp, key_heads=keys
        )

    @property
    def values(self) -> int:
        """Number of elements of one row's values. One row of the output has the same number."""
        return self.heads * self.value_width

    @property
    def keys(self) -> int:
        """Number of elements of one row's queries and keys together."""
        return 2 * self.key_heads * self.width

    @property
    def convolved(self) -> int:
        """Number of elements of one row's queries, keys and values, which the convolution reads."""
        return self.keys + self.values

    @property
    def state(self) -> int:
        """Number of elements of the state of one sequence, over all heads."""
        return self.heads * self.width * self.value_width

    @property
    def decay(self) -> Literal["none", "scalar", "vector"]:
        """Kind of decay of the state, from `FORMS`."""
        return FORMS[self.form].decay

    @property
    def decays(self) -> int:
        """Number of elements of one row's decay, over all heads."""
        return self.heads * {"none": 0, "scalar": 1, "vector": self.width}[self.decay]

    @property
    def delta(self) -> bool:
        """True if a delta rule updates the state; the transition is then a matrix."""
        return FORMS[self.form].delta if self.form else False

    def shares(self, tp: int, cp: int = 1) -> bool:
        """Return whether ranks can share the heads equally.

        The number of ranks must divide the value heads and the key heads. Mamba's key groups are
        replicated if there are fewer groups than context-parallel ranks.

        Args:
            tp: Tensor-parallel ranks.
            cp: Context-parallel ranks that exchange heads; 1 if they exchange states.
        """
        keys, ranks = self.key_heads or self.heads, tp * cp
        if self.heads % ranks or keys % tp:
            return False
        return keys % ranks == 0 or (not self.delta and cp % (keys // tp) == 0)


# Arguments of `gated_delta_net`: names in Hugging Face and Megatron, and Megatron's defaults.
DELTA_NET = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def gated_delta_net(heads: int, key_heads: int, width: int, value_width: int, taps: int) -> Mixer:
    """Return the mixer of Qwen3-Next (arXiv 2412.06464).

    The input projections are q, k, v and a gate, and beta and decay of each head.
    """
    keys, values = key_heads * width, heads * value_width
    return Mixer("gated delta net", 2 * keys + 2 * values + 2 * heads, values, heads,
                 taps * (2 * keys + values), "gated_delta_rule", key_heads, width, value_width,
                 taps)  # fmt: skip


def mamba2(heads: int, groups: int, width: int, value_width: int, taps: int) -> Mixer:
    """Return the mixer of Nemotron-H (arXiv 2405.21060).

    The input projections are a gate, x (values), B and C (keys and queries, in groups) and dt of
    each head. `others` counts the convolution with bias, A, D, the bias of dt, and a norm.
    """
    inner, states = heads * value_width, 2 * groups * width
    return Mixer("Mamba-2", 2 * inner + states + heads, inner, heads,
                 (taps + 1) * (inner + states) + 3 * heads + inner, "scalar_decay", groups, width,
                 value_width, taps)  # fmt: skip


def kimi_delta(heads: int, width: int, taps: int) -> Mixer:
    """Return the mixer of Kimi Linear (arXiv 2510.26692).

    The input projections are q, k, v, beta, and low-rank projections (rank `width`) to decay and
    gate. `others` includes the second matrices of decay and gate.
    """
    inner = heads * width
    return Mixer("Kimi delta attention", 3 * inner + heads + 2 * width, inner, heads,
                 3 * taps * inner + 2 * width * inner + heads + inner + width, "kda", heads,
                 width, width, taps)  # fmt: skip


def lightning(heads: int, width: int) -> Mixer:
    """Return the mixer of MiniMax-01 (arXiv 2501.08313).

    The input projections are q, k, v and a gate. The decay of a head is constant. There is no
    convolution.
    """
    inner = heads * width
    return Mixer("lightning attention", 4 * inner, inner, heads, inner, "scalar_decay", heads,
                 width, width, 0)  # fmt: skip
