"""What the ranks of the Megatron tests run: the example's own code, many times in one process."""

import contextlib
import functools
import gc
import inspect
import io
import logging
import os
import warnings
import weakref
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

_stores = []  # one per run: those of earlier runs hold addresses of groups that are gone


def start():
    """Once per rank: Megatron on the CPU."""
    from megatron_burst.plugins.testing import cpu

    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    cpu.enable()
    import pretrain_gpt  # noqa: F401  the slow import, here so that no test pays for it

    _let_local_attention_be_latent()
    gc.freeze()  # what was imported stays: collecting after each run need not look through it


def _let_local_attention_be_latent():
    """Megatron's own local attention, as the one-rank reference for MLA too: its arithmetic takes
    values of any width, only its constructor does not."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__

    @functools.wraps(original)
    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        original(self, *args, **kwargs)
        if v_channels is not None:
            heads = self.num_attention_heads_per_partition
            self.hidden_size_per_partition = heads * v_channels
            self.num_query_groups_per_partition = heads

    DotProductAttention.__init__ = __init__


@contextlib.contextmanager
def parallel(layout="zigzag", **sizes):
    """Megatron's groups of these sizes over the ranks, anew, with BurstAttention installed; all
    ranks do the same."""
    from megatron.core import parallel_state

    import megatron_burst.megatron as burst

    _meet_again()
    burst.install(layout)
    try:
        parallel_state.initialize_model_parallel(**sizes)
        yield
    finally:
        burst.uninstall()
        parallel_state.destroy_model_parallel()


def train(flags):
    """[(loss, gradient norm)] of a run of the example with these flags.

    That a fused loss had to be computed twice is an error.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("error", message="linear_cross_entropy")
        history = _run(flags)
    return [(record["loss"], record["grad_norm"]) for record in history]


def train_deterministically(flags):
    """As `train`, with what Megatron-LM's --deterministic-mode asks of torch."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        return train(flags)
    finally:
        torch.use_deterministic_algorithms(False)


def error(flags):
    """ "ValueError: ..." that a run with these flags ends in, or None."""
    try:
        _run(flags)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def train_without_exchange(flags):
    """A run whose attention sees only its own rank's part of the sequence: must be wrong."""
    import torch.nn.functional as F

    def local(q, k, v, plan, sink, label, max_logits):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3)

    with mock.patch("megatron_burst.megatron.attention.core_attention.attention", local):
        return train(flags)


def train_windowed_by_mask(flags, left):
    """A one-rank packed run whose document mask has a causal window of ``left`` tokens cut in."""
    import dataset

    split = dataset._on_this_context_parallel_rank

    def with_window(batch):
        mask = batch["attention_mask"]  # True: hidden
        mask |= mask.new_ones(mask.shape[-2:]).tril(-left - 1)
        return split(batch)

    with mock.patch.object(dataset, "_on_this_context_parallel_rank", with_window):
        return train(flags)


def train_with_dense_mask(flags, name):
    """A one-rank run whose layers, Megatron's own, get a mask of `own_masks` as a dense matrix."""
    import own_masks
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attend = DotProductAttention.forward

    @functools.wraps(attend)
    def forward(self, query, key, value, attention_mask, *args, **named):
        hidden = own_masks.dense(name, self.layer_number, len(query))[None, None]
        if attention_mask is not None:  # of a packed batch
            hidden = hidden | attention_mask
        return attend(self, query, key, value, hidden, *args, **named)

    with mock.patch.object(DotProductAttention, "forward", forward):
        return train(flags)


