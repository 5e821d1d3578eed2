"""Layout balanced in Megatron's core attention: exact, in order, refused on every rank."""

import packed_ranks
import pytest
import session
from workers import Workers

import megatron_burst as mb
from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster

LAYOUTS = ("balanced", "zigzag", "striped")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_attention_equals_a_dense_mask(four, layout, padded, window):
    for errors, empty in four(packed_ranks.worst_errors, layout, padded, window):
        assert max(errors) < 1e-10, errors
        assert empty == 0 or not padded  # padding sees nothing, and nothing sees it


@pytest.fixture
def slow_links(tmp_path):
    """Return the options of a run whose cluster file states slow links."""
    path = str(tmp_path / "slow.toml")
    rates = mb.Rates(1e6, 1e5, compute=1e12)
    cluster_file.write(Cluster("h100", 4, 2, rates=rates), path)
    return {"algorithm": "auto", "cluster": path}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("padded", [True, False])
def test_documents_that_slow_links_leave_whole_equal_a_dense_mask(four, slow_links, padded, window):
    for errors, empty in four(
        packed_ranks.worst_errors, "balanced", padded, window, None, slow_links
    ):
        assert max(errors) < 1e-10, errors
        assert empty == 0 or not padded


def test_slow_links_leave_documents_whole_and_the_log_says_so(four, slow_links):
    """Fewer documents of up to 60 tokens (the number of a rank) are split over two ranks."""
    cut = {}
    for name, choices in (("even", {}), ("whole", slow_links)):
        lines, rows = zip(*four(packed_ranks.said, choices), strict=True)
        assert ("to keep documents whole" in lines[0]) == (name == "whole"), lines[0]
        assert [sum(mine) for mine in rows] == [60] * 4
        held = zip(packed_ranks.ROOM, zip(*rows, strict=True), strict=False)
        cut[name] = sum(sum(n > 0 for n in each) > 1 for room, each in held if room <= 60)
    assert cut["whole"] < cut["even"]


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
        ("a document longer than the pack", "never decrease and end within the 240 tokens"),
        ("tokens that do not fill the ranks", "238 tokens: not divisible by"),
        ("cut in zigzag order before", "cut the 240 tokens of this pack"),
    ],
)
def test_wrong_packs_are_an_error_before_anything_is_computed(four, how, message):
    errors = four(packed_ranks.error, how, (0, 1, 2, 3))
    assert all(error.startswith("ValueError: ") and message in error for error in errors), errors


def test_a_right_pack_has_no_error(four):
    assert four(packed_ranks.error, "nothing", ()) == [None] * 4
