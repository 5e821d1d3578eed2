"""`megatron-burst show`: expressions, the scenes, text, pictures, and the gallery."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from schedule_cases import sends

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.cli import main as cli
from megatron_burst.layout import BlockStriped, DocumentZigzag, make
from megatron_burst.schedule import cost, rings
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.tables import Grid
from megatron_burst.tools import show
from megatron_burst.tools.show import balance, colours, language, timeline
from megatron_burst.tools.show.scene import MaskScene, Shards, kind_of, schedule_scene, share

ROOT = Path(mb.__file__).parent.parent
SIZES = cost.Sizes(8, 1, 8, 2, 16, 16, 2, 4, 4, (True, True, True))


# --- expressions of masks and layouts -------------------------------------------------------

EYE = np.eye(4, dtype=bool)
WRITTEN = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window(3, 0)": masks.Window(3, 0),
    "window(None, 2)": masks.Window(None, 2),
    "window(3)": masks.Window(3, 0),
    "window(right=2, left=3)": masks.Window(3, 2),
    "dilated(4)": masks.Dilated(4),
    "prefix(5)": masks.Prefix(5),
    "documents([0, 3, 8, 16])": masks.Documents([0, 3, 8, 16]),
    "same_span([(2, 5), (5, 9)])": masks.SameSpan([(2, 5), (5, 9)]),
    "block_sparse([[1,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1]], 4)": masks.BlockSparse(EYE, 4),
}


@pytest.mark.parametrize(("text", "mask"), WRITTEN.items(), ids=list(WRITTEN))
def test_every_word_makes_its_mask(text, mask):
    assert language.mask(text, 16) == mask


def test_a_table_is_read_row_by_row():
    mask = language.mask("dense([[1, 1, 0], [0, 1, 1], [0, 0, 1]])", 3)
    positions = np.arange(3)
    seen = mask.visible(positions[:, None], positions[None, :])
    assert seen.tolist() == [[True, True, False], [False, True, True], [False, False, True]]


def test_and_binds_tighter_than_or_and_parentheses_win():
    a, b, c = masks.Causal(), masks.Prefix(5), masks.Dilated(4)
    assert language.mask("causal | prefix(5) & dilated(4)", 16) == a | (b & c)
    assert language.mask("(causal|prefix(5))&dilated(4)", 16) == (a | b) & c
    assert language.mask(" ( ( causal\n ) ) ", 16) == a


leaves = st.sampled_from(sorted(WRITTEN.items()))


def joined(parts):
    """Two (text, mask) pairs as one, fully in parentheses."""
    return st.tuples(parts, st.sampled_from("&|"), parts).map(
        lambda t: (
            f"({t[0][0]} {t[1]} {t[2][0]})",
            t[0][1] & t[2][1] if t[1] == "&" else t[0][1] | t[2][1],
        )
    )


@given(st.recursive(leaves.map(tuple), joined, max_leaves=6))
def test_what_is_written_is_what_is_read(pair):
    text, mask = pair
    assert language.mask(text, 16) == mask


def test_a_random_table_is_the_same_every_time_and_sees_its_diagonal():
    first, again = (language.mask("random_blocks(4)", 64) for _ in range(2))
    other = language.mask("random_blocks(4, seed=1)", 64)
    assert first == again != other
    assert isinstance(first, masks.BlockSparse)
    assert first.table.diagonal().all()
    assert not first.table.all()


@pytest.mark.parametrize(
    ("text", "place", "helps"),
    [
        ("causal & windw(3)", "at character 10 (windw(3))", "window(left, right=0)"),
        ("causal & window()", "at character 10 (window())", "use window(left, right=0)"),
        ("window(-1, 0)", "at character 1 (window(-1, 0))", "at least 0 or None, got -1"),
        ("window(none, 2)", "at character 8 (none)", "expected a number, None, or a list"),
        ("window(1, side=2)", "at character 1 (window(1, side=2))", "'side'; use window(left"),
        ("window(**{'left': 1})", "at character 1 (window(**{'left': 1}))", "must be strings"),
        ("dilated(9**9**9)", "at character 9 (9**9**9)", "expected a number"),
        ("é(1) | dilated(x)", "at character 1 (é(1))", "there is no mask é"),
        ("causal | 'é' & dilated(x)", "at character 10 ('é')", "expected one of full, causal"),
        ("causal(3)", "at character 1 (causal(3))", "too many positional arguments; use causal"),
        ("dilated(0)", "at character 1 (dilated(0))", "at least 1"),
        ("documents([0, 3, 8])", "at character 1 (documents([0, 3, 8]))", "end at the length"),
        ("random_blocks(3)", "at character 1 (random_blocks(3))", "do not divide the 16"),
        ("random_blocks(4, -1)", "at character 1 (random_blocks(4, -1))", "0..4294967295, got -1"),
        ("block_sparse([[1]], 4)", "at character 1 (block_sparse([[1]], 4))", "sequence has 16"),
        ("dense([[1, 0], [0]])", "at character 1 (dense([[1, 0], [0]]))", "must be square"),
        ("dense([[1]])", "at character 1 (dense([[1]]))", "describes 1 positions"),
        ("(causal | full", "at character 1 ((causal | full)", "'(' was never closed"),
        ("causal full", "at character 8 (full)", "join them with & and |"),
        ("causal & window:3,0", "at character 16 (:3,0)", "window(left, right=0)"),
        ("causal and full", "at character 1 (causal and full)", "join them with & and |"),
        ("~causal", "at character 1 (~causal)", "join them with & and |"),
        ("masks.causal()", "at character 1 (masks.causal())", "expected one of full, causal"),
        ("().__class__", "at character 1 (().__class__)", "expected one of full, causal"),
        ("causal &", "at the end", "expected one of full, causal"),
        ("", "at the end", "expected one of full, causal"),
        ("causal)", "at character 7 ())", "unmatched ')'"),
    ],
)
def test_an_error_shows_the_place_and_what_works(text, place, helps):
    with pytest.raises(ValueError, match=re.escape(place)) as caught:
        language.mask(text, 16)
    assert helps in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(" * 500 + "causal" + ")" * 500, "too many nested parentheses"),
        ("&".join(["causal"] * 500), "at most 100 joined, got 500"),
        ("~" * 100_000 + "causal", f"at character 1 ({60 * '~'}...): "),
    ],
    ids=["parentheses", "joined", "operators"],
)
def test_masks_nested_too_deeply_are_one_line_too(text, says):
    with pytest.raises(ValueError, match="--mask") as caught:
        language.mask(text, 16)
    assert says in str(caught.value)


def test_every_class_of_masks_has_its_expression():
    """But for the base class, what is no mask, and trees, which are made from trajectories."""
    named = {getattr(masks, name) for name in masks.__all__} - {masks.Tree}
    classes = {cls for cls in named if isinstance(cls, type)}
    written = {type(mask) for mask in WRITTEN.values()} | {masks.Dense}
    assert {cls for cls in classes if issubclass(cls, masks.Mask)} == written | {masks.Mask}


def test_layouts_are_written_with_what_they_need():
    assert language.make_layout("striped", 4) == make("striped", cp_size=4)
    assert language.make_layout(" zigzag()", 4) == make("zigzag", cp_size=4)
    assert language.make_layout("block_striped(8)", 4) == BlockStriped(4, 8)
    assert language.make_layout("zigzag([0, 16, 24])", 2) == DocumentZigzag(2, [0, 16, 24])
    for text, problem in {
        "block_striped": "missing a required argument: 'block'; use block_striped(block)",
        "block_striped(x)": "at character 15 (x): expected a number",
        "block_striped:8": "at character 14 (:8): invalid syntax; expected one of",
        "striped(8)": "too many positional arguments; use striped",
        "zagzig": "there is no layout zagzig; expected one of contiguous",
        "zigzag([0, 3])": "multiples of 8",
        "striped | zigzag": "expected one of contiguous",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"--layout '{text}', at char")) as caught:
            language.make_layout(text, 4)
        assert problem in str(caught.value)


# --- what is drawn is what runs ------------------------------------------------------------


def shards(mask="causal", layout="zigzag", seq_len=32, ranks=4):
    return Shards(
        language.mask(mask, seq_len), language.make_layout(layout, ranks), seq_len, mask, layout
    )


def test_who_computes_what_by_hand():
    scene = MaskScene(shards(seq_len=4, ranks=2), rings.forward("ring", Grid(1, 2)))
    # zigzag: rank 0 holds 0 and 3, rank 1 holds 1 and 2
    assert scene.computers.tolist() == [
        [0, -1, -1, -1],
        [1, 1, -1, -1],
        [1, 1, 1, -1],
        [0, 0, 0, 0],
    ]
    assert scene.steps.tolist() == [[0, 1], [1, 0]]


def columns(plan):
    """Of all its tables, and of the bundles that their rows are of."""
    tables = plan.tables
    bundles = [(b.owner, b.number, *b.runs) for b in (tables.queries, tables.keys)]
    return [*tables.pairs, *tables.transfers, *bundles[0], *bundles[1]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["causal", "causal & window(5)", "documents([0, 9, 16, 32])"])
@pytest.mark.parametrize("side", ["auto", "kv", "query"])
def test_the_schedules_are_those_of_a_plan(algorithm, mask, side):
    for layout in ("contiguous", "zigzag"):
        q, k = ([torch.empty(8, 1, h, 16, requires_grad=True) for _ in range(4)] for h in (8, 2))
        parts = shards(mask, layout)
        plan = mb.prepare(
            q, k, k, groups=mb.Groups.in_process(inter=2, intra=2), layout=layout,
            mask=parts.mask, algorithm=algorithm, side=side,
            kernel="reference",
        )  # fmt: skip
        forward = schedule_scene(parts, Grid(2, 2), plan.sizes, algorithm)
        way = {"backward": True, "side": side}
        backward = schedule_scene(parts, Grid(2, 2), plan.sizes, algorithm, **way)
        for scene, schedule in zip((forward, backward), plan.schedules, strict=True):
            assert (scene.plan.side, scene.plan.route) == (schedule.side, schedule.route)
            assert scene.plan.row_bytes == schedule.row_bytes
            for drawn, run in zip(columns(scene.plan), columns(schedule), strict=True):
                np.testing.assert_array_equal(drawn, run)


MASKS = ["causal", "causal & window(5)", "documents([0, 9, 16, 32]) & causal"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("side", ["kv", "query"])
def test_totals_are_the_traffic_of_all_ranks(algorithm, mask, side):
    for way in ({}, {"backward": True, "side": side}):
        scene = schedule_scene(shards(mask), Grid(2, 2), SIZES, algorithm, **way)
        sent = [cost.traffic(scene.plan, rank, SIZES) for rank in range(4)]
        for link in ("intra", "inter"):
            assert sum(getattr(t, link) for t in sent) == sum(
                total.bytes for (name, _), total in scene.totals.items() if name == link
            )
        assert sum(total.hops for total in scene.totals.values()) == sum(
            len(list(sends(scene.plan, rank))) for rank in range(4)
        )


def test_totals_of_all_are_those_where_everything_is_visible():
    parts = shards("causal & window(5)", "contiguous")
    scene = schedule_scene(parts, Grid(2, 2), SIZES, "burst", backward=True, side="kv")
    everything = schedule_scene(
        shards("full", "contiguous"), Grid(2, 2), SIZES, "burst", backward=True, side="kv",
        route=scene.plan.route,
    )  # fmt: skip
    assert {k: (t.hops, t.bytes) for k, t in everything.totals.items()} == {
        k: (t.hops_of_all, t.bytes_of_all) for k, t in scene.totals.items()
    }
    kinds = Counter(kind_of(hop) for hop in [*scene.hops, *scene.left_out])
    assert kinds == {kind: total.hops_of_all for kind, total in scene.totals.items()}


def test_nothing_counts_as_left_out_where_the_ring_turns_the_other_way():
    """Under zigzag and causal, rank 3's rows are seen by fewer ranks than rank 0's."""
    scene = schedule_scene(shards(), Grid(1, 4), SIZES, "ring", route="ring")
    (hop,) = [hop for hop in scene.hops if hop.src == 1 and hop.post == 0]
    assert (hop.dst, scene.left_out) == (0, [])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(2, 2)])
def test_the_rows_of_the_pairs_hold_every_visible_position_pair_once(algorithm, mask, grid):
    parts = shards(mask)
    for way in ({}, {"backward": True, "side": "query"}):
        scene = schedule_scene(parts, grid, SIZES, algorithm, **way)
        cells = [scene.cells(rank, step) for rank in range(4) for step in range(scene.steps)]
        assert sum(scene.work) == parts.pairs.sum() == sum(parts.work)
        assert sum(map(len, cells)) == len(scene.plan.tables.pairs.rank)
        most = max(sum(cell.share for cell in some) for some in cells)
        assert most == pytest.approx(1.0)


def test_parts_of_a_chunk_are_its_rows_in_the_order_of_the_shard():
    """Two ways round, nothing hidden: halves of 4 of 8 rows; at step 2 both reach rank 2."""
    parts = shards("full", "contiguous")
    scene = schedule_scene(parts, Grid(1, 4), SIZES, "two_way")
    sent = {hop.dst: hop.chunk for hop in scene.hops if hop.src == 0 and hop.post == 0}
    assert {dst: scene.ranges(chunk) for dst, chunk in sent.items()} == {1: [(0, 4)], 3: [(4, 8)]}
    assert scene.rows(sent[1]) == (4, 8)
    assert scene.bytes(sent[1]) == 4 * SIZES.forward.kv
    pairs = [(cell.pair.key, *scene.parts(cell.pair)) for cell in scene.cells(2, 2)]
    assert pairs == [(0, "4/8"), (0, "4/8")]
    assert scene.most(2) == 2


def test_what_is_held_and_what_crosses_at_least_by_hand():
    """Two nodes of one rank, 8 rows each; a window of 5: rank 1 sees the last five rows of rank 0.

    They are held from the boundary at which they are sent until rank 1 has computed with them.
    """
    parts = shards("causal & window(5)", "contiguous", 16, 2)
    scene = schedule_scene(parts, Grid(2, 1), SIZES, "burst")
    assert scene.held == scene.once_per_node == 5 * SIZES.forward.kv
    (chunk,) = [hop.chunk for hop in scene.hops]
    assert scene.ranges(chunk) == [(3, 8)]
    assert scene.released(1) == {2: [chunk]}
    back = schedule_scene(parts, Grid(2, 1), SIZES, "burst", backward=True, side="kv")
    ring = schedule_scene(shards("full"), Grid(1, 4), SIZES, "ring")
    assert ring.held == 2 * 8 * SIZES.forward.kv  # one to compute with, one on its way
    assert back.once_per_node == 5 * (SIZES.backward.kv + SIZES.backward.dkv)


@pytest.mark.parametrize("mask", [*MASKS, "full"])
def test_multicast_crosses_between_nodes_as_often_as_it_must(mask):
    for way in ({}, {"backward": True, "side": "kv"}):
        scene = schedule_scene(shards(mask), Grid(2, 2), SIZES, "multicast", **way)
        sent = sum(t.bytes for (link, _), t in scene.totals.items() if link == "inter")
        assert sent == scene.once_per_node


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_work_and_imbalance_are_those_of_balance(layout):
    parts = shards("causal | prefix(9)", layout)
    scene = schedule_scene(parts, Grid(1, 4), SIZES, "ring")
    assert scene.work == parts.work == balance.work(parts.layout, parts.mask, 32)
    assert scene.imbalance == pytest.approx(balance.imbalance(parts.layout, parts.mask, 32))


def test_colours_of_ranks_differ():
    for ranks in (1, 2, 9, 10, 32):
        assert len({colours.of_rank(rank, ranks) for rank in range(ranks)}) == ranks


# --- the command line ----------------------------------------------------------------------


def lines(capsys):
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_text_of_a_schedule(capsys):
    assert cli.main(["show", "schedule", "--ranks", "2", "--layout", "contiguous"]) == 0
    expected = """\
