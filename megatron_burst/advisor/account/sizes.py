"""How many elements a row of each tensor of a layer has, on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..settings import Settings
from ..shapes.layer_kinds import FORMS, Mixer
from ..shapes.models import Model

B, F = 2, 4  # bytes of an activation, of an fp32 number


@dataclass(frozen=True)
class Scan:
    """Linear attention on one tensor-parallel rank: heads of values, key_heads of queries and
    keys, width x value_width numbers of a head's state. decay: "none", "scalar" or "vector" per
    head; delta: it has a beta per head, and maps of states are matrices. taps: of the short
    convolution, which queries, keys and values go through; batch: sequences of a micro-batch."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    decay: Literal["none", "scalar", "vector"]
    delta: bool
    taps: int
    batch: int

    @classmethod
    def of(cls, mixer: Mixer, run: Settings) -> Scan:
        """Of a mixer whose form is known."""
        decay, delta = FORMS[mixer.form]
        return cls(mixer.heads // run.tp, max(1, mixer.key_heads // run.tp), mixer.width,
                   mixer.value_width, decay, delta, mixer.taps, run.micro_batch)  # fmt: skip

    @property
    def values(self) -> int:
        """Numbers of a row's values, and of its results."""
        return self.heads * self.value_width

    @property
    def keys(self) -> int:
        """Numbers of a row's queries and keys together."""
        return 2 * self.key_heads * self.width

    @property
    def state(self) -> int:
        """Numbers of a sequence's state."""
        return self.heads * self.width * self.value_width

    @property
    def decays(self) -> int:
        """Numbers of a row's decay."""
        return self.heads * {"none": 0, "scalar": 1, "vector": self.width}[self.decay]


@dataclass(frozen=True)
class Sizes:
    """Elements in a row of each tensor of a layer on one tensor-parallel rank.

    heads of queries, kv_heads of keys; width of a query or key head, value_width of a value head.
    ffn: of the MLP, or of all experts that see a row; experts: how many these are. gate: the
    attention's result is multiplied by one. latent: the narrow rows of multi-head latent attention,
    on every rank; up: what keys and values are expanded to. mixer: (into, out); scan: what its
    linear attention has, None where that is not counted.
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    ffn: int
    experts: int
    gated: bool
    tp: int
    cpu: bool
    gate: bool = False
    latent: int = 0
    up: int = 0
    mixer: tuple[int, int] = (0, 0)
    scan: Scan | None = None

    @property
    def query(self) -> int:
        return self.heads * self.width

    @property
    def keys(self) -> int:
        return self.kv_heads * self.width

    @property
    def values(self) -> int:
        return self.kv_heads * self.value_width

    @property
    def kv(self) -> int:
        return self.keys + self.values

    @property
    def out(self) -> int:
        return self.heads * self.value_width

    @classmethod
    def of(cls, model: Model, run: Settings, sparse: bool | None = None) -> Sizes:
        """sparse: of a layer with experts; None: if the model has any."""
        heads = model.heads // run.tp
        sparse = bool(model.moe_layers) if sparse is None else sparse
        ffn = model.dense_ffn if model.experts and not sparse else model.ffn
        low, mixer = model.latent, model.mixer
        return cls(
            hidden=model.hidden,
            heads=heads,
            kv_heads=max(1, model.kv_heads // run.tp),  # with fewer heads than ranks: copies
            width=model.head_dim,
            value_width=model.value_dim,
            ffn=max(1, (model.top_k * ffn + model.shared if sparse else ffn) // run.tp),
            experts=model.top_k if sparse else 0,
            gated=model.gated,
            tp=run.tp,
            cpu=run.path == "cpu",
            gate=model.output_gate,
            latent=low.q_rank + low.kv_rank + low.rope if low else 0,
            up=heads * (model.head_dim - low.rope + model.value_dim) if low else 0,
            mixer=(mixer.into // run.tp, mixer.out // run.tp) if mixer else (0, 0),
            scan=Scan.of(mixer, run) if mixer and mixer.form else None,
        )
