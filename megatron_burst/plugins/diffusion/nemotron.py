# SPDX-License-Identifier: Apache-2.0
"""Nemotron Labs Diffusion, a text model that denoises blocks of tokens.

The sequence of n tokens enters the model twice: a noised copy, then the clean copy. The mask is
`masks.BlockDiffusion`. Each copy is cut over ranks in the layout of the run, so that a rank holds
the same tokens of both copies, and the ranks have equal work. Bridge's training step cuts the
tokens before it makes the noised copy, so the cut needs no patch.

The noise is drawn for the whole sequence on every rank, with the seed of one rank. So a sequence
has one masking ratio, and the noise does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType

from ...config import BurstConfig
from ...layout import Layout
from ...layout import make as make_layout
from ...layout.sharding import to_device
from ...masks import BlockDiffusion, Mask
from ...megatron import patching
from ...megatron.attention.core_attention import BurstCoreAttention
from ...megatron.attention.plan_book import LayerKind, PlanBook, RowChunkSizes, Tensors
from ...megatron.checks.problem import Problem
from ...megatron.data.packed import Pack
from ...megatron.data.slicing import context_group, shard_sequence
from ...megatron.specs import transformer_of
from ...planning.prepare import AttentionOperation
from . import bridge
from .same_inputs import check_same

PROVIDER = "NemotronLabsDiffusionModelProvider"
_PROVIDERS = "models.nemotron_labs_diffusion.nemotron_labs_diffusion_provider"
_ATTENTION = "models.common.nemotron_labs_diffusion_attention"
_CLASS, _BLOCK_MASK = "NemotronLabsDiffusionAttention", "compute_block_mask"
_STEP, _MASKING = "models.common.dgpt_step", "forward_process_simple_masking"
NEEDED = (
    bridge.Needed(_PROVIDERS, f"{PROVIDER}.provide", ("vp_stage",)),
    bridge.Needed(_ATTENTION, f"{_CLASS}.__init__", ("config", "layer_number")),
    bridge.Needed(_ATTENTION, "apply_rotary_pos_emb", ("q", "k", "cos", "sin", "unsqueeze_dim")),
    bridge.Needed(_ATTENTION, "_get_llama_4_attn_scale", ("position_ids", "beta")),
    bridge.Needed(_ATTENTION, _BLOCK_MASK, ("block_size", "max_seq_length")),
    bridge.Needed(_STEP, "DGPTStep.__call__", ("model",)),
    bridge.Needed(_STEP, "DGPTStep._apply_noise", ("tokens", "loss_mask")),
    bridge.Needed(_STEP, _MASKING, ("input_ids", "mask_token_id", "eps", "loss_mask", "generator")),
)
_LAYOUTS = ("zigzag", "striped")
_POSITIONS_KEPT = 4  # training and evaluation, each on two devices


@dataclass(frozen=True)
class BlockDiffusionKind(LayerKind):
    """Kind of layers whose sequence consists of a noised copy and a clean copy of the tokens.

    Layers of equal kind share plans.

    Attributes:
        block: Number of tokens of a block.
    """

    block: int = 1

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask:
        """Return the mask of a sequence of two copies; see `Kind.own_mask`."""
        return BlockDiffusion(seq_len // 2, self.block)

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: Any
    ) -> AttentionOperation:
        """Return the `AttentionOperation` for q [s, b, h, d], k [s, b, g, d] and v [s, b, g, w]."""
        operation = super().operation(book, tensors, pack, rows, own)
        layout = layout_of_copies(self.burst.layout, own.length, book.groups.size)
        options = dataclasses.replace(operation.options, layout=layout)
        return dataclasses.replace(operation, options=options)


def layout_of_copies(name: str, length: int, cp_size: int) -> Layout:
    """Return the layout of two copies of a sequence, each cut in the layout of the run.

    Args:
        name: "zigzag" or "striped".
        length: Number of tokens of one copy.
        cp_size: Number of ranks.
    """
    if name == "striped":  # stripes of both copies, because `cp_size` divides `length`
        return make_layout("striped", cp_size=cp_size)
    return make_layout("zigzag", cp_size=cp_size, cu_seqlens=[0, length, 2 * length])


class BlockDiffusionCoreAttention(BurstCoreAttention):
    """Replacement of Bridge's `NemotronLabsDiffusionAttention` at context-parallel size > 1.

    It rotates queries and keys by the position in their copy, and scales queries by the position in
    the sequence of both copies, as in Bridge. Arguments and shapes are the same as in
    `BurstCoreAttention`.

    Raises:
        ValueError: Same as in `BurstCoreAttention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **named: Any,
    ) -> None:
        self._block = getattr(config, "block_size", 16)  # Bridge's default
        super().__init__(config, layer_number, AttnMaskType.no_mask, attention_type, **named)
        home, single_rank = bridge.module(_ATTENTION), copy.copy(config)
        single_rank.context_parallel_size = 1  # the class requires 1
        # The cost of Bridge's mask is quadratic in the sequence length.
        with patching.instead(home, _BLOCK_MASK, lambda **_: None):
            source = getattr(home, _CLASS)(
                single_rank, layer_number, attn_mask_type, attention_type
            )
        self.rope_embedding_module = source.rope_embedding_module
        self._scaling = source.beta, source.max_position_embeddings

    def _layer_kind(self, mask_type: AttnMaskType) -> BlockDiffusionKind:
        kind = super()._layer_kind(mask_type)
        return bridge.as_subclass(kind, BlockDiffusionKind, block=self._block)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Compute attention over this rank's rows of both copies.

        Args:
            query: [s, b, h, d], first rows of the noised copy, then equally many of the clean copy.
            key: [s, b, g, d].
            value: [s, b, g, w].
            attention_mask: Ignored, as in Bridge.
            attn_mask_type: Ignored, as in Bridge.
            attention_bias: Must be None.
            packed_seq_params: Must be None.
            unknown: Further keywords of Megatron; all values must be None.

        Returns:
            [s, b, h*w].

        Raises:
            ValueError: Arguments are not supported; all ranks raise the same error.
        """
        with self.book.shared_errors(self.leads):
            if packed_seq_params is not None:
                raise ValueError(
                    f"packed_seq_params: {_CLASS} does not support packed documents; call the "
                    "model without packed_seq_params"
                )
            query, key = self._rotated(query, key)
        return super().forward(
            query,
            key,
            value,
            attn_mask_type=AttnMaskType.no_mask,
            attention_bias=attention_bias,
            **unknown,
        )

    def _rotated(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scaled and rotated queries and the rotated keys; shapes do not change."""
        home, positions = bridge.module(_ATTENTION), self._positions(query)
        length = len(query) * self.book.groups.size // 2
        cos, sin = self.rope_embedding_module(query, (positions % length)[None])
        angles = {"cos": cos.transpose(0, 1), "sin": sin.transpose(0, 1)}  # [s, 1, d]
        query, key = home.apply_rotary_pos_emb(query, key, **angles, unsqueeze_dim=1)
        beta, longest = self._scaling
        if beta is not None:
            scale = home._get_llama_4_attn_scale(positions, beta, longest)  # [s, 1]
            query = query * scale.to(query.dtype)[:, None, None]
        return query, key

    def _positions(self, query: torch.Tensor) -> torch.Tensor:
        """Return the positions of this rank's rows in the sequence of both copies, int64 [s]."""
        groups = self.book.groups
        total = len(query) * groups.size
        key = self._burst.layout, total, query.device

        def make() -> torch.Tensor:
            layout = layout_of_copies(self._burst.layout, total // 2, groups.size)
            return to_device(layout.positions(groups.rank, total), query.device)

        return groups.recent("positions of two copies", _POSITIONS_KEPT).of(key, make)

    def set_inference_mode(self, enabled: bool) -> None:
        """Refuse to generate text.

        Args:
            enabled: True to generate text.

        Raises:
            ValueError: `enabled` is true.
        """
        if enabled:
            raise ValueError(
                "Nemotron Labs Diffusion does not generate text over context-parallel ranks: build "
                "the model with context_parallel_size=1"
            )


def patch_model(patches: patching.PatchSet, is_ours: Callable[[Any], bool]) -> None:
    """Patch the provider to build our core attention.

    Args:
        patches: The set of patches.
        is_ours: Test for a layer spec of `apply_burst` (`layers.is_ours`).
    """
    provider = getattr(bridge.module(_PROVIDERS), PROVIDER)
    patches.wrap(provider, "provide", ["vp_stage"], partial(_provided, is_ours))


def _provided(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> Any:
    """Call `provide` with our core attention, if `apply_burst` made the layer spec."""
    if not bridge.splits(self, is_ours):
        return original(self, *args, **named)
    with patching.instead(bridge.module(_PROVIDERS), _CLASS, BlockDiffusionCoreAttention):
        return original(self, *args, **named)


def problems(model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for each unsupported setting; see `DiffusionRecipes.problems`."""
    name = type(model).__name__
    if burst.layout not in _LAYOUTS:
        yield Problem(
            f"--burst-layout {burst.layout} with {name}: each copy of the sequence is cut in the "
            "layout, and ranks have equal work only with zigzag or striped",
            add=("--burst-layout zigzag",),
        )
    chunks = "whose core attention rotates its queries, which row chunks do not support"
    yield from bridge.option_problems(name, burst, {"sequence_chunks": chunks})
    yield from bridge.head_problems(name, burst)
    yield from bridge.mean_problems(name, transformer, burst)
    reason = "Bridge's training step reads tokens and labels on every stage"
    yield from bridge.pipeline_problems(name, transformer, reason)


def with_attention(model: Any, layers: Any) -> Any:
    """Return the layer spec unchanged: the provider sets the core attention (see `patch_model`)."""
    layout = transformer_of(model).burst.layout
    bridge.log_choice(model, f"noised and clean copy are each cut in layout {layout}")
    return layers


def patch_bridge() -> None:
    """Patch Bridge's training step to draw the noise of whole sequences. Idempotent."""
    name = "recipes, block diffusion"
    if patching.installed(name) is None:
        step = bridge.module(_STEP).DGPTStep
        with patching.patch_set(name) as patches:
            patches.wrap(step, "__call__", ["model"], _seeded)
            patches.wrap(step, "_apply_noise", ["tokens", "loss_mask"], _noised)


def forward_step(recipe: Any) -> Any:
    """Return Bridge's forward step, with its default seed.

    Args:
        recipe: The recipe.
    """
    return bridge.module(_STEP).DGPTStep()


def _seeded(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run the training step with a generator whose seed is the same on all ranks of a sequence."""
    model = patching.given_to(original, (self, *args), named)["model"]
    config = bridge.module(_STEP).get_model_config(model)
    if (
        bridge.uses_burst_attention(config)
        and config.different_seed_per_dp
        and self._noise_generator is None
    ):
        generator = torch.Generator(device=torch.cuda.current_device())
        generator.manual_seed(self.seed + 100 * parallel_state.get_data_parallel_rank())
        self._noise_generator = generator
    return original(self, *args, **named)


def _noised(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run `DGPTStep._apply_noise` with noise of the whole sequence."""
    if not bridge.uses_burst_attention(self.config):
        return original(self, *args, **named)
    home = bridge.module(_STEP)
    masking = partial(_masked, getattr(home, _MASKING))
    with patching.instead(home, _MASKING, masking):
        return original(self, *args, **named)


def _masked(
    original: Callable,
    input_ids: torch.Tensor,
    mask_token_id: int,
    eps: float = 1e-3,
    loss_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace some of this rank's tokens by the mask token.

    The noise is drawn for the whole sequence, so the replaced tokens are the same as on one rank.

    Args:
        original: Bridge's function, which draws the noise.
        input_ids: Tokens of this rank, int64 [b, s].
        mask_token_id: The mask token.
        eps: The lowest probability of masking.
        loss_mask: [b, s], 0 for tokens that are never masked; None if all may be masked.
        generator: Random generator; None for the default generator of the device.

    Returns:
        The noised tokens, a bool that is True for masked tokens, and the probability of masking;
        all [b, s].
    """
    batch, rows = input_ids.shape
    tokens = input_ids.new_zeros(batch, rows * context_group().size())
    _, masked, probability = original(tokens, mask_token_id, eps=eps, generator=generator)
    check_same("Nemotron Labs Diffusion", masked=masked, probability=probability)
    masked, probability = shard_sequence(masked), shard_sequence(probability)
    if loss_mask is not None:
        masked = masked & (loss_mask != 0)
    return torch.where(masked, mask_token_id, input_ids), masked, probability
