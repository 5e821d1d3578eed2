# SPDX-License-Identifier: Apache-2.0
"""Problems of lists with an entry per layer: Megatron's lists of layers with a window or with
linear attention, and its list of exchanges (`--cp-comm-type`), which BurstAttention replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..model_shape import layers_without_further_heads
from .problem import Problem

# A frequency, or a list with an entry for each layer, and the setting without which it is not read.
_FREQUENCIES = {
    "window_attn_skip_freq": "window_size",
    "linear_attention_freq": "experimental_attention_variant",
}


def frequency_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem for each list that has fewer entries than the model has layers."""
    count = layers_without_further_heads(config)
    for name, needs in _FREQUENCIES.items():
        marks: Any = getattr(config, name, None)
        if getattr(config, needs, None) and isinstance(marks, list) and len(marks) < count:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(
                f"{flag} {marks} is of {len(marks)} layers, and the model has {count}: give an "
                "entry for each, or a number"
            )


def exchange_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem if `cp_comm_type` names several exchanges. One exchange, such as the default,
    is ignored; an exchange for each layer must not be dropped silently.
    """
    kinds: Any = getattr(config, "cp_comm_type", None)
    if mixed(kinds):
        yield Problem(
            f"--cp-comm-type {' '.join(map(str, kinds))} chooses an exchange of Megatron's own "
            "attention for each layer, and BurstAttention replaces them all; "
            "--context-parallel-algo auto chooses an algorithm for each kind of layers",
            remove=("--cp-comm-type",),
        )


def mixed(kinds: Any) -> bool:
    """Return whether these exchanges are a list of several kinds."""
    return isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1
