# SPDX-License-Identifier: Apache-2.0
"""`mb.linear_logprobs` in place of verl's fused LM head.

verl hands Megatron a function that gets hidden states where logits would be computed. Its own one
gathers them over tensor-parallel ranks and keeps them for backward; ours takes what each rank has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..logprobs import linear_logprobs


def processed(original: Callable[..., Any], **given: Any) -> Any:
    """`fused_output_processor`: log-probabilities and entropies [t] of the t labels [1, t].

    hidden_states [t, 1, d], or a part of their rows under sequence parallelism. Megatron calls it
    by keywords alone.
    """
    config = given["config"]
    burst = getattr(config, "burst", None)
    if burst is None or burst.algorithm == "megatron":
        return original(**given)
    outputs = importlib.import_module("verl.utils.model").CausalLMOutputForPPO
    hidden, weight, layer = (
        given[name] for name in ("hidden_states", "output_weight", "output_layer")
    )
    # Imports Megatron.
    check = importlib.import_module("megatron_burst.megatron.lm_head.fused_loss").check_output
    check(layer, "fused_output_processor")
    found = linear_logprobs(
        hidden.flatten(0, 1),
        layer.weight if weight is None else weight,
        given["labels"].flatten(),
        temperature=given["context"].temperature,
        tp_group=layer.tp_group,
        sequence_parallel=config.sequence_parallel,
    )
    output = outputs(
        loss=None, logits=None, past_key_values=None, hidden_states=hidden, attentions=None
    )
    output.log_probs, output.entropy = found.logprobs, found.entropy
    return output
