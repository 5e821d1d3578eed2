# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst show`: draw masks, layouts, schedules, scans of states and prefix trees, as text
or as PNG.

This module holds the flags and the size limits. `scene`, `packs`, `scans` and `trees` compute what
is drawn; `text`, `pictures` and `timeline` draw it. rich and matplotlib are imported only when they
draw.
"""

from __future__ import annotations

import argparse

from ...layout import LAYOUTS
from ...schedule import rings
from ...schedule.algorithms import ALGORITHMS
from ...schedule.cost import Sizes
from ...schedule.tables import ROUTES, Grid
from .. import call_flags
from ..call_flags import check_positive, named
from . import language
from .balance import best_layout
from .packs import PackScene, pack_scene
from .scans import add_flags as add_scan
from .scans import scan_scene
from .scene import LayoutScene, MaskScene, Shards, schedule_scene
from .trees import add_flags as add_tree
from .trees import tree_scene
from .words import Scene

# The largest pictures that can be read: positions of a matrix or a strip, ranks of a timeline.
POSITIONS = {"text": 256, "png": 1024}
RANKS = {"text": 32, "png": 32}
PICTURES = {
    "mask": "the score matrix, coloured by the rank that computes each pair",
    "schedule": "what each rank computes and sends in each step",
    "layout": "which positions each rank holds",
    "documents": "which rank holds which part of packed documents, in three layouts",
    "scan": "how states of linear attention pass from rank to rank",
    "tree": "a prefix tree of trajectories: which rank holds which part, and the mask",
}
PACK = 1 << 20  # positions of packed documents, of which only runs are drawn

# What belongs below the help of a picture with this flag.
LANGUAGE = {
    "mask": """\
masks:    full, causal, window(LEFT, RIGHT), dilated(STRIDE), prefix(N), documents(CU_SEQLENS),
          block_sparse(TABLE, BLOCK), random_blocks(BLOCK, SEED), dense(TABLE)
          joined by & and |, with ( ) as in Python: causal & (window(23) | prefix(4))
          LEFT and RIGHT: positions, None for no limit; RIGHT is 0 if not given
          CU_SEQLENS: cumulative document lengths, [0, 3, 8, 16]; TABLE: [[1, 0], [1, 1]]
""",
    "layout": """\
layouts:  contiguous, zigzag, striped, block_striped(BLOCK),
          zigzag(CU_SEQLENS) for zigzag within each document, balanced(CU_SEQLENS);
          balanced alone takes the documents of --mask
""",
    "lengths": "lengths:  300, 20, 5 or random(SEED, MEDIAN), which fill --seq positions\n",
    "trajectories": """\
trajectories: a file with lines such as [11, 12, 13], the token ids of one trajectory, or
          random(SEED, PROMPTS, SAMPLES, TURNS): SAMPLES trajectories of each prompt, of which each
          shares a random number of turns with one before it (default: 0, 1, 4, 2); prompt=64 and
          turn=32 are the mean tokens of a prompt and of a turn
