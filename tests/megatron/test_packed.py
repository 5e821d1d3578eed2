"""Packed batches, without ranks: documents, positions of tokens, slicing, rotary angles."""

import gc
import inspect
import weakref
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from rotary import Group, config

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.megatron.attention import plan_book
from megatron_burst.megatron.data import slicing
from megatron_burst.megatron.data.cut import BatchCut, cut_for, cut_of_run
from megatron_burst.megatron.data.packed import Packs, pack_of
from megatron_burst.megatron.data.rope import packed_rope
from megatron_burst.megatron.model_shape import layer_windows


@pytest.fixture(params=["zigzag", "striped", "balanced"])
def layout(request):
    burst.install(request.param)
    burst.configure(config(), mb.BurstConfig(layout=request.param))
    yield request.param
    burst.uninstall()


@pytest.fixture
def balanced():
    burst.install("balanced")
    burst.configure(config(), mb.BurstConfig(layout="balanced"))
    yield BatchCut("balanced")
    burst.uninstall()


# Until Megatron-Core 0.17; later versions have one function for both.
TWO_FUNCTIONS = hasattr(utils, "get_thd_batch_on_this_cp_rank")


def cut(batch, group):
    function = utils.get_batch_on_this_cp_rank
    hybrid = "is_hybrid_cp" in inspect.signature(function).parameters
    return function(batch=batch, cp_group=group, **({"is_hybrid_cp": False} if hybrid else {}))


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_documents_and_padding():
    pack = pack_of(24, ends(0, 5, 5, 12, 12))
    assert pack.bounds == pack.documents == (0, 5, 12, 24)
    assert pack.padding == (2,)
    pack = pack_of(24, ends(0, 5, 12), ends(0, 8, 16))
    assert pack.bounds == (0, 8, 16, 24)
    assert pack.documents == (0, 5, 8, 15, 16, 24)
    assert pack.padding == (1, 3, 4)
    assert pack_of(24, ends(0, 5, 12, -1, -1), ends(0, 8, 16, -1)) == pack  # as NeMo fills up
    visible = pack.mask.visible(np.arange(24)[:, None], np.arange(24)[None, :])
    assert visible[:5, :5].all()
    assert visible[8:15, 8:15].all()
    assert not visible[:5, 5:].any()  # padding is not seen
    assert not visible[8:15, 15].any()
    assert visible.sum() == 5 * 5 + 7 * 7  # nothing else is seen, and padding sees nothing


def test_an_empty_document_leaves_only_its_padding():
    pack = pack_of(24, ends(0, 5, 5, 12), ends(0, 8, 10, 20))
    assert pack.documents == (0, 5, 8, 10, 17, 20, 24)
    assert pack.padding == (1, 2, 4, 5)
    assert pack_of(16, ends(0, 8, 16)).padding == ()


