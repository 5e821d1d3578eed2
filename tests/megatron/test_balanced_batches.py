"""Layout balanced in Megatron's core attention: exact, in order, refused on every rank alike."""

import packed_ranks
import pytest
import session
from workers import Workers

LAYOUTS = ("balanced", "zigzag", "striped")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_attention_equals_a_dense_mask(four, layout, padded, window):
    for errors, empty in four(packed_ranks.worst_errors, layout, padded, window):
        assert max(errors) < 1e-10, errors
        assert empty == 0 or not padded  # padding sees nothing, and nothing sees it


@pytest.mark.slow
def test_packed_attention_equals_a_dense_mask_on_eight_ranks():
    workers = Workers(8)
    try:
        workers.run(session.start, timeout=180)
        for errors, empty in workers.run(packed_ranks.worst_errors, "balanced", True, None):
            assert max(errors) < 1e-10, errors
            assert empty == 0
    finally:
        workers.close()


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)])
def test_a_batch_without_documents_is_an_error_on_every_rank(four, ranks):
    errors = four(packed_ranks.error, "no documents", ranks)
    told = "cuts packed batches"
    assert all(error.startswith("ValueError: ") and told in error for error in errors), errors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a document longer than the pack", "never decrease and end by the 240 tokens"),
        ("tokens that do not fill the ranks", "238 tokens: not divisible by"),
        ("cut in zigzag order before", "nothing here cut the 240 tokens"),
    ],
)
def test_wrong_packs_are_an_error_before_anything_is_computed(four, how, message):
    errors = four(packed_ranks.error, how, (0, 1, 2, 3))
    assert all(error.startswith("ValueError: ") and message in error for error in errors), errors


def test_a_right_pack_has_no_error(four):
    assert four(packed_ranks.error, "nothing", ()) == [None] * 4