layouts:  balanced, or contiguous, zigzag, striped, block_striped(BLOCK)
""",
}
EXAMPLES = {
    "mask": "--mask 'causal & window(23)' --layout striped --ranks 8",
    "schedule": "--algorithm burst --nodes 2 --per-node 4 --backward --side query",
    "layout": "--mask causal --ranks 4",
    "documents": "--lengths 300,20,5,60,40,31 --ranks 4",
    "scan": "--algorithm two_level --nodes 2 --per-node 4",
    "tree": "--trajectories 'random(seed=1, samples=8, turns=3)' --nodes 2 --per-node 4",
}
TAKES = {
    "mask": ("mask", "layout"), "schedule": ("mask", "layout"), "layout": ("mask", "layout"),
    "documents": ("lengths", "mask"), "scan": ("layout", "lengths"), "tree": ("trajectories",),
}  # fmt: skip
EPILOG = "examples:\n" + "".join(
    f"  megatron-burst show {name} {words}\n" for name, words in EXAMPLES.items()
)


def epilog(name: str) -> str:
    """What follows the help of one picture: the values that its flags take, and an example."""
    values = "".join(LANGUAGE[flag] for flag in TAKES[name])
    return f"{values}\nexample: megatron-burst show {name} {EXAMPLES[name]}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `show`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    pictures = parser.add_subparsers(dest="picture", metavar="PICTURE", required=True)
    for name, meaning in PICTURES.items():
        sub = pictures.add_parser(
            name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.",
            epilog=epilog(name), formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        add = sub.add_argument
        if name == "documents":
            add("--lengths", required=True, metavar="LENGTHS",
                help="tokens of each document: 300,20,5 or random(SEED, MEDIAN)")  # fmt: skip
        if name not in ("scan", "tree"):
            mask = None if name == "layout" else "causal"
            add("--mask", default=mask, metavar="MASK", help="which pairs attend, for example "
                f"'causal & window(1023)' (default: {mask or 'none, so no work is drawn'})",
            )  # fmt: skip
        if name not in ("documents", "tree"):
            layout = None if name == "layout" else "zigzag"
            add("--layout", default=layout, metavar="LAYOUT",
                help=f"which positions a rank holds (default: {layout or 'each in turn'})",
            )  # fmt: skip
        add("--ranks", type=int, metavar="N", help="ranks on one node (default: 4)")
        call_flags.add_grid(sub)
        if name != "tree":
            add(*named("--seq"), type=int, metavar="N",
                help="length of the sequence (default: 8 positions per rank)")  # fmt: skip
        call_flags.add_pictures(sub, "write a PNG file instead of text")
        if name == "schedule":
            _add_schedule(sub)
        elif name == "scan":
            add_scan(sub)
        elif name == "tree":
            add_tree(sub)


def _add_schedule(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--algorithm", default="burst", choices=ALGORITHMS, help="default: burst")
    add("--backward", action="store_true", help="draw backward instead of forward")
    call_flags.add_side(sub)
    add("--route", default="auto", choices=("auto", *ROUTES), help="send chunks round the ring, or "
        "directly from their owners (default: auto, fewer bytes)")  # fmt: skip
    add("--rank", type=int, metavar="N", help="draw only this rank")
    call_flags.add_heads(sub, width=128)


def run(arguments: argparse.Namespace) -> None:
    """Draw what the flags ask for. Raises ValueError for bad flags."""
    scene = scene_of(arguments)
    paths = call_flags.pictures(arguments)
    if not paths:
        from . import text

        text.show(scene)
    for path in paths:
        from . import pictures

        pictures.draw(scene, path)
        print(path)


def scene_of(arguments: argparse.Namespace) -> Scene:
    """The scene that the flags describe. Raises ValueError for flags that do not fit together."""
    grid = _grid(arguments)
    kind = "png" if arguments.png or arguments.svg else "text"
    check_positive(arguments, ("seq", "heads", "kv_heads", "width"))
    if arguments.picture == "documents":
        _at_most("--ranks", grid.size, RANKS[kind], kind)
        return _documents(arguments, grid)
    if arguments.picture == "tree":
        _at_most("--ranks", grid.size, RANKS[kind], kind)
        return tree_scene(arguments, grid, kind)
    seq_len = 8 * grid.size if arguments.seq is None else arguments.seq
    if arguments.picture in ("schedule", "scan"):
        _at_most("--ranks", grid.size, RANKS[kind], kind)
    else:
        _at_most("--seq", seq_len, POSITIONS[kind], kind)
    if arguments.picture == "scan":
        return scan_scene(arguments, grid, seq_len)
    if arguments.picture == "layout":
        return _layouts(arguments, grid, seq_len)
    mask = language.mask(arguments.mask, seq_len)
    layout = language.make_layout(arguments.layout, grid.size, grid.intra, mask)
    layout.check(seq_len)
    shards = Shards(mask, layout, seq_len, arguments.mask, arguments.layout)
    if arguments.picture == "mask":
        return MaskScene(shards, rings.forward("ring", Grid(1, grid.size)))
    return schedule_scene(
        shards, grid, _sizes(arguments, seq_len // grid.size), arguments.algorithm,
        backward=arguments.backward, side=arguments.side, route=arguments.route,
        only=arguments.rank,
    )  # fmt: skip


def _documents(arguments: argparse.Namespace, grid: Grid) -> PackScene:
    """Documents, filled up with padding to what zigzag of the pack can cut."""
    multiple = 2 * grid.size
    wanted = arguments.seq or 64 * grid.size
    if wanted > PACK:
        raise ValueError(f"--seq: packs of at most {PACK} tokens are drawn, got {wanted}")
    lengths = language.lengths(arguments.lengths, wanted)
    total = sum(lengths)
    if total > (arguments.seq or PACK):
        raise ValueError(f"--lengths: {total} tokens do not fit into {arguments.seq or PACK}")
    seq_len = arguments.seq or -(-total // multiple) * multiple
    if seq_len % multiple:
        raise ValueError(f"--seq must be a multiple of {multiple} here, got {seq_len}")
    mask = language.mask(arguments.mask, seq_len)
    return pack_scene(lengths, seq_len, grid, mask, arguments.mask)


def _layouts(arguments: argparse.Namespace, grid: Grid, seq_len: int) -> LayoutScene:
    ranks = grid.size
    names = [arguments.layout] if arguments.layout else list(LAYOUTS)
    mask = language.mask(arguments.mask or "full", seq_len)
    layouts = [language.make_layout(name, ranks, grid.intra, mask) for name in names]
    for layout in layouts:
        layout.check(seq_len)
    rows = [
        Shards(mask, layout, seq_len, arguments.mask or "", name)
        for layout, name in zip(layouts, names, strict=True)
    ]
    every = arguments.mask and not arguments.layout
    return LayoutScene(tuple(rows), best_layout(mask, ranks, seq_len) if every else None)


def _grid(arguments: argparse.Namespace) -> Grid:
    nodes, per_node = arguments.nodes, arguments.per_node
    if (nodes is None) != (per_node is None):
        raise ValueError("--nodes and --per-node go together; give both, or --ranks")
    if nodes is not None and arguments.ranks not in (None, nodes * per_node):
        raise ValueError(
            f"--ranks {arguments.ranks} is not --nodes {nodes} x --per-node {per_node}"
        )
    check_positive(arguments, ("ranks", "nodes", "per_node"))
    if nodes is None:
        return Grid(1, 4 if arguments.ranks is None else arguments.ranks)
    return Grid(nodes, per_node)


def _at_most(flag: str, value: int, limit: int, kind: str) -> None:
    if value > limit:
        more = flag == "--seq" and kind == "text"
        larger = f" (--png: {POSITIONS['png']})" if more else ""
        raise ValueError(
            f"{flag}: a picture as {kind} shows at most {limit}{larger}, got {value}; scale all "
            "lengths down together"
        )


def _sizes(arguments: argparse.Namespace, tokens: int) -> Sizes:
    """Sizes of a call with batch 1: bf16 inputs, gradients and row statistics in fp32."""
    if arguments.heads % arguments.kv_heads:
        raise ValueError(
            f"--kv-heads must divide --heads, got {arguments.kv_heads} and {arguments.heads}"
        )
    return Sizes(
        tokens=tokens, batch=1, heads=arguments.heads, kv_heads=arguments.kv_heads,
        width=arguments.width, value_width=arguments.width, itemsize=2, stat_itemsize=4,
        wire_itemsize=4, needs_grad=(True, True, True),
    )  # fmt: skip
