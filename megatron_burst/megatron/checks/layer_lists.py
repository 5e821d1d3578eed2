# SPDX-License-Identifier: Apache-2.0
"""Checks of lists with one entry per layer: windows, linear attention, and `--cp-comm-type`.

`--cp-comm-type` selects how Megatron's own attention exchanges keys and values; BurstAttention
replaces that attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..model_shape import layers_without_further_heads
from .problem import Problem

# Each key is a setting with a frequency or with one entry per layer. Megatron ignores the key if
# its value, another setting, is not set.
_FREQUENCIES = {
    "window_attn_skip_freq": "window_size",
    "linear_attention_freq": "experimental_attention_variant",
}


def frequency_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem for each list that has fewer entries than the model has layers."""
    count = layers_without_further_heads(config)
    for name, required in _FREQUENCIES.items():
        entries: Any = getattr(config, name, None)
        if getattr(config, required, None) and isinstance(entries, list) and len(entries) < count:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(
                f"{flag} {entries} has {len(entries)} entries, and the model has {count} layers: "
                "use one entry per layer, or a number"
            )


def exchange_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem if `cp_comm_type` selects different exchanges for different layers.

    A single exchange, such as the default, is ignored. A list of different exchanges is an explicit
    choice for each layer, so it is reported.
    """
    kinds: Any = getattr(config, "cp_comm_type", None)
    if mixed(kinds):
        yield Problem(
            f"--cp-comm-type {' '.join(map(str, kinds))} chooses an exchange of Megatron's own "
            "attention for each layer, and BurstAttention replaces that attention; "
            "--context-parallel-algo auto chooses an algorithm for each kind of layer",
            remove=("--cp-comm-type",),
        )


def mixed(kinds: Any) -> bool:
    """Return whether `cp_comm_type` is a list of different exchanges."""
    return isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1
