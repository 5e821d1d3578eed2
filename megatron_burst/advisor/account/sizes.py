"""How many elements a row of each tensor of a layer has, on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import Settings
from ..shapes.models import Model

B, F = 2, 4  # bytes of an activation, of an fp32 number


@dataclass(frozen=True)
class Sizes:
    """Elements in a row of each tensor of a layer on one tensor-parallel rank.

    heads of queries, kv_heads of keys; width of a query or key head, value_width of a value head.
    ffn: of the MLP, or of all experts that see a row; experts: how many these are. gate: the
    attention's result is multiplied by one. latent: the narrow rows of multi-head latent attention,
    on every rank; up: what keys and values are expanded to. mixer: (into, out).
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
        )
