# SPDX-License-Identifier: Apache-2.0
"""The layout of a run if no flag names it, and the choice of `--burst-layout auto`.

Without a flag the layout follows from the other options and from Megatron's own settings, if the
model allows it. "auto" takes the layouts with which a step sends the fewest bytes:

- If tokens are contiguous, a state of linear attention visits each rank once; if they are zigzag,
  twice.
- Softmax attention runs in zigzag. Tokens with another layout are exchanged around it.

Bytes follow from shapes alone and are summed over the ranks for one forward of one sequence.
Backward, tensor parallelism and the algorithm of the state scan multiply both layouts alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .. import flags
from ..config import OFF, BurstConfig
from ..layout import make, routes
from ..units import byte_size
from .checks.command_line import settings_of
from .checks.config import layout_problems
from .checks.problem import Problem, refuse
from .checks.splitting import ATTENTION as ATTENTION_LAYOUT
from .checks.splitting import LINEAR as LINEAR_LAYOUT
from .checks.splitting import (
    STREAMS,
    attends,
    layouts_of,
    megatrons_layouts,
    splits,
    two_layout_problems,
)
from .model_shape import ModelShape
from .patching import log


class Layers(NamedTuple):
    """How many layers of a model are of which kind: gated delta nets, Mamba mixers, attention."""

    delta_net: int
    mamba: int
    softmax: int


class StreamChoice(NamedTuple):
    """Options with their layout, and the reason for it; None if it was not "auto"."""

    burst: BurstConfig
    why: str | None = None


def settled(config: Any, burst: BurstConfig, seq_length: int | None) -> StreamChoice:
    """Return the options with a layout in place of "auto".

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names; the layers of a
            hybrid model are those of its `hybrid_layer_pattern`.
        burst: the options.
        seq_length: global, in tokens; None if it is not known.

    Raises:
        ValueError: The length or the layers are needed and not known.
    """
    if burst.layout != "auto":
        return StreamChoice(burst)
    plain = dataclasses.replace(burst, layout="zigzag")
    if burst.algorithm == OFF or not splits(config):
        return StreamChoice(plain)
    layers = layers_of(config)
    if not layers.delta_net + layers.mamba:
        return StreamChoice(plain, "the model has no layers of linear attention")
    if burst.linear == OFF:
        return StreamChoice(plain, f"--burst-linear {OFF} expects it")
    if seq_length is None:
        refuse([Problem(
            "--burst-layout auto counts bytes, and the length of the sequence is not known: give "
            "configure() seq_length, or name a layout"
        )])  # fmt: skip
    assert seq_length is not None
    attention = burst.attention_layout or "zigzag"
    bytes_of, choices = {}, {"zigzag": plain}
    for stream in STREAMS:
        apart: Any = None if stream == attention else attention
        tried: Any = dataclasses.replace(burst, layout=stream, attention_layout=apart)
        bad = [*two_layout_problems(config, tried)]
        if stream != "zigzag":
            bad += layout_problems(config, stream)
        if not bad:
            choices[stream] = tried
            bytes_of[stream] = sum(traffic(config, layers, stream, attention, seq_length))
    if len(bytes_of) < 2:
        return StreamChoice(plain, "other settings need it")
    best = min(bytes_of, key=lambda name: (bytes_of[name], name != "zigzag"))
    said = ", ".join(f"{name} {byte_size(bytes_of[name])}" for name in sorted(bytes_of))
    return StreamChoice(
        choices[best], f"states and rows between ranks in forward, per sequence: {said}"
    )


def one_layout(config: Any, burst: BurstConfig) -> None:
    """Let a configuration that `configure` has read tell Megatron of one layout, the stream's.

    Megatron would otherwise exchange rows around layers of attention itself, and BurstAttention
    again. Configurations without these settings stay as they are.
    """
    if burst.algorithm == OFF or not splits(config) or burst.layout not in STREAMS:
        return
    for name in (LINEAR_LAYOUT, ATTENTION_LAYOUT):
        was = getattr(config, name, burst.layout)
        if was != burst.layout:
            setattr(config, name, burst.layout)
            log(
                f"{name} {was} is now {burst.layout}, the layout of all tokens: Megatron moves no "
                f"rows around layers, and core attention has {layouts_of(burst).attention}"
            )


def settle(args: Any) -> None:
    """Complete parsed arguments: give them the flags of ours that they lack, and layouts.

    Logs on rank 0 which layout was taken, if that does not follow from the flags.
    """
    layout_named = getattr(args, "burst_layout", None) is not None
    attention_named = getattr(args, "burst_attention_layout", None) is not None
    flags.settle(args)
    burst, wrong = flags.choices(args)
    settings = settings_of(args)
    if not layout_named:
        burst, line = unnamed_layouts(settings, burst, attention_named=attention_named)
        args.burst_layout = burst.layout
        if not attention_named:  # a wrong name stays, so that it is refused
            args.burst_attention_layout = burst.attention_layout
        if line is not None:
            log(line)
    if burst.layout == "auto" and not wrong:
        burst, why = settled(settings, burst, getattr(settings, "seq_length", None))
        args.burst_layout, args.burst_attention_layout = burst.layout, burst.attention_layout
        log_choice(burst, why)


def unnamed_layouts(
    config: Any, burst: BurstConfig, *, attention_named: bool = False
) -> tuple[BurstConfig, str | None]:
    """Return options whose layout no flag names with the layouts of the run.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: options with the layout that follows from the others (`flags.layout_for`).
        attention_named: whether a flag names the layout of attention.

    Returns:
        The options with the layouts of Megatron's own settings, if it has some. Otherwise with
        zigzag in place of striped, which follows from an attention store of a part, where the model
        or other options exclude it; and then a line for the log, otherwise None.
    """
    wanted = megatrons_layouts(config)
    if wanted is not None and not attention_named and burst.algorithm != OFF and splits(config):
        attention: Any = None if wanted.attention == wanted.stream else wanted.attention
        stream: Any = wanted.stream
        burst = dataclasses.replace(burst, layout=stream, attention_layout=attention)
    if burst.layout != "striped" or not attends(config, burst):
        return burst, None
    what = ModelShape.of(config).linear_setting
    if burst.attention_layout not in (None, "striped"):
        what = f"--burst-attention-layout {burst.attention_layout}"
    excluding = what or next((each.reason for each in layout_problems(config, "striped")), None)
    if excluding is None:
        return burst, None
    line = (
        f"--burst-layout zigzag: --burst-attention-store {burst.store} would take striped, with "
        f"which ranks store equally much, and it does not go with {excluding}"
    )
    return dataclasses.replace(burst, layout="zigzag"), line


def log_choice(burst: BurstConfig, why: str | None) -> None:
    """Log the layouts that "auto" chose."""
    if why is not None:
        log(f"--burst-layout auto: {' '.join(layouts_of(burst).flags)}, because {why}")


def traffic(
    config: Any, layers: Layers, stream: str, attention: str, seq_length: int
) -> tuple[int, int]:
    """Bytes that ranks send in forward of one sequence: (for states, for rows around attention)."""
    ranks = config.context_parallel_size
    hops = (ranks - 1) * (2 if stream == "zigzag" else 1)  # zigzag's turn is on one rank
    states = hops * (
        (layers.delta_net and layers.delta_net * _delta_net_state(config))
        + (layers.mamba and layers.mamba * _mamba_state(config))
    )
    if stream == attention or not layers.softmax:
        return states, 0
    ours, theirs = (make(name, cp_size=ranks) for name in (stream, attention))
    moved = 0
    for rank in range(ranks):
        moved += sum(routes.relayout(ours, theirs, seq_length, rank).leaving(rank, ranks))
    return states, layers.softmax * moved * _attention_row(config)


def layers_of(config: Any) -> Layers:
    """The layers of a model, of further heads too.

    Raises `ValueError` for a hybrid model whose pattern is not known here.
    """
    shape = ModelShape.of(config)
    if shape.attention is None:
        refuse([Problem(
            "--burst-layout auto counts layers, and this configuration of a hybrid model does not "
            "say which it has: name a layout",
            add=("--burst-layout zigzag",),
        )])  # fmt: skip
    return Layers(
        shape.count("delta_net", "kda"), shape.count("mamba"), shape.count("softmax", "sparse")
    )


def _delta_net_state(config: Any) -> int:
    """Bytes that travel once along a chain: states in fp32, and the convolution's rows."""
    if ModelShape.of(config).count("kda"):
        heads, width = config.kimi_linear_num_heads, config.kimi_linear_head_dim
        rows = (config.kimi_linear_conv_kernel_size - 1) * 3 * heads * width
        return 4 * heads * width * width + _element(config) * rows
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    rows = (config.linear_conv_kernel_dim - 1) * (2 * keys + heads * width)
    return 4 * heads * width * config.linear_key_head_dim + _element(config) * rows


def _mamba_state(config: Any) -> int:
    """The same of a Mamba mixer, whose convolution is 4 wide."""
    width, state = config.mamba_head_dim, config.mamba_state_dim
    heads = getattr(config, "mamba_num_heads", None) or 2 * config.hidden_size // width
    channels = heads * width + 2 * config.mamba_num_groups * state
    return 4 * heads * width * state + _element(config) * 3 * channels


def _attention_row(config: Any) -> int:
    """Bytes of a row of q, k, v and out."""
    heads = config.num_attention_heads
    if getattr(config, "multi_latent_attention", False):
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        return _element(config) * heads * (2 * key + 2 * config.v_head_dim)
    width = getattr(config, "kv_channels", None) or config.hidden_size // heads
    return _element(config) * 2 * width * (heads + (config.num_query_groups or heads))


def _element(config: Any) -> int:
    """Bytes of a number in activations."""
    return 2 if getattr(config, "bf16", False) or getattr(config, "fp16", False) else 4
