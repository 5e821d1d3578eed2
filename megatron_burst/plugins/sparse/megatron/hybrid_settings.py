# SPDX-License-Identifier: Apache-2.0
"""Settings of DeepSeek-V4's hybrid attention, and checks of Megatron's settings.

The names of settings are from Megatron's branch for DeepSeek-V4. A setting that is not passed to
`mb.sparse_layer_spec` is read from the configuration, if this Megatron has it; otherwise the
default applies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ....megatron.checks.problem import Problem, Rule
from ....spine_options import OFF
from ..options import SPARSE, SparseOptions
from .checks import OF_SPECS, sparse_algorithm, spec_problems

CSA, HCA = 4, 128  # ratios of DeepSeek-V4
WIDEST_DENSE = 256  # most columns of the dense kernels on CUDA
VARIANT = "dsv4_hybrid"  # Megatron's name for models with these layers
LOSS = 0.01  # default weight of an indexer's loss
NAME = "layers with hybrid attention"


def too_wide(width: int, on_cuda: bool) -> bool:
    """Return whether only the kernels of selected keys support keys of this width."""
    return on_cuda and width > WIDEST_DENSE


def key_algorithm(burst: SparseOptions, ratio: int, lists: bool) -> str:
    """Return the algorithm that sends the window's keys, or the compressed keys.

    Args:
        burst: Options of the run.
        ratio: Number of rows of a compressed key; 0 for the keys of the window.
        lists: True if the kernels of selected keys run.
    """
    if ratio > CSA and burst.algorithm == SPARSE["ring"] and burst.sparse == "auto":
        return "prefetch"  # a chunk has few keys: one kernel call for all chunks
    return sparse_algorithm(burst) if lists else burst.algorithm


def hybrid_keys(
    burst: SparseOptions, ratio: int, selects: bool, width: int, on_cuda: bool
) -> tuple[str, bool]:
    """Return the algorithm and the type of kernel for one set of keys; a hook for `advise`.

    A layer with hybrid attention has two sets of keys: the window's keys and compressed keys.

    Args:
        burst: Options of the run.
        ratio: Number of rows of a compressed key; 0 for the keys of the window.
        selects: True if an indexer selects keys for each query.
        width: Width of the keys.
        on_cuda: True for a run on CUDA.

    Returns:
        The algorithm that sends the keys; and True if the kernels of selected keys run.
    """
    lists = selects or too_wide(width, on_cuda)
    return key_algorithm(burst, ratio, lists), lists


@dataclass(frozen=True)
class HybridSettings:
    """Settings of hybrid attention, with the defaults of DeepSeek-V4-Flash.

    Attributes:
        csa_compress_ratios: Ratio of each layer: rows per compressed key. 0 for a layer with only a
            window, 4 for compressed sparse attention, and any other number for heavily compressed
            attention.
        csa_window_size: Positions of the window, including the query's own position.
        csa_compress_rotary_base: Base of the rotary frequencies in layers with compressed keys.
        csa_dense_mode: True if queries of compressed sparse attention attend to all compressed
            keys, without an indexer.
        dsa_indexer_n_heads: Number of index heads.
        dsa_indexer_head_dim: Width of index heads.
        dsa_indexer_topk: Number of compressed keys that the indexer selects per query.
        dsa_indexer_loss_coeff: Weight of the indexer's loss; None for 0.01, 0 freezes the indexer.
        o_groups: Number of groups of heads; each group has an output projection.
        o_lora_rank: Width of the output of a group.
    """

    csa_compress_ratios: tuple[int, ...]
    csa_window_size: int = 128
    csa_compress_rotary_base: float = 160000.0
    csa_dense_mode: bool = False
    dsa_indexer_n_heads: int = 64
    dsa_indexer_head_dim: int = 128
    dsa_indexer_topk: int = 512
    dsa_indexer_loss_coeff: float | None = None
    o_groups: int = 8
    o_lora_rank: int = 1024

    def ratio(self, layer_number: int) -> int:
        """Return the rows per compressed key of a layer (from 1); 0 without compressed keys."""
        return self.csa_compress_ratios[layer_number - 1]

    def overlaps(self, layer_number: int) -> bool:
        """Return whether a compressed key of a layer also covers the previous window."""
        return self.ratio(layer_number) == CSA

    def selects(self, layer_number: int) -> bool:
        """Return whether an indexer selects the compressed keys of a layer."""
        return self.overlaps(layer_number) and not self.csa_dense_mode

    @property
    def loss_coeff(self) -> float:
        """Weight of the indexer's loss."""
        coeff = self.dsa_indexer_loss_coeff
        return LOSS if coeff is None else coeff


