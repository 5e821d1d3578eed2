# SPDX-License-Identifier: Apache-2.0
"""The shape of a model from the fields of a Hugging Face `config.json`.

Names of fields are those of transformers' configuration classes. A part that nothing here counts is
named in `Model.also`, and a kind of layer that nothing here knows is refused.
"""

from __future__ import annotations

from typing import Any

from .layer_kinds import (
    DELTA_NET,
    Indexer,
    Latent,
    Mixer,
    gated_delta_net,
    kimi_delta,
    lightning,
    mamba2,
)
from .model import Model, Numerics

# transformers' names of kinds of layers -> letters of `layer_kinds.KINDS`.
LAYER_TYPES = {
    "full_attention": "F", "sliding_attention": "W", "linear_attention": "L",
    "chunked_attention": "W", "mamba": "M", "attention": "*", "mlp": "-", "moe": "-",
}  # fmt: skip
NEEDED = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size")
MOST = 10**9  # of a width or a count; larger ones are slips of the pen
LARGEST = 10**15  # of other numbers; rotary bases of a million tokens are above 10**9
# model_type of models without any attention.
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba", "rwkv")
UNGATED = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2")


class Config(dict[str, Any]):
    """The fields of a `config.json`, those that are null left out. name: of the file."""

    def __init__(self, found: dict[str, Any], name: str) -> None:
        super().__init__({key: value for key, value in found.items() if value is not None})
        self.name = name

    def size(self, key: str) -> int:
        """A whole number from 0 to `MOST`; 0 where there is no such field."""
        found = self._of(key, self.get(key, 0), int, "a whole number from 0")
        if found > MOST:
            raise ValueError(f"{self.name}: {key!r} must be at most {MOST:,}, got {found:.3g}")
        return found

    def number(self, key: str) -> float:
        """A number from 0 to `LARGEST` of a field that is there."""
        found = self[key]
        if type(found) not in (int, float) or not 0 <= found <= LARGEST:
            raise ValueError(
                f"{self.name}: {key!r} must be a number from 0 to {LARGEST:,}, got {found!r:.60}"
            )
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._of(key, self.get(key, default), bool, "true or false")

    def text(self, key: str, default: str = "") -> str:
        return self._of(key, self.get(key, default), str, "a text")

    def items_of(self, key: str, kind: type) -> list[Any]:
        """A list of which each item is of a kind; empty where there is no such field."""
        found = self._of(key, self.get(key, []), list, "a list")
        said = {int: "whole numbers from 0", str: "texts"}[kind]
        return [self._of(key, each, kind, f"a list of {said}") for each in found]

    def needed(self, key: str) -> int:
        """`size` of a field that cannot be missing; KeyError where it is."""
        return self.size(key) if key in self else self[key]

    def _of(self, key: str, value: Any, kind: type, said: str) -> Any:
        if type(value) is not kind or (kind is int and value < 0):
            raise ValueError(f"{self.name}: {key!r} must be {said}, got {value!r:.60}")
        return value


def from_config(config: dict[str, Any], name: str = "config.json") -> Model:
    """The model of a configuration. ValueError naming the field that is missing or not known."""
    also: tuple[str, ...] = ()
    if isinstance(config.get("text_config"), dict):
        also = ("what is not the text model (a vision or audio tower)",)
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", True)} | dict(
            config["text_config"]
        )
    return _model(Config(config, name), also)


def _model(config: Config, also: tuple[str, ...]) -> Model:
    name = config.name
    for key in NEEDED:
        if key not in config:
            raise ValueError(
                f"{name}: has no {key!r}; a config.json of a decoder with num_hidden_layers, "
                "hidden_size, num_attention_heads, intermediate_size and vocab_size would do"
            )
    if (kind := config.get("model_type")) in STATES_ALONE:
        raise ValueError(
            f"{name}: model_type {kind!r} has no layer of attention, which is what context "
            "parallelism is advised for here; hybrids such as nemotron_h are known"
        )
    if config.size("num_nextn_predict_layers"):
        also += ("the head that predicts several tokens",)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    pattern, window = _pattern(config, name)
    fields: dict[str, Any] = {
        "name": config.text("_name_or_path") or name,
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads") or heads,
        "vocabulary": config.size("vocab_size"),
        "head_dim": config.size("head_dim") or config.size("attention_head_dim"),
        "gated": _gated(config),
        "tied": config.flag("tie_word_embeddings", _like(config, "gemma")),
        "output_gate": config.flag("attn_output_gate", _like(config, "qwen3_next")),
        "pattern": pattern,
        "window": window,
        "sinks": _like(config, "gpt_oss"),
        "mixer": _mixer(config, name) if set(pattern) & set("LM") else None,
        "also": also,
        "numerics": _numerics(config),
    }
    return Model(**(fields | _latent(config, name) | _mlp(config, pattern, name)))


