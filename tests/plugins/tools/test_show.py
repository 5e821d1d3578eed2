"""`megatron-burst show`: masks and layouts from flags, the scenes, pictures, and the gallery."""

import argparse
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
from matplotlib.patches import Rectangle
from schedule_cases import sends

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.cli import main as cli
from megatron_burst.layout import BlockStriped, DocumentZigzag, make
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools import show
from megatron_burst.plugins.tools.show import balance, colours, timeline
from megatron_burst.plugins.tools.show import words as show_words
from megatron_burst.plugins.tools.show.scene import (
    MaskScene,
    Shards,
    kind_of,
    schedule_scene,
    share,
)
from megatron_burst.schedule import cost, rings
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.tables import Grid

ROOT = Path(mb.__file__).parent.parent
SIZES = cost.Sizes(8, 1, 8, 2, 16, 16, 2, 4, 4, (True, True, True))


def scene_of(words, file="x.png"):
    """Return the scene of `megatron-burst show` with these arguments."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    return show.scene_of(parser.parse_args([*shlex.split(words), "--out", file]))


# --- masks and layouts from flags ------------------------------------------------------------

BOUNDS = [0, 3, 8, 16]
MASKS_OF_FLAGS = {
    "": masks.Causal(),
    "--mask full": masks.Full(),
    "--mask causal": masks.Causal(),
    "--mask window --left 3": masks.Window(3, 0),
    "--mask window --left 3 --right 2": masks.Window(3, 2),
    "--mask dilated --stride 4": masks.Dilated(4),
    "--mask prefix --first 5": masks.Prefix(5),
    "--lengths 3,5,8": masks.Documents(BOUNDS) & masks.Causal(),
    "--lengths 3,5": masks.Documents(BOUNDS) & masks.Causal(),
    "--mask full --lengths 3,5": masks.Documents(BOUNDS) & masks.Full(),
    "--mask own_masks:made": masks.Causal() | masks.Prefix(2),
    "--mask own_masks:Names.mask": masks.Dilated(2),
    "--mask own_masks:Names.mask --lengths 3,5": masks.Documents(BOUNDS) & masks.Dilated(2),
}
OWN = """\
from megatron_burst.masks import Causal, Dilated, Prefix

def made():
    return Causal() | Prefix(2)

class Names:
    mask = Dilated(2)

def takes(one):
    return one

number = 5

def returns():
    return 5