@dataclass(frozen=True)
class HybridRule:
    """The arguments of `mb.sparse_layer_spec` for hybrid attention.

    Attributes:
        rule: "csa", "hca" or "window".
        passed: The settings that were passed, as pairs of name and value.
    """

    rule: str
    passed: tuple[tuple[str, Any], ...]

    def settings(self, config: Any) -> HybridSettings:
        """Return the settings of a model.

        Args:
            config: `MLATransformerConfig` of the model.

        Raises:
            ValueError: The ratios of rule "csa" are missing.
        """
        settings = {
            field.name: getattr(config, field.name)
            for field in fields(HybridSettings)
            if getattr(config, field.name, None) is not None
        }
        settings |= dict(self.passed)
        if self.rule in ("hca", "window"):
            ratio = HCA if self.rule == "hca" else 0
            settings["csa_compress_ratios"] = (ratio,) * config.num_layers
        if "csa_compress_ratios" not in settings:
            raise ValueError(
                "csa_compress_ratios is required for rule csa: the ratio of each layer, such as "
                "[0, 0, 4, 128, 4, 128]"
            )
        settings["csa_compress_ratios"] = tuple(settings["csa_compress_ratios"])
        return HybridSettings(**settings)


RULES = ("csa", "hca", "window")


def hybrid_rule(rule: str, settings: dict[str, Any]) -> HybridRule:
    """Check the arguments of `mb.sparse_layer_spec` for hybrid attention, and return them.

    Args:
        rule: "csa", "hca" or "window".
        settings: Settings by name; None for a setting that was not passed.

    Raises:
        ValueError: An argument is invalid.
    """
    passed = {name: value for name, value in settings.items() if value is not None}
    ratios = passed.get("csa_compress_ratios")
    if ratios is not None:
        if rule != "csa":
            raise ValueError(
                f"csa_compress_ratios requires rule csa, got rule {rule}, whose layers have one "
                "ratio; omit it"
            )
        whole = isinstance(ratios, Sequence) and all(type(x) is int and x >= 0 for x in ratios)
        if not whole or 1 in ratios:
            raise ValueError(
                "csa_compress_ratios must be a list with 0 or an integer >= 2 for each layer, got "
                f"{ratios!r:.100}"
            )
        passed["csa_compress_ratios"] = tuple(ratios)
    for name in (
        "csa_window_size", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
        "o_groups", "o_lora_rank",
    ):  # fmt: skip
        value = passed.get(name, 1)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r:.60}")
    for name, least in (("csa_compress_rotary_base", 1.0), ("dsa_indexer_loss_coeff", 0.0)):
        value = passed.get(name, least)
        number = isinstance(value, (int, float)) and type(value) is not bool
        if not number or not least <= value < math.inf:
            raise ValueError(f"{name} must be a number >= {least:g}, got {value!r:.60}")
    dense = passed.get("csa_dense_mode", False)
    if type(dense) is not bool:
        raise ValueError(f"csa_dense_mode must be True or False, got {dense!r:.60}")
    return HybridRule(rule, tuple(passed.items()))