def train_with_heads_inside_documents(flags):
    """A one-rank packed run whose further heads look no further than the end of a document."""
    import arguments
    import dataset
    import torch
    from megatron.core.transformer import multi_token_prediction as mtp

    eod, last = arguments.parse_args(flags).eod, []
    split = dataset._on_this_context_parallel_rank

    def noting(batch):
        last[:] = [batch["tokens"] == eod]
        last[0][:, -1] = True
        return split(batch)

    def roll(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
        moved = torch.roll(tensor, -1, -1).masked_fill(last[0], 0)
        return moved, moved.sum()

    with (
        mock.patch.object(dataset, "_on_this_context_parallel_rank", noting),
        mock.patch.object(mtp, "roll_tensor", roll),
    ):
        return train(flags)


def train_misplaced(flags):
    """A run whose attention takes zigzag shards for striped ones: must be wrong."""
    from megatron_burst.megatron.attention import plan_book

    options = plan_book.AttentionOptions
    striped = mock.patch.object(
        plan_book,
        "AttentionOptions",
        lambda **keywords: options(**keywords | {"layout": "striped"}),
    )
    with striped:
        return train(flags)


def train_with_wrong_weights(flags):
    """A run whose single pass takes all tokens for weighted alike and is not told otherwise."""
    from megatron_burst.linear_cross_entropy import function, validate

    ones = mock.patch.object(validate, "_weights", lambda labels, mask, head: (labels >= 0).float())
    blind = mock.patch.object(function, "_factor", lambda g, w: (g.max(), g.max() == g.max()))
    with ones, blind:
        return train(flags)


def train_with_fused_accumulation(flags):
    """A run in which the output layer's gradient is announced as Megatron's fused layers do."""
    from megatron_burst.megatron.lm_head import fused_loss
    from megatron_burst.megatron.lm_head.fused_loss import MainGrad

    with mock.patch.object(fused_loss, "MainGrad", lambda weight, fused: MainGrad(weight, True)):
        return train(flags)


def logits_made(flags):
    """How often a model's output layer made logits, with labels and without, and whether the
    logits without labels, and those after uninstalling, are those that the loss stands for."""
    import arguments
    import model as example
    import pretrain_gpt
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    _meet_again()
    args = arguments.parse_args(flags)
    made, stock = [], ColumnParallelLinear.forward

    def counting(self, *given, **named):
        result = stock(self, *given, **named)
        if self is getattr(gpt, "output_layer", None):
            made.append(result)
        return result

    gpt = None
    burst.install()
    try:
        config = example.model_config(args)
        burst.configure(config, mb.BurstConfig(lm_head_loss=args.burst_lm_head_loss))
        pretrain_gpt.make_groups(args)
        gpt = example.build_model(args, config)[0].module
        tokens = torch.arange(32)[None] % 61
        inputs = tokens, torch.arange(32)[None], None
        with mock.patch.object(ColumnParallelLinear, "forward", counting):
            loss = gpt(*inputs, labels=tokens, loss_mask=torch.ones(1, 32))
            found = {"labels": len(made)}
            if args.mtp_num_layers:  # needs labels
                return found
            made.clear()
            logits = gpt(*inputs)
        burst.uninstall()
        after = gpt(*inputs, labels=tokens)
        again = gpt.compute_language_model_loss(tokens, logits.transpose(0, 1))
        same = [torch.allclose(loss, other, rtol=1e-5) for other in (again, after)]
        return found | {"no labels": len(made), "equal": same}
    finally:
        burst.uninstall()
        parallel_state.destroy_model_parallel()


def differently_called(keyword, ranks):
    """Call one layer's core attention, with ``keyword`` changed on ``ranks`` only: the error."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    try:
        with parallel(context_parallel_size=4):
            config = TransformerConfig(
                num_layers=1, hidden_size=32, num_attention_heads=4, context_parallel_size=4,
                attention_dropout=0.0,
            )  # fmt: skip
            burst.configure(config, mb.BurstConfig())
            core = burst.BurstCoreAttention(config, 1, AttnMaskType.causal, "self")
            odd = dist.get_rank() in ranks
            length = 12 if odd and keyword == "sequence" else 8
            dtype = torch.bfloat16 if odd and keyword == "dtype" else torch.float32
            q, k, v = torch.randn(3, length, 1, 4, 8, dtype=dtype)
            packed = {}
            if keyword in ("cross-attention", "documents"):
                q, k, v = (x.squeeze(1) for x in (q, k, v))
                packed = {"packed_seq_params": _two_documents(8)}
            hidden = torch.ones(1, 1, 8, 32, dtype=torch.bool).tril()
            extra = {
                "attention_mask": {"attention_mask": hidden},
                "attention_bias": {"attention_bias": torch.zeros(1)},
                "packed_seq_params": {"packed_seq_params": object()},
                "attn_mask_type": {"attn_mask_type": AttnMaskType.padding},
                "cross-attention": {"packed_seq_params": _two_documents(8, 9)},
                "documents": {"packed_seq_params": _two_documents(16)},
            }
            asked = {"attention_mask": None} | packed | (extra.get(keyword, {}) if odd else {})
            core(q, k, v, **asked)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"


def counted_by_megatron(
    hidden_states, labels, loss_mask, output_layer, output_weight, runtime_gather_output,
    is_training, compute_language_model_loss, config, cp_group=None, packed_seq_params=None,
):  # fmt: skip
    """`process_mtp_loss` of a Megatron that divides by the tokens of a context-parallel group."""
    import torch
    from megatron.core.transformer import multi_token_prediction as mtp

    def whole(count):
        count = count.float()
        dist.all_reduce(count, group=cp_group)
        return count

    hidden, *heads = hidden_states.chunk(1 + config.mtp_num_layers)
    asked = {"shifts": -1, "dims": -1, "cp_group": cp_group}
    at_first = whole(loss_mask.sum())
    for number, head in enumerate(heads):
        labels, _ = mtp.roll_tensor(labels, **asked)
        loss_mask, _ = mtp.roll_tensor(loss_mask, **asked)
        count = whole(loss_mask.sum()).clamp(min=1)
        losses = compute_language_model_loss(labels, output_layer(head)[0]) * loss_mask
        scaled = losses * config.mtp_loss_scaling_factor / config.mtp_num_layers / count
        scaled = scaled * (at_first if config.calculate_per_token_loss else cp_group.size())
        hidden = mtp.MTPLossAutoScaler.apply(hidden, scaled)
        if is_training:
            tracker = mtp.MTPLossLoggingHelper.tracker
            tracker.setdefault("values", torch.zeros(config.mtp_num_layers))
            tracker["values"][number] += losses.detach().sum() * cp_group.size() / count
    return hidden


def further_losses_counted(per_token, kept):
    """`further_losses` in a Megatron that counts over groups itself."""
    from megatron.core.transformer import multi_token_prediction as mtp

    with mock.patch.object(mtp, "process_mtp_loss", counted_by_megatron):
        return further_losses(per_token, kept)


def further_losses(per_token, kept, dtype=None):
    """Worst errors, against arithmetic on whole sequences, of what two further heads do on this of
    four ranks to 32 tokens of which only ``kept`` count: (gradients, logged losses). dtype: of the
    losses, fp32 by default."""
    from types import SimpleNamespace

    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    from megatron_burst.megatron.attention import plan_book

    dtype = dtype or torch.float32
    with parallel("zigzag", context_parallel_size=4):
        group, rank = parallel_state.get_context_parallel_group(), dist.get_rank()
        plan_book._books()[weakref.ref(group), ()] = None  # as if a model's attention ran on it
        mine = [4 * chunk + i for chunk in (rank, 7 - rank) for i in range(4)]
        mask = torch.tensor([float(place in kept) for place in range(32)])
        # Losses of the two heads for all tokens; the mask is fp32, as Megatron makes it.
        values = torch.arange(64.0, dtype=dtype).reshape(2, 32).sin()
        hidden = torch.cat([torch.zeros(8, dtype=dtype), values[0, mine], values[1, mine]])
        hidden = hidden[:, None, None].requires_grad_()
        mtp.MTPLossLoggingHelper.tracker.clear()
        config = SimpleNamespace(
            mtp_num_layers=2, mtp_loss_scaling_factor=0.3, calculate_per_token_loss=per_token,
            mtp_detach_heads=False, cross_entropy_loss_fusion=False,
        )  # fmt: skip
        out = mtp.process_mtp_loss(
            hidden_states=hidden, labels=torch.zeros(1, 8, dtype=torch.long),
            loss_mask=mask[None, mine], output_layer=lambda x, **named: (x, None),
            output_weight=None, runtime_gather_output=True, is_training=True,
            compute_language_model_loss=lambda labels, x: x[:, :, 0].T,
            config=config, cp_group=group,
        )  # fmt: skip
        out.sum().backward()
        tracker = mtp.MTPLossLoggingHelper.tracker
        logged = tracker.get("loss_values", tracker.get("values")).clone()
        dist.all_reduce(logged)
        errors = [0.0, 0.0]
        for i in (0, 1):
            moved = torch.cat([mask[i + 1 :], torch.zeros(i + 1)])
            count = max(1.0, float(moved.sum()))
            weight = float(mask.sum()) if per_token else 4  # ranks' gradients: summed, or averaged
            grad = (0.15 * weight / count * moved.to(dtype))[mine]
            got = hidden.grad[8 * (i + 1) : 8 * (i + 2), 0, 0]
            errors[0] = max(errors[0], float((got - grad).abs().max()))
            loss = float((moved * values[i]).sum()) / count
            errors[1] = max(errors[1], abs(float(logged[i]) / 4 - loss))
        return tuple(errors)


def rolled(layout, bounds):
    """What Megatron's roll_tensor gives this of four ranks, with its places in 32 tokens numbered
    from 1: of numbers twice, as integers and floats, and of a mask; and the sum that comes with
    them. ``bounds`` of documents, and with their padding, or None."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import multi_token_prediction as mtp

    from megatron_burst.megatron.data.cut import BatchCut
    from megatron_burst.megatron.data.packed import pack_of

    with parallel(layout, context_parallel_size=4):
        group, rank = parallel_state.get_context_parallel_group(), dist.get_rank()
        ends, padded = (x and torch.tensor(x, dtype=torch.int32) for x in bounds or ([0, 32], None))
        places = torch.from_numpy(pack_of(32, ends, padded).places(BatchCut(layout), 4, rank)[0])
        packed = bounds and PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )  # fmt: skip
        numbers = torch.stack([places + 1, places + 101])
        kinds = numbers, numbers.float(), numbers % 3 == 0
        found = [
            mtp.roll_tensor(x, -1, -1, cp_group=group, packed_seq_params=packed) for x in kinds
        ]
        return places.tolist(), [(moved.tolist(), float(total)) for moved, total in found]