"""


@pytest.fixture
def own_masks(tmp_path, monkeypatch):
    """Create a module of masks that can be imported."""
    (tmp_path / "own_masks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_masks", None)


@pytest.mark.parametrize(("words", "mask"), MASKS_OF_FLAGS.items(), ids=list(MASKS_OF_FLAGS))
def test_flags_make_their_mask(words, mask, own_masks):
    assert scene_of(f"mask --ranks 2 {words}").shards.mask == mask


def test_titles_name_masks_and_layouts():
    for words, title in {
        "mask --mask window --left 3": "window left 3 right 0, zigzag",
        "mask --lengths 8,8 --layout striped": "causal, 3 documents, striped",
        "mask --lengths 8,24 --per-document": "causal, 2 documents, zigzag of each document",
        "mask --layout block_striped --block 8": "causal, block_striped, block 8",
        "layout": "32 positions over 4 ranks",
        "layout --mask full": "32 positions over 4 ranks, mask full",
        "layout --lengths 8": "32 positions over 4 ranks, mask full, 2 documents",
        "schedule": "burst, forward, 4 ranks: causal, zigzag",
    }.items():
        assert show_words.title(scene_of(words)) == title


def test_flags_make_their_layout():
    def layout(words):
        return scene_of(f"mask --nodes 2 --per-node 2 --seq 64 {words}").shards.layout

    assert layout("--layout striped") == make("striped", cp_size=4)
    assert layout("") == layout("--lengths 16,48") == make("zigzag", cp_size=4)
    assert layout("--layout block_striped --block 8") == BlockStriped(4, 8)
    assert layout("--lengths 16,48 --per-document") == DocumentZigzag(4, [0, 16, 64])
    balanced = {"cp_size": 4, "cu_seqlens": [0, 16, 64], "per_node": 2}
    for words, window in {"": (None, 0), "--mask full": (None, None),
                          "--mask window --left 3 --right 1": (3, 1)}.items():  # fmt: skip
        found = layout(f"--layout balanced --lengths 16 {words}")
        assert found == make("balanced", **balanced, windows=[window])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("nowhere:mask", "No module named 'nowhere'; MODULE:NAME must be a mask"),
        ("own_masks:other", "AttributeError: module 'own_masks' has no attribute 'other'"),
        ("own_masks:takes", "TypeError: takes() missing 1 required positional argument"),
        ("own_masks:number", "TypeError: 'int' object is not callable"),
        ("own_masks:returns", "--mask own_masks:returns: got int; MODULE:NAME must be a mask"),
        (":made", "ValueError: Empty module name"),
    ],
)
def test_a_mask_that_cannot_be_imported(words, problem, own_masks):
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        scene_of(f"mask --mask {words}")
    assert str(caught.value).startswith(f"--mask {words}: ")
    assert str(caught.value).endswith("in a module that Python can import (PYTHONPATH)")


# --- what is drawn is what runs ------------------------------------------------------------


MADE = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "causal & window(5)": masks.Window(5, 0),
    "causal | prefix(9)": masks.Causal() | masks.Prefix(9),
    "documents": masks.Documents([0, 9, 16, 32]),
    "causal documents": masks.Documents([0, 9, 16, 32]) & masks.Causal(),
}


def shards(mask="causal", layout="zigzag", seq_len=32, ranks=4):
    return Shards(MADE[mask], make(layout, cp_size=ranks), seq_len, mask, layout)


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
    """Return the columns of all tables of a schedule, and of the bundles of their rows."""
    tables = plan.tables
    bundles = [(b.owner, b.number, *b.runs) for b in (tables.queries, tables.keys)]
    return [*tables.pairs, *tables.transfers, *bundles[0], *bundles[1]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["causal", "causal & window(5)", "documents"])
@pytest.mark.parametrize("side", ["auto", "kv", "query"])
def test_the_schedules_are_those_of_a_plan(algorithm, mask, side):
    for layout in ("contiguous", "zigzag"):
        q, k = ([torch.empty(8, 1, h, 16, requires_grad=True) for _ in range(4)] for h in (8, 2))
        parts = shards(mask, layout)
        plan = in_process.prepare(
            q, k, k, groups=in_process.groups(inter=2, intra=2), layout=layout,
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


MASKS = ["causal", "causal & window(5)", "causal documents"]


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


def test_compressed_keys_are_a_shorter_sequence():
    """Contiguous: rank r has 2 keys, each of 4 rows, and sends them to the 3 - r ranks after it."""
    words = "--mask compressed --key-rows 4 --layout contiguous --seq 32 --kv-heads 1 --width 16"
    scene = scene_of(f"schedule {words} --values-are-keys")
    assert scene.shards.pairs.tolist() == [
        [sum(w < (t + 1) // 4 for t in range(8 * i, 8 * i + 8) for w in (2 * j, 2 * j + 1))
         for j in range(4)]
        for i in range(4)
    ]  # fmt: skip
    keys = 2 * 16 * 2  # bytes
    assert sum(total.bytes for total in scene.totals.values()) == (3 + 2 + 1) * keys
    assert sum(total.bytes_of_all for total in scene.totals.values()) == 12 * keys
    twice = scene_of(f"schedule {words}")
    assert sum(total.bytes for total in twice.totals.values()) == 2 * (3 + 2 + 1) * keys


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
    """Two directions, everything visible: halves of 4 of 8 rows; at step 2 both reach rank 2."""
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
    """Two nodes of one rank, 8 rows each, window 5: rank 1 needs the last five rows of rank 0.

    Rank 1 holds them from the boundary at which they are sent until it has computed with them.
    """
    parts = shards("causal & window(5)", "contiguous", 16, 2)
    scene = schedule_scene(parts, Grid(2, 1), SIZES, "burst")
    assert scene.received_bytes == scene.once_per_node == 5 * SIZES.forward.kv
    (chunk,) = [hop.chunk for hop in scene.hops]
    assert scene.ranges(chunk) == [(3, 8)]
    assert scene.released(1) == {2: [chunk]}
    back = schedule_scene(parts, Grid(2, 1), SIZES, "burst", backward=True, side="kv")
    ring = schedule_scene(shards("full"), Grid(1, 4), SIZES, "ring")
    assert ring.received_bytes == 2 * 8 * SIZES.forward.kv  # one to compute with, one on its way
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
    assert scene.work == parts.work
    assert scene.imbalance == pytest.approx(balance.imbalance(parts.layout, parts.mask, 32))


@pytest.mark.parametrize(
    ("words", "best"),
    [("--mask full", "zigzag"), ("--mask causal", "zigzag"), ("--mask window --left 15", "striped"),
     ("", None), ("--mask full --layout striped", None)],
)  # fmt: skip
def test_the_best_layout_has_the_least_imbalance(words, best):
    """Among equal layouts it is zigzag, which is Megatron's own."""
    assert scene_of(f"layout --ranks 4 --seq 64 {words}").best == best


