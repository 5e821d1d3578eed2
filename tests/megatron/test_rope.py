"""Rotary tables of the rows of a rank, without ranks: against Megatron's and exact angles."""

import gc
import math
import weakref
from itertools import pairwise

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from rotary import KINDS, LAYOUTS, Group, distance, embedding, installed, table, worst

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron import patching
from megatron_burst.megatron.data import rope
from megatron_burst.megatron.data.angles import EXACT, TurnRates, angles_at


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    burst.uninstall()
    yield
    burst.uninstall()


def near(position):
    """Return some positions up to this one."""
    positions = torch.arange(position - 60, position)
    return torch.cat([positions, torch.randint(EXACT, position, (40,))])


RATES = 1 / 10000 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)


@pytest.mark.parametrize(
    ("position", "ours", "fp32"),
    [(10**6, 2.5e-7, 0.02), (4 * 10**6, 2.5e-7, 0.08), (2 * 10**7, 2.5e-7, 0.9), (2**33, 3e-6, 3)],
)
@pytest.mark.parametrize("interpolation", [None, 1 / 3.7])
def test_angles_beyond_the_border_are_exact(position, ours, fp32, interpolation):
    torch.manual_seed(0)
    rates, at = TurnRates(RATES, interpolation), near(position)
    found = angles_at(at, rates, position)[:, 0, 0]
    assert found.abs().max() <= math.pi + 1e-6
    assert worst(at, rates, found) < ours
    if interpolation is None:  # as Megatron computes them
        rounded = at.float()[:, None] * RATES
        assert fp32 < worst(at, rates, rounded) <= min(rates.worst_of_fp32(position) * 1.01, 3.15)


def test_neighbours_beyond_2_to_the_24_differ():
    at = torch.arange(2**25, 2**25 + 8)
    angles = angles_at(at, TurnRates(RATES), 2**26)[:, 0, 0, 0].double()
    assert all(abs(distance(a, b) - 1) < 1e-6 for a, b in pairwise(angles))
    assert len(at.float().unique()) < 8  # as Megatron counts


def test_the_border_belongs_to_a_position():
    at = torch.arange(EXACT - 2, EXACT + 2)
    alone, long = (angles_at(at, TurnRates(RATES), reach)[:, 0, 0] for reach in (EXACT + 2, 10**7))
    assert torch.equal(alone, long)
    assert torch.equal(alone[:2, :64], at[:2].float()[:, None] * RATES)
    assert worst(at, TurnRates(RATES), alone[:, :64]) < 2**-9
    assert worst(at[2:], TurnRates(RATES), alone[2:, :64]) < 2.5e-7


# --- tables of Megatron's embeddings --------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_are_megatrons_bit_for_bit(kind, layout):
    whole, scale = table(embedding(kind)(48))
    shifted, _ = table(embedding(kind)(48, offset=5))
    installed(layout)
    for rank in range(3):
        held = mb.layout.make(layout, cp_size=3).positions(rank, 48)
        for offset, expected in ((0, whole), (5, shifted)):
            found, found_scale = table(embedding(kind, Group(rank, 3))(48, offset=offset))
            assert torch.equal(found, expected[held])
            assert found_scale == scale
    assert torch.equal(table(embedding(kind)(48))[0], whole)
    other = embedding(kind, Group(0, 3))  # a group of its own for one micro-batch
    assert torch.equal(
        table(other(48, cp_group=Group(1, 2)))[0],
        whole[mb.layout.make(layout, cp_size=2).positions(1, 48)],
    )


def test_stock_is_equal_up_to_the_border_and_closer_to_exact_beyond():
    stock = embedding("plain")(EXACT + 64)[:, 0, 0]
    installed("zigzag")
    ours = embedding("plain")(EXACT + 64)[:, 0, 0]
    assert torch.equal(ours[:EXACT], stock[:EXACT])
    at, rates = torch.arange(EXACT, EXACT + 64), rope.tables().rates(embedding("plain"))
    assert worst(at, rates, ours[EXACT:]) < 2.5e-7 < 5e-4 < worst(at, rates, stock[EXACT:])


def test_what_differs_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(rope, "log", said.append)
    installed("zigzag")
    for length in (64, EXACT, EXACT + 8, EXACT + 16):
        embedding("plain", Group(0, 4))(length)
    assert len(said) == 1
    assert "from 65,536 on are computed in fp64" in said[0]
    assert "0.0039 rad at position 65,543" in said[0]
    assert patching.log is not said.append


def test_layers_with_the_same_angles_share_a_table():
    installed("zigzag")
    first, second, other = (embedding(kind, Group(1, 2)) for kind in ("plain", "plain", "llama3"))
    assert first(48) is second(48)
    assert first(48) is not other(48)
    made = weakref.ref(first(16))
    for length in (32, 64, 80, 96):
        first(length)
    gc.collect()
    assert made() is None  # Megatron keeps 32 of them


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_latent_attention_gets_cosines_of_the_rows(layout):
    angles, scale = embedding("yarn")(48)
    before = embedding("yarn")
    before.cp_group = Group(1, 3)
    installed(layout)
    held = mb.layout.make(layout, cp_size=3).positions(1, 48)
    for yarn in (embedding("yarn", Group(1, 3)), before):
        for dtype in (torch.float32, torch.bfloat16):
            cos, sin = yarn.get_cached_cos_sin(48, dtype=dtype)
            assert torch.equal(cos, (angles.cos() * scale).to(dtype)[held])
            assert torch.equal(sin, (angles.sin() * scale).to(dtype)[held])
            assert yarn.get_cached_cos_sin(48, dtype=dtype)[0] is cos
        cos, _ = yarn.get_cached_cos_sin(48, packed_seq=True)  # its kernel chooses rows
        assert torch.equal(cos, (angles.cos() * scale)[:48])
    mine = embedding("yarn")
    burst.uninstall()  # a model built in between keeps working
    assert torch.equal(mine.get_cached_cos_sin(48)[0], angles.cos() * scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_angles_of_several_axes_are_made_of_the_ranks_position_ids(layout):
    rope = MultimodalRotaryEmbedding(16, 1.0, cp_group=Group(1, 3))
    ids = torch.randint(0, 99, (3, 2, 48))
    whole = rope(ids, [2, 3, 3], cp_group=Group(0, 1))
    installed(layout)
    held = mb.layout.make(layout, cp_size=3).positions(1, 48)
    assert torch.equal(rope(ids, [2, 3, 3]), whole[held])
    assert torch.equal(rope(ids, [2, 3, 3], cp_group=Group(0, 1)), whole)


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_a_sequence_that_does_not_divide_is_refused(name):
    installed("striped")
    with pytest.raises(ValueError, match=r"--seq-length 50 is not divisible by 2 x"):
        embedding(name, Group(0, 4))(50)
    burst.uninstall()
    installed("balanced")
    with pytest.raises(ValueError, match="cuts packed batches"):
        embedding(name, Group(0, 4))(48)
