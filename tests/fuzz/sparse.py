"""Selection, attention over it and the indexer's loss, on grids in one process:
`python -m tests.fuzz sparse`."""

import random
from collections.abc import Callable, Iterable

import nccl_rules
import oracle
import torch
from workers import Workers

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

from .judge import EXACT, strided
from .sparse_cases import SparseCase, draw, solve, tensors
from .tally import Tally, tried

SIZES = (1, 2, 3, 4, 4, 6, 8)
NAMES = "index_q", "index_k", "index_weights", "q", "k", "v"


def case(number: int) -> SparseCase:
    return draw(f"sparse {number}", random.Random(number).choice(SIZES))


def faults(case: SparseCase) -> list[str]:
    """What is wrong with one case."""
    groups = in_process.groups(inter=case.grid.inter, intra=case.grid.intra)
    traces = nccl_rules.record(groups)
    try:
        found = _faults(case, groups)
    except ValueError as error:
        if any(word in str(error) for word in case.refused.split(" or ") if case.refused):
            return []
        raise
    if case.refused and "served" not in case.refused:
        return [f"served, though {case.refused!r}"]
    for name, communicators in nccl_rules.COMMUNICATORS.items():
        broken = nccl_rules.faults(traces, communicators(groups.topology))
        found += [f"NCCL, communicators {name}: {fault}" for fault in broken]
    return found


def _faults(case: SparseCase, groups) -> list[str]:
    *given, dout, sink, outer = tensors(case)
    ranks = [
        [None if x is None else strided(x[rows], case.strides).requires_grad_(need)
         for rows in case.positions]
        if x is not None else None
        for x, need in zip(given, case.needs, strict=True)
    ]  # fmt: skip
    if sink is not None:
        sink.requires_grad_(case.sink == "learnt")
    size = groups.size
    named = {"groups": groups, "algorithm": case.algorithm}
    of_selection = named | {"layout": case.layout, "mask": case.mask}
    if case.form == "plan":
        _, _, _, q, k, v = ranks
        plan = in_process.prepare(q, k, k if v is None else v, store=case.keep, **of_selection)
        named = of_selection = {"plan": plan, "label": case.seed}
    width = case.widths[1] if case.latent else None
    kept = {}

    def layer(home, *given):
        *index, q, k, v, sink = given
        by = {"plan": home} if case.form == "plan" else {"groups": home}
        chosen = mb.select(*index, rule=case.made_rule, top_k=case.top_k, **{**of_selection, **by})
        out = mb.sparse_attention(
            q, k, v, chosen, value_width=width, scale=case.scale, sink=sink, kernel=case.kernel,
            return_lse=case.once, **{**named, **by},
        )  # fmt: skip
        out, lse = out if case.once else (out, None)
        kept.setdefault(id(home), chosen.ids)
        if case.rule == "nsa":  # has no loss
            return out, None
        return out, mb.indexer_loss(
            *index, q, k, chosen, rule=case.made_rule, scale=case.scale, lse=lse, **{**named, **by}
        )

    homes = (plan if case.form == "plan" else groups).ranks
    each = [[None] * size if x is None else x for x in ranks] + [[sink] * size]
    if case.keep is None:
        done = in_process.on_ranks(groups, layer, homes, *each)
    else:
        done = in_process.checkpoint(groups, layer, homes, *each, keep=case.keep)
    results = [out for out, _ in done] + [loss for _, loss in done if loss is not None]
    flat = [t for x in ranks if x is not None for t in x]
    units, out, loss, grads = solve(case)
    found = _units(case, [kept[id(home)] for home in homes], units)
    wanted = [out[rows] for rows in case.positions] + [loss[rows] for rows in case.positions]
    for n, (mine, right) in enumerate(zip(results, wanted, strict=False)):
        found += _off(("out", "loss")[n // size], n % size, mine.detach(), right)
    needed = [x for x in [*flat, sink] if x is not None and x.requires_grad]
    starts = [x[rows] for x in (dout, outer) for rows in case.positions]
    pairs = [(y, g) for y, g in zip(results, starts, strict=False) if y.requires_grad]
    if not pairs:
        return found
    for again in range(1 + case.twice):
        last = again == case.twice
        mine = torch.autograd.grad(
            [y for y, _ in pairs], needed, [g for _, g in pairs], retain_graph=not last,
            allow_unused=True,
        )  # fmt: skip
        of = {id(x): g for x, g in zip(needed, mine, strict=True)}
        for name, shards, grad in zip(NAMES, ranks, grads[:6], strict=True):
            for rank, shard in enumerate(shards or ()):
                if shard.requires_grad and grad is not None:
                    found += _off("d" + name, rank, of[id(shard)], grad[case.positions[rank]])
        if sink is not None and sink.requires_grad:
            found += _off("dsink", 0, of[id(sink)], grads[6])
    return found


def _units(case: SparseCase, ids, units) -> list[str]:
    for rank, rows in enumerate(case.positions):
        for n, row in enumerate(rows):
            for place, wanted in enumerate(units[row]):
                mine = ids[rank][n].flatten(0, 1)[place].tolist()
                if mine != wanted + [-1] * (case.top_k - len(wanted)):
                    return [f"rank {rank}, position {row}, {place}: {mine}, not {wanted}"]
    return []


def _off(name: str, rank: int, mine, right) -> list[str]:
    if mine is None or mine.shape != right.shape or mine.dtype != right.dtype:
        return [f"rank {rank}: {name} is {None if mine is None else (mine.dtype, mine.shape)}"]
    error = oracle.worst(mine, right)
    return [] if error <= EXACT else [f"rank {rank}: {name} is off by {error:.3g}"]


def kinds(case: SparseCase) -> list[str]:
    """What a case counts for in the tally."""
    if case.refused and "served" not in case.refused:
        return [f"refused: {case.refused}"]
    length = case.shape[0]
    return [
        f"ranks {case.grid.size}", f"rule {case.rule}", f"algorithm {case.algorithm}",
        f"kernel {case.kernel}", f"form {case.form}", f"sink {case.sink}", *case.kinds,
        *["latent"] * case.latent, *["equal scores"] * case.equal,
        *["all are selected"] * (case.top_k * case.block >= length),
        *["checkpoint"] * (case.keep is not None), *["frozen"] * (not all(case.needs)),
        *["backward twice"] * case.twice, *["lse handed on"] * case.once, f"strides {case.strides}",
    ]  # fmt: skip


def search(cases: Iterable[int], _: Callable[[int], Workers] | None = None) -> Tally:
    """Try these cases, until too many have failed."""
    return tried("sparse", cases, case, kinds, faults)
