"""The interface between layers of Megatron Lite and their attention, with layers made here.

`test_lite_models` runs Lite's own layers, if its source is available. These tests compare packed
documents with softmax and recurrence by hand, and check refusals.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from recurrences import Case, tokens
from torch import nn

from megatron_burst.plugins.lite.swap import set_attention_backend

ENDS = (0, 8, 24, 24, 32)  # of documents, one of them empty
WIDTH, HEADS, SHARED, HEAD = 12, 4, 2, 6


def of_lite(cls):
    """Make a class look like Lite's: it is identified by its name and module."""
    cls.__module__ = f"megatron.lite.{cls.where}"
    return cls


class Stock(nn.Module):
    """A replacement of Transformer Engine's attention."""


@of_lite
class GQAttention(nn.Module):
    where = "primitive.modules.gqa"

    def __init__(self, ps):
        super().__init__()
        self.ps, self.attention_backend = ps, "te"
        self.num_heads_local, self.num_kv_heads_local, self.head_dim = HEADS, SHARED, HEAD
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * SHARED) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.core_attn = Stock()

    def set_attention_backend(self, name):
        if name != self.attention_backend:
            self.core_attn, self.attention_backend = Stock(), name

    def split(self, x):
        return self.qkv(x).unflatten(-1, (-1, HEAD)).split([HEADS, SHARED, SHARED], dim=-2)

    def forward(self, x, packed):
        if packed is None:
            return self.out(self.core_attn(*self.split(x), core_attention_bias_type="no_bias"))
        q, k, v = (part.squeeze(1) for part in self.split(x))
        told = {name: value for name, value in vars(packed).items() if value is not None}
        out = self.core_attn(q, k, v, attn_mask_type="padding_causal", **told)
        return self.out(out.reshape(len(out), 1, -1))


@of_lite
class GatedDeltaNet(nn.Module):
    where = "primitive.modules.gated_delta_net"

    def __init__(self, ps):
        super().__init__()
        self.ps, self.dk, self.dv, self.heads = ps, 3, 2, 2
        self.num_k_heads_local = self.num_v_heads_local = 2
        self.v_dim_local, self.conv_dim_local = 4, 16
        self.in_proj, self.o_proj = nn.Linear(WIDTH, 24), nn.Linear(4, WIDTH)
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

    def _split_proj(self, mixed, share):
        _, gate, beta, alpha = mixed.split([16, 4, 2, 2], dim=-1)
        return None, None, None, gate.unflatten(-1, (2, 2)), beta, alpha

    def _prepare_qkv(self, channels, gate, beta, alpha, batch, rows, share):
        q, k, v = channels.split([6, 6, 4], dim=-1)
        q, k = (F.normalize(x.unflatten(-1, (2, 3)), dim=-1) for x in (q, k))
        return q, k, v.unflatten(-1, (2, 2)), gate, beta, alpha

    def _compute_g_and_beta(self, A_log, dt_bias, alpha, beta):
        return -A_log.exp() * F.softplus(alpha + dt_bias), beta.sigmoid()

    def _apply_gated_norm(self, out, gate):
        return out * gate.sigmoid()

    def forward(self, x, position_ids=None, packed_seq_params=None):
        """Compute one document on one rank, by hand."""
        mixed = self.in_proj(x)
        _, _, _, gate, beta, alpha = self._split_proj(mixed.transpose(0, 1), 1)
        before = F.pad(mixed[..., :16].permute(1, 2, 0), (3, 0))
        channels = F.silu(F.conv1d(before, self.conv1d.weight, groups=16)).mT
        q, k, v, gate, beta, alpha = self._prepare_qkv(channels, gate, beta, alpha, 1, len(x), 1)
        decay, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        case = Case(*(part.transpose(0, 1) for part in (q, k, v, decay, beta)))
        out, _ = tokens(case, x.new_zeros(1, 2, 3, 2), 3**-0.5)
        out = self._apply_gated_norm(out.transpose(0, 1), gate)
        return self.o_proj(out.reshape(1, len(x), 4).transpose(0, 1))


