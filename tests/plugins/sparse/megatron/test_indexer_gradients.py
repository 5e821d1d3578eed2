"""Weight of an indexer's loss, and selections that DSA layers share.

The tests run on one rank, with stand-ins for Megatron's settings.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

import megatron_burst as mb
from megatron_burst.megatron import patching
from megatron_burst.megatron.run_state import RunState
from megatron_burst.plugins.sparse import rules
from megatron_burst.plugins.sparse.megatron import dsa, index_loss
from megatron_burst.plugins.testing import in_process
from megatron_burst.recompute.checkpoint import StoringCall

MASK = mb.masks.Documents([0, 4, 10, 13, 16], padding=[2]) & mb.masks.Causal()


@pytest.mark.parametrize("per_token", [False, True])
def test_what_the_loss_of_a_spec_counts(monkeypatch, per_token):
    """Selections of a row are summed; rows and micro-batches are averaged, or summed per token."""
    tracker = {}
    monkeypatch.setattr(DSAIndexerLossLoggingHelper, "tracker", tracker)
    state = RunState(plugins={index_loss._MICRO_BATCHES: 4})
    monkeypatch.setattr(patching, "run_state", lambda: state)
    config = SimpleNamespace(
        calculate_per_token_loss=per_token, grad_scale_func=lambda x: 8 * x, num_layers=3
    )
    out, losses = (torch.randn(5, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    actual = index_loss.attached(out, losses, 0.5, config, 2, "ranks", None)
    actual.sum().backward()
    assert torch.equal(actual, out)
    assert torch.equal(out.grad, torch.ones_like(out))
    expected = 8 * 0.5 / (1 if per_token else 10 * 4)
    torch.testing.assert_close(losses.grad, torch.full_like(losses, expected))
    mean = 0.5 * losses.sum().item() / 10
    assert tracker["values"].tolist() == pytest.approx([0, mean, 0])
    assert (tracker["reduce_group"], tracker["avg_group"]) == (None, "ranks")


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("real", [None, torch.tensor([[1.0, 0.0, 1.0, 1.0]])])
def test_what_the_loss_of_dsa_counts(monkeypatch, per_token, real):
    saved = {}
    megatron = SimpleNamespace(
        dsa_masking=SimpleNamespace(
            extract_query_valid_rows_from_packed_seq_params=lambda packed, **named: real
        ),
        DSAIndexerLossLoggingHelper=SimpleNamespace(save_loss_to_tracker=saved.update),
    )
    monkeypatch.setattr(dsa, "dsa", megatron)
    config = SimpleNamespace(calculate_per_token_loss=per_token, num_layers=3)
    pg_collection, coefficient = SimpleNamespace(cp="ranks"), 0.5
    layer = SimpleNamespace(
        config=config, pg_collection=pg_collection, layer_number=2, _coefficient=coefficient
    )
    rows = torch.tensor([[1.0, 20.0, 300.0, 4000.0]])
    actual = dsa.BurstDSAttention._reduced(layer, rows, None)
    total, count = (4321.0, 4) if real is None else (4301.0, 3)
    assert actual.item() == pytest.approx(0.5 * total / (1 if per_token else count))
    groups = ("ranks", None) if per_token else (None, "ranks")
    assert (saved["reduce_group"], saved["avg_group"]) == groups
    assert (saved["loss"].item(), saved["layer_number"]) == (actual.item(), 2)


def selection_of(unit):
    ids = torch.full((16, 1, 1, 1), unit, dtype=torch.int32)
    return mb.Selection(ids, mb.layout.make("zigzag", cp_size=1), mb.masks.Causal())


def test_a_recompute_shares_the_selection_of_its_own_micro_batch():
    """The source layer may have run another micro-batch since."""
    plan = SimpleNamespace(layout=mb.layout.make("zigzag", cp_size=1), mask=mb.masks.Causal())
    layer = SimpleNamespace(
        layer_number=4, source_layer=3, rule=rules.Dsa(), index_topk_freq=2,
        index_skip_topk_offset=0, _selections={1: selection_of(9), 3: selection_of(1)},
    )  # fmt: skip

    def share():
        return dsa.BurstDSAttention._source_selection(layer, {"plan": plan}).ids.unique().tolist()

    first, second = StoringCall(share, None), StoringCall(share, None)
    assert first() == [1]
    layer._selections[3] = selection_of(2)
    assert second() == [2]
    layer._selections[3] = selection_of(3)
    assert [share(), second(), first()] == [[3], [2], [1]]
    del layer._selections[3]
    with pytest.raises(ValueError, match="layer 4 shares the selection of layer 3"):
        share()


def test_everything_that_a_row_sees():
    """Selection of all visible keys, for a loss over all keys."""
    layout, groups = mb.layout.make("zigzag", cp_size=2), in_process.groups(intra=2)
    q = [torch.randn(8, 1, 1, 4) for _ in range(2)]
    plan = in_process.prepare(q, q, q, groups=groups, layout=layout, mask=MASK)
    for rank, one in enumerate(plan.ranks):
        positions = layout.positions(rank, 16)
        first, last, longest = dsa._rows(one)
        actual = [[*range(a, b + 1)] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        seen = MASK.visible(positions[:, None], torch.arange(16).numpy())
        assert actual == [[n for n, shown in enumerate(row) if shown] for row in seen]
        assert longest == 6
