"""Which rows of a chunk any query of a rank selects, of a toy model that is trained here.

    python -m benchmarks.sparse --parts union

Rows that no query of a rank selected need not travel to it. A decoder of two layers reads bytes of
this documentation; its indexer learns the attention of all heads, first of dense attention, then of
its own selection, as DeepSeek-V3.2 was trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megatron_burst as mb
from benchmarks.report import DOCS, markdown

HIDDEN, HEADS, WIDTH, INDEX_HEADS, LAYERS, BYTES = 128, 4, 32, 4, 2, 256
ROWS = 256  # whose attention the indexer learns in a dense step
TOP_K, RANKS, LAYOUTS = (64, 128, 256), (4, 8), ("zigzag", "striped")
Say = Callable[[str], None]


class SparseLayer(nn.Module):
    """One key head for all query heads, as absorbed latent attention has, and an indexer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2) * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.index = nn.Linear(HIDDEN, INDEX_HEADS * WIDTH + WIDTH + INDEX_HEADS, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def indexed(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """index_q, index_k, weights of x [s, 1, hidden], which gets no gradient of them."""
        sizes = [INDEX_HEADS * WIDTH, WIDTH, INDEX_HEADS]
        q, k, weights = self.index(self.norms[0](x).detach()).split(sizes, dim=-1)
        q, k = (_turned(t.unflatten(-1, (-1, WIDTH))) for t in (q, k))
        return q, k, weights

    def forward(self, x: torch.Tensor, top_k: int, groups: Any) -> tuple[torch.Tensor, Any, Any]:
        """The layer's result, the indexer's loss and its selection; top_k 0: dense, and none."""
        mixed = self.qkv(self.norms[0](x)).unflatten(-1, (-1, WIDTH))
        q, k, v = mixed.split([HEADS, 1, 1], dim=2)
        q, k = _turned(q), _turned(k)
        index: Any = self.indexed(x)
        if top_k:
            a, b, c = index
            chosen = mb.select(*index, rule="dsa", top_k=top_k, groups=groups)
            out: Any = mb.sparse_attention(q, k, v, chosen, groups=groups)
            loss = mb.indexer_loss(a, b, c, q, k, chosen, rule="dsa", groups=groups).mean()
        else:
            chosen, loss = None, _dense_loss(index, q, k)
            a, b, c = (t.permute(1, 2, 0, 3) for t in (q, k.expand_as(q), v.expand_as(q)))
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True).permute(2, 0, 1, 3)
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norms[1](x)), loss, chosen


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [s, 1, h, WIDTH]."""
    angles = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(WIDTH // 2) * 2 / WIDTH)
    cos, sin = (f(angles)[:, None, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _dense_loss(index: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """KL(attention summed over heads ; softmax of index scores), of all keys that `ROWS` random
    queries see."""
    rows = torch.randperm(len(q))[:ROWS]
    hidden = torch.arange(len(q)) > rows[:, None]
    with torch.no_grad():
        scores = torch.einsum("sbhd,tbd->hst", q[rows], k[:, :, 0]) * WIDTH**-0.5
        target = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).mean(dim=0)
    found = torch.relu(torch.einsum("sbid,tbd->ist", index[0][rows], index[1][:, :, 0]))
    found = torch.einsum("sbi,ist->st", index[2][rows], found).masked_fill(hidden, -1e9)
    return F.kl_div(found.log_softmax(dim=-1), target, reduction="batchmean")


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, HIDDEN)
        self.layers = nn.ModuleList(SparseLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor, top_k: int, groups: Any) -> tuple[Any, ...]:
        """Logits, the indexers' losses, the selections."""
        x, losses, chosen = self.embedding(tokens)[:, None], [], []
        for layer in self.layers:
            x, loss, one = layer(x, top_k, groups)
            losses.append(loss)
            chosen.append(one)
        return self.head(self.norm(x))[:, 0], losses, chosen


def text(folder: Path = DOCS) -> torch.Tensor:
    """All pages, as bytes."""
    pages = [path.read_bytes() for path in sorted(folder.rglob("*.md"))]
    return torch.frombuffer(bytearray(b"\n".join(pages)), dtype=torch.uint8).long()


def trained(seq: int, dense: int, sparse: int, say: Say) -> tuple[Toy, torch.Tensor, float]:
    """The model, bytes that it has not seen, and its loss on them in the end."""
    torch.manual_seed(0)
    model, tokens, groups = Toy(), text(), mb.Groups.in_process(intra=1).ranks[0]
    train, last = tokens[: -4 * seq], tokens[-4 * seq :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin = time.time()
    for step in range(dense + sparse):
        at = int(torch.randint(len(train) - seq - 1, ()))
        some = train[at : at + seq + 1]
        logits, losses, _ = model(some[:-1], 0 if step < dense else TOP_K[1], groups)
        loss = F.cross_entropy(logits, some[1:])
        optimizer.zero_grad()
        (loss + sum(losses)).backward()
        optimizer.step()
        if step % 20 == 0 or step == dense + sparse - 1:
            kl = sum(float(each.detach()) for each in losses) / LAYERS
            say(f"step {step}: loss {loss:.3f}, indexer {kl:.3f}, {time.time() - begin:.0f} s")
    with torch.no_grad():
        logits, _, _ = model(last[:seq], TOP_K[1], groups)
        return model, last, float(F.cross_entropy(logits, last[1 : seq + 1]))


def wanted(ids: torch.Tensor, layout: mb.layout.Layout) -> float:
    """Rows of other ranks that a rank selects, over those that its queries see; of all ranks.

    ids [s, top_k] of the whole sequence, -1 where there is none.
    """
    seq, taken, seen = len(ids), 0, 0
    owners = torch.empty(seq, dtype=torch.long)
    for rank in range(layout.cp_size):
        owners[torch.from_numpy(layout.positions(rank, seq))] = rank
    for rank in range(layout.cp_size):
        mine = owners == rank
        picked = torch.zeros(seq + 1, dtype=torch.bool)
        picked[ids[mine].flatten().long()] = True  # -1 is the place behind all others
        others = ~mine & (torch.arange(seq) <= int(mine.nonzero().max()))
        taken += int((picked[:seq] & others).sum())
        seen += int(others.sum())
    return taken / seen


def table(seq: int, dense: int, sparse: int, say: Say) -> str:
    """The fraction of rows that travel, by top_k, ranks and layout, of each layer."""
    model, unseen, loss = trained(seq, dense, sparse, say)
    groups, rows = mb.Groups.in_process(intra=1).ranks[0], []
    for top_k in TOP_K:
        with torch.no_grad():
            chosen = model(unseen[:seq], top_k, groups)[2]
        for ranks in RANKS:
            row = [f"{top_k}", f"{ranks}"]
            for name in LAYOUTS:
                layout = mb.layout.make(name, cp_size=ranks)
                each = [wanted(one.ids[:, 0, 0], layout) for one in chosen]
                row.append(", ".join(f"{100 * x:.0f} %" for x in each))
            rows.append(row)
    heads = ["top_k", "ranks", *LAYOUTS]
    return (
        f"{markdown(heads, rows)}\n\n{seq} bytes of text not trained on, {LAYERS} layers, loss "
        f"{loss:.2f} after {dense} dense and {sparse} sparse steps."
    )
