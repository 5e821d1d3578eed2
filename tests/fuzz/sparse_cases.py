"""What a seed stands for: a call of `mb.select`, of attention over what it finds, and of the loss.

What must be refused is said here, by hand, before the package is asked.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import sparse_oracle
import torch

import megatron_burst as mb
from megatron_burst.plugins.sparse import rules as selection_rules

from . import rules
from .draw import GRIDS, STRIDES, Grid

ALGORITHMS = "ring", "double_ring", "burst", "multicast", "prefetch", "all_gather"
OF_BLOCKS = {
    "qsa": selection_rules.Qsa, "moba": selection_rules.Moba, "msa": selection_rules.Msa,
    "nsa": selection_rules.Nsa,
}  # fmt: skip


@dataclass(frozen=True)
class SparseCase:
    """One layer: its tensors come from `seed`."""

    seed: int
    grid: Grid
    shape: tuple[int, int]  # S, b
    rule: str
    block: int
    means: int  # of a unit, for nsa
    index_heads: tuple[int, int]
    index_width: int
    heads: tuple[int, int]  # query heads, key heads
    widths: tuple[int, int]  # of keys and values
    latent: bool
    top_k: int
    equal: bool  # do most scores have a twin?
    positions: list = field(repr=False)
    seen: np.ndarray = field(repr=False)
    layout: object
    mask: object
    algorithm: str
    kernel: str
    form: str  # "keywords" or "plan"
    scale: float | None
    sink: str  # "none", "fixed" or "learnt"
    needs: tuple[bool, ...]  # index_q, index_k, index_weights, q, k, v
    strides: str
    keep: float | None  # of mb.checkpoint around it
    twice: bool  # does backward run twice?
    once: bool  # does the loss take lse from attention?
    kinds: frozenset
    refused: str  # the words of the refusal

    @property
    def made_rule(self):
        if self.rule == "nsa":
            return selection_rules.Nsa(self.block, self.means)
        return selection_rules.Dsa() if self.rule == "dsa" else OF_BLOCKS[self.rule](self.block)


def draw(name: str, size: int) -> SparseCase:
    """The case called `name` on `size` ranks."""
    rng = random.Random(name)
    inter, intra = rng.choice(GRIDS[size])
    rule = rng.choice(["dsa", "dsa", "dsa", *OF_BLOCKS])
    batch = rng.choice([1, 1, 2, 3])
    equal, refused = rng.random() < 0.3 and rule != "nsa", ""
    block, rows = 1, rng.choice([2, 4, 6, 8] if size > 3 else [2, 4, 8, 12, 18])
    if rule != "dsa":
        block = rng.choice([2, 4] if equal else [2, 3, 4])  # halves are exact
        rows = 2 * block * rng.choice([1, 2, 3] if size < 6 else [1])
    length = rows * size
    layout, positions, laid = rules.layout(rng, size, rows)
    mask, seen, kinds = rules.mask(rng, length)
    if rule != "dsa" and rng.random() < 0.85:
        laid = rng.choice(["contiguous", "zigzag"])
        layout = laid
        positions = rules.oracle.permutation(laid, size, length)
        mask, seen, kinds = _of_blocks(rng, length, block)
    if rule != "dsa":
        refused = _refusal(positions, laid, kinds, mask, block)
    key_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    latent = rng.random() < 0.25
    index_heads = heads = key_heads * group, key_heads
    if rule in ("dsa", "qsa"):
        index_heads = rng.choice([1, 2, 3]), 1
    elif rule == "msa":  # a selection per index head
        index_heads = key_heads, rng.choice([1, key_heads])
    elif rule == "nsa":
        index_heads = key_heads * rng.choice([1, 2]), key_heads
    if latent:
        heads = heads[0], 1
    top_k = rng.choice([1, 2, 3, 5, 8, length // block, length + 3])
    needs = tuple(rng.random() < 0.85 for _ in range(6))
    return SparseCase(
        seed=rng.randrange(1 << 30),
        grid=Grid(inter, intra, 1, "head_first"),
        shape=(length, batch),
        rule=rule, block=block,
        means=rng.choice([n for n in range(1, block + 1) if block % n == 0]),
        index_heads=index_heads, index_width=rng.choice([2, 4, 5]),
        heads=heads, widths=(7, 5) if latent else rng.choice([(4, 4), (5, 3), (3, 6)]),
        latent=latent, top_k=max(3, top_k) if rule == "nsa" else top_k, equal=equal,
        positions=positions, seen=seen, layout=layout, mask=mask,
        algorithm=rng.choice(ALGORITHMS), kernel=rng.choice(["aten", "aten", "reference"]),
        form=rng.choice(["plan", "keywords"]), scale=rng.choice([None, 0.3]),
        sink=rng.choice(["none", "none", "fixed", "learnt"]), needs=needs,
        strides=rng.choice(STRIDES), keep=rng.choice([None, None, 0.3, 0.5, 1.0]),
        twice=rng.random() < 0.15, once=rng.random() < 0.5, refused=refused,
        kinds=frozenset({f"layout {laid}", *(f"mask {kind}" for kind in kinds)}),
    )  # fmt: skip


def _of_blocks(rng, length, block):
    """A mask that rules of blocks take, its table, and the kinds in it."""
    q, k = np.arange(length)[:, None], np.arange(length)[None, :]
    units = length // block
    bounds = sorted(block * rng.randint(0, units) for _ in range(rng.randint(0, 4)))
    bounds = [0, *bounds, length]
    number = np.searchsorted(bounds, np.arange(length), side="right")
    same, before = number[:, None] == number, np.broadcast_to(q >= k, (length, length)).copy()
    documents = mb.masks.Documents(bounds)
    return rng.choice([
        (mb.masks.Causal(), before, {"causal"}),
        (mb.masks.Full(), before | True, {"full"}),
        (documents, same, {"documents"}),
        (documents & mb.masks.Causal(), same & before, {"documents", "causal", "and"}),
    ])  # fmt: skip


def _refusal(positions, laid, kinds, mask, block) -> str:
    """What a rule of blocks cannot have."""
    for mine in positions:
        parts = np.reshape(mine, (-1, block))
        if (parts[:, 0] % block).any() or (parts != parts[:, :1] + np.arange(block)).any():
            return "cuts the blocks of"
    if laid not in ("contiguous", "zigzag"):
        return "cuts the blocks of or mask: a rule with blocks or served"
    odd = any(bound % block for bound in mask.breaks.tolist())
    strange = kinds - {"causal", "full", "documents", "and"}
    return "mask: a rule with blocks" if odd or strange else ""


def tensors(case: SparseCase) -> list[torch.Tensor | None]:
    """index_q, index_k, index_weights, q, k, v, dout, the sink, the weights of the loss, whole."""
    (length, batch), (i, n), (h, k) = case.shape, case.index_heads, case.heads
    selections = case.made_rule.selections(i, n)
    make = torch.Generator().manual_seed(case.seed)
    sizes = ((i, case.index_width), (n, case.index_width), (i,), (h, case.widths[0]),
             (k, case.widths[0]), (k, case.widths[1]), (h, case.widths[1]))  # fmt: skip
    found = [torch.randn(length, batch, *s, generator=make, dtype=torch.float64) for s in sizes]
    if case.equal:
        found[:3] = [x.round().clamp(-1, 1) for x in found[:3]]
    if case.rule in ("moba", "msa", "nsa"):
        found[2] = None
    if case.latent:
        found[5] = None
    sink = torch.randn(h, generator=make, dtype=torch.float64)
    outer = torch.randn(length, batch, selections, generator=make, dtype=torch.float64)
    return [*found, None if case.sink == "none" else sink, outer]


def solve(case: SparseCase):
    """(units, out, loss, gradients of the six tensors and of the sink), dense, by hand."""
    *given, dout, sink, outer = tensors(case)
    seen, batch = torch.from_numpy(case.seen), case.shape[1]
    leaves = [None if x is None else x.requires_grad_() for x in given]
    *index, q, k, v = leaves
    if nsa := case.rule == "nsa":
        found = sparse_oracle.compressed_scores(*index[:2], case.block, case.means, seen)
    else:
        found = sparse_oracle.index_scores(case.rule, case.block, *index)
    units = sparse_oracle.chosen(
        found.detach(), seen, case.block, case.top_k, case.rule != "dsa", nsa, int(nsa)
    )
    heads = case.heads[0]
    hidden = ~sparse_oracle.table(units, seen, case.block, batch, heads)
    scale = case.scale or case.widths[0] ** -0.5
    values = k[..., : case.widths[1]] if case.latent else v
    if sink is not None:
        sink.requires_grad_()
    out, _ = sparse_oracle.attention(q, k, values, hidden, scale, sink)
    with torch.no_grad():
        shares = sink if case.once else None  # what lse counts
        _, p = sparse_oracle.attention(q, k, values, hidden, scale, shares)
    loss = sparse_oracle.indexer_loss(found, units, p, case.block)
    wanted = [x for x in [*leaves, sink] if x is not None]
    total = (out * dout).sum() + (0.0 if nsa else (loss * outer).sum())
    grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    grads = [None if x is None else next(grads) for x in [*leaves, sink]]
    return units, out.detach(), loss.detach(), grads
