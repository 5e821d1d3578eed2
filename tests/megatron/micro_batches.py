"""Ranks of `test_micro_batches`: every micro-batch has its own group."""

import contextlib
import gc
import inspect
import weakref
from functools import partial
from itertools import pairwise
from unittest import mock

import session
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def held_rows(bounds, size, rank):
    """Return the rows of a pack on a rank by hand: of each document two of 2 x size equal parts."""
    if size == 1:
        return list(range(bounds[-1]))
    rows = []
    for start, end in pairwise(bounds):
        piece = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            rows += range(start + number * piece, start + (number + 1) * piece)
    return rows


def dense_reference(seed, bounds, window=None):
    """Return inputs, output and gradients of one rank with the whole pack, in fp64.

    The inputs are queries, keys, values and the gradient of the output. A dense mask is used.
    """
    draw = torch.Generator().manual_seed(seed)
    total = bounds[-1]
    q, k, v, grad = (
        torch.randn(total, heads, WIDTH, generator=draw, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    place = torch.arange(total)
    document = sum(((place >= end).long() for end in bounds[1:]), torch.zeros(total).long())
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place <= window
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / WIDTH**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, values)
    grads = torch.autograd.grad(out, inputs, grad)
    return [x.detach() for x in inputs], grad, [out.detach(), *grads]


def packed(bounds, group, size=None):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cp_group=group, local_cp_size=size
    )


def error_of(cores, seed, bounds, group, size=None, window=None):
    """Return the worst error of this rank's rows of a micro-batch in the layers ``cores``.

    The layers run one after another. All ranks of the micro-batch's group call this.
    """
    n, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    inputs, grad, expected = dense_reference(seed, bounds, window)
    rows = held_rows(bounds, n, rank)
    local_inputs = [x[rows].requires_grad_() for x in inputs]
    worst = 0.0
    for core in cores:
        out = core(*local_inputs, packed_seq_params=packed(bounds, group, size))
        grads = torch.autograd.grad(out, local_inputs, grad[rows].flatten(1))
        results = [out.detach().view(-1, HEADS, WIDTH), *grads]
        for got, want in zip(results, expected, strict=True):
            worst = max(worst, float((got - want[rows]).abs().max()))
    return worst


@contextlib.contextmanager
def layers(window=None, size=4, **burst_options):
    """Return two core attentions over this many context-parallel ranks, and the groups of a run."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    with session.parallel(context_parallel_size=size):
        groups = {
            (0, 1): dist.new_group([0, 1]), (2, 3): dist.new_group([2, 3]),
            (0, 1, 2, 3): dist.new_group([0, 1, 2, 3]), (1, 2): dist.new_group([1, 2]),
            **{(rank,): dist.new_group([rank]) for rank in range(4)},
        }  # fmt: skip
        config = TransformerConfig(
            num_layers=2, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS,
            num_query_groups=KV_HEADS, context_parallel_size=size, attention_dropout=0.0,
            params_dtype=torch.float64, window_size=None if window is None else (window, 0),
        )  # fmt: skip
        burst.configure(config, mb.BurstConfig(**burst_options))
        cores = [
            burst.BurstCoreAttention(config, number, AttnMaskType.causal, "self")
            for number in (1, 2)
        ]
        yield cores, groups


# Of each rank, in order: (ranks that hold the micro-batch, its documents). All ranks share a list,
# and skip what they do not hold.
RUN = (
    ((0, 1, 2, 3), (0, 16, 64)),
    ((0, 1), (0, 8, 32)), ((2, 3), (0, 12, 32)),
    ((0,), (0, 5, 11)), ((0,), (0, 7)), ((1,), (0, 9)), ((2, 3), (0, 4, 8, 24)),
    ((1, 2), (0, 8, 12)),
    ((0, 1, 2, 3), (0, 8, 16, 40)),
    ((0, 1), (0, 8, 32)), ((3,), (0, 13)),
)  # fmt: skip


def alternating(options, window=None, size=4):
    """Run all of this rank's micro-batches twice.

    Return the worst error; the ranks of each book; the process groups made in the second round; and
    whether `uninstall` frees the grids.
    """
    rank = dist.get_rank()
    with layers(window, size, **options) as (cores, groups):
        local_steps = [
            (i, *micro_batch) for i, micro_batch in enumerate(RUN) if rank in micro_batch[0]
        ]

        check, worst, count = partial(error_of, cores, window=window), [], []
        for _ in range(2):
            for seed, ranks, bounds in local_steps:
                worst.append(check(seed, bounds, groups[ranks], len(ranks)))
            count.append(len(c10d._world.pg_names))
        worst.append(check(99, (0, 3, 8), None, 1))  # a rank alone, without a process group
        made = len(c10d._world.pg_names) - count[0]
        books = sorted(cores[0].book.micro_batch_books)
        assert cores[0].book is cores[1].book
        alive = [weakref.ref(book.groups) for book in cores[0].book.micro_batch_books.values()]
    del cores, groups, check
    gc.collect()
    return max(worst), books, made, [reference() is not None for reference in alive]


# --- whole runs -----------------------------------------------------------------------------------


def documents(step, length, count):
    """Return `count` packs of documents of multiples of 8 tokens: [[tokens, ...], ...]."""
    draw = torch.Generator().manual_seed(step)
    packs = []
    for _ in range(count):
        sizes = []
        while sum(sizes) < length:
            lengths_count = int(torch.randint(1, 5, (), generator=draw))
            sizes.append(min(8 * lengths_count, length - sum(sizes)))
        packs.append([
            torch.randint(1, 4, (size + 1,), generator=draw).cumsum(0) % 61 for size in sizes
        ])  # fmt: skip
    return packs


def sample(texts):
    """Return documents as one sample of Megatron's dataset of packs."""
    ends = torch.tensor([0, *(len(text) - 1 for text in texts)]).cumsum(0).int()
    places = torch.cat([torch.arange(len(text) - 1) for text in texts])
    return {
        "tokens": torch.cat([text[:-1] for text in texts]),
        "labels": torch.cat([text[1:] for text in texts]),
        "position_ids": places,
        "loss_mask": (places % 5 != 3).float(),
        "cu_seqlens": ends,
    }


