"""The only file that names the package: it makes the calls of `cases` and returns their tensors.

If a public name or argument changes, change it here, so that old and new versions get equal calls:
`_first` takes the first home of a name that a version has. Everything else goes through
`import megatron_burst as mb`.

Shape letters: as in the docstrings of the operations.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import megatron_burst as mb

from .cases import Case

Results = Iterator[tuple[str, Any]]  # name of a result, and a tensor or a number
RULES = ("megatron_burst.sparse.rules", "megatron_burst.plugins.sparse.rules")


def results(case: Case, tp_group: Any = None) -> Results:
    """Yield outputs, gradients and bytes of a case."""
    yield from CALLS[case.kind](case, tp_group)


def _first(*modules: str) -> Any:
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(modules)} exists")


# The operations that take a list with the tensor of each rank.
LISTS = _first("megatron_burst.plugins.testing.in_process", "megatron_burst")
IN_PROCESS = mb.Groups.in_process if LISTS is mb else LISTS.groups


class Tensors:
    """Random tensors of a case, in the order in which they are asked for."""

    def __init__(self, case: Case) -> None:
        self.make = torch.Generator().manual_seed(case.seed)
        self.dtype = getattr(torch, case.dtype)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.make, dtype=torch.float64).to(self.dtype)

    def labels(self, count: int, limit: int) -> torch.Tensor:
        return torch.randint(0, limit, (count,), generator=self.make)


class Ranks:
    """The ranks of a case, in one process."""

    def __init__(self, case: Case) -> None:
        inter, intra = case.grid
        ulysses = {"ulysses": case.ulysses} if case.ulysses > 1 else {}
        self.groups = IN_PROCESS(inter=inter, intra=intra, **ulysses)
        self.size = inter * intra
        self.layout = mb.layout.make(case.options["layout"], cp_size=self.size)

    def cut(self, whole: torch.Tensor, needs_grad: bool = True) -> list[torch.Tensor]:
        """The shards of a tensor [s, ...], as leaves."""
        shards = [mb.shard(whole, self.layout, rank, dim=0) for rank in range(self.size)]
        return [shard.detach().clone().requires_grad_(needs_grad) for shard in shards]

    def sent(self) -> Results:
        """Bytes that each rank has sent, within its node and to other nodes."""
        for rank, groups in enumerate(self.groups.ranks):
            yield f"bytes sent by rank {rank}", (groups.counters.intra, groups.counters.inter)


def mask_of(mask: tuple[Any, ...]) -> Any:
    name, *numbers = mask
    masks = mb.masks
    return {
        "causal": lambda: masks.Causal(),
        "full": lambda: masks.Full(),
        "window": lambda: masks.Window(*numbers),
        "causal or prefix": lambda: masks.Causal() | masks.Prefix(*numbers),
        "documents": lambda: masks.Documents(*numbers),
        "causal documents": lambda: masks.Documents(*numbers) & masks.Causal(),
    }[name]()


def _gradients(
    outs: list[torch.Tensor], starts: list[torch.Tensor], leaves: dict[str, torch.Tensor]
) -> Results:
    found = torch.autograd.grad(outs, [*leaves.values()], starts, allow_unused=True)
    yield from zip((f"d {name}" for name in leaves), found, strict=True)


def _numbered(**shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name} {i}": x for name, some in shards.items() for i, x in enumerate(some)}


def _attention(case: Case, _: Any) -> Results:
    at, random, n = Ranks(case), Tensors(case), case.sizes
    q, k, v = (
        at.cut(random(n["s"], n["b"], n[heads], n[width]))
        for heads, width in (("h", "d"), ("k", "d"), ("k", "w"))
    )
    dout = at.cut(random(n["s"], n["b"], n["h"], n["w"]), needs_grad=False)
    leaves, keep = _numbered(q=q, k=k, v=v), case.choices["keep"]
    sink = random(n["h"]).requires_grad_() if case.choices["sink"] else None
    if sink is not None:
        leaves["sink"] = sink
    options = {**case.options, "layout": at.layout, "mask": mask_of(case.mask)}
    planned, store = {"groups": at.groups, **options}, {} if keep is None else {"store": keep}
    plan = LISTS.prepare(q, k, v, sink=sink, **planned, **store)
    for rank, one in enumerate(plan.ranks):
        yield f"bytes planned for rank {rank}", [tuple(vars_of(x)) for x in one.traffic()]
    if case.choices["planned"]:
        planned = {"plan": plan}

    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [list(flat[i : i + at.size]) for i in range(0, 3 * at.size, at.size)]
        return tuple(LISTS.attention(*parts, sink=sink, **planned))

    def of_rank(rank: int, *qkv: torch.Tensor) -> torch.Tensor:
        own = {name: planned[name].ranks[rank] for name in ("groups", "plan") if name in planned}
        *qkv, given = qkv
        return mb.attention(*qkv, sink=given, **{**planned, **own})

    flat = [*q, *k, *v]
    if keep is None:
        outs = call(*flat)
    elif LISTS is mb:
        outs = mb.checkpoint(call, *flat, keep=keep)
    else:
        ranks = range(at.size)
        outs = LISTS.checkpoint(at.groups, of_rank, ranks, q, k, v, [sink] * at.size, keep=keep)
    yield from _numbered(out=list(outs)).items()
    yield from _gradients(list(outs), dout, leaves)
    yield from at.sent()


def vars_of(traffic: Any) -> Iterator[int]:
    """The numbers of a traffic, whatever kind of record it is."""
    yield from (traffic if isinstance(traffic, tuple) else vars(traffic).values())


def _linear(case: Case, _: Any) -> Results:
    at, random, n = Ranks(case), Tensors(case), case.sizes
    form, shape = case.options["form"], (n["s"], n["b"])
    q, k = (at.cut(random(*shape, n["g"], n["d"]) / 2) for _ in range(2))
    v = at.cut(random(*shape, n["h"], n["w"]))
    named: dict[str, Any] = {}
    if form in ("scalar_decay", "gated_delta_rule"):
        named["decay"] = at.cut(-random(*shape, n["h"]).abs())
    elif form in ("vector_decay", "kda"):
        named["decay"] = at.cut(-random(*shape, n["h"], n["d"]).abs())
    if form in ("delta_rule", "gated_delta_rule", "kda"):
        named["beta"] = at.cut(random(*shape, n["h"]).sigmoid())
    leaves = _numbered(q=q, k=k, v=v, **named)
    dout = at.cut(random(*shape, n["h"], n["w"]), needs_grad=False)
    initial = None
    if case.choices["initial"]:
        initial = torch.randn(n["documents"], n["b"], n["h"], n["d"], n["w"], generator=random.make)
        initial = initial.to(torch.float64 if case.dtype == "float64" else torch.float32)
        leaves["initial"] = initial.requires_grad_()
    options = {**case.options, "layout": at.layout}
    if options["cu_seqlens"] is not None:
        options["cu_seqlens"] = list(options["cu_seqlens"])
    outs, finals = LISTS.linear_attention(
        q, k, v, **named, initial_state=initial, groups=at.groups, **options
    )
    yield from _numbered(out=outs, final=finals).items()
    yield from _gradients(outs, dout, leaves)
    yield from at.sent()


def _lm_head(case: Case, tp_group: Any) -> Results:
    random, n, operation = Tensors(case), case.sizes, case.choices["operation"]
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    hidden, weight = random(n["n"], n["d"]), random(n["v"], n["d"])
    labels = random.labels(n["n"], case.options["vocab_size"] or n["v"])
    labels[::5] = -100
    upstream = random(n["n"]).abs().to(torch.float64 if case.dtype == "float64" else torch.float32)
    other = random(n["n"], n["d"]), random(n["v"], n["d"])
    hidden, weight = hidden.requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()
    named: dict[str, Any] = {**case.options, "tp_group": tp_group}
    if operation == "cross_entropy":
        mask = {"loss_mask": upstream} if case.choices["masked"] else {}
        upstream = upstream if mask else torch.ones_like(upstream)
        loss = mb.linear_cross_entropy(hidden, weight, labels, **named, **mask)
        found, starts = {"loss": loss}, [upstream]
    elif operation == "logprobs":
        all_of_it = mb.linear_logprobs(hidden, weight, labels, top_k=3, **named)
        yield from (("top", all_of_it.top), ("top ids", all_of_it.top_ids))
        found = {"logprobs": all_of_it.logprobs, "entropy": all_of_it.entropy}
        starts = [upstream, upstream.flip(0)]
    else:
        other = other[0], other[1].chunk(size)[rank].clone()
        reverse = bool(case.choices["masked"])
        found = {"kl": mb.linear_kl(hidden, weight, *other, reverse=reverse, **named)}
        starts = [upstream]
    yield from found.items()
    yield from _gradients([*found.values()], starts, {"hidden": hidden, "weight": weight})


def _sparse(case: Case, _: Any) -> Results:
    at, random, n = Ranks(case), Tensors(case), case.sizes
    name, shape = case.choices["rule"], (n["s"], n["b"])
    rules = _first(*RULES)
    rule = rules.Dsa() if name == "dsa" else getattr(rules, name.capitalize())(n["block"])
    index = [at.cut(random(*shape, n[x], 4)) for x in ("i", "n")]
    weights = at.cut(random(*shape, n["i"])) if name in ("dsa", "qsa") else None
    q, k, v = (at.cut(random(*shape, n[h], n[w])) for h, w in (("h", "d"), ("k", "d"), ("k", "w")))
    dout = at.cut(random(*shape, n["h"], n["w"]), needs_grad=False)
    named = {"groups": at.groups, "algorithm": case.options["algorithm"]}
    chosen = LISTS.select(
        *index, weights, rule=rule, top_k=case.choices["top_k"], layout=at.layout,
        mask=mask_of(case.mask), **named,
    )  # fmt: skip
    outs = LISTS.sparse_attention(q, k, v, chosen, kernel="aten", **named)
    losses = LISTS.indexer_loss(*index, weights, q, k, chosen, rule=rule, **named)
    yield from _numbered(ids=[one.ids for one in chosen], out=outs, loss=losses).items()
    leaves = _numbered(q=q, k=k, v=v, index_q=index[0], index_k=index[1])
    if weights is not None:
        leaves |= _numbered(index_weights=weights)
    starts = [*dout, *(torch.ones_like(x) for x in losses)]
    yield from _gradients([*outs, *losses], starts, leaves)
    yield from at.sent()


CALLS: dict[str, Callable[[Case, Any], Results]] = {
    "attention": _attention, "linear": _linear, "lm_head": _lm_head, "sparse": _sparse,
}  # fmt: skip
