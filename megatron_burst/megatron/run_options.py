# SPDX-License-Identifier: Apache-2.0
"""Options of a run: parsed arguments with default values, and with concrete layouts.

Without a flag the layout follows from the other options and from Megatron's own settings, if the
model supports it. "auto" selects the layout of tokens with which a step sends the fewest bytes
(module `layout_bytes`).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import flags
from ..config import OFF, BurstConfig
from ..units import byte_size
from .checks.config import layout_problems
from .checks.problem import Problem, refuse
from .checks.splitting import two_layout_problems
from .layout_bytes import layers_of, traffic
from .model_shape import PATTERNS, ModelShape
from .patching import log
from .selection import (
    ATTENTION_LAYOUT,
    LINEAR_LAYOUT,
    STREAMS,
    layouts_of,
    megatrons_layouts,
    splits_with_burst,
    uses_burst,
)


def settings_of(args: Any) -> SimpleNamespace:
    """Return parsed arguments under the names of a `TransformerConfig`.

    With a yaml file the arguments have sections, whose entries are read like the other arguments.
    """
    settings: dict[str, Any] = {}
    for name in ("language_model", "model_parallel"):
        if (section := getattr(args, name, None)) is not None:
            settings |= vars(section)
    settings |= vars(args)
    if "num_query_groups" in settings and not settings.get("group_query_attention", True):
        settings["num_query_groups"] = None
    if settings.get("recompute_activations"):
        settings["recompute_granularity"] = "selective"
    settings["is_hybrid_model"] = any(settings.get(name) for name in PATTERNS)
    for name in ("num_attention_heads", "num_query_groups"):
        settings.setdefault(name, None)
    for name in ("context_parallel_size", "tensor_model_parallel_size"):
        settings.setdefault(name, 1)
    return SimpleNamespace(**settings)


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
    this function after the layouts of the run were chosen, because `default_layouts` reads the
    settings. Configurations without these settings are unchanged.
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


class ParsedOptions(NamedTuple):
    """Parsed arguments of a run.

    Attributes:
        settings: Megatron's arguments under the names of a `TransformerConfig`. It was copied
            before completion, so read our flags from `burst`.
        burst: The options, with concrete layouts. A wrong value is replaced by its default.
        errors: A message for each wrong value.
    """

    settings: SimpleNamespace
    burst: BurstConfig
    errors: list[str]


def complete_arguments(args: Any) -> ParsedOptions:
    """Add default values of missing flags, and concrete layouts, to parsed arguments.

    Rank 0 logs the layout if "auto" selects it, or if zigzag replaces the default layout striped. A
    second call for the same arguments changes nothing, because the first one set the layout.

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
    return ParsedOptions(settings, burst, errors)


def default_layouts(
    config: Any, burst: BurstConfig, *, attention_named: bool = False
) -> tuple[BurstConfig, str | None]:
    """Choose the layouts of a run whose flags do not name the layout.

    Megatron's own layout settings, if present, determine the layouts. Otherwise the layout follows
    from the other options (`flags.layout_for`). Striped then becomes zigzag if the model or another
    option excludes striped.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: options; the layout is replaced.
        attention_named: whether a flag names the layout of attention.

    Returns:
        The options, and a log line if zigzag replaces striped, otherwise None.
    """
    pack = burst.pack if getattr(config, "context_parallel_size", 1) != 1 else "off"
    default: Any = flags.layout_for(burst.algorithm, burst.store, pack)
    burst = dataclasses.replace(burst, layout=default)
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
