"""Selection and attention over it, dense and in float64, written out by hand.

Nothing here imports megatron_burst. Shape letters: S the whole sequence, b batch, i index heads,
h query heads, k key heads, H selections of a row, u units, d, w widths.
"""

import math

import torch


def index_scores(rule, block, q, k, weights):
    """[S, b, H, u] in the dtype of q."""
    length, _, heads, _ = q.shape
    if rule == "dsa":
        dot = torch.stack([q[:, :, h].transpose(0, 1) @ k[:, :, 0].permute(1, 2, 0)
                           for h in range(heads)])  # fmt: skip
        found = (weights.permute(2, 1, 0)[..., None] * dot * (dot > 0)).sum(0)
        return found.transpose(0, 1).unsqueeze(2)
    blocks = [slice(u, u + block) for u in range(0, length, block)]
    if rule == "qsa":
        means = torch.stack([k[each].mean(0) for each in blocks])
        return index_scores("dsa", 1, q, means, weights)
    group = heads // k.shape[2]
    each = []
    for h in range(heads):
        keys = k[:, :, h // group]
        if rule == "moba":
            keys = torch.stack([keys[part].mean(0) for part in blocks])
        each.append(q[:, :, h].transpose(0, 1) @ keys.permute(1, 2, 0))  # [b, S, u or S]
    if rule == "moba":
        return torch.stack(each, 2).transpose(0, 1)
    assert rule == "msa"
    pooled = [torch.stack([x[..., part].amax(-1) for part in blocks], -1) for x in each]
    return torch.stack(pooled, 2).transpose(0, 1)


def compressed_scores(q, k, block, means, seen):
    """[S, b, H, u] of the rule "nsa": softmax over the means that are seen as a whole."""
    length, _, heads, width = q.shape
    each, group = block // means, heads // k.shape[2]
    pooled = torch.stack([k[n : n + each].mean(0) for n in range(0, length, each)])
    whole = seen.unflatten(1, (-1, each)).all(-1)[:, None]  # [S, 1, means of the sequence]
    found = []
    for h in range(heads):
        dot = torch.einsum("sbd,cbd->sbc", q[:, :, h], pooled[:, :, h // group]) / math.sqrt(width)
        weight = torch.where(whole, dot.exp(), 0.0)
        found.append(weight / weight.sum(-1, keepdim=True).clamp(min=1e-300))
    of_keys = [sum(found[n : n + group]) for n in range(0, heads, group)]
    return torch.stack(of_keys, 2).unflatten(-1, (-1, means)).sum(-1)


def chosen(scores, seen, block, top_k, own, first=False, near=0):
    """The units of each row as a list: the best top_k visible ones, ties to the lower unit, and
    before them the own unit where `own`, the first that is seen, and so many before the own.
    seen bool [S, S]."""
    length, batch, heads, units = scores.shape
    visible_of, scores = seen.unflatten(1, (units, block)).any(-1).tolist(), scores.tolist()
    rows = []
    for t in range(length):
        visible = [u for u in range(units) if visible_of[t][u]]
        for b in range(batch):
            for h in range(heads):
                rank = {u: (-scores[t][b][h][u], u) for u in visible}
                always = {t // block} if own else set()
                always |= {t // block - n for n in range(1, near + 1)}
                always |= {*visible[:1]} if first else set()
                rank |= {u: (-math.inf, u) for u in always & {*visible}}
                rows.append(sorted(sorted(visible, key=rank.get)[:top_k]))
    return [rows[n : n + batch * heads] for n in range(0, len(rows), batch * heads)]


def table(chosen, seen, block, batch, heads):
    """bool [S, b, h, S]: which keys each query head attends to."""
    length = len(chosen)
    found = torch.zeros(length, batch, len(chosen[0]) // batch, length, dtype=torch.bool)
    for t, row in enumerate(chosen):
        for n, units in enumerate(row):
            b, h = divmod(n, len(row) // batch)
            for u in units:
                found[t, b, h, u * block : (u + 1) * block] = True
    found &= seen[:, None, None]
    return found.repeat_interleave(heads // found.shape[2], dim=2)


def attention(q, k, v, hidden, scale, sink=None):
    """out [S, b, h, w] and p [S, b, h, S], by operators that autograd knows."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->sbht", q, keys) * scale
    weight = torch.where(hidden, torch.zeros_like(scores), (scores - scores.detach().amax()).exp())
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - scores.detach().amax()).exp()[:, None]
    p = weight / torch.where(total == 0, torch.ones_like(total), total)
    return torch.einsum("sbht,tbhw->sbhw", p, values), p


def indexer_loss(scores, chosen, p, block):
    """KL(p ; softmax of the scores) over what was chosen, [S, b, H]: p [S, b, h, S] of attention,
    summed over heads and units, normalised."""
    heads = scores.shape[2]
    p = p.unflatten(2, (heads, -1)).sum(3).unflatten(-1, (-1, block)).sum(-1)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-300)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for t, row in enumerate(chosen):
        for n, some in enumerate(row):
            kept[t, n // heads, n % heads, some] = True
    log = torch.log_softmax(scores.masked_fill(~kept, -1e300), -1)
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - log), 0.0).sum(-1)