def test_colours_of_ranks_differ():
    for ranks in (1, 2, 9, 10, 32):
        assert len({colours.of_rank(rank, ranks) for rank in range(ranks)}) == ranks


# --- the command line ----------------------------------------------------------------------


def test_the_words_of_a_schedule():
    """Partial outputs of queries are sent back."""
    found = scene_of("schedule --ranks 2 --layout contiguous --mask full --algorithm token_ring")
    assert show_words.subtitle(found) == (
        "16 positions; queries (Q) are sent, partial outputs (O, lse) are sent back"
    )
    assert "partial output hops: intra 2 (64.5 KiB)" in show_words.caption(found)
    assert {show_words.name_of(hop.chunk) for hop in found.hops} >= {"q0", "o1"}
    found = scene_of("mask --mask window --left 1 --seq 8 --ranks 2")
    assert show_words.caption(found)[0].startswith("work per rank 7 to 8 pairs")


def test_shares_are_told_in_rows_and_of_long_chunks_in_percent():
    assert [share(*part) for part in ((8, 8), (3, 8), (99, 99), (25, 100))] == [
        "", "3/8", "", "25%",
    ]  # fmt: skip


def test_an_algorithm_registered_later_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS, "mine", ALGORITHMS["two_way"])
    words = "schedule --ranks 4 --algorithm mine"
    assert show_words.title(scene_of(words)) == "mine, forward, 4 ranks: causal, zigzag"
    assert cli.main(["show", *words.split(), "--out", str(tmp_path / "mine.png")]) == 0


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


def test_the_examples_of_the_help_have_scenes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree.jsonl").write_text("[1, 2, 3]\n[1, 2, 4]\n")
    examples = re.findall("^  megatron-burst show (.*)$", show.EPILOG, re.MULTILINE)
    assert len(examples) == len(show.PICTURES)
    for example in examples:
        words, _, file = example.partition(" --out ")
        assert show_words.title(scene_of(words))
        assert file == f"{words.split()[0]}.png"


