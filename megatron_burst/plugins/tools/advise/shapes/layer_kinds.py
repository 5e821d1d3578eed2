# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers of a decoder: attention halves, and mixers by kind.

This module decides which form of linear attention a mixer computes, and its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .....linear_attention.forms import FORMS

# Attention half and whether there is an MLP half, by the letter of `Model.pattern`.
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
    """The halves of a layer.

    Attributes:
        attention: Kind of its attention half: "full", "window", "chunked", "mixer" or None.
        mlp: It has an MLP half.
        sparse: Its MLP half has experts.
        algorithm: Algorithm of its attention if its kind has its own; None: `Settings.algorithm`.
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
        rope: Width of the part of a head with rotary positions. All heads share this part of a key.
        q_rank: Width of the latent from which queries are projected; 0: the hidden states.
    """

    kv_rank: int
    rope: int
    q_rank: int = 0


@dataclass(frozen=True)
class Indexer:
    """The selection of keys in sparse latent attention (DeepSeek-V3.2).

    Attributes:
        heads: Heads that score all keys that a query may attend to.
        width: Width of a head, and of the one index key per row.
        top_k: Number of keys with the highest scores that a query attends to.
    """

    heads: int
    width: int
    top_k: int


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes rows without softmax attention (Mamba-2, gated delta net).

    Attributes:
        name: Its name, for output.
        into: Width of its projections from hidden states.
        out: Width of its projection to hidden states.
        heads: Heads, which tensor-parallel ranks divide.
        others: Its other parameters (convolution, decay).
        form: Form of linear attention, one of `FORMS`; "": only its projections are counted.
        key_heads: Heads of queries and keys, which value heads share.
        width: Width of a key head. The state of a head has width x value_width numbers.
        value_width: Width of a value head.
        taps: Rows of the short convolution of queries, keys and values; 0: no convolution.

    Raises:
        ValueError: The form does not exist, or the sizes do not fit each other.
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
        """Return the part of one of `tp` tensor-parallel ranks."""
        keys = max(1, self.key_heads // tp) if self.form else 0
        return replace(
            self, into=self.into // tp, out=self.out // tp, heads=self.heads // tp, key_heads=keys
        )

    @property
    def values(self) -> int:
        """Elements of a row's values, and of its results."""
        return self.heads * self.value_width

    @property
    def keys(self) -> int:
        """Elements of a row's queries and keys together."""
        return 2 * self.key_heads * self.width

    @property
    def convolved(self) -> int:
        """Elements of a row that the short convolution reads: queries, keys and values."""
        return self.keys + self.values

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.heads * self.width * self.value_width

    @property
    def decay(self) -> Literal["none", "scalar", "vector"]:
        """The kind of decay of a state, from `FORMS`."""
        return FORMS[self.form].decay

    @property
    def decays(self) -> int:
        """Elements of a row's decay."""
        return self.heads * {"none": 0, "scalar": 1, "vector": self.width}[self.decay]

    @property
    def delta(self) -> bool:
        """True if it writes by a delta rule, which makes the transition of a state a matrix."""
        return FORMS[self.form].delta if self.form else False

    def shares(self, tp: int, cp: int = 1) -> bool:
        """Return whether ranks can share its heads.

        The ranks must divide the heads of values and of keys. Mamba's groups of keys are copied if
        they are fewer than context-parallel ranks.

        Args:
            tp: Tensor-parallel ranks.
            cp: Context-parallel ranks of Megatron's exchange of heads.
        """
        keys, ranks = self.key_heads or self.heads, tp * cp
        if self.heads % ranks or keys % tp:
            return False
        return keys % ranks == 0 or (not self.delta and cp % (keys // tp) == 0)


# Names and defaults of the arguments of `gated_delta_net` in Hugging Face and Megatron.
DELTA_NET = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def gated_delta_net(heads: int, key_heads: int, width: int, value_width: int, taps: int) -> Mixer:
    """Return the mixer of Qwen3-Next (arXiv 2412.06464).

    It projects to q, k, v and a gate, and to beta and decay of each head.
    """
    keys, values = key_heads * width, heads * value_width
    return Mixer("gated delta net", 2 * keys + 2 * values + 2 * heads, values, heads,
                 taps * (2 * keys + values), "gated_delta_rule", key_heads, width, value_width,
                 taps)  # fmt: skip


def mamba2(heads: int, groups: int, width: int, value_width: int, taps: int) -> Mixer:
    """Return the mixer of Nemotron-H (arXiv 2405.21060).

    It projects to a gate, x (values), B and C (keys and queries, in groups) and dt of each head.
    `others` are the convolution with its bias, A, D, the bias of dt, and a norm.
    """
    inner, states = heads * value_width, 2 * groups * width
    return Mixer("Mamba-2", 2 * inner + states + heads, inner, heads,
                 (taps + 1) * (inner + states) + 3 * heads + inner, "scalar_decay", groups, width,
                 value_width, taps)  # fmt: skip


def kimi_delta(heads: int, width: int, taps: int) -> Mixer:
    """Return the mixer of Kimi Linear (arXiv 2510.26692).

    It projects to q, k, v and beta, and to decay and gate through `width` numbers each. `others`
    contain the second matrices of decay and gate.
    """
    inner = heads * width
    return Mixer("Kimi delta attention", 3 * inner + heads + 2 * width, inner, heads,
                 3 * taps * inner + 2 * width * inner + heads + inner + width, "kda", heads,
                 width, width, taps)  # fmt: skip


def lightning(heads: int, width: int) -> Mixer:
    """Return the mixer of MiniMax-01 (arXiv 2501.08313).

    It projects to q, k, v and a gate. The decay is constant per head; there is no convolution.
    """
    inner = heads * width
    return Mixer("lightning attention", 4 * inner, inner, heads, inner, "scalar_decay", heads,
                 width, width, 0)  # fmt: skip
