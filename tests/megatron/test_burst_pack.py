"""`--burst-pack documents`: the work of a model, and unsupported settings.

The exchange of documents between ranks is tested in tests/packing/test_pack_exchange.py, whole runs
in tests/megatron_lm/test_pack_training.py.
"""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_burst import BurstConfig
from megatron_burst.megatron.checks.features import packing_problems
from megatron_burst.megatron.packing.step import work_of

PACK = BurstConfig(pack="documents")


def model(**changed):
    names = {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 2, "ffn_hidden_size": 10, "gated_linear_unit": True, "window_size": None,
        "window_attn_skip_freq": None, "context_parallel_size": 2,
    }  # fmt: skip
    return SimpleNamespace(**names | changed)


def test_work_of_a_model():
    work = work_of(model())
    # A layer's matrices: Q and output 8 x 8, K and V 8 x 4, three of 8 x 10.
    flops = 2 * 2 * (2 * 64 + 2 * 32 + 3 * 80)
    assert work.pair_flops == 2 * 4 * (2 + 2)
    assert work.token == round(flops * 3 / (3.5 * work.pair_flops))
    assert work.windows == ((None, 0, 2),)
    windowed = work_of(model(window_size=(3, 0), window_attn_skip_freq=2))
    assert windowed.windows == ((3, 0, 1), (None, 0, 1))


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, 5), (2, 3), (3, 2), ([0, 1, 1, 0, 0], 2), ([0] * 5, 0)]
)
def test_work_of_a_model_with_experts_in_some_layers(frequency, layers):
    """A token uses 2 experts of width 6 and a shared one of width 7, or an MLP of width 10."""
    work = work_of(model(
        num_layers=5, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=6,
        moe_shared_expert_intermediate_size=7, moe_layer_freq=frequency,
    ))  # fmt: skip
    widths = layers * (2 * 6 + 7) + (5 - layers) * 10
    flops = 2 * (5 * (2 * 64 + 2 * 32) + 3 * 8 * widths)
    assert work.token == round(flops * 3 / (3.5 * work.pair_flops))


def agreed(numbers):
    """Return the numbers of micro-batches on the ranks of one model; None for an error."""
    from unittest import mock

    from megatron.core import parallel_state

    from megatron_burst.megatron.packing import step

    world = mock.Mock(return_value=dist.group.WORLD)
    with mock.patch.object(parallel_state, "get_model_parallel_group", world):
        try:
            return step._agreed(numbers[dist.get_rank()])
        except ValueError as error:
            assert "--burst-pack: ranks of one model" in str(error)  # noqa: PT017
            return None


@pytest.mark.parametrize(
    ("numbers", "found"),
    [((3, 0, 3, 0), 3), ((3, 3, 3, 3), 3), ((3, 0, 4, 0), None), ((-1, 0, 0, 0), None),
     ((3, 0, -1, 0), None)],
)  # fmt: skip
def test_ranks_that_read_nothing_learn_how_many_micro_batches(four, numbers, found):
    assert four(agreed, numbers) == [found] * 4


@pytest.mark.parametrize(
    ("changed", "words", "fix"),
    [
        ({"calculate_per_token_loss": False}, "loss per token", "--calculate-per-token-loss"),
        ({"micro_batch_size": 2}, "requires one pack per micro-batch", "--micro-batch-size 1"),
        ({"sequence_packing_scheduler": "dp_balanced"}, "packs documents itself", "--burst-pack"),
        ({"hybrid_context_parallel": True}, "packs documents itself", "--burst-pack"),
        ({"gtp_weight_remat_size": 2}, "equal numbers of micro-batches", "--burst-pack"),
        ({"cuda_graph_impl": "full_iteration"}, "fixed number", "--cuda-graph-impl"),
    ],
)
def test_what_packing_refuses(changed, words, fix):
    (problem,) = packing_problems(model(**changed), PACK)
    assert words in problem.reason
    assert fix in (*problem.add, *problem.remove)
    assert not list(packing_problems(model(**changed), BurstConfig()))
