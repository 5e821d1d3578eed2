# SPDX-License-Identifier: Apache-2.0
"""Shapes of models by name, from the official config.json files on Hugging Face.

Only the decoder is described. `Model.also` lists other parts (vision, multi-token prediction).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .layer_kinds import (
    Hybrid,
    Indexer,
    Latent,
    Mixer,
    gated_delta_net,
    kimi_delta,
    lightning,
    mamba2,
)
from .model import Family, Model, padded
from .model_config import from_config


def _moe(layers: int, **fields: Any) -> dict[str, Any]:
    return {"layers": layers, "moe_layers": layers} | fields


def _gemma3(name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, dim: int) -> Model:
    """Return a Gemma 3 model.

    Each layer with full attention follows five layers with a window of 1,024 tokens (Gemma 3
    report).
    """
    pattern = ("WWWWWF" * layers)[:layers]
    return Model(name, layers, hidden, heads, kv, ffn, 262208, dim, tied=True, pattern=pattern,
                 window=1024, also=("the vision tower",))  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    """Return a gpt-oss model.

    Every other layer has a window of 128 tokens, and attention has sinks (gpt-oss model card).
    """
    return Model(name, hidden=2880, heads=64, kv_heads=8, ffn=2880, vocabulary=201088, head_dim=64,
                 pattern="WF" * (layers // 2), window=128, sinks=True,
                 **_moe(layers, experts=experts, top_k=4))  # fmt: skip


_LLAMA = (
    Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
    Model("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
    Model("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
    *(Model(f"llama{v}-8b", 32, 4096, 32, 8, 14336, 128256) for v in ("3", "3.1")),
    *(Model(f"llama{v}-70b", 80, 8192, 64, 8, 28672, 128256) for v in ("3", "3.1", "3.3")),
    *(Model(f"llama{v}-405b", 126, 16384, 128, 8, 53248, 128256) for v in ("3", "3.1")),
    Model("llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied=True),
    Model("llama3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
    Model("mistral-7b", 32, 4096, 32, 8, 14336, 32000),
    Model("mixtral-8x7b", hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000,
          **_moe(32, experts=8, top_k=2)),
    Model("mixtral-8x22b", hidden=6144, heads=48, kv_heads=8, ffn=16384, vocabulary=32768,
          **_moe(56, experts=8, top_k=2)),
)  # fmt: skip
_QWEN = (
    Model("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
    Model("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064),
    Model("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
    Model("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
    Model("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, 128, tied=True),
    Model("qwen3-1.7b", 28, 2048, 16, 8, 6144, 151936, 128, tied=True),
    Model("qwen3-4b", 36, 2560, 32, 8, 9728, 151936, 128, tied=True),
    Model("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 128),
    Model("qwen3-14b", 40, 5120, 40, 8, 17408, 151936, 128),
    Model("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, 128),
    Model("qwen3-30b-a3b", hidden=2048, heads=32, kv_heads=4, ffn=768, vocabulary=151936,
          head_dim=128, **_moe(48, experts=128, top_k=8)),
    Model("qwen3-235b-a22b", hidden=4096, heads=64, kv_heads=4, ffn=1536, vocabulary=151936,
          head_dim=128, **_moe(94, experts=128, top_k=8)),
    Model("qwen3-next-80b-a3b", hidden=2048, heads=16, kv_heads=2, ffn=512, vocabulary=151936,
          head_dim=256, output_gate=True, pattern="LLLF" * 12,
          mixer=gated_delta_net(32, 16, 128, 128, 4),
          also=("multi-token prediction",),
          **_moe(48, experts=512, top_k=10, shared=512)),
)  # fmt: skip
_FURTHER = (
    Model("deepseek-v2-lite", 27, 2048, 16, 16, 1408, 102400, head_dim=192, value_dim=128,
          latent=Latent(512, 64), experts=64, top_k=6, shared=2 * 1408, moe_layers=26,
          dense_ffn=10944),
    Model("deepseek-v2", 60, 5120, 128, 128, 1536, 102400, head_dim=192, value_dim=128,
          latent=Latent(512, 64, 1536), experts=160, top_k=6, shared=2 * 1536, moe_layers=59,
          dense_ffn=12288),
    Model("deepseek-v3", 61, 7168, 128, 128, 2048, 129280, head_dim=192, value_dim=128,
          latent=Latent(512, 64, 1536), experts=256, top_k=8, shared=2048, moe_layers=58,
          dense_ffn=18432, also=("multi-token prediction",)),
    Model("deepseek-v3.2", 61, 7168, 128, 128, 2048, 129280, head_dim=192, value_dim=128,
          latent=Latent(512, 64, 1536), experts=256, top_k=8, shared=2048, moe_layers=58,
          dense_ffn=18432, also=("multi-token prediction", "the indexer's loss"),
          indexer=Indexer(64, 128, 2048)),
    Model("deepseek-v4-flash", hidden=4096, heads=64, kv_heads=1, ffn=2048, vocabulary=129280,
          head_dim=512, pattern="VV" + "SH" * 20 + "S", hybrid=Hybrid(Indexer(64, 128, 512)),
          also=("multi-token prediction", "hyper-connections",
                "the indexer's loss"),
          **_moe(43, experts=256, top_k=6, shared=2048)),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    _gemma3("gemma-3-4b", 34, 2560, 8, 4, 10240, 256),
    _gemma3("gemma-3-12b", 48, 3840, 16, 8, 15360, 256),
    _gemma3("gemma-3-27b", 62, 5376, 32, 16, 21504, 128),
    Model("nemotron-h-8b", 52, 4096, 32, 8, 21504, 131072, head_dim=128, gated=False,
          pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
          mixer=mamba2(128, 8, 128, 64, 4)),
    Model("kimi-linear-48b-a3b", 27, 2304, 32, 32, 1024, 163840, head_dim=192, value_dim=128,
          latent=Latent(512, 64), pattern="LLLF" * 6 + "LLF", mixer=kimi_delta(32, 128, 4),
          experts=256, top_k=8, shared=1024, moe_layers=26, dense_ffn=9216),
    Model("minimax-text-01", hidden=6144, heads=64, kv_heads=8, ffn=9216, vocabulary=200064,
          head_dim=128, pattern="LLLLLLLF" * 10, mixer=lightning(64, 128),
          **_moe(80, experts=32, top_k=2)),
)  # fmt: skip
_LATENT = "--qk-layernorm --moe-router-dtype fp32"
_SMALL = "--norm-epsilon 1e-06"
_YARN = f"{_SMALL} --rope-type yarn --rotary-scaling-factor 40"
_YARN_V2 = f"{_YARN} --mscale 0.707 --mscale-all-dim 0.707"
_V3 = Family(
    f"{_LATENT} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5",
    f"{_YARN} --mscale 1 --mscale-all-dim 1",
)
_LLAMA3 = "--rotary-base 500000"
_LLAMA31 = f"{_LLAMA3} --use-rope-scaling --rope-scaling-factor 8"
# Prefix of a name in `NAMED` -> `Family`; the longest matching prefix is used.
FAMILIES = {
    "llama2": Family(),
    "llama3": Family(numerics=_LLAMA3),
    "llama3.1": Family(numerics=_LLAMA31),
    "llama3.2": Family(numerics=f"{_LLAMA3} --use-rope-scaling --rope-scaling-factor 32"),
    "llama3.3": Family(numerics=_LLAMA31),
    "mixtral": Family(numerics="--rotary-base 1000000"),
    "qwen2.5": Family("--add-qkv-bias", "--rotary-base 1000000"),
    "qwen2.5-7b": Family("--add-qkv-bias", f"{_SMALL} --rotary-base 1000000"),
    "qwen3": Family("--qk-layernorm", f"{_SMALL} --rotary-base 1000000"),
    "qwen3-next": Family("--qk-layernorm --apply-layernorm-1p --moe-shared-expert-gate",
                         f"{_SMALL} --rotary-base 10000000 --rotary-percent 0.25"),
    "deepseek-v2": Family(f"{_LATENT} --moe-router-pre-softmax --moe-router-num-groups 8 "
                          "--moe-router-group-topk 3 --moe-router-topk-scaling-factor 16.0",
                          _YARN_V2),
    "deepseek-v2-lite": Family(f"{_LATENT} --moe-router-pre-softmax", _YARN_V2),
    "deepseek-v3": _V3,
    "deepseek-v4": Family(f"{_LATENT} --moe-router-score-function sqrtsoftplus "
                          "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5",
                          f"{_SMALL} --rotary-base 10000",
                          lacking=("hyper-connections, the limit of the activation, and routing "
                                   "by hashes in the first layers",)),
    "gpt-oss": Family("--glu-linear-offset 1.0 --activation-func-clamp-value 7.0",
                      "--rotary-base 150000 --position-embedding-type yarn "
                      "--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 "
                      "--yarn-beta-fast 32 --yarn-beta-slow 1 "
                      "--no-yarn-correction-range-round-to-int",
                      "--normalization RMSNorm --position-embedding-type rope", "--quick-geglu",
                      biases=True),
    "gemma-3": Family("--qk-layernorm --apply-layernorm-1p", f"{_SMALL} --rotary-base 1000000",
                      lacking=("an MLP gated by GELU (--swiglu sets an MLP of the same size), "
                               "additional norms after attention and MLP, scaled embeddings, a "
                               "separate rotary base in layers with a window, and scaled positions "
                               "in other layers",)),
    "nemotron-h": Family("--squared-relu", norms="--normalization RMSNorm --disable-bias-linear "
                         "--position-embedding-type none"),
    "kimi-linear": Family(f"{_LATENT} --moe-router-score-function sigmoid "
                          "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.446",
                          lacking=("latent attention without rotary positions",)),
    "minimax-text": Family(numerics="--rotary-base 10000000 --rotary-percent 0.5",
                           lacking=("scaled residuals",)),
}  # fmt: skip


def _with_family(model: Model) -> Model:
    fitting = [name for name in FAMILIES if model.name.startswith(name)]
    return replace(model, family=FAMILIES[max(fitting, key=len)] if fitting else None)


NAMED: dict[str, Model] = {
    model.name: _with_family(model) for model in (*_LLAMA, *_QWEN, *_FURTHER)
}


def named(name: str, vocabulary_multiple: int = 1) -> Model:
    """Return the model of a name, of a `config.json`, or of the folder that contains one.

    Args:
        name: Name in `NAMED`, or path.
        vocabulary_multiple: Number to whose multiple the vocabulary is padded, as in Megatron.

    Raises:
        ValueError: The name is unknown; the message contains the most similar name, or all names.
    """
    if name.lower() in NAMED:
        return padded(NAMED[name.lower()], vocabulary_multiple)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        near = [candidate for candidate in NAMED if name.lower() in candidate]
        near = near if len(near) == 1 else difflib.get_close_matches(name.lower(), NAMED, 1)
        names = f"names: {', '.join(NAMED)}"
        if near:
            names = f"did you mean {near[0]}? (advise without --model lists all names)"
        raise ValueError(f"--model {name}: neither a name nor a path of a config.json; {names}")
    return padded(from_config(_read(path), str(path)), vocabulary_multiple)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model {path}: not a JSON file: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--model {path}: must hold a JSON object {{...}}, got {fields!r:.40}")
    return fields


__all__ = ["NAMED", "Latent", "Mixer", "Model", "from_config", "named", "padded"]
