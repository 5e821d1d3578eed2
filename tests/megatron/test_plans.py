"""Number of plans that four ranks make: one for the lengths of a micro-batch, none in backward."""

import collections
from unittest import mock

import packed_ranks
import pytest
import torch
import torch.distributed as dist
from packed_ranks import HEADS, LENGTHS, TOTAL, WIDTH

OTHER_LENGTHS = LENGTHS[::-1]  # documents of another micro-batch, without padding between them


def counted(happens):
    """Return how often `happens` in a layer's core attention makes a plan and compares plans.

    It gets ``forward(lengths, recompute)``, which returns a scalar.
    """
    from megatron.core.tensor_parallel import random

    from megatron_burst.comm.groups import Groups
    from megatron_burst.megatron.attention import plan_book
    from megatron_burst.megatron.data.packed import packs

    counts, prepared, compare = collections.Counter(), plan_book.prepared, Groups.compare

    def forward(lengths, recompute=False):
        asked, x = packed_ranks.params(lengths, None), torch.ones(TOTAL // 4, HEADS, WIDTH)
        packs().note_cut(packs().of(TOTAL, asked.cu_seqlens_q))  # as the data path does

        def layer(x):
            return core(x, x, x, packed_seq_params=asked)

        x.requires_grad_()
        return (random.checkpoint(layer, False, x) if recompute else layer(x)).sum()

    def noting(name, function):
        return lambda *args, **named: counts.update([name]) or function(*args, **named)

    with (
        packed_ranks.core_attention("striped") as core,
        mock.patch.object(plan_book, "prepared", noting("made", prepared)),
        mock.patch.object(Groups, "compare", noting("compared", compare)),
    ):
        try:
            happens(forward)
        except ValueError as error:
            return str(error)
    return counts["made"], counts["compared"]


def recomputed(forward):
    """Run two micro-batches in flight."""
    first, second = forward(LENGTHS, True), forward(OTHER_LENGTHS, True)
    second.backward()
    first.backward()


def again(forward):
    for lengths in (LENGTHS, OTHER_LENGTHS, LENGTHS, LENGTHS):
        forward(lengths).backward()


def on_rank_two(forward):
    """All ranks have a plan of these lengths, but one rank calls with others."""
    forward(LENGTHS)
    forward(OTHER_LENGTHS if dist.get_rank() == 2 else LENGTHS)


def known_elsewhere(forward):
    """Like `on_rank_two`, with a plan that all ranks have."""
    forward(OTHER_LENGTHS)
    on_rank_two(forward)


@pytest.mark.parametrize(("happens", "counts"), [(recomputed, (2, 0)), (again, (2, 2))])
def test_a_plan_is_made_once_for_the_lengths_of_a_micro_batch(four, happens, counts):
    assert four(counted, happens) == [counts] * 4


@pytest.mark.parametrize("happens", [on_rank_two, known_elsewhere])
def test_a_known_plan_is_compared_with_those_of_the_others(four, happens):
    found = four(counted, happens)
    assert found == found[:1] * 4
    assert found[0].startswith("ranks disagree: rank 0 has mask ")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad")])
def test_an_error_in_backward_is_not_sent_to_ranks_that_only_look_plans_up(error):
    """In forward, the leader sends its error to all ranks."""
    from megatron_burst.megatron.attention import plan_book

    groups = mock.Mock(gather=mock.Mock(side_effect=lambda header: [header]))
    book = plan_book.PlanBook(groups)
    for leads, recomputing, sent in ((True, False, 1), (True, True, 0), (False, False, 0)):
        groups.gather.reset_mock()
        expected = ValueError if sent else type(error)
        with (
            mock.patch.object(plan_book, "in_backward", return_value=recomputing),
            pytest.raises(expected, match="bad"),
            book.shared_errors(leads),
        ):
            raise error
        assert groups.gather.call_count == sent
