# SPDX-License-Identifier: Apache-2.0
"""What layers of a decoder are made of: kinds of attention halves, and mixers by kind.

Decides which form of linear attention a kind of layer computes, and what of it is a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .....linear_attention.forms import FORMS

# What a layer is made of, by the letter of `Model.pattern`: (attention half, has an MLP half).
FULL, WINDOW, CHUNKED, MIXER = "full", "window", "chunked", "mixer"
SOFTMAX = FULL, WINDOW, CHUNKED  # attention halves with softmax attention
KINDS: dict[str, tuple[str | None, bool]] = {
    "F": (FULL, True),
    "W": (WINDOW, True),
    "C": (CHUNKED, True),
    "L": (MIXER, True),
    "*": (FULL, False),
    "M": (MIXER, False),
    "-": (None, True),
}


class LayerPart(NamedTuple):
    """A layer: its attention half ("full", "window", "chunked", "mixer" or None), whether
    it has an MLP half and whether that has experts.

    algorithm: of its attention, if its kind of layers has its own; None: `Settings.algorithm`.
    """

    attention: str | None
    mlp: bool
    sparse: bool
    algorithm: str | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with expanded heads:
    keys and values come out of `kv_rank` numbers, queries of `q_rank` (0: of the hidden states).
    rope: width of the part of a head that is turned, which all heads of a key share.
    """

    kv_rank: int
    rope: int
    q_rank: int = 0


@dataclass(frozen=True)
class Indexer:
    """What selects the keys of sparse latent attention (DeepSeek-V3.2): `heads` of `width` score
    all keys that a query sees, one index key of `width` per row; the best `top_k` are attended
    to.
    """

    heads: int
    width: int
    top_k: int


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes rows without softmax attention (Mamba-2, gated delta net). into, out:
    widths of its projections from and to hidden states; others: its other parameters (convolution,
    decay). heads: tensor-parallel ranks divide them.

    form: of linear attention, one of `FORMS`; "": what it computes between its projections is not
    counted. key_heads: of queries and keys, which heads share; width, value_width: of a head of
    keys and of values: a head's state has width x value_width numbers. taps: rows of the short
    convolution of queries, keys and values, 0: there is none.

    Raises ValueError for a form that there is not, and for sizes that it could not have.
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
            raise ValueError(f"mixer {self.name}: form {self.form!r} is none of {', '.join(FORMS)}")
        if min(self.key_heads, self.width, self.value_width) < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"mixer {self.name}: form {self.form} needs key_heads that divide the "
                f"{self.heads} heads, got {self.key_heads}, and a width and a value_width from 1, "
                f"got {self.width} and {self.value_width}"
            )

    def on_rank(self, tp: int) -> Mixer:
        """What one of `tp` tensor-parallel ranks has of it."""
        keys = max(1, self.key_heads // tp) if self.form else 0
        return replace(
            self, into=self.into // tp, out=self.out // tp, heads=self.heads // tp, key_heads=keys
        )

    @property
    def values(self) -> int:
        """Numbers of a row's values, and of its results."""
        return self.heads * self.value_width

    @property
    def keys(self) -> int:
        """Numbers of a row's queries and keys together."""
        return 2 * self.key_heads * self.width

    @property
    def convolved(self) -> int:
        """Numbers of a row that the short convolution sees: queries, keys and values."""
        return self.keys + self.values

    @property
    def state(self) -> int:
        """Numbers of a sequence's state."""
        return self.heads * self.width * self.value_width

    @property
    def decay(self) -> Literal["none", "scalar", "vector"]:
        """What a token keeps of the state before it, as of `FORMS`."""
        return FORMS[self.form].decay

    @property
    def decays(self) -> int:
        """Numbers of a row's decay."""
        return self.heads * {"none": 0, "scalar": 1, "vector": self.width}[self.decay]

    @property
    def delta(self) -> bool:
        """Whether it writes by a delta rule, so that its map of a state is a matrix."""
        return FORMS[self.form].delta if self.form else False

    def shares(self, tp: int, cp: int = 1) -> bool:
        """Whether tensor-parallel ranks, and the context-parallel ranks of Megatron's exchange of
        heads, can share its heads: they divide those of values and of keys; Mamba's groups of keys
        are copied where they are fewer than context-parallel ranks.
        """
        keys, ranks = self.key_heads or self.heads, tp * cp
        if self.heads % ranks or keys % tp:
            return False
        return keys % ranks == 0 or (not self.delta and cp % (keys // tp) == 0)


# What Hugging Face and Megatron both call the arguments of `gated_delta_net`, and their defaults.
DELTA_NET = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def gated_delta_net(heads: int, key_heads: int, width: int, value_width: int, taps: int) -> Mixer:
    """Qwen3-Next's (arXiv 2412.06464): q, k, v and a gate, beta and decay of each head."""
    keys, values = key_heads * width, heads * value_width
    return Mixer("gated delta net", 2 * keys + 2 * values + 2 * heads, values, heads,
                 taps * (2 * keys + values), "gated_delta_rule", key_heads, width, value_width,
                 taps)  # fmt: skip


def mamba2(heads: int, groups: int, width: int, value_width: int, taps: int) -> Mixer:
    """Nemotron-H's (arXiv 2405.21060): a gate, x (values), B and C (keys and queries, in groups)
    and dt of each head; the convolution has a bias, and A, D, dt's bias and a norm are others.
    """
    inner, states = heads * value_width, 2 * groups * width
    return Mixer("Mamba-2", 2 * inner + states + heads, inner, heads,
                 (taps + 1) * (inner + states) + 3 * heads + inner, "scalar_decay", groups, width,
                 value_width, taps)  # fmt: skip


def kimi_delta(heads: int, width: int, taps: int) -> Mixer:
    """Kimi Linear's (arXiv 2510.26692): q, k, v and beta; decay and gate through `width` numbers
    each, whose second matrices are others.
    """
    inner = heads * width
    return Mixer("Kimi delta attention", 3 * inner + heads + 2 * width, inner, heads,
                 3 * taps * inner + 2 * width * inner + heads + inner + width, "kda", heads,
                 width, width, taps)  # fmt: skip


def lightning(heads: int, width: int) -> Mixer:
    """MiniMax-01's (arXiv 2501.08313): q, k, v and a gate; a decay that is constant per head, no
    convolution.
    """
    inner = heads * width
    return Mixer("lightning attention", 4 * inner, inner, heads, inner, "scalar_decay", heads,
                 width, width, 0)  # fmt: skip
