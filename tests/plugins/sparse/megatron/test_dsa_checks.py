"""Requirements of sparse attention (DSA) on a run over several ranks, and the error messages."""

import dsa_ranks
import pytest
from test_checks import config

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron.checks.config import layer_problems
from megatron_burst.megatron.patching import core_version
from megatron_burst.plugins.sparse.megatron import checks

NEW = core_version() >= checks.HYBRID_SINCE
DSA = {"experimental_attention_variant": "dsa", "cp_comm_type": None}
new = pytest.mark.skipif(not NEW, reason="DSA over ranks from 0.19 on")


def told(chosen=None, cp=2, **changes):
    choices = mb.BurstConfig(**{"kernel": "reference"} | (chosen or {}))
    changes = {"calculate_per_token_loss": True} | DSA | changes
    return [str(problem) for problem in layer_problems(config(cp, **changes), choices)]


def test_dsa_is_served_from_0_19_on():
    if NEW:
        assert not told()
    else:
        (words,) = told()
        assert "--experimental-attention-variant dsa at --context-parallel-size 2 needs" in words
        assert "needs Megatron-Core 0.19 or newer" in words
        assert words.endswith("upgrade megatron-core")
    assert not told(cp=1)
    assert not told({"sparse": "megatron"})


@new
@pytest.mark.parametrize(
    ("chosen", "changes", "words"),
    [
        ({}, {"dsa_kernel_backend": "cudnn"}, "--dsa-kernel-backend cudnn .* --burst-sparse meg"),
        ({"side": "query"}, {}, "--burst-side query: queries .* stay .* remove --burst-side"),
        ({"algorithm": "ulysses"}, {}, "cannot share heads .* --context-parallel-algo auto"),
        ({"ulysses_size": 2}, {}, "cannot share heads"),
        ({"wire_dtype": "bf16"}, {}, "--burst-wire-dtype bf16"),
        ({"sequence_chunks": 4}, {}, "--burst-sequence-chunks 4"),
        ({"attention_layout": "contiguous"}, {}, "--burst-attention-layout contiguous"),
        ({"mask": "own_masks:window"}, {}, "--burst-mask own_masks:window"),
        ({"pack": "trees"}, {}, "--burst-pack trees"),
        ({"offload": 0.5}, {}, "--burst-offload 0.5"),
        (
            {},
            {"dsa_indexer_topk_freq": 2, "fp8": "hybrid", "recompute_granularity": "full"},
            "topk-freq 2: in fp8 and fp4, .* recomputes .* remove --recompute-granularity",
        ),
        ({}, {"window_size": (8, 0)}, "--window-size"),
        ({}, {"softmax_type": "learnable"}, "--softmax-type learnable: DSA does not support sinks"),
        ({}, {"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({}, {"log_max_attention_logit": True}, "--log-max-attention-logit"),
        ({"layout": "striped", "sparse": "megatron"}, {}, "assumes zigzag order"),
        ({"algorithm": "megatron"}, {}, "all-gather, got cp_comm_type None; add --cp-comm-type"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(chosen, changes, words):
    import re

    actual = told(chosen, **changes)
    assert any(re.search(words, each) for each in actual), actual
    flag = "--experimental-attention-variant dsa"
    assert any(each.startswith(flag) and re.search(words, each) for each in actual)


@new
def test_groups_that_change_are_refused():
    actual = told(dynamic_context_parallel=True, multi_latent_attention=True)
    assert any("context-parallel does not work with --multi-la" in each for each in actual)


@new
@pytest.mark.parametrize("layout", ["contiguous", "striped", "balanced"])
def test_every_layout(layout):
    assert not told({"layout": layout})


def test_which_algorithm_carries_keys():
    for algorithm, sparse, expected in (
        ("burst", "auto", "multicast"), ("all_gather", "auto", "all_gather"),
        ("tile", "auto", "multicast"), ("ring", "auto", "ring"),
        ("auto", "auto", "auto"), ("ring", "ring", "burst"),
        ("burst", "multicast", "multicast"), ("auto", "all_gather", "all_gather"),
    ):  # fmt: skip
        chosen = mb.BurstConfig(algorithm=algorithm, sparse=sparse)
        assert checks.sparse_algorithm(chosen) == expected
    with pytest.raises(ValueError, match=r"--burst-sparse. must be one of auto, ring, multicast"):
        mb.BurstConfig(sparse="p2p")


@new
def test_the_exchange_need_not_be_given():
    """Megatron asserts an all-gather before it is known which attention runs."""
    for arguments in (None, "p2p"):
        with pytest.raises(AssertionError, match="allgather"):
            dsa_ranks.config({"context_parallel_size": 2}, cp_comm_type=arguments)
    burst.install("zigzag")
    try:
        made = dsa_ranks.config({"context_parallel_size": 2})
        assert burst.configure(made, mb.BurstConfig()).cp_comm_type is None
        made = dsa_ranks.config({"context_parallel_size": 2}, cp_comm_type="p2p")
        with pytest.raises(ValueError, match=r"by all-gather, got cp_comm_type p2p"):
            burst.configure(made, mb.BurstConfig(algorithm="megatron"))
        burst.configure(made, mb.BurstConfig(sparse="megatron"))
        assert made.cp_comm_type == "allgather"
        with pytest.raises(AssertionError, match="allgather"):
            dsa_ranks.config({"context_parallel_size": 2}, cp_comm_type="a2a")
    finally:
        burst.uninstall()


@new
def test_other_sparse_attention_is_refused_by_name():
    from types import SimpleNamespace

    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_burst.plugins.sparse.megatron import hooks

    class Own(DSAttention):
        pass

    def original(self, config, submodules):
        self.built = True

    settings = SimpleNamespace(
        burst=mb.BurstConfig(), context_parallel_size=2, experimental_attention_variant="dsa"
    )
    for core in (Own, ModuleSpec(module=DSAttention)):
        parts = SimpleNamespace(core_attention=core)
        with pytest.raises(ValueError, match=r"^SimpleNamespace with \w+: only Megatron's DSAtt"):
            hooks._refuse_unsupported(original, SimpleNamespace(), settings, parts)
    silent = SimpleNamespace(burst=mb.BurstConfig(), context_parallel_size=2)
    with pytest.raises(
        ValueError, match='sparse attention; set experimental_attention_variant="dsa"'
    ):
        hooks._refuse_unsupported(original, SimpleNamespace(), silent, parts)
    settings.burst = mb.BurstConfig(sparse="megatron")
    layer = SimpleNamespace()
    hooks._refuse_unsupported(original, layer, settings, parts)
    assert layer.built