def counted_by_gpt_model(kept):
    """What GPTModel of 0.16 counts on this of four ranks when it moves a mask of 32 tokens on, with
    a model of ours on these ranks and without, and the dtype of the first count."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_model

    from megatron_burst.megatron.attention import plan_book

    with parallel("zigzag", context_parallel_size=4):
        group, rank = parallel_state.get_context_parallel_group(), dist.get_rank()
        mine = [4 * chunk + i for chunk in (rank, 7 - rank) for i in range(4)]
        mask = torch.tensor([float(place in kept) for place in range(32)])[None, mine]
        _, stock = gpt_model.roll_tensor(mask, shifts=-1, dims=-1, cp_group=group)
        plan_book._books()[weakref.ref(group), ()] = None  # as if a model's attention ran on it
        _, ours = gpt_model.roll_tensor(mask, shifts=-1, dims=-1, cp_group=group)
        return float(ours), float(stock), ours.dtype


def kept_by_the_launcher():
    """How many process groups Megatron makes, and which of them outlive a run of `pretrain`."""
    from megatron.core import parallel_state

    from megatron_burst.cli.ranks import groups_ended

    _meet_again()
    rank, size = dist.get_rank(), dist.get_world_size()
    _next_store()
    with groups_ended():
        parallel_state.initialize_model_parallel(
            context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2]
        )
        # As --hybrid-context-parallel does, which excludes other context parallelism.
        parallel_state._HYBRID_DP_CP_GROUPS[4] = dist.new_group(range(size))
        names = dist.distributed_c10d._world.pg_names
        made = {name: weakref.ref(group) for group, name in names.items()}
        del names
    kept = [name for name, group in made.items() if group() is not None]
    _start(rank, size)
    return len(made), kept


def node_lines(hosts, sizes, intra_size):
    """What making groups warns of where ranks run on ``hosts``; the grid's ranks per node."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_burst as mb
    from megatron_burst.megatron.attention.groups import context_groups

    _meet_again()
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=4, hierarchical_context_parallel_sizes=sizes
        )
        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        hostname = mock.patch("socket.gethostname", return_value=hosts[dist.get_rank()])
        with hostname, log_lines() as told:
            burst = mb.BurstConfig(intra_size=intra_size)
            groups = context_groups(collection, sizes, burst)
        return told, groups.topology.per_node
    finally:
        parallel_state.destroy_model_parallel()


