"""Entries of a batch: cut along their tokens, unchanged, or refused with key and shape."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core import utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from rotary import Group, config

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron.attention.core_attention import check_call
from megatron_burst.megatron.data import slicing
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.recipes import packed

# Positions that rank 1 of 2 holds of 16, by hand.
HELD = {
    "zigzag": [4, 5, 6, 7, 8, 9, 10, 11],
    "striped": [1, 3, 5, 7, 9, 11, 13, 15],
    "contiguous": [8, 9, 10, 11, 12, 13, 14, 15],
}
DOCUMENTS = [0, 6, 16]  # not multiples of 4: zigzag cuts the whole pack
PACKED = {
    "of Megatron-LM": {"cu_seqlens": torch.tensor([DOCUMENTS], dtype=torch.int32)},
    "of PackedSeqParams": {"cu_seqlens_q": torch.tensor(DOCUMENTS, dtype=torch.int32)},
    "PackedSeqParams": {
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=torch.tensor(DOCUMENTS, dtype=torch.int32)
        )
    },
}


@pytest.fixture(params=HELD)
def layout(request):
    burst.install(request.param)
    burst.configure(config(), mb.BurstConfig(layout=request.param))
    yield request.param
    burst.uninstall()


def cut(batch):
    function = utils.get_batch_on_this_cp_rank
    hybrid = "is_hybrid_cp" in inspect.signature(function).parameters
    named = {"is_hybrid_cp": False} if hybrid else {}
    return function(batch=dict(batch), cp_group=Group(1, 2), **named)


def rows(batch, *more):
    """Return different numbers everywhere: [batch, 16, *more]."""
    count = torch.Size((batch, 16, *more)).numel()
    return torch.arange(count).reshape(batch, 16, *more)


CUT = {
    "tokens": rows(2),
    "labels": rows(2) + 1,
    "loss_mask": rows(2).float(),
    "position_ids": rows(1),
    "teacher": rows(2, 3),
    "vectors": rows(2, 5).float(),
}
WHOLE = {
    "image": torch.ones(2, 3, 8, 8),
    "pixel_values": torch.ones(2, 16),
    "dataset_id": torch.tensor([3, 4]),
    "step": torch.tensor(7),
    "max_seqlen": torch.tensor([16]),
    "name": ["a", "b"],
    "count": 16,
    "nothing": None,
}


def test_what_has_one_value_per_token_is_cut_and_all_else_is_whole(layout):
    found = cut(CUT | WHOLE)
    for name, value in CUT.items():
        assert found[name].tolist() == [[row[i] for i in HELD[layout]] for row in value.tolist()]
    for name, value in WHOLE.items():
        assert found[name] is value


def test_a_stage_without_tokens(layout):
    """The last stage has labels, a middle stage has embeddings or nothing."""
    last = {"tokens": None, "labels": rows(2), "image": torch.ones(2, 4)}
    assert cut(last)["labels"][0].tolist() == HELD[layout]
    inside = {"tokens": None, "embeddings": rows(1, 3), "mask": rows(1)}
    assert cut(inside)["embeddings"].shape == (1, 8, 3)
    assert cut(inside)["mask"].tolist() == [HELD[layout]]
    empty = {"tokens": None, "labels": None, "attention_mask": None}
    assert cut(empty) == empty
    unlike = {"tokens": None, "chosen": rows(1), "rejected": torch.ones(1, 12)}
    with pytest.raises(ValueError, match=r"chosen \[1, 16\], rejected \[1, 12\].*shard_sequence"):
        cut(unlike)


def test_positions_of_several_axes_are_whole(layout):
    """M-RoPE makes angles of all positions, and cuts the angles."""
    positions = torch.arange(96).reshape(3, 2, 16)
    found = cut({"tokens": rows(2), "position_ids": positions})
    assert found["position_ids"] is positions
    assert found["tokens"].shape == (2, 8)
    alone = cut({"tokens": None, "position_ids": positions, "labels": None})
    assert alone["position_ids"] is positions


def test_the_queries_of_a_dense_mask_are_cut(layout):
    mask = torch.arange(2 * 256).reshape(2, 1, 16, 16)
    for asked in ({"tokens": rows(2)}, {"tokens": None}):
        found = cut(asked | {"attention_mask": mask})["attention_mask"]
        assert found.tolist() == [[[x[0][i] for i in HELD[layout]]] for x in mask.tolist()]


@pytest.mark.parametrize("packed", [{}, *PACKED.values()])
@pytest.mark.parametrize("shape", [(1,), (), (1, 1, 1, 1)])
def test_a_mask_of_one_element_is_a_placeholder(layout, shape, packed):
    mask = torch.ones(shape)
    found = cut({"tokens": rows(1), "attention_mask": mask} | packed)
    assert found["attention_mask"] is mask
    assert found["tokens"].shape == (1, 8)
    params = None if not packed else SimpleNamespace(qkv_format="thd")
    masks = {"attention_mask": mask, "attention_bias": None}
    check_call(AttnMaskType.causal, masks, params, BatchCut(layout))


WRONG = {
    "a mask of padding": {"tokens": rows(2), "attention_mask": torch.ones(2, 16)},
    "a mask for each row": {"tokens": rows(2), "attention_mask": torch.ones(2)},
    "a mask without heads": {"tokens": rows(2), "attention_mask": torch.ones(2, 16, 16)},
    "another length": {"tokens": rows(2), "labels": torch.ones(2, 15)},
    "rows": {"tokens": rows(2), "loss_mask": torch.ones(16)},
    "other axes": {"tokens": rows(2), "position_ids": torch.ones(2, 3, 16)},
    "tokens first": {"tokens": rows(2), "embeddings": torch.ones(16, 2, 4)},
    "no rows": {"tokens": rows(2), "types": torch.ones(16)},
    "other rows": {"tokens": rows(2), "types": torch.ones(5, 16)},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_could_mean_anything_is_refused_with_key_and_shape(layout, case):
    batch = WRONG[case]
    key, value = list(batch.items())[-1]
    with pytest.raises(ValueError, match="batch entry") as raised:
        cut(batch)
    said = str(raised.value)
    assert f"batch entry {key} of shape {list(value.shape)}" in said
    if key == "attention_mask":
        for remedy in (
            "--no-create-attention-mask-in-dataloader to Megatron-LM",
            "skip_getting_attention_mask_from_dataset=True in Megatron-Bridge",
        ):
            assert remedy in said


# --- packed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", PACKED)
def test_packed_batches_follow_the_same_rule(layout, how):
    one = {name: value[:1] for name, value in CUT.items()}
    found = cut(one | WHOLE | {"dataset_id": torch.tensor([3])} | PACKED[how])
    for name, value in one.items():
        assert found[name].tolist() == [[value[0].tolist()[i] for i in HELD[layout]]]
    assert found["image"] is WHOLE["image"]
    assert found["dataset_id"].tolist() == [3]


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"attention_mask": torch.ones(1, 16)}, r"attention_mask of shape \[1, 16\].*Bridge"),
        ({"attention_mask": torch.ones(1, 1, 16, 16)}, "--no-create-attention-mask-in-dataloader"),
        ({"position_ids": torch.ones(3, 1, 16)}, r"position_ids of shape \[3, 1, 16\].*M-RoPE"),
        ({"labels": torch.ones(1, 12)}, r"labels of shape \[1, 12\].*one length"),
        ({"tokens": rows(2)}, r"tokens of shape \[2, 16\].*--micro-batch-size 1"),
    ],
)
def test_packed_batches_are_refused_by_the_same_rule(layout, how, entry, words):
    with pytest.raises(ValueError, match=words):
        cut({"tokens": rows(1)} | entry | PACKED[how])


def test_a_packed_stage_in_the_middle_has_lengths_alone(layout):
    batch = {"tokens": None, "labels": None} | PACKED["of Megatron-LM"]
    assert cut(batch) == batch


@pytest.mark.parametrize("how", PACKED)
def test_packed_batches_of_bridge_follow_the_same_rule(layout, how, monkeypatch):
    def of_bridge(batch, cp_group):
        raise AssertionError("Bridge would cut the batch")

    monkeypatch.setattr(slicing, "context_group", lambda group=None: Group(1, 2))
    mask = torch.ones(1, 1, 16, 16)
    batch = {"tokens": rows(1), "labels": None, "attention_mask": mask} | PACKED[how]
    found = packed._cutting(of_bridge, dict(batch), cp_group=None)
    assert found["tokens"].tolist() == [HELD[layout]]
    for name in (*PACKED[how], "attention_mask", "labels"):
        assert found[name] is batch[name]
    with pytest.raises(ValueError, match=r"must have cu_seqlens.* keys of this batch are tokens$"):
        packed._cutting(of_bridge, {"tokens": rows(1)}, cp_group=None)


@pytest.mark.skipif(
    "is_hybrid_cp" not in inspect.signature(utils.get_batch_on_this_cp_rank).parameters,
    reason="this Megatron-Core has another function for hybrid context parallelism",
)
@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("size", [1, 2])
def test_groups_of_a_micro_batch_follow_the_same_rule(layout, how, size):
    batch = {"tokens": rows(1), "local_cp_size": torch.tensor(size)} | PACKED[how]
    found = utils.get_batch_on_this_cp_rank(
        batch=dict(batch), is_hybrid_cp=True, cp_group=Group(1, 2),
        hybrid_cp_group_func=lambda group_size: Group(1, group_size),
    )  # fmt: skip
    assert found["tokens"].tolist() == [HELD[layout] if size == 2 else list(range(16))]
