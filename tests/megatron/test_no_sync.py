"""Packed batches on a fake GPU: descriptions are read once, and indices are sent once."""

import gc
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from no_sync import HostSync, NoSync, pinning
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_burst.megatron as burst
from megatron_burst.megatron.attention.plan_book import PlanBook
from megatron_burst.megatron.data import packed
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.megatron.data.loader import BatchIterator
from megatron_burst.megatron.data.rope import packed_rope
from megatron_burst.megatron.data.slicing import take

ENDS = (0, 5, 17, 24)  # of no multiples of anything
CUT = BatchCut("striped")


class Group:
    """The methods of a process group that slicing calls."""

    def size(self):
        return 2

    def rank(self):
        return 1


@pytest.fixture(autouse=True)
def installed():
    burst.install("striped")
    yield
    burst.uninstall()


@pytest.fixture
def reads(monkeypatch):
    """Return how often tensors that describe a pack were read."""
    found, pack_of = [], packed.pack_of
    monkeypatch.setattr(packed, "pack_of", lambda *given: found.append(1) or pack_of(*given))
    return found


def rope():
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    return partial(packed_rope, "striped", rotate, rope_utils._apply_rotary_pos_emb_thd)


def params(ends, **others):
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **others)


def test_layers_read_what_describes_a_batch_once(reads):
    ends, apply, book = torch.tensor(ENDS), rope(), PlanBook(groups=None)  # pyright: ignore
    batch = {name: torch.arange(24)[None] for name in ("tokens", "labels", "position_ids")}
    take(batch, (ends, None), CUT, 2, 1)
    angles, tokens = torch.rand(24, 1, 1, 4), torch.rand(12, 2, 4)
    for _ in range(3):  # layers
        for _ in "qk":
            apply(tokens, ends, angles, cp_group=Group())
        book.pack(24, params(ends))
    assert len(reads) == 1
    ends[1] = 6  # another batch in the same memory
    assert book.pack(24, params(ends)).bounds == (0, 6, 17, 24)
    assert len(reads) == 2


def test_equal_lengths_in_tensors_of_their_own_are_no_cross_attention(reads):
    ends, keys, book = torch.tensor(ENDS), torch.tensor(ENDS), PlanBook(groups=None)  # pyright: ignore
    both = params(ends)
    both.cu_seqlens_kv = keys
    for _ in range(3):
        book.pack(24, both)
    assert len(reads) == 2
    both.cu_seqlens_kv = torch.tensor((0, 6, 24))
    with pytest.raises(ValueError, match="cu_seqlens_kv differs"):
        book.pack(24, both)


@pytest.mark.parametrize("send", [
    lambda lengths: lengths.to("meta"),
    lambda lengths: mock.patch.object(torch.Tensor, "cuda", lambda x: x.to("meta"))(lengths.cuda)(),
])  # fmt: skip
def test_what_a_loader_made_is_known_on_the_device_without_reading_it(send):
    """A script sends it to "meta", which cannot be read, and takes a view of the copy."""
    whole, room = torch.tensor([[*ENDS, 24, 24]]), torch.tensor([[*ENDS, -1, -1]])
    batch = {"tokens": torch.arange(24)[None], "cu_seqlens": whole, "cu_seqlens_padded": room}
    loaded = next(BatchIterator(iter([batch, ("no", "dict")])))
    assert loaded["tokens"] is batch["tokens"]
    sent, padded = (send(loaded[name]) for name in ("cu_seqlens", "cu_seqlens_padded"))
    assert type(sent) is torch.Tensor
    ends = sent[0, :4]
    del sent
    gc.collect()
    assert packed.packs().of(24, ends).bounds == ENDS
    pack = packed.packs().of(24, ends, padded.squeeze(0))
    assert pack.bounds == ENDS
    assert packed.packs().values(ends[1::2]).tolist() == [5, 24]
    for other in (ends + 0, ends.int(), ends.add_(1)):  # computed, or other lengths since
        with pytest.raises(NotImplementedError):
            packed.packs().of(24, other)


def test_padded_lengths_are_read_once_too(reads):
    ends, room, apply = torch.tensor((0, 3, 9)), torch.tensor((0, 5, 24)), rope()
    book, layer = PlanBook(groups=None), params(ends, cu_seqlens_q_padded=room)  # pyright: ignore
    angles, tokens = torch.rand(24, 1, 1, 4), torch.rand(12, 2, 4)
    layer.cu_seqlens_kv_padded = room
    for _ in range(3):
        apply(tokens, room, angles, cp_group=Group())
        book.pack(24, layer)
    assert len(reads) == 2  # with the padding as rope has it, and both as attention has them


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need CUDA's torch"
)
def test_the_host_waits_for_nothing_and_sends_each_index_once():
    ends, apply = torch.tensor(ENDS), rope()
    packed.packs().of(24, ends)  # the one time that the host reads
    with FakeTensorMode(allow_non_fake_inputs=True), pinning():
        batch = {name: torch.ones(1, 24, device="cuda") for name in ("tokens", "labels", "mask")}
        angles, tokens = (torch.ones(s, device="cuda") for s in ((24, 1, 1, 4), (12, 2, 4)))
        with NoSync() as mode:
            take(batch, (ends, None), CUT, 2, 1)
            assert mode.uploads == 1
            for _ in range(6):
                apply(tokens, ends, angles, cp_group=Group())
        assert mode.uploads == 2
        # The check itself: lengths on the device have to be read, once.
        with pytest.raises(HostSync), NoSync():
            apply(tokens, torch.ones(4, device="cuda"), angles, cp_group=Group())
    assert batch["tokens"].shape == (1, 12)
