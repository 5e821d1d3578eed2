"""What the ranks of all models do: make groups, fill weights, write losses and gradients."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist


def start(work):
    """Make process groups, and return the context-parallel size."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    tensor = work.get("tensor", 1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size() // tensor
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, context_parallel_size=ranks
    )
    random.model_parallel_cuda_manual_seed(7)
    return ranks


def filled(model, tensor_rank=0):
    """Return the model with random weights that depend only on their names and this number."""
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(index + 1000 * tensor_rank)
        noise = torch.randn(weight.shape, generator=draw)
        weight.data.copy_(noise * (0.1 if "norm" in name else 0.2) + ("norm" in name))
    return model


def training_state():
    """Return the parts of Bridge's training state that its forward steps read."""
    checks = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    return SimpleNamespace(
        timers=mock.MagicMock(), straggler_timer=mock.MagicMock(),
        cfg=SimpleNamespace(rerun_state_machine=checks, dataset=SimpleNamespace()),
    )  # fmt: skip


def write(model, loss, output, counted=None):
    """Write [loss, {name: norm of the gradient}], summed over context-parallel ranks, on rank 0.

    `counted` is the number of tokens of this rank, by whose sum over ranks the loss is divided.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    total = torch.ones(()) if counted is None else counted.detach().float().clone()
    if counted is not None:
        dist.all_reduce(total, group=group)
    loss = loss / total
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    summed = loss.detach().clone()
    for value in (summed, *grads.values()):
        dist.all_reduce(value, group=group)
    if dist.get_rank() == 0:
        norms = {name: x.double().norm().item() for name, x in grads.items()}
        Path(output).write_text(json.dumps([summed.item(), norms]))