@of_lite
class DynamicSparseAttention(nn.Module):
    where = "primitive.modules.attention.dsa"

    def __init__(self, ps):
        super().__init__()
        self.ps = ps


@of_lite
class Model(nn.Module):
    where = "model.toy.lite.model"

    def __init__(self, ps, layers):
        super().__init__()
        self.ps, self.attention_backend = ps, "te"
        self.layers = nn.ModuleList(layer(ps) for layer in layers)

    def forward(self, x, packed):
        for layer in self.layers:
            x = x + layer(x, packed_seq_params=packed) if isinstance(
                layer, GatedDeltaNet
            ) else x + layer(x, packed)  # fmt: skip
        return x


def state():
    size = dist.get_world_size()
    return SimpleNamespace(cp_size=size, cp_rank=dist.get_rank(), cp_group=dist.group.WORLD)


def model(layers=(GatedDeltaNet, GQAttention, GatedDeltaNet, GQAttention)):
    torch.manual_seed(0)
    return Model(state(), layers).double()


def packed(ends=ENDS):
    ends = torch.tensor(ends, dtype=torch.int32)
    return SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=None, max_seqlen_q=16, max_seqlen_kv=16,
    )  # fmt: skip


def rows(ends=ENDS):
    """Return the rows of this rank, by hand: within each document, parts r and 2 G - 1 - r."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for start, stop in pairwise(ends):
        pieces = torch.arange(start, stop).chunk(2 * size) if stop > start else None
        if pieces is not None:
            found += [pieces[rank], pieces[2 * size - 1 - rank]]
    return torch.cat(found)


def by_hand(layer, x):
    """Run one document on one rank through a layer."""
    if isinstance(layer, GatedDeltaNet):
        return GatedDeltaNet.forward(layer, x)
    q, k, v = layer.split(x)
    k, v = (part.repeat_interleave(HEADS // SHARED, dim=2) for part in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / HEAD**0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return layer.out(torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2))


def expected(made, x, ends):
    parts = []
    for start, stop in pairwise(ends):
        part = x[start:stop]
        for layer in made.layers:
            part = part + by_hand(layer, part) if len(part) else part
        parts.append(part)
    return torch.cat(parts)


def errors(documents, checkpointed):
    """Return the largest error of outputs and gradients, in two micro-batches."""
    made, other, x = model(), model(), torch.randn(32, 1, WIDTH, dtype=torch.float64)
    groups = set_attention_backend(made, linear="ring")
    weights = torch.randn(32, 1, WIDTH, dtype=torch.float64)
    found = []
    for turn, ends in enumerate(documents):
        mine = rows(ends)
        part = x[mine].clone().requires_grad_()
        told = packed(ends) if len(ends) > 2 or turn else None
        run = made
        if checkpointed:
            run = lambda a, b: torch.utils.checkpoint.checkpoint(made, a, b, use_reentrant=False)  # noqa: E731
        out = run(part, told)
        found.append((mine, part, out, ends))
    sum((out * weights[mine]).sum() for mine, _, out, _ in found).backward()
    whole = [x.clone().requires_grad_() for _ in found]
    outs = [expected(other, one, ends) for one, (*_, ends) in zip(whole, found, strict=True)]
    sum((out * weights).sum() for out in outs).backward()
    pairs = []
    for (mine, part, out, _), one, theirs in zip(found, whole, outs, strict=True):
        pairs += [(out, theirs[mine]), (part.grad, one.grad[mine])]
    for ours, theirs in zip(made.parameters(), other.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        pairs.append((ours.grad, theirs.grad))
    worst = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    assert groups.size == dist.get_world_size()
    return worst


@pytest.mark.parametrize(
    ("documents", "checkpointed"),
    [([ENDS, (0, 16, 32)], True), ([(0, 32)], False)],
    ids=["packed", "whole"],
)
def test_a_model_is_that_of_one_rank(ranks, documents, checkpointed):
    assert max(ranks(2).run(errors, documents, checkpointed)) < 1e-12


def swaps():
    made = model()
    weights, keys = [id(w) for w in made.parameters()], list(made.state_dict())
    stock = [layer.core_attn for layer in made.layers[1::2]]

    def now():
        assert [id(w) for w in made.parameters()] == weights
        assert list(made.state_dict()) == keys
        cores = {type(layer.core_attn).__name__ for layer in made.layers[1::2]}
        return [*cores], "forward" in vars(made.layers[0]), made.attention_backend

    groups = set_attention_backend([made])
    seen = [now()]
    assert set_attention_backend(made, groups=groups, linear="lite", algorithm="ring") is groups
    seen.append(now())
    set_attention_backend(made, "te")
    assert [layer.core_attn for layer in made.layers[1::2]] == stock
    seen.append(now())
    made.layers[1].set_attention_backend("magi")
    set_attention_backend(made, groups=groups)
    set_attention_backend(made, "te")
    seen.append(now())
    assert made.layers[1].attention_backend == "te"
    return seen


def test_swaps_leave_parameters_and_keys(ranks):
    ours, te = "LiteCoreAttention", (["Stock"], False, "te")
    for seen in ranks(2).run(swaps):
        assert seen == [([ours], True, "burst"), ([ours], False, "burst"), te, te]


def said(case):
    made = model()
    core = made.layers[1]
    try:
        if case == "sparse":
            set_attention_backend(model([GQAttention, DynamicSparseAttention]))
        elif case == "wrapped":
            core.core_attn.forward = core.core_attn.forward
            set_attention_backend(made)
        elif case == "wrapped linear":
            made.layers[0].forward = made.layers[0].forward
            set_attention_backend(made)
        elif case == "nothing":
            set_attention_backend(nn.Linear(1, 1))
        elif case in ("groups", "documents", "padding", "ends", "lengths", "unknown", "bias"):
            _said_by_a_call(case, made)
        else:
            set_attention_backend(made, **case)
    except ValueError as error:
        return str(error)


def _said_by_a_call(case, made):
    if case == "groups":
        set_attention_backend(made, groups=dist.group.WORLD)
    set_attention_backend(made)
    rank, x = dist.get_rank(), torch.zeros(16, 1, WIDTH, dtype=torch.float64)
    told = packed(ENDS)
    if case == "documents":
        told = packed(ENDS if rank else (0, 16, 32))
    elif case == "padding":
        told.cu_seqlens_q = torch.tensor([0, 7, 24, 24, 32])
    elif case == "ends":
        told = packed((0, 8, 24))
    elif case == "lengths":
        told = packed((0, 7, 32))
    made.layers = made.layers[1:]  # first attention
    if case == "unknown":
        made.layers[-1](x, told)  # which leads no kind
    if case == "bias":
        made.layers[0].core_attn(x, x, x, core_attention_bias_type="alibi")
    made(x, told)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"backend": "magi"}, "backend is 'magi'"),
        ({"layout": "striped"}, "use algorithm, side, kernel, "),
        ({"linear": "headwise"}, "it must be one of lite, auto, "),
        ({"backend": "te", "side": "kv"}, "backend 'te' takes neither groups nor options"),
        ("sparse", "DynamicSparseAttention (sparse attention over keys that an indexer selects)"),
        ("wrapped", "core_attn: Lite's recompute or offload wraps this module"),
        ("wrapped linear", "linear_attn: Lite's recompute or offload wraps this module"),
        ("nothing", "contains no attention of Megatron Lite"),
        ("groups", "groups: the model has 2 context-parallel ranks; pass mb.Groups over"),
        (
            "documents",
            "ranks disagree: rank 0 has layout DocumentZigzag(cp_size=2, cu_seqlens=[0, 16, ",
        ),
        ("padding", "packed_seq_params: cumulative lengths of queries and keys"),
        ("ends", "packed_seq_params: documents end at 24, but the 2 ranks hold 32 rows"),
        ("lengths", "cu_seqlens: zigzag within documents needs multiples of 4 positions"),
        ("unknown", "which the first layer of the same type did not get"),
        ("bias", "attention supports only Lite's causal attention without bias"),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(map(str, case.values())),
)
def test_what_is_refused(ranks, case, message):
    for text in ranks(2).run(said, case):
        assert text, "nothing was refused"
        assert message in text
