# SPDX-License-Identifier: Apache-2.0
"""Selection of the layout of a run: the default without a flag, and `--burst-layout auto`.

Without a flag the layout follows from the other options and from Megatron's own settings, if the
model supports it. "auto" selects the layout of tokens with which a step sends the fewest bytes:

- If tokens are contiguous, a state of linear attention visits each rank once; if tokens are zigzag,
the state visits each rank twice.
- Softmax attention uses zigzag (or `--burst-attention-layout`). If the tokens have another layout,
rows are exchanged before and after attention.

Bytes are computed from shapes and summed over the ranks, for one forward of one sequence. Backward,
tensor parallelism and the algorithm of the state scan change the bytes of both layouts by the same
factor.
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
    layouts_of,
    megatrons_layouts,
    splits_with_burst,
    two_layout_problems,
    uses_burst,
)
from .model_shape import ModelShape
from .patching import log


class LayerCounts(NamedTuple):
    """Numbers of layers of a model: gated delta nets, Mamba mixers, and softmax attention."""

    delta_net: int
    mamba: int
    softmax: int


class StreamChoice(NamedTuple):
    """Options with a concrete layout, and the reason to log; None if "auto" chose nothing."""

    burst: BurstConfig
    why: str | None = None


def resolve_auto_layout(config: Any, burst: BurstConfig, seq_length: int | None) -> StreamChoice:
    """Return the options, with a concrete layout in place of "auto".

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names. The layers of a
            hybrid model are read from its `hybrid_layer_pattern`.
        burst: the options of the run.
        seq_length: global sequence length in tokens; None if unknown.

    Raises:
        SettingsError: The choice depends on `seq_length` or on the layers, which are unknown.
    """
    if burst.layout != "auto":
        return StreamChoice(burst)
    plain = dataclasses.replace(burst, layout="zigzag")
    if not splits_with_burst(config, burst):
        return StreamChoice(plain)
    layers = layers_of(config)
    if not layers.delta_net + layers.mamba:
        return StreamChoice(plain, "the model has no layers of linear attention")
    if burst.linear == OFF:
        return StreamChoice(plain, f"--burst-linear {OFF} requires it")
    if seq_length is None:
        refuse([Problem(
            "--burst-layout auto needs the sequence length to count bytes: pass seq_length to "
            "configure(), or name a layout"
        )])  # fmt: skip
    assert seq_length is not None
    attention = burst.attention_layout or "zigzag"
    bytes_of, choices = {}, {"zigzag": plain}
    for stream in STREAMS:
        separate: Any = None if stream == attention else attention
        candidate: Any = dataclasses.replace(burst, layout=stream, attention_layout=separate)
        problems = [*two_layout_problems(config, candidate)]
        if stream != "zigzag":
            problems += layout_problems(config, stream)
        if not problems:
            choices[stream] = candidate
            bytes_of[stream] = sum(traffic(config, layers, stream, attention, seq_length))
    if len(bytes_of) < 2:
        return StreamChoice(plain, "other settings require it")
    best = min(bytes_of, key=lambda name: (bytes_of[name], name != "zigzag"))
    bytes_text = ", ".join(f"{name} {byte_size(bytes_of[name])}" for name in sorted(bytes_of))
    return StreamChoice(choices[best], f"ranks send in one forward of a sequence: {bytes_text}")


def one_layout(config: Any, burst: BurstConfig) -> None:
    """Set Megatron's own layout settings to the layout of the tokens between layers.

    With other values both Megatron and BurstAttention would exchange rows around attention. Call
    this function after `configure` has read the settings. Configurations without these settings are
    unchanged.
    """
    if not splits_with_burst(config, burst) or burst.layout not in STREAMS:
        return
    for name in (LINEAR_LAYOUT, ATTENTION_LAYOUT):
        previous = getattr(config, name, burst.layout)
        if previous != burst.layout:
            setattr(config, name, burst.layout)
            log(
                f"{name} {previous} is now {burst.layout}, the layout of all tokens: Megatron "
                f"exchanges no rows around layers, and core attention uses "
                f"{layouts_of(burst).attention}"
            )


class CompletedFlags(NamedTuple):
    """The options of a command line, after default values and layouts were added.

    Attributes:
        burst: The options. A wrong value is replaced by its default.
        errors: A message for each wrong value.
        line: A log line if zigzag replaces the default layout striped, otherwise None.
    """

    burst: BurstConfig
    errors: list[str]
    line: str | None


def complete_flags(args: Any, config: Any) -> CompletedFlags:
    """Add default values of missing flags, and the layouts of the run, to parsed arguments.

    Args:
        args: parsed arguments; changed.
        config: the model's settings under the names of a `TransformerConfig`.

    Returns:
        The options, errors of wrong values, and a log line.
    """
    layout_named = getattr(args, "burst_layout", None) is not None
    attention_named = getattr(args, "burst_attention_layout", None) is not None
    flags.add_defaults(args)
    burst, errors = flags.options_and_errors(args)
    if layout_named:
        return CompletedFlags(burst, errors, None)
    burst, line = default_layouts(config, burst, attention_named=attention_named)
    args.burst_layout = burst.layout
    if not attention_named:  # keep a wrong name, which the checks report
        args.burst_attention_layout = burst.attention_layout
    return CompletedFlags(burst, errors, line)


def complete_arguments(args: Any) -> None:
    """Add default values of missing flags, and concrete layouts, to parsed arguments.

    Rank 0 logs the layout if "auto" selects it, or if zigzag replaces the default layout striped.

    Args:
        args: parsed arguments; changed.
    """
    settings = settings_of(args)
    burst, errors, line = complete_flags(args, settings)
    if line is not None:
        log(line)
    if burst.layout == "auto" and not errors:
        burst, why = resolve_auto_layout(settings, burst, getattr(settings, "seq_length", None))
        args.burst_layout, args.burst_attention_layout = burst.layout, burst.attention_layout
        log_choice(burst, why)


def default_layouts(
    config: Any, burst: BurstConfig, *, attention_named: bool = False
) -> tuple[BurstConfig, str | None]:
    """Choose the layouts of a run whose flags do not name the layout.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: options whose layout is the default for the other options (`flags.layout_for`).
        attention_named: whether a flag names the layout of attention.

    Returns:
        The options and a log line. Megatron's own layout settings, if present, determine the
            layouts. Striped (the default with a partial attention store) becomes zigzag if the
            model or another option excludes striped; otherwise the log line is None.
    """
    selected = megatrons_layouts(config)
    if selected is not None and not attention_named and splits_with_burst(config, burst):
        attention: Any = None if selected.attention == selected.stream else selected.attention
        stream: Any = selected.stream
        burst = dataclasses.replace(burst, layout=stream, attention_layout=attention)
    if burst.layout != "striped" or not uses_burst(config, burst):
        return burst, None
    excluding = ModelShape.of(config).linear_setting
    if burst.attention_layout not in (None, "striped"):
        excluding = f"--burst-attention-layout {burst.attention_layout}"
    if excluding is None:
        problems = layout_problems(config, "striped")
        excluding = next((problem.reason for problem in problems), None)
    if excluding is None:
        return burst, None
    line = (
        f"--burst-layout zigzag is used: --burst-attention-store {burst.store} would select "
        "striped, with which ranks store equal numbers of rows, but another setting excludes "
        f"striped: {excluding}"
    )
    return dataclasses.replace(burst, layout="zigzag"), line


def log_choice(burst: BurstConfig, why: str | None) -> None:
    """Log the layouts that "auto" selected."""
    if why is not None:
        log(f"--burst-layout auto: {' '.join(layouts_of(burst).flags)}, because {why}")


def traffic(
    config: Any, layers: LayerCounts, stream: str, attention: str, seq_length: int
) -> tuple[int, int]:
    """Return the bytes that all ranks together send in one forward of a sequence.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        layers: numbers of layers per kind.
        stream: the layout of the tokens.
        attention: the layout of softmax attention.
        seq_length: global sequence length in tokens.

    Returns:
        (bytes of states, bytes of rows that are exchanged around attention).
    """
    ranks = config.context_parallel_size
    # In zigzag a state passes the ranks in ascending order, then in descending order.
    hops = (ranks - 1) * (2 if stream == "zigzag" else 1)
    states = hops * (
        (layers.delta_net and layers.delta_net * _delta_net_state(config))
        + (layers.mamba and layers.mamba * _mamba_state(config))
    )
    if stream == attention or not layers.softmax:
        return states, 0
    stream_layout, attention_layout = (make(name, cp_size=ranks) for name in (stream, attention))
    moved = 0
    for rank in range(ranks):
        moved += sum(
            routes.relayout(stream_layout, attention_layout, seq_length, rank).leaving(rank, ranks)
        )
    return states, layers.softmax * moved * _attention_row(config)


def layers_of(config: Any) -> LayerCounts:
    """Return the numbers of layers of a model, including the layers of MTP heads.

    Raises:
        SettingsError: The configuration of a hybrid model does not contain its pattern.
    """
    shape = ModelShape.of(config)
    if shape.attention is None:
        refuse([Problem(
            "--burst-layout auto counts layers, and this configuration of a hybrid model does not "
            "state its pattern: name a layout",
            add=("--burst-layout zigzag",),
        )])  # fmt: skip
    return LayerCounts(
        shape.count("delta_net", "kda"), shape.count("mamba"), shape.count("softmax", "sparse")
    )


def _delta_net_state(config: Any) -> int:
    """Return the bytes that a delta net sends from rank to rank: fp32 states, convolution rows."""
    if ModelShape.of(config).count("kda"):
        heads, width = config.kimi_linear_num_heads, config.kimi_linear_head_dim
        rows = (config.kimi_linear_conv_kernel_size - 1) * 3 * heads * width
        return 4 * heads * width * width + _element(config) * rows
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    rows = (config.linear_conv_kernel_dim - 1) * (2 * keys + heads * width)
    return 4 * heads * width * config.linear_key_head_dim + _element(config) * rows


def _mamba_state(config: Any) -> int:
    """Return the bytes that a Mamba mixer (convolution of width 4) sends from rank to rank."""
    width, state = config.mamba_head_dim, config.mamba_state_dim
    heads = getattr(config, "mamba_num_heads", None) or 2 * config.hidden_size // width
    channels = heads * width + 2 * config.mamba_num_groups * state
    return 4 * heads * width * state + _element(config) * 3 * channels


def _attention_row(config: Any) -> int:
    """Return the bytes of q, k, v and out of one token."""
    heads = config.num_attention_heads
    if getattr(config, "multi_latent_attention", False):
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        return _element(config) * heads * (2 * key + 2 * config.v_head_dim)
    width = getattr(config, "kv_channels", None) or config.hidden_size // heads
    return _element(config) * 2 * width * (heads + (config.num_query_groups or heads))


def _element(config: Any) -> int:
    """Return the bytes per element of activations."""
    return 2 if getattr(config, "bf16", False) or getattr(config, "fp16", False) else 4
