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


def filled(model, size=0.2):
    """Return the model with random weights that depend only on their names.

    Tensor-parallel ranks have different parts of weights that are split over them.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        part = rank if getattr(weight, "tensor_model_parallel", False) else 0
        noise = torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(index + 999 * part)
        )
        weight.data.copy_(noise * (0.1 if "norm" in name else size) + ("norm" in name))
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

    Gradients of weights that are not split are also summed over tensor-parallel ranks.
    `counted` is the number of tokens of this rank, by whose sum over ranks the loss is divided.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    total = torch.ones(()) if counted is None else counted.detach().float().clone()
    if counted is not None:
        dist.all_reduce(total, group=group)
    loss = loss / total
    loss.backward()
    summed, grads = loss.detach().clone(), {}
    dist.all_reduce(summed, group=group)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            split = getattr(weight, "tensor_model_parallel", False)
            grads[name] = weight.grad
            dist.all_reduce(weight.grad, group=group if split else None)
    if dist.get_rank() == 0:
        norms = {name: x.double().norm().item() for name, x in grads.items()}
        Path(output).write_text(json.dumps([summed.item(), norms]))