def losses(flags, context_parallel_size, settings):
    """Return [(loss, gradient norm)] of a run of four ranks, and the groups of this rank.

    settings: of a TransformerConfig. Without settings every document is a micro-batch of one rank
    with Megatron's own attention, and nothing is installed.
    """
    import arguments
    import model as example
    import pretrain_gpt
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_burst.megatron as burst
    from megatron_burst import flags as burst_flags

    session._meet_again()
    sizes = ["--context-parallel-size", str(context_parallel_size)]
    args = arguments.parse_args([*flags, *sizes])
    config = example.model_config(args)
    initialize = parallel_state.initialize_model_parallel
    try:
        if settings:
            burst.install(layout=args.burst_layout)
            for name, value in settings.items():
                setattr(config, name, value)
            burst.configure(config, burst_flags.burst_config(args))
        hybrid = partial(initialize, hybrid_context_parallel=bool(settings))
        with mock.patch.object(parallel_state, "initialize_model_parallel", hybrid):
            pretrain_gpt.make_groups(args)
        stages = example.build_model(args, config)
        optimizer, schedule = example.build_optimizer(args, config, stages)
        history = []
        for step in range(2):
            batches, count = batches_of(args, step, config if settings else None)
            for stage in stages:
                stage.zero_grad_buffer()
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=split_step if settings else whole_step, data_iterator=batches,
                model=stages, num_microbatches=count, seq_length=args.seq_length,
                micro_batch_size=1,
            )  # fmt: skip
            _, norm, _ = optimizer.step()
            schedule.step(increment=args.global_batch_size)
            history.append((pretrain_gpt.mean_over_all_tokens(reports), float(norm)))
        cores = [m for stage in stages for m in stage.modules() if hasattr(m, "book")]
        return history, sorted({ranks for core in cores for ranks in core.book.micro_batch_books})
    finally:
        burst.uninstall()
        parallel_state.destroy_model_parallel()


def batches_of(args, step, config):
    """Return the iterator of one step, and the number of micro-batches passed to Megatron."""
    from megatron.core import parallel_state
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper

    packs = documents(step, args.seq_length, args.global_batch_size)
    if config is None:
        local = [text for texts in packs for text in texts][dist.get_rank() :: 4]
        return iter([sample([text]) for text in local]), len(local)
    rank, size = (
        parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    )  # fmt: skip
    local = [sample(texts) for texts in packs[rank::size]]
    return HybridCPDataLoaderWrapper(iter([local]), config), 1


def whole_step(batches, model):
    import pretrain_gpt

    batch = {name: x[None] for name, x in next(batches).items()}
    out = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip
    return out, partial(pretrain_gpt.sum_of_losses, batch["loss_mask"])


def split_step(batches, model):
    """Run one document, in the group that Megatron's scheduler chose."""
    import pretrain_gpt
    from megatron.core import parallel_state, utils

    batch = {name: x[None] for name, x in next(batches).items()}
    size, total = int(batch["local_cp_size"]), batch["tokens"].shape[1]
    batch["cu_seqlens"] = torch.tensor([[0, total]], dtype=torch.int32)
    of_size = parallel_state.get_hybrid_data_context_parallel_groups
    group = of_size(group_size=size) if size > 1 else None
    cut = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" in inspect.signature(cut).parameters:
        batch = cut(batch, is_hybrid_cp=True, hybrid_cp_group_func=of_size)
        assert batch.get("hybrid_cp_group") is group
    elif group is not None:
        batch = cut(batch, cp_group=group)
    assert batch["tokens"].shape[1] * size == total
    params = packed((0, total), group, size)
    params.max_seqlen_q = params.max_seqlen_kv = total
    out = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"], packed_seq_params=params,
    )  # fmt: skip
    return out, partial(pretrain_gpt.sum_of_losses, batch["loss_mask"])
