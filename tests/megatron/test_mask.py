"""A mask of the user (`--burst-mask`): training over ranks equals training on one rank.

The reference is Megatron's own attention with the same mask as a dense matrix written by hand.
"""

import numpy as np
import own_masks
import packed_ranks
import pytest
import session
import torch
from test_parity import TOLERANCE, worst

import megatron_burst as mb
from megatron_burst.megatron.attention.plan_book import LayerKind
from megatron_burst.megatron.checks.config import layer_problems
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.megatron.data.packed import pack_of
from megatron_burst.megatron.users_mask import MaskBatch, MaskLayer, users_mask

TWO, FOUR = "--context-parallel-size 2", "--context-parallel-size 4 --burst-intra-size 2"
RECOMPUTED = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--burst-attention-store 0.5 --burst-layout striped"
)


@pytest.fixture(scope="module")
def oracle(four, common):
    """Return `oracle(name, more="")`, [(loss, gradient norm)] of one rank with the dense mask."""
    results = {}

    def run(name, more=""):
        if (name, more) not in results:
            flags = [*common, *more.split()]
            results[name, more] = four(session.train_with_dense_mask, flags, name)[0]
        return results[name, more]

    return run


WAYS = {
    "cp2": ("", TWO),
    "cp4": ("", FOUR),
    "cp4-gqa-striped": (
        "--num-query-groups 2", f"{FOUR} --burst-side kv --burst-layout striped",
    ),
    "cp2-store": ("", f"{TWO} {RECOMPUTED}"),
    "cp4-packed": ("--packed", FOUR),
}  # fmt: skip
# The one-rank run of a packed batch hides the future in its own table, which prefixes see.
CASES = [(name, way) for name in ("chunked_local", "prefix_lm") for way in WAYS
         if (name, way) != ("prefix_lm", "cp4-packed")]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), CASES)
def test_training_over_ranks_equals_megatrons_own_with_the_dense_mask(oracle, train, name, way):
    more, split = WAYS[way]
    whole = oracle(name, more)
    ours = train(f"{more} {split} --burst-mask own_masks:{name}")
    assert worst(ours, whole) < TOLERANCE
    assert worst(whole, train(more)) > 100 * TOLERANCE  # of a causal run


def test_the_start_up_line_names_the_function(four, common):
    flags = [*common, *TWO.split(), "--burst-mask", "own_masks:chunked_local"]
    told = four(session.logged, flags)[0]
    assert any("masks of own_masks:chunked_local" in line for line in told)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of_the_rank", ["ranks disagree", "SameChunk(size=8)", "SameChunk(size=9)"]),
        ("broken_on_one", ["rank 1", "--burst-mask", "RuntimeError: no such table"]),
        ("no_mask", ["--burst-mask", "64, which is not a mask of mb.masks"]),
        ("missing", ["--burst-mask own_masks:missing", "AttributeError"]),
        ("NOT_CALLABLE", ["--burst-mask own_masks:NOT_CALLABLE", "int is not callable"]),
    ],
)
def test_what_is_no_mask_of_all_ranks_is_refused_on_all(four, common, name, words):
    flags = [*common, *FOUR.split(), "--burst-mask", f"own_masks:{name}"]
    for told in four(session.error, flags):
        assert told.startswith("ValueError") or told.startswith("SettingsError"), told
        assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"context_parallel_size": 1}, "--context-parallel-size"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ],
)
def test_settings_of_the_model_that_exclude_it(changes, word):
    (told,) = refused(changes)
    assert "--burst-mask own_masks:prefix_lm" in told
    assert word in told


