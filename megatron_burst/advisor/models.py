"""Shapes of models, by name, from a Hugging Face `config.json` or from numbers.

Dense and mixture-of-experts decoders with multi-head or grouped-query attention, gated MLPs.
Multi-head latent attention and hybrid stacks are refused: their memory is not counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """A decoder. head_dim: width of a head; ffn: of the MLP, or of one expert; vocabulary: with
    padding. tied: the LM head is the embedding. experts: 0 for a dense model; top_k of them see a
    token, and `shared` wide is what every token sees besides. moe_layers: those with experts; the
    others have an MLP `dense_ffn` wide."""

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

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
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

    @property
    def attention_parameters(self) -> int:
        """Of one layer, norms included."""
        q, kv = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        return self.hidden * (2 * q + kv) + 2 * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Of the MLP of one layer without experts; of one with experts, router and shared part."""
        each = (3 if self.gated else 2) * self.hidden
        if self.experts:
            return each * self.shared + self.hidden * self.experts
        return each * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Of all experts of one layer."""
        return self.experts * (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        ends = self.hidden * (self.vocabulary * (1 if self.tied else 2) + 1)
        each = self.attention_parameters
        if not self.experts:
            return ends + self.layers * (each + self.dense_parameters)
        dense = (self.layers - self.moe_layers) * (3 if self.gated else 2) * self.hidden
        sparse = self.moe_layers * (self.dense_parameters + self.expert_parameters)
        return ends + self.layers * each + dense * self.dense_ffn + sparse

    @property
    def active_parameters(self) -> int:
        """That multiply a token: of experts only those that see it, and no embedding."""
        unseen = (self.experts - self.top_k) * self.expert_parameters // max(1, self.experts)
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.parameters - self.moe_layers * unseen - embedding


def _moe(layers: int, **fields: Any) -> dict[str, Any]:
    return {"layers": layers, "moe_layers": layers} | fields


# From the models' config.json on Hugging Face; FPDT's GPT sizes from its table 1 (gated MLPs left
# out: two matrices of 4 hidden).
NAMED: dict[str, Model] = {
    model.name: model
    for model in (
        Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        Model("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        Model("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        Model("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        Model("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        Model("mistral-7b", 32, 4096, 32, 8, 14336, 32000),
        Model("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
        Model("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
        Model("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
        Model("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
        Model("mixtral-8x7b", hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000,
              **_moe(32, experts=8, top_k=2)),
        Model("qwen3-30b-a3b", hidden=2048, heads=32, kv_heads=4, ffn=768, vocabulary=151936,
              head_dim=128, **_moe(48, experts=128, top_k=8)),
    )
}  # fmt: skip


def named(name: str, vocabulary_multiple: int = 1) -> Model:
    """A model by its name, or from the path of a `config.json` or of the folder that has one.

    vocabulary_multiple: the vocabulary is padded to a multiple of it, as Megatron does. ValueError
    with the names that there are for any other.
    """
    if name.lower() in NAMED:
        return padded(NAMED[name.lower()], vocabulary_multiple)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.exists():
        raise ValueError(
            f"--model {name}: no such name and no config.json there; names: {', '.join(NAMED)}"
        )
    return padded(from_config(json.loads(path.read_text()), str(path)), vocabulary_multiple)


def padded(model: Model, multiple: int) -> Model:
    """The same with a vocabulary that `multiple` divides."""
    return replace(model, vocabulary=-(-model.vocabulary // multiple) * multiple)


def from_config(config: dict[str, Any], name: str = "config.json") -> Model:
    """From the fields of a Hugging Face configuration. ValueError for what is not counted."""
    if any(config.get(key) for key in ("kv_lora_rank", "ssm_state_size", "mamba_d_state")):
        raise ValueError(
            f"{name}: multi-head latent attention and state-space layers are not counted yet; "
            "the memory of a dense or mixture-of-experts model with grouped-query attention is"
        )
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        layers, ffn = config["num_hidden_layers"], config["intermediate_size"]
        vocabulary = config["vocab_size"]
    except KeyError as error:
        raise ValueError(
            f"{name}: has no {error}; a config.json of a decoder with num_hidden_layers, "
            "hidden_size, num_attention_heads, intermediate_size and vocab_size would do"
        ) from None
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    return Model(
        name=config.get("_name_or_path") or name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn=(config.get("moe_intermediate_size") or ffn) if experts else ffn,
        vocabulary=vocabulary,
        head_dim=config.get("head_dim") or hidden // heads,
        gated=config.get("hidden_act", "silu") in ("silu", "swiglu"),
        tied=bool(config.get("tie_word_embeddings")),
        experts=experts,
        top_k=config.get("num_experts_per_tok") or 0,
        shared=config.get("shared_expert_intermediate_size") or 0,
        moe_layers=layers if experts else 0,
        dense_ffn=ffn if experts else 0,
    )