def _like(config: Config, family: str) -> bool:
    return str(config.get("model_type", "")).startswith(family)


def _gated(config: Config) -> bool:
    """Whether the MLP has three matrices: silu always has, gelu only where the family says so."""
    act = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    act = str(config.get("mlp_hidden_act", act))
    return act not in UNGATED or _like(config, "gemma")


def _numerics(config: Config) -> Numerics | None:
    """The epsilon of norms and rotary positions; None where the configuration says nothing of
    them. Newer ones have all of the latter in `rope_parameters`."""
    keys = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    flags = [f"--norm-epsilon {config.number(key):g}" for key in keys if key in config][:1]
    rope = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    if "rope_local_base_freq" in config or any(isinstance(each, dict) for each in rope.values()):
        return Numerics(" ".join(flags), "rotary positions of their own in some kinds of layers")
    lacking = ""
    base, share = (next((of.number(key) for of in (config, rope) if key in of), None)
                   for key in ("rope_theta", "partial_rotary_factor"))  # fmt: skip
    if base is not None and base == int(base):
        flags.append(f"--rotary-base {int(base)}")
    elif base is not None:
        lacking = f"a rotary base of {base}, which is no whole number"
    if share is not None:
        flags.append(f"--rotary-percent {share:g}")
    kind = rope.text("rope_type") or rope.text("type") or "default"
    if kind != "default":
        scaled = _scaled(kind, rope, bool(config.size("kv_lora_rank")))
        flags += [scaled] if scaled else []
        lacking = lacking if scaled else f"the rope scaling of {config.name} ({kind})"
    return Numerics(" ".join(flags), lacking) if flags or lacking else None