burst, forward, 2 ranks: causal, contiguous
16 positions; keys and values (K, V) are sent

          step 0    step 1
────────────────────────────
 rank 0   q0 k0 ◪   ·
          k0→1
 rank 1   q1 k1 ◪   q1 k0 ■
"""
    assert lines(capsys)[:8] == expected.splitlines()


def test_text_of_rows_of_chunks(capsys):
    """Halves, both ways round; what comes back of a query is a partial output."""
    common = "show schedule --ranks 2 --layout contiguous --mask full --algorithm "
    assert cli.main((common + "two_way").split()) == 0
    expected = """\
          step 0            step 1
────────────────────────────────────────
 rank 0   q0 k0 ■           q0 k1 ■ 4/8
          k0→1 4/8 16 KiB   q0 k1 ■ 4/8
          k0→1 4/8 16 KiB
"""
    assert lines(capsys)[3:8] == expected.splitlines()
    assert cli.main((common + "token_ring").split()) == 0
    text = "\n".join(lines(capsys))
    assert "queries (Q) are sent, partial outputs (O, lse) return" in text
    assert "o1→1" in text
    assert "o partial output with its lse, a whole chunk: 32.25 KiB" in text
    assert "partial output hops: intra 2 (64.5 KiB)" in text


def test_shares_are_told_in_rows_and_of_long_chunks_in_percent():
    assert [share(*part) for part in ((8, 8), (3, 8), (99, 99), (25, 100))] == [
        "", "3/8", "", "25%",
    ]  # fmt: skip


def test_an_algorithm_registered_later_is_drawn(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS, "mine", ALGORITHMS["two_way"])
    words = "show schedule --ranks 4 --algorithm mine"
    assert cli.main(words.split()) == 0
    assert lines(capsys)[0] == "mine, forward, 4 ranks: causal, zigzag"
    assert cli.main([*words.split(), "--png", str(tmp_path / "mine.png")]) == 0


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_arrows_are_filled_where_rows_travel_and_striped_for_partial_outputs(mask):
    scene = schedule_scene(shards(mask), Grid(1, 4), SIZES, "token_ring")
    axes = timeline.draw(scene).axes[0]
    filled = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_clip_path()]
    striped = [p for p in filled if p.get_hatch()]
    outs = [hop for hop in scene.hops if hop.chunk.family == "out"]
    rows = [sum(scene.rows(hop.chunk)[0] for hop in some) / 8 for some in (outs, scene.hops)]
    lengths = [sum(p.get_width() for p in some) for some in (striped, filled)]
    assert min(rows) > 0
    longest = 1 - 2 * 0.03  # an arrow of one step
    drained = sum(hop.post >= scene.steps for hop in outs)
    assert lengths[1] - lengths[0] == pytest.approx((rows[1] - rows[0]) * longest)
    assert len(striped) >= len(outs) > drained > 0


def test_text_of_a_mask(capsys):
    arguments = "show mask --mask causal&window(1) --seq 8 --ranks 2"
    assert cli.main(arguments.split()) == 0
    text = "\n".join(lines(capsys))
    assert "0·······\n00······\n·11·····\n··11····\n···11···\n····11··\n·····00·\n······00" in text
    assert "0···│····\n00··│····\n··0·│···0\n··00│····\n────┼────\n·1··│1···" in text
    assert "work per rank 7 to 8 pairs" in text


def test_the_examples_of_the_help_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall("^  megatron-burst (.*)$", show.EPILOG, re.MULTILINE)
    assert len(examples) == len(show.PICTURES)
    for example in examples:
        assert cli.main(shlex.split(example)) == 0
    assert capsys.readouterr().err == ""


def test_gradients_and_node_links_are_marked(capsys):
    common = "show schedule --nodes 2 --per-node 2 --layout striped "
    assert cli.main((common + "--backward --side query").split()) == 0
    text = "\n".join(lines(capsys))
    assert "q0⇒2 7/8 28.44 KiB @2" in text
    assert re.search(r"dq\d→\d", text)
    assert re.search(r"dq\d⇒\d @", text)
    assert cli.main((common + "--backward --side kv --rank 3").split()) == 0
    text = "\n".join(lines(capsys))
    assert "q3 k0 ◪" in text
    assert not re.search("^ rank [012] ", text, re.MULTILINE)
    assert re.search(r" -k\d ", text)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("mask --seq 30", "seq_len: layout zigzag"),
        ("mask --seq 4096", "--seq: a picture as text shows at most 256"),
        ("mask --ranks 0", "--ranks must be at least 1"),
        ("mask --nodes 2", "--nodes and --per-node go together"),
        ("mask --nodes 2 --per-node 2 --ranks 5", "--ranks 5 is not --nodes 2 x"),
        ("mask --png picture.jpg", "must end in .png"),
        ("mask --svg picture.png", "must end in .svg"),
        ("schedule --side query", "add --backward"),
        ("schedule --rank 9", "--rank must be in 0..3"),
        ("schedule --algorithm ulysses", "invalid choice"),
        ("schedule --heads 4 --kv-heads 3", "--kv-heads must divide --heads"),
        ("schedule --ranks 64", "--ranks: a picture as text shows at most 32"),
        ("documents --lengths 3,0", "--lengths: every document has at least one token, got 3,0"),
        ("documents --lengths 2.5", "--lengths must be an integer, got 2.5"),
        ("documents --lengths a",
         "there is no lengths a; expected one of numbers of tokens, random("),
        ("documents --lengths ()", "--lengths: every document has at least one token, got ()"),
        ("documents --lengths random(1)",
         "missing a required argument: 'median'; use random(seed,"),
        ("documents --lengths random(1,0)",
         "median must be at least 1 and spread 0, got 0 and 1.5"),
        ("documents --lengths random(1,5,1,0)", "longest must be at least 1, got 0"),
        ("documents --lengths random(-1,5)", "Seed must be between 0 and"),
        ("documents --lengths 50,50 --seq 64", "--lengths: 100 tokens do not fit into 64"),
        ("documents --lengths 5 --seq 12", "--seq must be a multiple of 8 here, got 12"),
        ("documents --lengths 5 --seq 2000000", "packs of at most 1048576 tokens are drawn"),
        ("documents --lengths 2000000", "--lengths: 2000000 tokens do not fit into 1048576"),
        ("documents --lengths 5 --mask prefix(3)", "inside documents causal, full, or window("),
        ("documents --lengths 5 --ranks 64", "--ranks: a picture as text shows at most 32"),
        ("documents", "--lengths"),
        ("mask --layout balanced",
         "layout balanced needs documents, its own or those of --mask; use "
         "balanced(cu_seqlens=None, windows=None, padding=None)"),
        ("mask --layout balanced([0,30])", "positive multiple of 4 tokens, got 30"),
        ("mask --layout balanced([0,16])", "seq_len: the documents end at 16, got 32"),
        ("scan --layout striped", "take zigzag, contiguous or balanced"),
        ("scan --algorithm ring --blocks 2", "--blocks: ring sends states whole"),
        ("scan --blocks 0", "--blocks must be at least 1, got 0"),
        ("scan --seq 16 --lengths 10,20", "--lengths: 30 tokens do not fit into 16"),
        ("scan --ranks 32 --lengths random(1,3) --seq 4096", "at most 128 pieces"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_2(arguments, problem, capsys):
    try:
        code = cli.main(["show", *arguments.split()])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert problem in err
    assert len(err.splitlines()) == 1


def test_a_missing_matplotlib_is_named_with_the_cure(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    assert cli.main(["show", "mask", "--png", "x.png"]) == 2
    assert "--png and --svg need matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_a_picture_as_svg_is_the_same_every_time(tmp_path):
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    words = ["show", "schedule", "--ranks", "2", "--seq-length", "8"]
    for file in files:
        assert cli.main([*words, "--svg", str(file), "--png", str(tmp_path / "as.png")]) == 0
    first, second = (file.read_text() for file in files)
    assert first == second
    assert "<svg" in first
    assert "<dc:date>" not in first
    assert (tmp_path / "as.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        "mask",
        "layout --mask causal",
        "schedule --backward",
        "documents --lengths 9,5,20,1",
        "tree --trajectories random",
    ],
)
def test_a_picture_is_a_small_png_and_the_same_every_time(arguments, tmp_path):
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for file in files:
        assert cli.main(["show", *arguments.split(), "--ranks", "2", "--png", str(file)]) == 0
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    assert first.endswith(b"IEND\xaeB`\x82")
    assert first == second
    assert not [name for name in (b"tEXt", b"iTXt", b"tIME") if name in first]
    assert len(first) < 100_000


def test_the_command_runs_as_a_module_and_text_needs_no_matplotlib():
    probe = (
        "import runpy, sys; sys.argv[1:] = 'show layout --ranks 2 --seq 8'.split();"
        "sys.modules['matplotlib'] = sys.modules['megatron'] = None;"
        "runpy.run_module('megatron_burst', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=True,
    )  # fmt: skip
    for name, strip in (
        ("contiguous", "00001111"),
        ("striped", "01010101"),
        ("zigzag", "00111100"),
    ):
        assert re.search(rf"^{name} +{strip} *$", done.stdout, re.MULTILINE)
    assert done.stderr == ""


# --- the gallery ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs/make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_is_what_its_generator_writes(gallery):
    assert (ROOT / "docs/gallery.md").read_text(encoding="utf-8") == gallery.page()


def test_the_gallery_has_its_pictures_no_others_and_they_are_small(gallery):
    names = [picture.name for section in gallery.SECTIONS for picture in section.pictures]
    sizes = {file.stem: file.stat().st_size for file in (ROOT / "docs/gallery").iterdir()}
    assert sorted(sizes) == sorted(names)
    assert max(sizes.values()) < 100_000
    assert sum(sizes.values()) < 1_100_000
    assert len(names) >= 12
