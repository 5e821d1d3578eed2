"""What layers of a decoder are made of: kinds of attention halves, by a letter for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# What a layer is made of, by the letter of `Model.pattern`: (attention half, has an MLP half).
FULL, WINDOW, MIXER = "full", "window", "mixer"
KINDS: dict[str, tuple[str | None, bool]] = {
    "F": (FULL, True),
    "W": (WINDOW, True),
    "L": (MIXER, True),
    "*": (FULL, False),
    "M": (MIXER, False),
    "-": (None, True),
}


class Part(NamedTuple):
    """A layer: its attention half ("full", "window", "mixer" or None), and whether it has an MLP
    half and whether that has experts."""

    attention: str | None
    mlp: bool
    sparse: bool


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with expanded heads:
    keys and values come out of `kv_rank` numbers, queries of `q_rank` (0: of the hidden states).
    rope: width of the part of a head that is turned, which all heads of a key share."""

    kv_rank: int
    rope: int
    q_rank: int = 0


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes rows without softmax attention (Mamba-2, gated delta net). into, out:
    widths of its projections from and to hidden states; others: its other parameters (convolution,
    decay). What its scan computes and holds is not counted. heads: tensor-parallel ranks divide
    them."""

    name: str
    into: int
    out: int
    heads: int
    others: int = 0