# What Megatron-LM fixes: of Llama 3's scaling, and of YaRN in latent attention.
LENGTH = "original_max_position_embeddings"
LLAMA3 = {LENGTH: 8192.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {LENGTH: 4096.0, "beta_fast": 32.0, "beta_slow": 1.0}


def _scaled(kind: str, rope: Config, latent: bool) -> str:
    """Scaled rotary positions as flags of Megatron-LM; "" where it has none for them."""
    factor = rope.number("factor") if "factor" in rope else 0.0
    if kind == "linear" and not latent and 0 < factor == int(factor):
        return f"--rotary-seq-len-interpolation-factor {int(factor)}"
    fixed = {"llama3": LLAMA3, "yarn": YARN}.get(kind, {})
    said = {key: rope.number(key) if key in rope else value for key, value in fixed.items()}
    if not factor or LENGTH not in rope or "attention_factor" in rope:
        return ""
    if kind == "llama3" and not latent and said == fixed:
        return f"--use-rope-scaling --rope-scaling-factor {factor:g}"
    if kind != "yarn" or (latent and said != fixed):
        return ""
    flags = f"--rotary-scaling-factor {factor:g}"
    for key, flag in (("mscale", "--mscale"), ("mscale_all_dim", "--mscale-all-dim")):
        flags += f" {flag} {rope.number(key):g}" if key in rope else ""
    if latent:
        return f"--rope-type yarn {flags}"
    length, fast, slow = said.values()
    whole = "" if rope.flag("truncate", True) else "no-"
    return (
        f"--position-embedding-type yarn {flags} --yarn-original-max-position-embeddings "
        f"{length:.0f} --yarn-beta-fast {fast:g} --yarn-beta-slow {slow:g} "
        f"--{whole}yarn-correction-range-round-to-int"
    )


def _object(config: Config, key: str) -> Config:
    found = config.get(key) or {}  # false: none
    if not isinstance(found, dict):
        raise ValueError(f"{config.name}: {key!r} must be an object, got {found!r:.60}")
    return Config(found, f"{config.name}: {key}")


def _latent(config: Config, name: str) -> dict[str, Any]:
    """Multi-head latent attention, with expanded heads: as many keys as queries."""
    if not config.size("kv_lora_rank"):
        return {}
    for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        if key not in config:
            raise ValueError(
                f"{name}: has kv_lora_rank but no {key!r}, a width of latent attention"
            )
    rope = config.size("qk_rope_head_dim")
    index = tuple(config.size(f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    return {
        "indexer": Indexer(*index) if all(index) else None,
        "kv_heads": config.size("num_attention_heads"),
        "head_dim": config.size("qk_nope_head_dim") + rope,
        "value_dim": config.size("v_head_dim"),
        "latent": Latent(config.size("kv_lora_rank"), rope, config.size("q_lora_rank")),
    }


def _mlp(config: Config, pattern: str, name: str) -> dict[str, Any]:
    """The MLP halves: dense, or experts in the last layers of those that have one."""
    ffn = config.size("intermediate_size")
    experts = next((config.size(key) for key in ("n_routed_experts", "num_local_experts",
                    "num_experts") if config.size(key)), 0)  # fmt: skip
    of_expert = config.size("moe_intermediate_size") or ffn
    if not of_expert or (not ffn and not experts):
        raise ValueError(f"{name}: has no 'intermediate_size'")
    if not experts:
        return {"ffn": ffn}
    shared = config.size("shared_expert_intermediate_size") or (
        (config.size("n_shared_experts") or config.size("num_shared_experts"))
        * (config.size("moe_shared_expert_intermediate_size") or of_expert)
    )
    with_mlp = sum(letter in "FWL-" for letter in pattern or "F" * config.size("num_hidden_layers"))
    return {
        "ffn": of_expert,
        "experts": experts,
        "top_k": config.size("num_experts_per_tok") or config.size("num_experts_per_token"),
        "shared": shared,
        "moe_layers": _moe_layers(config, with_mlp),
        "dense_ffn": ffn or of_expert,
    }


def _moe_layers(config: Config, layers: int) -> int:
    """How many layers have experts. Which ones changes neither time nor memory: taken as last."""
    override = config.text("hybrid_override_pattern")
    if override:
        return override.count("E")
    if moe := config.items_of("layers_block_type", str).count("moe"):
        return moe
    if "first_k_dense_replace" in config:
        every = config.size("moe_layer_freq") or 1
        dense = config.size("first_k_dense_replace")
        return sum(layer >= dense and layer % every == 0 for layer in range(layers))
    step = config.size("decoder_sparse_step") or 1
    dense = set(config.items_of("mlp_only_layers", int))
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _pattern(config: Config, name: str) -> tuple[str, int]:
    """A letter for each layer, and the window of those that have one."""
    layers = config.size("num_hidden_layers")
    override = config.text("hybrid_override_pattern")
    if override:
        odd = set(override) - set("M*-E")
        if odd or len(override) != layers:
            raise ValueError(
                f"{name}: hybrid_override_pattern {override!r} needs one of M, *, - and E for each "
                f"of the {layers} layers"
            )
        return override.replace("E", "-"), 0
    types = config.items_of("layer_types", str) or config.items_of("layers_block_type", str)
    window = config.size("sliding_window") or config.size("attention_chunk_size")
    if types:
        odd = sorted(set(types) - set(LAYER_TYPES))
        if odd:
            raise ValueError(
                f"{name}: layer_types (or layers_block_type) has {odd[0]!r}; known are "
                f"{', '.join(LAYER_TYPES)}"
            )
        return "".join(LAYER_TYPES[kind] for kind in types), window
    if "linear_attn_config" in config:  # layers are numbered from 1
        full = set(_kimi(config).items_of("full_attn_layers", int))
        return "".join("LF"[i + 1 in full] for i in range(layers)), 0
    if linear := config.items_of("attn_type_list", int):
        return "".join("LF"[bool(full)] for full in linear), 0
    if every := config.size("full_attention_interval"):
        return "".join("LF"[(i + 1) % every == 0] for i in range(layers)), 0
    if any(config.get(key) for key in ("ssm_state_size", "mamba_d_state", "state_size")):
        raise ValueError(
            f"{name}: has state-space layers but no hybrid_override_pattern and no layer_types, "
            "which say where they are"
        )
    return _windows(config, layers, window)


def _windows(config: Config, layers: int, window: int) -> tuple[str, int]:
    """Where only numbers say which layers have a window."""
    if not window or not config.flag("use_sliding_window", True):
        return "", 0
    if every := config.size("sliding_window_pattern"):
        return "".join("WF"[(i + 1) % every == 0] for i in range(layers)), window
    full = config.size("max_window_layers") if config.flag("use_sliding_window") else 0
    return ("F" * min(full, layers)).ljust(layers, "W"), window


def _mixer(config: Config, name: str) -> Mixer:
    """Mamba-2 as Nemotron-H names its sizes, Qwen3-Next's gated delta net, Kimi Linear's delta
    attention, or MiniMax's lightning attention."""
    try:
        if "linear_num_value_heads" in config:
            return gated_delta_net(*map(config.needed, DELTA_NET))
        if "linear_attn_config" in config:
            of = _kimi(config)
            return kimi_delta(*map(of.needed, ("num_heads", "head_dim", "short_conv_kernel_size")))
        if "attn_type_list" in config:
            heads = config.needed("num_attention_heads")
            return lightning(heads, config.size("head_dim") or config.size("hidden_size") // heads)
        return mamba2(*map(config.needed, ("mamba_num_heads", "n_groups", "ssm_state_size",
                                           "mamba_head_dim", "conv_kernel")))  # fmt: skip
    except KeyError as error:
        raise ValueError(
            f"{name}: has linear-attention or state-space layers but no {error}, which their size "
            "depends on"
        ) from None


def _kimi(config: Config) -> Config:
    """What Kimi Linear says of its linear layers."""
    return _object(config, "linear_attn_config")
