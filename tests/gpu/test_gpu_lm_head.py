"""The fused LM head and loss at real shapes in bf16, against float64 and torch's own error."""

from functools import lru_cache

import oracle
import pytest
import torch
import torch.nn.functional as F
from problems import BOUND, on

import megatron_burst as mb

SIZES = {"cuda": (2048, 1024, 32768), "cpu": (24, 16, 96)}  # tokens, width, vocabulary
CASES = [on(device, mode, first=True) for device in SIZES for mode in ("single_pass", "recompute")]


@lru_cache(maxsize=1)
def problem(device):
    """(hidden, weight, labels), and loss, dhidden, dweight in float64 and as torch has them."""
    tokens, width, vocabulary = SIZES[device]
    make = torch.Generator(device).manual_seed(5)
    options = {"generator": make, "device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, **options)
    weight = torch.randn(vocabulary, width, **options) / 8
    labels = torch.randint(0, vocabulary, (tokens,), generator=make, device=device)
    labels[::7] = -100
    scores = hidden.double() @ weight.double().T
    kept = labels != -100
    lse = scores.logsumexp(1)
    where = labels.clamp_min(0)[:, None]
    loss = (lse - scores.gather(1, where)[:, 0]) * kept
    p = torch.exp(scores - lse[:, None])
    p.scatter_add_(1, where, -torch.ones_like(lse)[:, None])
    p *= kept[:, None]
    truth = loss, p @ weight.double(), p.T @ hidden.double()
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    eager = F.cross_entropy((leaves[0] @ leaves[1].T).float(), labels, reduction="none")
    return (hidden, weight, labels), truth, (eager, *torch.autograd.grad(eager.sum(), leaves))


@pytest.mark.parametrize(("device", "mode"), CASES)
def test_errs_no_more_than_torch(device, mode):
    (hidden, weight, labels), truth, eager = problem(device)
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    tile = len(hidden) * len(weight) * 2 // 3  # bytes: three tiles or four
    loss = mb.linear_cross_entropy(*leaves, labels, tile=tile, mode=mode)
    got = loss, *torch.autograd.grad(loss.sum(), leaves)
    for part, mine, other, right in zip(
        ("loss", "dhidden", "dweight"), got, eager, truth, strict=True
    ):
        error, theirs = oracle.worst(mine, right), oracle.worst(other, right)
        assert error <= BOUND * theirs + 1e-6, f"{part}: {error:.3g}, torch {theirs:.3g}"
