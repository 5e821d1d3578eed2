"""Lists with an entry per layer.

Megatron's lists of windows and of linear attention must be long enough, and its list of exchanges
is refused.
"""

from types import SimpleNamespace

import pytest
from parsed import problems_of

import megatron_burst as mb
from megatron_burst.megatron import layout_bytes
from megatron_burst.megatron.checks.config import layer_problems

DELTA = {"experimental_attention_variant": "gated_delta_net", "window_size": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window_attn_skip_freq": [1, 0]}, "--window-attn-skip-freq [1, 0] has 2 entries"),
        (
            {"window_attn_skip_freq": [1, 0, 1], "hybrid_layer_pattern": "M*|M*/M*"},
            "[1, 0, 1] has 3 entries, and the model has 4 layers: use one entry per layer",
        ),
        (DELTA | {"linear_attention_freq": [1] * 3}, "--linear-attention-freq [1, 1, 1]"),
    ],
)
def test_lists_of_too_few_layers(changes, said):
    fields = {"context_parallel_size": 4, "num_layers": 4, "window_size": (9, 0)} | changes
    config = SimpleNamespace(
        **fields, num_attention_heads=4, num_query_groups=4, tensor_model_parallel_size=1
    )
    told = [str(each) for each in layer_problems(config, mb.BurstConfig())]
    assert sum(said in line for line in told) == 1
    assert layout_bytes.layers_of(config).softmax > 0  # raises nothing of its own


EXCHANGES = [
    ("p2p", False), (["p2p"], False), (["a2a", "a2a"], False), (None, False),
    (["p2p", "a2a"], True),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "refused"), EXCHANGES)
def test_megatrons_own_list_of_exchanges(kinds, refused):
    config = SimpleNamespace(
        context_parallel_size=4, tensor_model_parallel_size=1, num_attention_heads=4,
        num_query_groups=4, num_layers=4, cp_comm_type=kinds,
    )  # fmt: skip
    told = [str(each) for each in layer_problems(config, mb.BurstConfig())]
    assert len(told) == refused
    assert all("--cp-comm-type p2p a2a" in line for line in told)


def test_a_list_on_the_command_line_is_refused_once():
    args = SimpleNamespace(
        context_parallel_size=2, cp_comm_type=["p2p", "a2a"], num_attention_heads=4, num_layers=2,
    )  # fmt: skip
    args.context_parallel_algo = "burst"
    found = problems_of(args, ["--cp-comm-type", "p2p", "a2a"])
    (told,) = (str(each) for each in found if "--cp-comm-type" in str(each))
    assert "--context-parallel-algo auto" in told
