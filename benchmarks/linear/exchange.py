"""Rival that shares heads: an all-to-all before the layer and an all-to-all after it.

It is Megatron-Core's own code if that can be imported: `tensor_a2a_cp2hp` and `tensor_a2a_hp2cp` of
its gated delta net, in one piece as in that layer, or in sections as in its Mamba layer. Otherwise
it is torch's differentiable `all_to_all_single` with the same messages. With zigzag it also
reorders the rows before the layer and restores their order afterwards. The exchanged numbers encode
position and channel, so every rank can check what it receives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

from megatron_burst.megatron import homes

from .settings import LAYERS, Setting

MEGATRON, TORCH = "Megatron-Core's functions", "torch's all_to_all_single"
Exchange = Callable[[torch.Tensor], torch.Tensor]


def megatron() -> Any | None:
    """Return Megatron-Core's module with these functions; None if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return homes.find("gated_delta_net.common")


def exchanges(setting: Setting, module: Any | None) -> tuple[Exchange, Exchange]:
    """Return exchanges [s, 1, channels] -> [s x ranks, 1, channels / ranks], and back."""
    layer, zigzag = LAYERS[setting.form], setting.layout == "zigzag"
    sections = None if layer.joined else list(layer.channels(setting.heads, setting.width))
    group = dist.group.WORLD
    if module is None:
        return (
            lambda x: _undone(_sections(x, sections), zigzag),
            lambda x: _from_heads(_redone(x, zigzag)),
        )
    # The output has one section of channels.
    return (
        lambda x: module.tensor_a2a_cp2hp(
            x, seq_dim=0, head_dim=-1, cp_group=group, split_sections=sections,
            undo_attention_load_balancing=zigzag,
        ),
        lambda x: module.tensor_a2a_hp2cp(
            x, seq_dim=0, head_dim=-1, cp_group=group, redo_attention_load_balancing=zigzag,
        ),
    )  # fmt: skip


def numbers(positions: torch.Tensor, channels: torch.Tensor, salt: int) -> torch.Tensor:
    """Return bfloat16 [positions, 1, channels]: whole numbers below 251, exact in bfloat16."""
    values = (positions[:, None] * 7 + channels[None] * 13 + salt) % 251
    return values[:, None].bfloat16()


def owned(setting: Setting, size: int, rank: int, channels: Sequence[int]) -> torch.Tensor:
    """Return the channels that a rank holds if heads are shared: its share of each section."""
    starts = torch.tensor([0, *channels]).cumsum(0)
    parts = [
        torch.arange(int(start) + rank * n // size, int(start) + (rank + 1) * n // size)
        for start, n in zip(starts[:-1], channels, strict=True)
    ]
    return torch.cat(parts)


def sections_of(setting: Setting) -> tuple[int, ...]:
    """Return the channels that are sent together, in the order of the input."""
    layer = LAYERS[setting.form]
    channels = layer.channels(setting.heads, setting.width)
    return (sum(channels),) if layer.joined else channels


def _sections(x: torch.Tensor, sections: list[int] | None) -> torch.Tensor:
    parts = (x,) if sections is None else x.split(sections, dim=-1)
    return torch.cat([_to_heads(part) for part in parts], dim=-1)


def _to_heads(x: torch.Tensor) -> torch.Tensor:
    parts = torch.stack(x.chunk(dist.get_world_size(), dim=-1))
    return all_to_all_single(torch.empty_like(parts), parts).flatten(0, 1)


def _from_heads(x: torch.Tensor) -> torch.Tensor:
    parts = x.contiguous().unflatten(0, (dist.get_world_size(), -1))
    return torch.cat(list(all_to_all_single(torch.empty_like(parts), parts)), dim=-1)


def _order(rows: int) -> torch.Tensor:
    """Return the places of the sequence's rows among all ranks' rows under zigzag."""
    size = dist.get_world_size()
    chunks = torch.arange(rows).chunk(2 * size)
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])])


def _undone(x: torch.Tensor, zigzag: bool) -> torch.Tensor:
    return x[_order(len(x))] if zigzag else x


def _redone(x: torch.Tensor, zigzag: bool) -> torch.Tensor:
    return x[_order(len(x)).argsort()] if zigzag else x