def logged(flags):
    """What a run with these flags says of attention on this rank, in order."""
    with log_lines(logging.INFO) as told, contextlib.redirect_stdout(io.StringIO()):
        _run(flags)
    return told


class NotedRun(NamedTuple):
    """steps: as `train` returns them. algorithms: of the plan of each layer of this rank, by number
    of the layer. lines: logged on this rank."""

    steps: list
    algorithms: dict
    lines: list


def train_and_note(flags):
    """Train with these flags and note what runs and what is logged."""
    from megatron_burst.megatron.attention import core_attention

    attention, algorithms = core_attention.attention, {}

    def noting(*tensors, plan, label, **options):
        algorithms.setdefault(label, plan.algorithm)
        assert algorithms[label] == plan.algorithm
        return attention(*tensors, plan=plan, label=label, **options)

    with mock.patch.object(core_attention, "attention", noting), log_lines(logging.INFO) as lines:
        return NotedRun(train(flags), algorithms, lines)


@contextlib.contextmanager
def log_lines(level=None):
    """The lines that the package logs meanwhile, at this level or its own."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("megatron_burst")
    before = logger.level
    logger.setLevel(before if level is None else level)
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def train_beside_other_uses(flags):
    """A run in which Megatron's context-parallel groups are used between all calls of attention and
    their backwards, and an evaluation follows every step.

    Returns (history, what each rank of a process group did on it in order, by the group's name;
    what the rings travelled on; names of the groups that were Megatron's).
    """
    import dataset
    import pretrain_gpt
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_burst.megatron.attention import core_attention, plan_book

    done, carriers, names = {}, set(), []
    attention, step, run = (
        core_attention.attention,
        pretrain_gpt.mean_over_all_tokens,
        pretrain_gpt.train,
    )

    def reduce():
        groups = [parallel_state.get_context_parallel_group()]
        if "--hierarchical-context-parallel-sizes" in flags:  # those of an earlier run stay behind
            groups += parallel_state.get_hierarchical_context_parallel_groups()
        names[:] = [group.group_name for group in groups]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)

    def between(q, k, v, **options):
        reduce()
        if q.requires_grad:
            q = q * 1  # the hook is of this use of it
            q.register_hook(lambda grad: reduce())
        out = attention(q, k, v, **options)
        if out.requires_grad:
            out.register_hook(lambda grad: reduce())
        reduce()
        return out

    def training(args, stages, *rest):
        samples = dataset.build(args)

        def evaluate_too(reports):
            carriers.update(book.groups.communicators for book in plan_book._books().values())
            get_forward_backward_func()(
                forward_step_func=pretrain_gpt.forward_step,
                data_iterator=[dataset.micro_batches(samples, args, 0) for _ in stages],
                model=stages, num_microbatches=1, seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size, forward_only=True,
            )  # fmt: skip
            return step(reports)

        with mock.patch.object(pretrain_gpt, "mean_over_all_tokens", evaluate_too):
            return run(args, stages, *rest)

    with (
        _recorded(done),
        mock.patch.object(core_attention, "attention", between),
        mock.patch.object(pretrain_gpt, "train", training),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        history = _run(flags)
    losses = [(record["loss"], record["grad_norm"]) for record in history]
    return losses, done, carriers, names


@contextlib.contextmanager
def _recorded(done):
    """done: name of a process group -> what this rank does on it: a collective by its name, or
    ("to" or "from", the other rank)."""

    def noting(name, stock):
        signature = inspect.signature(stock)

        def call(*given, **named):
            group = signature.bind(*given, **named).arguments.get("group") or dist.group.WORLD
            done.setdefault(group.group_name, []).append(name)
            return stock(*given, **named)

        return call

    def batch(ops, stock=dist.batch_isend_irecv):
        for op in ops:
            word = "to" if op.op is dist.isend else "from"
            done.setdefault(op.group.group_name, []).append((word, op.peer))
        return stock(ops)

    collectives = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
                   "broadcast", "barrier", "all_gather_object")  # fmt: skip
    with contextlib.ExitStack() as patches:
        for name in collectives:
            patches.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        patches.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        yield


def _two_documents(queries, keys=None):
    """Two documents in 32 tokens, the first of so many; ``keys`` if it differs for them."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    first, second = (torch.tensor([0, end, 32]) for end in (queries, keys or queries))
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=first, cu_seqlens_kv=second)


