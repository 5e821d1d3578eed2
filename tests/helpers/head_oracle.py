"""The truth for the LM head: logits, loss and gradients written out by hand, in float64.

Nothing here imports megatron_burst or uses torch's own loss functions.

Shape letters: n tokens, d width, v vocabulary rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """The keywords of the operation that change the loss."""

    logit_scale: float = 1.0
    logit_softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    ignore_index: int = -100


def loss(hidden, weight, labels, options):
    """(loss [n], softmax [n, v], lse [n], logits [n, v], slope [n, v]) of hidden [n, d]."""
    count = options.vocab_size or len(weight)
    raw = options.logit_scale * (hidden.double() @ weight.double().T)
    logits, slope = raw, torch.ones_like(raw)
    if options.logit_softcap is not None:
        cap = options.logit_softcap
        logits = cap * torch.tanh(raw / cap)
        slope = 1 / torch.cosh(raw / cap) ** 2
    real = logits[:, :count]
    top = real.max(dim=1).values
    lse = top + torch.log(torch.exp(real - top[:, None]).sum(dim=1))
    softmax = torch.zeros_like(logits)
    softmax[:, :count] = torch.exp(real - lse[:, None])
    result = torch.zeros(len(labels), dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        if label == options.ignore_index:
            continue
        hit = real[i, label] if 0 <= label < count else 0.0
        e = options.label_smoothing
        result[i] = lse[i] - (1 - e) * hit - e * real[i].mean() + options.z_loss * lse[i] ** 2
    return result, softmax, lse, logits, slope


def gradients(hidden, weight, labels, upstream, options):
    """(dhidden [n, d], dweight [v, d]) of sum(upstream * loss)."""
    count = options.vocab_size or len(weight)
    _, softmax, lse, _, slope = loss(hidden, weight, labels, options)
    dlogits = softmax * (1 + 2 * options.z_loss * lse)[:, None]
    dlogits[:, :count] -= options.label_smoothing / count
    for i, label in enumerate(labels.tolist()):
        if 0 <= label < count:
            dlogits[i, label] -= 1 - options.label_smoothing
    ignored = labels == options.ignore_index
    factor = torch.where(ignored, 0, upstream.double()) * options.logit_scale
    dlogits = dlogits * slope * factor[:, None]
    return dlogits @ weight.double(), dlogits.T @ hidden.double()


def best(hidden, weight, labels, options):
    """Most likely vocabulary row of each token."""
    count = options.vocab_size or len(weight)
    return loss(hidden, weight, labels, options)[3][:, :count].max(dim=1).indices


def logprobs(hidden, weight, rows, labels, upstream, options, temperature):
    """(log-probabilities [E], entropies [E], dhidden, dweight) of labels [E] at rows [E] of hidden
    [n, d]; the gradients are those of sum(upstream[0] * logprobs + upstream[1] * entropies)."""
    count = options.vocab_size or len(weight)
    _, _, _, logits, slope = loss(
        hidden, weight, torch.zeros(len(hidden), dtype=torch.int64), options
    )
    x = logits[:, :count] / temperature
    p = torch.exp(x - x.max(dim=1).values[:, None])
    p = p / p.sum(dim=1, keepdim=True)
    found, entropies = torch.zeros(2, len(labels), dtype=torch.float64)
    dlogits = torch.zeros_like(logits)
    for e, (row, label) in enumerate(zip(rows.tolist(), labels.tolist(), strict=True)):
        if label == options.ignore_index:
            continue
        log_p = torch.log(p[row])
        found[e], entropies[e] = log_p[label], -(p[row] * log_p).sum()
        dlogits[row, :count] -= upstream[0][e] * p[row]
        dlogits[row, label] += upstream[0][e]
        dlogits[row, :count] -= upstream[1][e] * p[row] * (log_p + entropies[e])
    dlogits = dlogits * slope * options.logit_scale / temperature
    return found, entropies, dlogits @ weight.double(), dlogits.T @ hidden.double()


def kl(models, upstream, options, temperature, reverse):
    """(KL [n], dhidden, dweight) of the first of two (hidden, weight) from the second."""
    count = options.vocab_size or len(models[0][1])
    logs, slopes = [], []
    for hidden, weight in models:
        none = torch.zeros(len(hidden), dtype=torch.int64)
        _, _, _, logits, slope = loss(hidden, weight, none, options)
        x = logits[:, :count] / temperature
        top = x.max(dim=1, keepdim=True).values
        logs.append(x - top - torch.log(torch.exp(x - top).sum(dim=1, keepdim=True)))
        slopes.append(slope)
    log_p, log_q = logs
    p, q = log_p.exp(), log_q.exp()
    found = ((p * (log_p - log_q)) if reverse else (q * (log_q - log_p))).sum(dim=1)
    dlogits = torch.zeros_like(slopes[0])
    dlogits[:, :count] = p * (log_p - log_q - found[:, None]) if reverse else p - q
    dlogits *= upstream[:, None] * slopes[0] * options.logit_scale / temperature
    hidden, weight = models[0]
    return found, dlogits @ weight.double(), dlogits.T @ hidden.double()
