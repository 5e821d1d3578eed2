"""Rotary tables of packed batches, whose rows are known only when they are used; and memory."""

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from rotary import LAYOUTS, Group, config, embedding, installed, table, worst

import megatron_burst as mb
import megatron_burst.megatron as burst
from benchmarks.memory.live import LiveTensors
from megatron_burst.megatron.data import rope
from megatron_burst.megatron.data.angles import EXACT


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    burst.uninstall()
    yield
    burst.uninstall()


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", ["plain", "interleaved", "interpolated", "yarn"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced"])
@pytest.mark.parametrize(("bounds", "longest"), [((0, 7, 30, 48), 23), ((0, 7, 30, 48), 48)])
def test_packed_batches_turn_as_on_one_rank(kind, layout, bounds, longest):
    stock = embedding(kind)
    tokens, settings = torch.randn(48, 2, 16), config(rotary_interleaved=kind == "interleaved")
    angles, scale = table(stock(longest, packed_seq=True))
    whole = rope_utils.apply_rotary_pos_emb(
        tokens, angles, settings, ends(*bounds), scale, Group(0, 1)
    )
    installed(layout)
    found = torch.full_like(whole, torch.nan)
    for rank in range(2):
        group = Group(rank, 2)
        blank, _ = table(embedding(kind, group)(longest, packed_seq=True))
        assert blank.untyped_storage().nbytes() == 4
        assert blank.shape == (longest, 1, 1, 16)
        pack = rope.packs().of(48, ends(*bounds))
        held = pack.places(rope.cut_of_run(layout), 2, rank)[0]
        found[held] = rope_utils.apply_rotary_pos_emb(
            tokens[held], blank.detach(), settings, ends(*bounds), scale, group
        )
    assert torch.equal(found, whole)
    alone = rope_utils.apply_rotary_pos_emb(
        tokens, blank, settings, ends(*bounds), scale, Group(0, 1)
    )  # one rank holds the micro-batch
    assert torch.equal(alone, whole)


def test_long_documents_of_a_pack_are_exact_too():
    installed("striped")
    total, longest = 2 * EXACT, EXACT + 4096
    bounds, group = ends(0, total - longest, total), Group(1, 2)
    plain = embedding("plain", group)
    held = rope.TableRows("striped", 2, 1)
    blank = plain(longest, packed_seq=True)
    found = rope.tables().of_pack(blank, total // 2, bounds, held)[:, 0, 0]
    place = torch.arange(1, total, 2)
    place = torch.where(place < total - longest, place, place - (total - longest))
    some = torch.cat([torch.arange(8), torch.arange(len(place) - 24, len(place))])
    rates = rope.tables().rates(plain)
    assert worst(place[some[8:]], rates, found[some[8:]]) < 2.5e-7
    assert torch.equal(found[some[:8], :8], place[:8].float()[:, None] * rates.per_position)


def test_fused_kernels_get_the_rows_too(monkeypatch):
    def whole(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
        raise AssertionError("chooses rows of a whole table")

    def fused(t, freqs, interleaved=False):
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, interleaved)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", whole)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", fused)
    installed("zigzag")
    rope, tokens, settings = embedding("plain", Group(1, 2)), torch.randn(24, 2, 16), config()
    given = tokens, rope(32, packed_seq=True), settings, ends(0, 16, 48), 1.0, Group(1, 2)
    expected = rope_utils.apply_rotary_pos_emb(*given)
    settings.apply_rope_fusion = True
    assert torch.equal(rope_utils.apply_rotary_pos_emb(*given), expected)
    assert rope_utils.fused_apply_rotary_pos_emb_thd is not whole
    burst.uninstall()
    assert rope_utils.fused_apply_rotary_pos_emb_thd is whole


def test_a_table_that_is_not_known_yet_is_loud():
    installed("zigzag")
    blank = embedding("plain", Group(0, 2))(32, packed_seq=True)
    assert blank.isnan().all()
    copied = torch.full((1,), torch.nan).expand(32, 1, 1, 16)
    with pytest.raises(ValueError, match="copied before it reached the attention layer"):
        rope_utils.apply_rotary_pos_emb(
            torch.randn(16, 2, 16), copied, config(), ends(0, 32), 1.0, Group(0, 2)
        )


@pytest.mark.parametrize("name", ["blank", "table"])
def test_tables_stay_on_the_device(name):
    """A copy of a blank would be as long as the sequence, and unknown to the attention layer."""
    installed("zigzag")
    made = embedding("plain", Group(0, 2))(2**12, packed_seq=name == "blank")
    host, seen = mb.HostMemory(2**30), []
    weight = torch.ones((), requires_grad=True)

    def layer(given, weight):
        seen.append(given)
        return weight * 2

    with host.saved(min_bytes=1):
        out = torch.utils.checkpoint.checkpoint(layer, made, weight, use_reentrant=True)
    out.backward()
    seen.append(host.move(made).get())
    assert len(seen) == 3
    assert {x.data_ptr() for x in seen} == {made.data_ptr()}
    assert host.bytes_out <= weight.element_size()


# --- memory ---------------------------------------------------------------------------------


def test_no_table_is_as_long_as_the_sequence():
    installed("zigzag")
    rows, ranks = 2**15, 64
    rope = RotaryEmbedding(64, 1.0, use_cpu_initialization=True, cp_group=Group(3, ranks))
    with LiveTensors() as live:
        held = rope(rows * ranks)
    assert held.shape == (rows, 1, 1, 64)
    own = rows * 64 * 4
    assert own <= live.bytes["device"] < own + 2**20
    assert live.peak.bytes < own + 6 * 2**20 < rows * ranks * 64 * 4 / 16
    bounds = ends(0, rows * ranks)
    blank = rope(rows * ranks, packed_seq=True)
    with LiveTensors() as live:
        rope_utils.apply_rotary_pos_emb(
            torch.empty(rows, 1, 64), blank, config(), bounds, 1.0, Group(3, ranks)
        )
    assert live.peak.bytes < 9 * own