def test_gradients_and_node_links_of_backward():
    common = "schedule --nodes 2 --per-node 2 --layout striped --backward "
    found = scene_of(common + "--side query")
    hops = {(show_words.name_of(hop.chunk), hop.link, hop.dst, hop.land - hop.post): hop
            for hop in found.hops}  # fmt: skip
    crossing = hops["q0", "inter", 2, 2]  # lands at the boundary after the next one
    assert found.rows(crossing.chunk) == (7, 8)
    assert {(name[:2], link) for name, link, *_ in hops} >= {("dq", "intra"), ("dq", "inter")}
    alone = scene_of(common + "--side kv --rank 3")
    assert list(alone.ranks) == [3]
    assert any(show_words.name_of(chunk)[0] == "k"
               for chunks in alone.released(3).values() for chunk in chunks)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("mask --seq 30", "seq_len: layout zigzag"),
        ("mask --seq 4096", "--seq: a picture shows at most 1024"),
        ("layout --seq 8192", "--seq: a picture shows at most 4096"),
        ("mask --ranks 0", "--ranks must be at least 1"),
        ("mask --nodes 2", "--nodes and --per-node require each other"),
        ("mask --nodes 2 --per-node 2 --ranks 5", "--ranks 5 differs from --nodes 2 x"),
        ("mask --out picture.jpg", "--out: the file name must end in .png or .svg, got"),
        ("mask --out nowhere/picture.png", "--out nowhere/picture.png: its folder does not exist"),
        ("mask --mask windw", "--mask windw: unknown; use causal, full, window, dilated, "
         "compressed, prefix"),
        ("mask --mask compressed --key-rows 2", "only `show schedule` draws masks"),
        ("schedule --mask compressed --key-rows 2 --lengths 3", "--lengths is not supported with"),
        ("schedule --mask compressed --key-rows 3 --seq 32", "needs a positive multiple of 8, got"),
        ("mask --mask window", "--mask window requires --left N"),
        ("mask --mask window --left -1", "--mask window: left: a window size must be at least 0"),
        ("mask --left 3", "--left applies to --mask window, got --mask causal"),
        ("mask --mask dilated --stride 2 --first 1", "--first applies to --mask prefix"),
        ("mask --mask dilated --stride 0", "--mask dilated: stride must be at least 1"),
        ("mask --mask causal&full", "--mask causal&full: unknown"),
        ("mask --lengths 3,0", "--lengths must be a whole number of tokens"),
        ("mask --seq 32 --lengths 30,30", "60 tokens in total, but --seq is 32; set --seq 60"),
        ("mask --layout balanced", "--layout balanced requires documents; add --lengths"),
        ("mask --layout block_striped", "--layout block_striped requires --block N"),
        ("mask --block 4", "--block applies to --layout block_striped, got zigzag"),
        ("mask --per-document", "--per-document requires --layout zigzag and --lengths"),
        ("mask --per-document --lengths 9,5 --layout striped", "--per-document requires --layout"),
        ("mask --layout striped(8)", "invalid choice"),
        ("schedule --side query", "add --backward"),
        ("schedule --rank 9", "--rank must be in 0..3"),
        ("schedule --algorithm ulysses", "invalid choice"),
        ("schedule --heads 4 --kv-heads 3", "--kv-heads must divide --heads"),
        ("schedule --ranks 64", "--ranks: a picture shows at most 32"),
        ("scan --layout striped", "use layout zigzag, contiguous or balanced"),
        ("scan --algorithm ring --blocks 2", "--blocks: ring sends whole states"),
        ("scan --blocks 0", "--blocks must be at least 1, got 0"),
        ("scan --seq 16 --lengths 10,20", "--lengths: documents have 30 tokens in total"),
        ("scan --ranks 32 --seq 4096 --lengths " + ",".join(["40"] * 100), "at most 128 pieces"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_2(arguments, problem, capsys):
    try:
        out = [] if "--out" in arguments else ["--out", "x.png"]
        code = cli.main(["show", *arguments.split(), *out])
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
    assert cli.main(["show", "mask", "--out", "x.png"]) == 2
    assert "--out requires matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_a_picture_as_svg_is_the_same_every_time(tmp_path):
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    words = ["show", "schedule", "--ranks", "2", "--seq-length", "8"]
    for file in files:
        assert cli.main([*words, "--out", str(file)]) == 0
    first, second = (file.read_text() for file in files)
    assert first == second
    assert "<svg" in first
    assert "<dc:date>" not in first


@pytest.mark.parametrize(
    "arguments",
    [
        "mask",
        "layout --mask causal",
        "schedule --backward",
        "layout --lengths 9,5,20,1",
        "tree --trajectories {root}/docs/gallery/tree.jsonl",
    ],
)
def test_a_picture_is_a_small_png_and_the_same_every_time(arguments, tmp_path):
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for file in files:
        words = arguments.format(root=ROOT).split()
        assert cli.main(["show", *words, "--ranks", "2", "--out", str(file)]) == 0
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    assert first.endswith(b"IEND\xaeB`\x82")
    assert first == second
    assert not [name for name in (b"tEXt", b"iTXt", b"tIME") if name in first]
    assert len(first) < 100_000


def test_the_command_runs_as_a_module_and_needs_no_torch(tmp_path):
    probe = (
        "import runpy, sys; sys.argv[1:] = 'show layout --ranks 2 --seq 8 --out a.png'.split();"
        "sys.modules['torch'] = sys.modules['megatron'] = None;"
        "runpy.run_module('megatron_burst', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("a.png\n", "")
    assert (tmp_path / "a.png").exists()
    rows = scene_of("layout --ranks 2 --seq 8").rows
    assert {each.layout_text: each.holders.tolist() for each in rows} == {
        "contiguous": [0, 0, 0, 0, 1, 1, 1, 1],
        "striped": [0, 1, 0, 1, 0, 1, 0, 1],
        "zigzag": [0, 0, 1, 1, 1, 1, 0, 0],
    }


# --- the gallery ---------------------------------------------------------------------------


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")  # gallery_masks
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
    sizes = {file.stem: file.stat().st_size for file in (ROOT / "docs/gallery").glob("*.png")}
    assert sorted(sizes) == sorted(names)
    assert max(sizes.values()) < 100_000
    assert sum(sizes.values()) < 1_100_000
    assert len(names) >= 12
