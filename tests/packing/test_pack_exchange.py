"""`--burst-pack documents`: documents of a batch and their exchange between ranks.

Training runs are in tests/megatron_lm/test_pack_training.py.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst.megatron.packing.documents import (
    documents_of,
    gather,
    micro_batch,
    names_of,
    route,
)


def batch(mask, ends=None, padded=None):
    """Return ascending tokens, labels shifted by one, and the ends of documents."""
    tokens = torch.arange(100, 100 + len(mask))[None]
    actual = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.tensor(mask, dtype=torch.float32)[None],
        "position_ids": tokens - 100,
    }
    for name, value in (("cu_seqlens", ends), ("cu_seqlens_padded", padded)):
        if value is not None:
            actual[name] = torch.tensor([value], dtype=torch.int32)
    return actual


def tokens(documents):
    return [document["tokens"].tolist() for document in documents]


def test_documents_end_with_their_last_loss():
    actual = documents_of(batch([1, 1, 0, 0, 1, 1, 0, 0], [0, 3, 6, 8, 8]))
    assert tokens(actual) == [[100, 101], [103, 104, 105]]
    assert [one["labels"].tolist() for one in actual] == [[101, 102], [104, 105, 106]]
    assert actual[1]["loss_mask"].tolist() == [0, 1, 1]
    assert actual[1]["position_ids"].tolist() == [3, 4, 5]


def test_padding_between_documents_is_none():
    padded = batch([1, 1, 0, 0, 1, 0, 0, 0], [0, 2, 3], [0, 4, 8])
    assert tokens(documents_of(padded)) == [[100, 101], [104]]
    assert documents_of(batch([0, 0, 0], [0, 3])) == []


def test_a_micro_batch_is_documents_and_padding_without_a_loss():
    one = batch([1] * 6, [0, 2, 6])
    packed = micro_batch(documents_of(one), names_of(one), 1100)
    assert packed["tokens"].shape == packed["loss_mask"].shape == (1, 1100)
    assert packed["tokens"][0, :6].tolist() == one["tokens"][0].tolist()
    assert packed["loss_mask"].sum() == 6
    assert packed["cu_seqlens"].tolist() == [[0, 2, 6, 518, 1030, 1100]]
    assert packed["cu_seqlens"].dtype == packed["max_seqlen"].dtype == torch.int32
    assert packed["max_seqlen"].tolist() == [512]
    empty = micro_batch([], names_of(one), 8)
    assert empty["loss_mask"].sum() == 0
    assert empty["cu_seqlens"].tolist() == [[0, 8]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_mask": torch.ones(1)}, "--no-create-attention-mask-in-dataloader"),
        ({"labels": None}, "no labels"),
        ({"cu_seqlens": None}, "--dataloader-inter-document-masking"),
        ({"labels": torch.ones(1, 3)}, "one length"),
        ({key: torch.ones(2, 4) for key in ("tokens", "labels", "loss_mask", "position_ids")},
         "--micro-batch-size 1"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_packed(changed, words):
    with pytest.raises(ValueError, match=words):
        documents_of(batch([1] * 4, [0, 4]) | changed)


# --- between ranks ---------------------------------------------------------------------------


def numbers_of_all(counts):
    own = [1000 * dist.get_rank() + i for i in range(counts[dist.get_rank()])]
    return gather(own, dist.group.WORLD)


@pytest.mark.parametrize("counts", [(3, 0), (1, 2000), (1023, 1024)])
def test_numbers_of_all_ranks(ranks, counts):
    expected = [[1000 * rank + i for i in range(count)] for rank, count in enumerate(counts)]
    assert ranks(2).run(numbers_of_all, counts) == [expected] * 2


def one_is_unusable():
    with pytest.raises(ValueError, match="data-parallel rank 1 cannot use its batches"):
        gather(None if dist.get_rank() else [5], dist.group.WORLD)


def test_a_rank_with_bad_data_stops_all(ranks):
    ranks(2).run(one_is_unusable)


def routed(lengths, homes):
    """Route documents of odd lengths and several dtypes; each is filled with its number."""
    rank = dist.get_rank()
    first = sum(len(one) for one in lengths[:rank])
    kinds = {"tokens": torch.int64, "loss_mask": torch.float32, "small": torch.int8}
    own = [
        {name: torch.full((length,), first + i, dtype=kind) for name, kind in kinds.items()}
        for i, length in enumerate(lengths[rank])
    ]
    like = {name: torch.empty(0, dtype=kind) for name, kind in kinds.items()}
    actual = route(own, homes, lengths, like, dist.group.WORLD)
    return {n: {name: x.tolist() for name, x in one.items()} for n, one in actual.items()}


@pytest.mark.parametrize(
    ("lengths", "homes"),
    [
        ([[3, 1], [5]], [[2], [0, 1]]),
        ([[3, 1], [5]], [[0, 1, 2], []]),
        ([[], [5, 2, 7]], [[3 - 1, 0], [1]]),
        ([[], []], [[], []]),
    ],
)
def test_documents_reach_where_they_are_trained_on(ranks, lengths, homes):
    sizes = [length for one in lengths for length in one]
    for actual, home in zip(ranks(2).run(routed, lengths, homes), homes, strict=True):
        assert set(actual) == set(home)
        for number, document in actual.items():
            assert set(document) == {"tokens", "loss_mask", "small"}
            for values in document.values():
                assert values == [number] * sizes[number]