@pytest.mark.parametrize(
    ("cu_seqlens", "padded", "message"),
    [
        (ends(0, 5, 4), None, "never decrease"),
        (ends(1, 5), None, "start at 0"),
        (ends(0, -1, 5), None, "never decrease"),
        (ends(-1, -1), None, "start at 0"),
        (ends(0, -24), None, "copy of the cu_seqlens of a prefix tree.*TreePack.params"),
        (ends(0, 25), None, "end within the 24 tokens"),
        (ends(0), None, "start at 0"),
        (torch.zeros(2, 3), None, "--micro-batch-size 1"),
        (ends(0, 9, 12), ends(0, 8, 16), "has less room"),
        (ends(0, 5), ends(0, 8, 16), "has less room"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(cu_seqlens, padded, message):
    with pytest.raises(ValueError, match=message):
        pack_of(24, cu_seqlens, padded)


@pytest.mark.parametrize(
    ("name", "bounds", "each_document"),
    [
        ("zigzag", (0, 8, 24), True),
        ("zigzag", (0, 6, 24), False),
        ("striped", (0, 8, 24), False),
        ("contiguous", (0, 7, 24), False),
    ],
)
def test_documents_are_laid_out_one_by_one_only_as_megatron_does(name, bounds, each_document):
    pack = pack_of(24, ends(*bounds))
    found = pack.layout(BatchCut(name), 2)
    assert isinstance(found, mb.layout.DocumentZigzag) == each_document
    parts = [pack.places(BatchCut(name), 2, rank) for rank in range(2)]
    in_pack = np.concatenate([part[0] for part in parts])
    assert sorted(in_pack) == list(range(24))
    by_hand = [p - max(b for b in bounds if b <= p) for p in in_pack]
    assert np.concatenate([part[1] for part in parts]).tolist() == by_hand


def test_megatrons_packed_layout_by_hand():
    pack = pack_of(12, ends(0, 4, 12))
    assert pack.places(BatchCut("zigzag"), 2, 0)[0].tolist() == [0, 3, 4, 5, 10, 11]
    assert pack.places(BatchCut("zigzag"), 2, 1)[0].tolist() == [1, 2, 6, 7, 8, 9]


def test_a_pack_that_does_not_divide_says_what_to_pad():
    with pytest.raises(ValueError, match="pad the end of the pack"):
        pack_of(22, ends(0, 5, 22)).layout(BatchCut("striped"), 2)


@pytest.mark.parametrize("bounds", [(0, 8, 24), (0, 5, 24), (0, 5, 20)])
def test_both_slicing_functions_take_the_same_tokens(layout, bounds):
    tokens = torch.arange(24)[None]
    expected = []
    for rank in range(2):
        places, _ = pack_of(24, ends(*bounds)).places(BatchCut(layout), 2, rank)
        batch = {"tokens": tokens, "labels": tokens + 1, "cu_seqlens": ends(*bounds)[None]}
        found = cut(batch, Group(rank, 2))
        assert found["tokens"].tolist() == [places.tolist()]
        assert found["labels"].tolist() == [(places + 1).tolist()]
        assert found["cu_seqlens"].tolist() == [list(bounds)]
        expected.extend(places)
        if not TWO_FUNCTIONS:
            continue
        thd, params = utils.get_thd_batch_on_this_cp_rank(
            {"tokens": tokens}, ends(*bounds), ends(*bounds), ends(24), cp_size=2, cp_rank=rank
        )
        assert thd["tokens"].tolist() == [places.tolist()]
        assert params.cu_seqlens_q.tolist() == list(bounds)
    assert sorted(expected) == list(range(24))


def test_a_packed_batch_with_several_rows_or_a_mask_is_refused(layout):
    two = {"tokens": torch.zeros(2, 24)}
    with pytest.raises(ValueError, match="--micro-batch-size 1"):
        cut(two | {"cu_seqlens": ends(0, 24)[None]}, Group(0, 2))
    masked = {"tokens": torch.zeros(1, 24), "attention_mask": torch.zeros(1, 1, 24, 24)}
    with pytest.raises(ValueError, match="--no-create-attention-mask-in-dataloader"):
        cut(masked | {"cu_seqlens": ends(0, 24)[None]}, Group(0, 2))


@pytest.mark.parametrize("bounds", [(0, 8, 24), (0, 5, 24)])
@pytest.mark.parametrize("angles", ["of the longest document", "of the whole pack"])
def test_rotary_angles_follow_the_tokens(layout, bounds, angles):
    heads = torch.randn(24, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    longest = max(np.diff(bounds))
    rows = 24 if angles == "of the whole pack" else int(longest)
    freqs = torch.outer(torch.arange(rows), torch.tensor([1.0, 0.1, 1.0, 0.1])).double()
    freqs = freqs[:, None, None, :]
    for rank in range(2):
        in_pack, in_document = pack_of(24, ends(*bounds)).places(BatchCut(layout), 2, rank)
        places = in_pack if rows == 24 else in_document
        found = rope_utils._apply_rotary_pos_emb_thd(
            heads[in_pack], ends(*bounds), freqs, cp_group=Group(rank, 2)
        )
        angle = freqs[places][:, 0]
        first, second = heads[in_pack].chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        by_hand = heads[in_pack] * angle.cos() + turned * angle.sin()
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)


def test_batches_are_freed_with_what_is_known_of_them():
    known, one = Packs(), ends(0, 8, 16)
    alone = known.of(24, one)
    alive, sent = [], []
    for own in (True, False):  # padding of its own, or the same tensor
        for _ in range(3):
            lengths = one if own else ends(0, 8, 16)
            padded = ends(0, 8, 16) if own else lengths
            pack = known.of(24, lengths, padded)
            assert pack == pack_of(24, lengths, padded)
            assert known.of(24, lengths, padded) is pack
            assert known.of(24, one) is alone
            sent.append(weakref.ref(pack.index(BatchCut("zigzag"), 2, 0, torch.device("cpu"))))
            alive.append(weakref.ref(padded))
    del lengths, padded, pack
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    # All of them are cut alike: what was sent was sent once, and is kept as long as one of them.
    assert len({id(ref()) for ref in sent}) == 1
    assert sent[0]() is not None
    del one, alone
    gc.collect()
    assert [ref() for ref in sent] == [None] * 6


def test_old_plans_are_dropped():
    groups = mb.Groups.single()
    book = plan_book.PlanBook(groups=groups, startup="said")
    kind = plan_book.LayerKind(mb.BurstConfig(), True, None, None, (1, 1, 4, 4), BatchCut("zigzag"))
    tensors = dict.fromkeys("qkv", torch.zeros(300, 1, 1, 4))
    packs = [pack_of(300, ends(0, end, 300)) for end in range(1, plan_book.PLANS_KEPT + 2)]
    for pack in packs:
        book.plan(kind, True, tensors, pack)
    assert len(book._plans) == plan_book.PLANS_KEPT
    assert book.plan(kind, False, tensors, packs[1]) is not None
    with pytest.raises(ValueError, match=f"last {plan_book.PLANS_KEPT} calls"):
        book.plan(kind, False, tensors, packs[0])


def test_rope_of_newer_versions_is_told_the_longest_document_besides():
    def theirs(t, cu_seqlens, freqs, max_seqlen=None, cp_group=None):
        raise AssertionError("documents of uneven lengths are not laid out by themselves")

    rope = partial(packed_rope, "zigzag", lambda t, freqs: t * freqs, theirs)
    freqs = torch.arange(8.0).view(8, 1, 1, 1)  # of the whole pack
    ends = torch.tensor([0, 3, 8])
    turned = rope(torch.ones(4, 1, 1), ends, freqs, max_seqlen=5, cp_group=Group(1, 2))
    assert turned.flatten().tolist() == [2, 3, 4, 5]  # the zigzag share of rank 1 of 2


# --- layout balanced ------------------------------------------------------------------------


def test_a_run_is_cut_by_its_nodes_and_by_what_all_its_layers_see():
    every = {"window_size": (8, 0), "window_attn_skip_freq": 3, "num_layers": 12}
    windows = ((8, 0), (8, 0), (None, 0))
    assert layer_windows(config(**every)) == windows
    assert layer_windows(config(num_layers=3, **{"window_size": (4, 0)})) == ((4, 0),)
    choice = mb.BurstConfig(layout="balanced", intra_size=2)
    two = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert cut_for(config(**every, **two), choice) == BatchCut("balanced", 2, windows, 2)
    assert cut_for(config(), mb.BurstConfig(layout="balanced")) == BatchCut("balanced")
    nodes = config(hierarchical_context_parallel_sizes=[1, 2])
    assert cut_for(nodes, mb.BurstConfig(layout="balanced")).per_node == 1
    assert cut_for(config(**every), mb.BurstConfig(layout="striped")) == BatchCut("striped")


def test_what_a_row_costs_follows_from_the_cluster_file(tmp_path):
    """The cost by hand.

    4 heads of 16 + 16 columns for each of two tensor-parallel ranks are 256 FLOPs a pair in
    forward, times 1 + 3. A row of 2 key/value heads has 128 bytes in each pass and the same number
    of elements of fp32 gradients: 512. In the time of a byte 1e12 / 1e9 / 1024 pairs are computed.
    """
    path = str(tmp_path / "mine.toml")
    rates = mb.Rates(4e9, 1e9, compute=1e12, backward=3.0)
    sizes = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 16}
    of_run = config(**sizes, tensor_model_parallel_size=2)

    def cost(nics, **changes):
        cluster_file.write(Cluster("h100", 8, 4, rates=rates, nics=nics), path)
        choice = {"algorithm": "auto", "layout": "balanced", "cluster": path} | changes
        return cut_for(of_run, mb.BurstConfig(**choice)).row_cost

    assert cost(4) == pytest.approx((125.0, 500.0))
    assert cost(2) == pytest.approx((125.0, 1000.0))  # two ranks share a NIC
    assert cost(4, wire_dtype="bf16") == pytest.approx((125.0 * 0.75, 500.0 * 0.75))
    assert cost(4, cluster=None) is None
    assert cost(4, ulysses_size=2) is None
    latent = {"multi_latent_attention": True, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8,
              "v_head_dim": 16}  # fmt: skip
    of_run = SimpleNamespace(**vars(of_run) | latent)
    assert cost(4) == pytest.approx((125.0, 500.0))  # twice as wide in both


def test_the_first_configuration_decides_how_a_run_is_cut():
    burst.install("balanced")
    try:
        with pytest.raises(ValueError, match=r"call configure\(\) first"):
            cut({"tokens": torch.zeros(1, 24), "cu_seqlens": ends(0, 24)[None]}, Group(0, 2))
        for window in ((8, 0), (4, 0)):
            burst.configure(config(window_size=window), mb.BurstConfig(layout="balanced"))
        assert cut_of_run("balanced") == BatchCut("balanced", None, ((8, 0),))
    finally:
        burst.uninstall()


def test_what_pads_the_end_of_a_pack_has_no_weight(balanced):
    # Two ranks, one document of 8 tokens and 8 of padding: as many of either on each.
    layout = pack_of(16, ends(0, 8)).layout(balanced, 2)
    assert [(layout.positions(rank, 16) < 8).sum() for rank in range(2)] == [4, 4]
    whole = pack_of(16, ends(0, 8, 16)).layout(balanced, 2)  # a second document instead
    assert [(whole.positions(rank, 16) < 8).sum() for rank in range(2)] != [4, 4]


def test_slicing_rope_and_attention_cut_alike_whatever_they_know_of_the_padding(balanced):
    known, lengths, padded = Packs(), ends(0, 5, 12), ends(0, 8, 16)
    attention, rope = known.of(24, lengths, padded), known.of(24, padded)
    slicing = known.of(24, ends(0, 8, 16)[None])
    assert attention.padding != rope.padding
    assert attention.layout(balanced, 2) is rope.layout(balanced, 2)
    assert slicing.layout(balanced, 2) is rope.layout(balanced, 2)


def test_packs_of_other_documents_have_layouts_of_their_own(balanced):
    known = Packs()
    first, second, third = (
        known.of(24, bounds) for bounds in (ends(0, 4, 24), ends(0, 22, 24), ends(0, 4))
    )
    known.note_cut(first)
    assert [known.was_cut(pack) for pack in (first, second, third)] == [True, False, False]
    laid = [pack.layout(balanced, 2) for pack in (first, second, third)]
    assert len(set(laid)) == 3


def test_nodes_of_a_smaller_group_are_what_divides_it():
    pack = pack_of(24, ends(0, 24))
    assert pack.layout(BatchCut("balanced", 4), 6).per_node == 2  # pyright: ignore
    assert pack.layout(BatchCut("balanced", 4), 2).per_node == 2  # pyright: ignore


@pytest.mark.parametrize(
    ("total", "cut_by", "message"),
    [
        (25, BatchCut("balanced"), r"25 tokens: not divisible by --context-parallel-size \(2\);"),
        (24, BatchCut("balanced", multiple=5), r"\(2\) x --tensor-model-parallel-size \(5\); pad"),
    ],
)
def test_a_pack_that_does_not_fill_the_ranks_is_refused(total, cut_by, message):
    with pytest.raises(ValueError, match=message):
        pack_of(total, ends(0, total)).layout(cut_by, 2)
    assert pack_of(26, ends(0, 26)).layout(BatchCut("balanced"), 2)  # where zigzag needs 2 x 2


def test_layout_balanced_refuses_batches_without_documents(balanced):
    with pytest.raises(ValueError, match=r"cuts packed batches.*--burst-layout zigzag"):
        cut({"tokens": torch.zeros(1, 24)}, Group(0, 2))
    with pytest.raises(ValueError, match="cuts packed batches"):
        rope_utils.get_pos_emb_on_this_cp_rank(torch.zeros(24, 1, 1, 4), 0, Group(0, 2))


def test_a_micro_batch_that_one_rank_holds_is_gathered_without_a_group(layout):
    tokens, bounds = torch.arange(24)[None], ends(0, 5, 24)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, local_cp_size=1
    )
    with mock.patch.object(slicing, "context_group", return_value=Group(1, 2)):
        mine = burst.shard_sequence(tokens, params)
        assert torch.equal(mine, tokens)
        assert torch.equal(burst.gather_sequence(mine, params, dim=1), tokens)


def test_whole_packs_are_cut_for_scripts_of_their_own(layout):
    tokens, bounds = torch.arange(24)[None], ends(0, 5, 20)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    for rank in range(2):
        found = burst.shard_sequence(tokens, params, group=Group(rank, 2))
        assert torch.equal(
            found, cut({"tokens": tokens, "cu_seqlens": bounds[None]}, Group(rank, 2))["tokens"]
        )
    if layout == "balanced":
        with pytest.raises(ValueError, match="requires packed_seq_params"):
            burst.shard_sequence(tokens, group=Group(0, 2))
    else:
        expected = mb.shard(tokens, mb.layout.make(layout, cp_size=2), 1, dim=1)
        assert torch.equal(burst.shard_sequence(tokens, group=Group(1, 2)), expected)
