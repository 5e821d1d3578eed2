"""The truth the tests compare with: dense attention, layouts and bytes, written out by hand.

Nothing here imports megatron_burst: positions, masks, gradients and byte counts are stated a
second time, as plainly as possible, so that a fault in the package cannot hide in its own test.

Shape letters: S the whole sequence, b batch, h query heads, k key/value heads, d, w widths.
"""

import math

import torch


def permutation(layout, ranks, length):
    """The positions each rank holds, in shard order: a list of `ranks` lists."""
    if layout == "contiguous":
        n = length // ranks
        return [[r * n + i for i in range(n)] for r in range(ranks)]
    if layout == "striped":
        return [[r + i * ranks for i in range(length // ranks)] for r in range(ranks)]
    assert layout == "zigzag"
    n = length // (2 * ranks)
    shards = []
    for r in range(ranks):
        front, back = r * n, length - (r + 1) * n
        shards.append([front + i for i in range(n)] + [back + i for i in range(n)])
    return shards


def visible(mask, length):
    """bool [S, S]: does the query of this row see the key of this column?"""
    rules = {
        "full": lambda query, key: True,
        "causal": lambda query, key: key <= query,
        # Nobody sees the third quarter of the keys; the second quarter of the queries is blind.
        "gap": lambda query, key: 4 * query // length != 1 and 4 * key // length != 2,
    }
    rule = rules[mask]
    return torch.tensor([[rule(query, key) for key in range(length)] for query in range(length)])


def attention(q, k, v, dout, seen, scale=None, softcap=None, sink=None):
    """Everything attention computes, in float64, gradients by formula.

    q [S, b, h, d], k [S, b, k, d], v [S, b, k, w], dout [S, b, h, w], seen bool [S, S].
    softcap: a score t becomes cap * tanh(t / cap). sink [h]: a logit in the softmax of every row
    (and in lse) that has no value. Returns out [S, b, h, w], lse [S, b, h], dq, dk, dv. A row that
    sees nothing has out 0 and lse -inf, or its sink, and gives no gradient.
    """
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    length, batch, heads, _ = q.shape
    group = heads // k.shape[2]
    out = torch.zeros_like(dout)
    lse = torch.full((length, batch, heads), -math.inf, dtype=torch.float64, device=q.device)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    some = seen.any(dim=1)  # rows that see anything
    for b in range(batch):
        for h in range(heads):
            key, value, grad = k[:, b, h // group], v[:, b, h // group], dout[:, b, h]
            scores, slope = q[:, b, h] @ key.T * scale, 1.0
            if softcap is not None:
                slope = torch.cosh(scores / softcap) ** -2
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -math.inf)
            p = torch.zeros_like(scores)
            p[some] = torch.softmax(scores[some], dim=1)
            lse[some, b, h] = torch.logsumexp(scores[some], dim=1)
            if sink is not None:
                alone = lse[:, b, h].clone()
                lse[:, b, h] = torch.logaddexp(alone, sink[h].double())
                p *= torch.exp(alone - lse[:, b, h])[:, None]
            out[:, b, h] = p @ value
            delta = (grad * out[:, b, h]).sum(dim=1, keepdim=True)
            ds = p * (grad @ value.T - delta) * slope
            dq[:, b, h] = ds @ key * scale
            dk[:, b, h // group] += ds.T @ q[:, b, h] * scale
            dv[:, b, h // group] += p.T @ grad
    return out, lse, dq, dk, dv


def sink_gradient(sink, lse, out, dout):
    """[h]: of a sink that is part of lse; every row gives -p_sink * (dout . out)."""
    share = torch.exp(sink.double() - lse)
    return -(share * (dout.double() * out).sum(dim=-1)).sum(dim=(0, 1))


def hops(algorithm, nodes, per_node, rank):
    """{link class: messages `rank` sends in one pass}, activations and gradients alike.

    The table "Bytes, exactly" of BurstEngine, in the variant where what a rank and a node add
    to their own gradient stays home. In a flat ring the last rank of a node sends to the next.
    """
    if algorithm == "ring":
        count = nodes * per_node - 1
        leaves_node = nodes > 1 and (rank + 1) % per_node == 0
        return {"intra": 0 if leaves_node else count, "inter": count if leaves_node else 0}
    return {"intra": nodes * (per_node - 1), "inter": nodes - 1}


def row_hops(algorithm, nodes, per_node, users, ways=(1, 1)):
    """For every rank (activation, gradient) {link class: rows it sends} where only some rows are
    seen.

    users: for each owner {ranks that have to do with a row: how many such rows it has}. Each row
    walks the same way as a chunk in `hops`, but no further than its last user, and its gradient
    sets out from the first. ways: of the rings between and within nodes, -1 the other way round.
    "direct": from the owner to each user, and back.
    """
    size = nodes * per_node
    sent = [({"intra": 0, "inter": 0}, {"intra": 0, "inter": 0}) for _ in range(size)]

    def send(gradient, src, dst, rows):
        link = "intra" if src // per_node == dst // per_node else "inter"
        sent[src][gradient][link] += rows

    for owner in range(size):
        for ranks, rows in users[owner].items():
            if algorithm == "direct":
                for user in ranks - {owner}:
                    send(0, owner, user, rows)
                    send(1, user, owner, rows)
            else:
                grid = (1, size) if algorithm == "ring" else (nodes, per_node)
                _walk(owner, ranks, *grid, ways, lambda *hop, rows=rows: send(*hop, rows))
    return sent


def _walk(owner, users, height, width, ways, send):
    """One row on its way over `height` rings of `width` ranks: send(gradient, src, dst)."""
    node, index = divmod(owner, width)
    path = [
        [(node + ways[0] * s) % height * width + (index + ways[1] * i) % width
         for i in range(width)]
        for s in range(height)
    ]  # fmt: skip
    for line in path:
        used = [i for i, r in enumerate(line) if r in users]
        for i in range(width - 1):
            if any(later > i for later in used):
                send(0, line[i], line[i + 1])
        for i in range(1, width):
            if any(1 <= earlier <= i for earlier in used):
                send(1, line[i], line[(i + 1) % width])
    used = [s for s, line in enumerate(path) if users & set(line)]
    for s in range(height - 1):
        if any(later > s for later in used):
            send(0, path[s][0], path[s + 1][0])
    for s in range(1, height):
        if any(1 <= earlier <= s for earlier in used):
            send(1, path[s][0], path[(s + 1) % height][0])


def activation_bytes(side, rows, heads, kv_heads, d, w, item, stat):
    """One travelling chunk: K, V; or Q, dO and the two statistics lse and delta."""
    if side == "kv":
        return rows * kv_heads * (d + w) * item
    return rows * heads * ((d + w) * item + 2 * stat)


def gradient_bytes(side, rows, heads, kv_heads, d, w, wire):
    """One travelling gradient: dK, dV; or dQ."""
    return rows * (kv_heads * (d + w) if side == "kv" else heads * d) * wire


def worst(got, wanted):
    """The largest absolute difference, infinite where either is not finite."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    difference = (got.detach().double() - wanted.double()).abs()
    if not difference.numel():
        return 0.0
    return difference.max().item() if difference.isfinite().all() else math.inf