# Settings that do not work with these layers, but work with BurstAttention in other layers.
_RULES = (
    *OF_SPECS,
    Rule(lambda c, b: not c.multi_latent_attention,
         "{flag} need an MLATransformerConfig, whose v_head_dim, qk_pos_emb_head_dim and "
         "q_lora_rank they read", add=("--multi-latent-attention",)),
    Rule(lambda c, b: c.multi_latent_attention and c.q_lora_rank is None,
         "{flag} need --q-lora-rank"),
    Rule(lambda c, b: b.store not in (None, 0, 0.0, 1, 1.0),
         "{flag} keep all attention outputs or none, got --burst-attention-store {b.store}",
         add=("--burst-attention-store 1.0",)),
    Rule(lambda c, b: b.attention_layout not in (None, b.layout),
         "{flag} with --burst-attention-layout {b.attention_layout}: the combination was not "
         "tested",
         remove=("--burst-attention-layout",)),
    Rule(lambda c, b: b.mask,
         "{flag} with --burst-mask {b.mask}: the combination was not tested",
         remove=("--burst-mask",)),
    Rule(lambda c, b: is_megatrons(c) and not c.csa_dense_mode and c.dsa_indexer_loss_coeff
         and not c.dsa_indexer_use_sparse_loss,
         "{flag}: the indexer's loss covers only selected keys",
         add=("--dsa-indexer-use-sparse-loss",)),
    Rule(lambda c, b: is_megatrons(c) and c.dsa_kernel_backend not in (None, "none"),
         "{flag}: --dsa-kernel-backend {c.dsa_kernel_backend} computes over keys of the whole "
         "sequence", add=("--dsa-kernel-backend none",)),
    Rule(lambda c, b: is_megatrons(c) and not c.qk_layernorm,
         "{flag} always normalize queries and keys", add=("--qk-layernorm",)),
    Rule(lambda c, b: c.normalization != "RMSNorm",
         "{flag} have RMS norms, got --normalization {c.normalization}",
         add=("--normalization RMSNorm",)),
    Rule("window_size", "{flag} with --window-size: pass csa_window_size to sparse_layer_spec",
         remove=("--window-size",)),
    Rule(lambda c, b: c.softmax_type not in (None, "vanilla"),
         "{flag} with --softmax-type {c.softmax_type}: they have their own sink",
         remove=("--softmax-type",)),
    Rule(lambda c, b: c.recompute_granularity == "selective"
         and "mla_up_proj" in (c.recompute_modules or ()),
         "{flag} cannot recompute mla_up_proj alone; use module core_attn or "
         "--recompute-granularity full", remove=("--recompute-modules mla_up_proj",)),
    Rule(lambda c, b: c.fp8 or c.fp4, "{flag} with fp8 or fp4: the combination was not tested",
         remove=("--fp8-format", "--fp4-format")),
)  # fmt: skip


def is_megatrons(config: Any) -> bool:
    """Return whether Megatron's own settings select hybrid attention.

    Args:
        config: `TransformerConfig` of the model.
    """
    return getattr(config, "experimental_attention_variant", None) == VARIANT


def hybrid_problems(config: Any, rule: HybridRule) -> Iterator[Problem]:
    """Yield a `Problem` for each setting of Megatron that does not work with hybrid attention.

    Args:
        config: `TransformerConfig` of the model, after `configure`.
        rule: Arguments of `mb.sparse_layer_spec`.
    """
    burst = config.burst
    yield from spec_problems(_RULES, config, burst, NAME)
    if OFF in (burst.algorithm, burst.sparse) or not config.multi_latent_attention:
        return
    settings, layers = rule.settings(config), config.num_layers
    if len(settings.csa_compress_ratios) < layers:
        yield Problem(
            f"csa_compress_ratios must have a ratio for each of the {layers} layers, got "
            f"{len(settings.csa_compress_ratios)}"
        )
    heads, tp = config.num_attention_heads, config.tensor_model_parallel_size
    if settings.o_groups % tp or heads % settings.o_groups:
        yield Problem(
            f"{NAME}: o_groups {settings.o_groups} must divide --num-attention-heads {heads} and "
            f"be a multiple of --tensor-model-parallel-size {tp}"
        )
    if not 0 < config.qk_pos_emb_head_dim <= config.v_head_dim or config.qk_pos_emb_head_dim % 2:
        yield Problem(
            f"{NAME}: --qk-pos-emb-head-dim {config.qk_pos_emb_head_dim} must be an even number "
            f"of at most --v-head-dim {config.v_head_dim}"
        )
    narrow = settings.dsa_indexer_head_dim < config.qk_pos_emb_head_dim
    if narrow and any(settings.selects(number) for number in range(1, layers + 1)):
        yield Problem(
            f"{NAME}: index_width {settings.dsa_indexer_head_dim} must be at least "
            f"--qk-pos-emb-head-dim {config.qk_pos_emb_head_dim}, the number of rotated columns"
        )
