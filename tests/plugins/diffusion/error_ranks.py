"""Inputs that are wrong on one of two ranks, with Bridge's training steps and core attention."""

import json
from pathlib import Path

import flux_ranks
import nemotron_ranks
import torch
import torch.distributed as dist
import wan_ranks
from harness import start


def refused(function, *args, **named):
    """Return the messages of the `ValueError` that the call raises on the ranks."""
    message, messages = "nothing was raised", [None] * dist.get_world_size()
    try:
        function(*args, **named)
    except ValueError as error:
        message = str(error)
    dist.all_gather_object(messages, message)
    return messages


def run(work):
    """Write, by name, the messages of both ranks."""
    ranks, found = start(work), {}
    models = {}
    for name, module in {"wan": wan_ranks, "flux": flux_ranks, "nemotron": nemotron_ranks}.items():
        models[name] = module.built(work, ranks)
        found[f"{name} noise"] = refused(module.trained, models[name], seed=5 + dist.get_rank())

    wrong = dist.get_rank() == 1
    core = models["nemotron"].decoder.layers[0].self_attention.core_attention
    q, k, v = torch.randn(3, 8, 1, 4, 8).unbind()
    found["packed"] = refused(core, q, k, v, packed_seq_params=object() if wrong else None)
    rows = 6 if wrong else 8  # 3 rows of a copy, which zigzag cannot cut
    found["rows"] = refused(core, q[:rows], k[:rows], v[:rows])

    core = models["wan"].decoder.layers[0].cross_attention.core_attention
    q, k, v = torch.randn(3, 8, 4, 12).unbind()
    params = wan_ranks.cross_params(clips=[0, 16], texts=[0, 5])
    found["boundaries"] = refused(core, q, k, v, packed_seq_params=None if wrong else params)
    keys = 4 if wrong else 5
    found["texts"] = refused(core, q, k[:keys], v[:keys], packed_seq_params=params)
    if dist.get_rank() == 0:
        Path(work["output"]).write_text(json.dumps(found))