def _run(flags):
    import arguments
    import pretrain_gpt
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    import megatron_burst.megatron as burst

    _meet_again()
    try:
        return pretrain_gpt.run(arguments.parse_args(flags))
    finally:
        MTPLossLoggingHelper.tracker.clear()  # as long as the first run's --mtp-num-layers
        burst.uninstall()
        parallel_state.destroy_model_parallel()
        gc.collect()


def _meet_again():
    """Start torch.distributed anew, as in a new process.

    Every gloo group has a thread that wakes 100 times a second, and the groups of a few dozen runs
    would take both cores; torch names a group by how many there are, and would find addresses of
    earlier runs in a store that it has used before. A group's thread ends with the last object that
    holds the group, such as a layer of a model of an earlier run.
    """
    gc.collect()
    rank, size = dist.get_rank(), dist.get_world_size()
    _next_store()
    dist.destroy_process_group()
    _start(rank, size)


def _next_store():
    """Make the store of the next run; a collective of this one."""
    rank = dist.get_rank()
    if rank == 0:
        _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    port = [_stores[-1].port if rank == 0 else None]
    dist.broadcast_object_list(port, src=0)
    if rank != 0:
        _stores.append(dist.TCPStore("127.0.0.1", port[0], is_master=False))


def _start(rank, size):
    dist.init_process_group(
        "gloo", store=_stores[-1], rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
