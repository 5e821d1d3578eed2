# SPDX-License-Identifier: Apache-2.0
"""Replacement of verl's fused LM head by `mb.linear_logprobs`.

verl passes Megatron a function that gets hidden states in place of logits. verl's own function
gathers the hidden states over tensor-parallel ranks and saves them for backward. The replacement
uses the hidden states of each rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ....megatron.selection import burst_of
from ..logprobs import linear_logprobs


def processed(original: Callable[..., Any], **arguments: Any) -> Any:
    """Compute log-probabilities and entropies of labels in place of `fused_output_processor`.

    Megatron passes all arguments as keywords: labels [1, t] of t tokens, hidden_states [t, 1, d].
    Under sequence parallelism a rank has only some rows of hidden_states. The result has log_probs
    [t] and entropy [t].
    """
    config = arguments["config"]
    burst = burst_of(config)
    if burst is None or burst.algorithm == "megatron":
        return original(**arguments)
    outputs = importlib.import_module("verl.utils.model").CausalLMOutputForPPO
    hidden, weight, layer = (
        arguments[name] for name in ("hidden_states", "output_weight", "output_layer")
    )
    # Imported late, because it imports Megatron.
    check = importlib.import_module("megatron_burst.megatron.lm_head.fused_loss").check_output
    check(layer, "fused_output_processor")
    results = linear_logprobs(
        hidden.flatten(0, 1),
        layer.weight if weight is None else weight,
        arguments["labels"].flatten(),
        temperature=arguments["context"].temperature,
        tp_group=layer.tp_group,
        sequence_parallel=config.sequence_parallel,
    )
    output = outputs(
        loss=None, logits=None, past_key_values=None, hidden_states=hidden, attentions=None
    )
    output.log_probs, output.entropy = results.logprobs, results.entropy
    return output
