"""Linear attention written by hand as its recurrence, in float64: what all its tests compare with.

Document by document and token by token, each state a matrix; gradients by torch's autograd.
"""

from typing import NamedTuple

import torch


class Case(NamedTuple):
    """The tensors of a call, rows first, as `mb.linear_attention` takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None


# form -> shape of its decay behind [s, b, h], and whether it has a beta
SHAPES = {
    "linear": (None, False),
    "scalar_decay": ("", False),
    "vector_decay": ("d", False),
    "delta_rule": (None, True),
    "gated_delta_rule": ("", True),
    "kda": ("d", True),
}


def case(form, rows, *, b=2, g=2, h=4, d=5, w=3, seed=0, dtype=torch.float64):
    """Random tensors as models have them: keys of length 1, beta from 0 to 1, decays below 0."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    decay, beta = SHAPES[form]
    q, k, v = normal(rows, b, g, d), normal(rows, b, g, d), normal(rows, b, h, w)
    k = k / k.norm(dim=-1, keepdim=True)
    log = None if decay is None else -normal(rows, b, h, *([d] if decay else [])).abs() / 4
    written = normal(rows, b, h).sigmoid() if beta else None
    return Case(*(None if x is None else x.to(dtype) for x in (q, k, v, log, written)))


def leaves(given):
    """The same tensors, which want gradients."""
    return Case(*(None if x is None else x.detach().clone().requires_grad_() for x in given))


def tokens(given, state, scale):
    """(outputs [s, b, h, w], the state [b, h, d, w] behind) of consecutive rows of one document."""
    outs = []
    for t in range(given.v.shape[0]):
        state, out = token(given, t, state, scale)
        outs.append(out)
    return (torch.stack(outs) if outs else given.v), state


def token(given, t, state, scale):
    """One token: (the state behind, its output [b, h, w])."""
    heads, shared = given.v.shape[2], given.v.shape[2] // given.k.shape[2]
    states, outs = [], []
    for head in range(heads):
        before = state[:, head]
        key = given.k[t, :, head // shared].unsqueeze(-1)  # [b, d, 1]
        query = given.q[t, :, head // shared].unsqueeze(-1)
        value = given.v[t, :, head].unsqueeze(-2)  # [b, 1, w]
        if given.decay is not None:
            kept = given.decay[t, :, head].exp()  # [b] or [b, d]
            before = (kept.unsqueeze(-1) if kept.dim() == 2 else kept[:, None, None]) * before
        if given.beta is not None:
            value = given.beta[t, :, head, None, None] * (value - key.mT @ before)
        states.append(before + key @ value)
        outs.append(scale * (query.mT @ states[-1]).squeeze(-2))
    return torch.stack(states, 1), torch.stack(outs, 1)


def pieces(given, lengths, entering, scale):
    """(outputs [s, b, h, w], states [p, b, h, d, w] behind) of pieces of these lengths, each from
    the state that enters it."""
    parts = zip(*(split(x, lengths) for x in given), strict=True)
    found = [tokens(Case(*one), entering[i], scale) for i, one in enumerate(parts)]
    return torch.cat([out for out, _ in found]), torch.stack([state for _, state in found])


def split(x, lengths):
    return [None] * len(lengths) if x is None else list(x.split(list(lengths)))


def applied(maps, states):
    """transition S + increment, of each piece: transition None, [p, b, h], [p, b, h, d] or
    [p, b, h, d, d]."""
    kept = maps.transition
    if kept is None:
        return states + maps.increment
    if kept.dim() == 5:
        return kept @ states + maps.increment
    return kept.reshape(*kept.shape, *[1] * (5 - kept.dim())) * states + maps.increment


def gradients(results, wanted, seed=1):
    """Of a random weighted sum of the results with respect to the tensors of `wanted`."""
    made = torch.Generator().manual_seed(seed)
    total = 0.0
    for x in results:
        total = total + (x * torch.randn(x.shape, generator=made, dtype=torch.float64)).sum()
    wanted = [x for x in wanted if x is not None]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [
        torch.zeros_like(x) if one is None else one for x, one in zip(wanted, found, strict=True)
    ]


def documents(given, bounds, initial, scale, backward=False):
    """(outputs [s, b, h, w], states [documents, b, h, d, w] behind) of all documents; backward:
    from the last token of each to its first."""
    outs, ends = [None] * bounds[-1], []
    for n, state in enumerate(initial):
        rows = range(bounds[n], bounds[n + 1])
        for t in reversed(rows) if backward else rows:
            state, outs[t] = token(given, t, state, scale)
        ends.append(state)
    return torch.stack(outs), torch.stack(ends)