@pytest.mark.parametrize(
    ("choices", "flag"),
    [
        ({"algorithm": "megatron"}, "--context-parallel-algo"),
        ({"layout": "balanced"}, "--burst-layout balanced"),
        ({"sequence_chunks": 4}, "--burst-sequence-chunks 4"),
        ({"attention_layout": "zigzag", "layout": "contiguous"}, "--burst-attention-layout zigzag"),
        ({"pack": "documents"}, "--burst-pack documents"),
    ],
)
def test_choices_that_exclude_it(choices, flag):
    (told,) = refused({}, **choices)
    assert "--burst-mask own_masks:prefix_lm" in told
    assert flag in told


def refused(changes, **choices):
    """Return the problems that name the mask, for a configuration with these fields."""
    from types import SimpleNamespace

    fields = {
        "context_parallel_size": 4, "tensor_model_parallel_size": 1, "num_attention_heads": 4,
        "num_query_groups": 4, "calculate_per_token_loss": True, "micro_batch_size": 1,
    }  # fmt: skip
    burst = mb.BurstConfig(mask="own_masks:prefix_lm", **choices)
    problems = layer_problems(SimpleNamespace(**fields | changes), burst)
    return [str(problem) for problem in problems if "--burst-mask" in str(problem)]


@pytest.mark.parametrize("path", ["own_masks", "own_masks:", "a b:c", ""])
def test_a_name_that_is_no_import_path(path):
    with pytest.raises(ValueError, match=r"mask \(--burst-mask\) must be"):
        mb.BurstConfig(mask=path)


def test_what_the_function_is_told():
    seen = []
    own_masks.noting = lambda layer, batch: seen.append((layer, batch)) or mb.masks.Causal()
    try:
        burst = mb.BurstConfig(mask="own_masks:noting")
        kind = LayerKind(burst, True, (8, 0), None, (4, 4, 8, 8), BatchCut("zigzag"), number=3)
        pack = pack_of(32, torch.tensor([0, 12, 30]))
        kind.own_mask(pack, 32)
        kind.own_mask(None, 64)
    finally:
        del own_masks.noting
    layer = MaskLayer(number=3, causal=True, window=(8, 0))
    assert seen == [(layer, MaskBatch(32, (0, 12, 30, 32))), (layer, MaskBatch(64, None))]


def test_a_mask_that_ranks_could_not_compare():
    class Nameless(mb.masks.Mask):
        pass

    own_masks.nameless = lambda layer, batch: Nameless()
    try:
        with pytest.raises(ValueError, match="make it a dataclass"):
            users_mask("own_masks:nameless", MaskLayer(1, True, None), MaskBatch(8, None))
    finally:
        del own_masks.nameless


def outputs_of_tables():
    """Return the error of each of two calls with masks whose texts numpy abbreviates equally."""
    import megatron_burst.megatron as burst

    tables = [np.zeros(2048, dtype=np.int64) for _ in range(2)]
    tables[1][50:120] = 1
    assert repr(tables[0]) == repr(tables[1])
    errors, current = [], [mb.masks.Causal()]
    own_masks.table = lambda layer, batch: current[0]
    with packed_ranks.core_attention("zigzag", choices={"mask": "own_masks:table"}) as core:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(packed_ranks.TOTAL, 1, packed_ranks.HEADS, packed_ranks.WIDTH,
                        generator=draw, dtype=torch.float64)  # fmt: skip
        rows = burst.shard_sequence(x, dim=0)
        for ids in tables:
            current[0] = own_masks.SameId(ids)
            out = burst.gather_sequence(core(rows, rows, rows, attention_mask=None), dim=0)
            ids = torch.from_numpy(ids[: packed_ranks.TOTAL])
            seen = (ids[:, None] == ids) & torch.ones(len(ids), len(ids)).tril().bool()
            scores = torch.einsum("qbhd,kbhd->bhqk", x, x) * packed_ranks.WIDTH**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            expected = torch.einsum("bhqk,kbhd->qbhd", weights, x).flatten(2)
            errors.append((out - expected).abs().max().item())
    return errors


def test_masks_with_long_tables_have_their_own_plans(four):
    for errors in four(outputs_of_tables):
        assert max(errors) < 1e-10
