# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst show`: draw masks, layouts, schedules, state scans and prefix trees.

This module defines the flags and the size limits. `inputs` creates masks and layouts from flags.
`scene`, `scans` and `trees` compute the content of a picture. `pictures` and `timeline` draw it
with matplotlib, which is imported only for drawing.
"""

from __future__ import annotations

import argparse

from ....layout import LAYOUTS
from ....schedule import rings
from ....schedule.algorithms import ALGORITHMS
from ....schedule.cost import Sizes
from ....schedule.tables import ROUTES, Grid
from .. import call_flags
from ..call_flags import check_positive, named
from . import inputs
from .scans import add_flags as add_scan
from .scans import scan_scene
from .scene import LayoutScene, MaskScene, Shards, schedule_scene
from .trees import add_flags as add_tree
from .trees import tree_scene
from .words import Scene

# Limits of a readable picture: positions of a matrix, and ranks of a timeline.
POSITIONS, RANKS = 1024, 32
PICTURES = {
    "mask": "the score matrix, coloured by the rank that computes each pair",
    "schedule": "what each rank computes and sends in each step",
    "layout": "which positions each rank holds",
    "scan": "how ranks send states of linear attention to each other",
    "tree": "a prefix tree of trajectories: the rank that holds each part, and the mask",
}
STRIP = 4096  # maximum positions of a layout strip, which has one bar per range of positions

EXAMPLES = {
    "mask": "--mask window --left 23 --layout striped --ranks 8 --out mask.png",
    "schedule": "--algorithm burst --nodes 2 --per-node 4 --backward --out schedule.png",
    "layout": "--mask causal --ranks 4 --out layout.png",
    "scan": "--algorithm two_level --nodes 2 --per-node 4 --out scan.png",
    "tree": "--trajectories tree.jsonl --nodes 2 --per-node 4 --out tree.png",
}
EPILOG = "examples:\n" + "".join(
    f"  megatron-burst show {name} {words}\n" for name, words in EXAMPLES.items()
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `show`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    pictures = parser.add_subparsers(dest="picture", metavar="PICTURE", required=True)
    for name, meaning in PICTURES.items():
        sub = pictures.add_parser(
            name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.",
            epilog=f"example: megatron-burst show {name} {EXAMPLES[name]}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if name not in ("scan", "tree"):
            inputs.add_mask(sub, None if name == "layout" else "causal")
        if name != "tree":
            inputs.add_lengths(sub)
            inputs.add_layout(sub, None if name == "layout" else "zigzag")
        if name in ("mask", "schedule", "layout"):
            inputs.add_per_document(sub)
        add = sub.add_argument
        add("--ranks", type=int, metavar="N", help="ranks on one node (default: 4)")
        call_flags.add_grid(sub)
        if name != "tree":
            add(*named("--seq"), type=int, metavar="N",
                help="length of the sequence (default: 8 positions per rank, or more if --lengths "
                "requires it)")  # fmt: skip
        call_flags.add_out(sub, "the picture", required=True)
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
    add("--route", default="auto", choices=("auto", *ROUTES), help="send chunks along the ring, or "
        "directly from their owners (default: auto, the route with fewer bytes)")  # fmt: skip
    add("--rank", type=int, metavar="N", help="draw only this rank")
    call_flags.add_heads(sub, width=128)
    add("--values-are-keys", action="store_true",
        help="the values are equal to the keys, so only keys are sent")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Draw the picture that the flags describe, and print the path of its file.

    Raises:
        ValueError: A flag is invalid.
    """
    scene = scene_of(arguments)
    call_flags.check_out(arguments.out)
    from . import pictures

    pictures.draw(scene, arguments.out)
    print(arguments.out)


def scene_of(arguments: argparse.Namespace) -> Scene:
    """Return the scene (the content of the picture) that the flags describe.

    Raises:
        ValueError: Flags are inconsistent.
    """
    grid = _grid(arguments)
    check_positive(arguments, ("seq", "heads", "kv_heads", "width"))
    if arguments.picture not in ("mask", "layout"):
        _at_most("--ranks", grid.size, RANKS)
    if arguments.picture == "tree":
        return tree_scene(arguments, grid)
    seq_len = arguments.seq or max(8 * grid.size, inputs.least_seq(arguments.lengths, grid.size))
    if arguments.picture in ("mask", "layout"):
        _at_most("--seq", seq_len, POSITIONS if arguments.picture == "mask" else STRIP)
    if arguments.picture == "scan":
        return scan_scene(arguments, grid, seq_len)
    if arguments.picture == "layout":
        return _layouts(arguments, grid, seq_len)
    shards = _shards(arguments, inputs.mask_of(arguments, seq_len), arguments.layout, grid, seq_len)
    if arguments.picture == "mask":
        return MaskScene(shards, rings.forward("ring", Grid(1, grid.size)))
    return schedule_scene(
        shards, grid, _sizes(arguments, shards), arguments.algorithm,
        backward=arguments.backward, side=arguments.side, route=arguments.route,
        only=arguments.rank,
    )  # fmt: skip


def _shards(
    arguments: argparse.Namespace, shown: inputs.ShownMask, name: str, grid: Grid, seq_len: int
) -> Shards:
    """Return the sequence and its mask, divided into shards by the layout `name`."""
    layout, text = inputs.layout_of(arguments, name, grid, shown.documents, shown.window)
    layout.check(seq_len)
    shards = Shards(shown.mask, layout, seq_len, shown.text, text)
    if shards.key_len != seq_len:
        if arguments.picture != "schedule":
            raise ValueError(
                f"--mask {shown.text} has {shards.key_len} keys for {seq_len} queries, and only "
                "`show schedule` draws masks with different numbers of keys and queries; use "
                "`show schedule`, or another mask"
            )
        layout.check(shards.key_len)
    return shards


def _layouts(arguments: argparse.Namespace, grid: Grid, seq_len: int) -> LayoutScene:
    shown = inputs.mask_of(arguments, seq_len)
    names = [arguments.layout] if arguments.layout else list(LAYOUTS)
    if not arguments.layout and shown.documents is not None:
        names.append("balanced")
    if not arguments.mask and arguments.lengths is None:
        shown = shown._replace(text="")  # without a mask, the work of ranks is not drawn
    rows = [_shards(arguments, shown, name, grid, seq_len) for name in names]
    return LayoutScene(tuple(rows))


def _grid(arguments: argparse.Namespace) -> Grid:
    nodes, per_node = arguments.nodes, arguments.per_node
    if (nodes is None) != (per_node is None):
        raise ValueError("--nodes and --per-node require each other; set both, or set --ranks")
    if nodes is not None and arguments.ranks not in (None, nodes * per_node):
        raise ValueError(
            f"--ranks {arguments.ranks} differs from --nodes {nodes} x --per-node {per_node}; "
            "remove --ranks"
        )
    check_positive(arguments, ("ranks", "nodes", "per_node"))
    if nodes is None:
        return Grid(1, 4 if arguments.ranks is None else arguments.ranks)
    return Grid(nodes, per_node)


def _at_most(flag: str, value: int, limit: int) -> None:
    if value > limit:
        raise ValueError(
            f"{flag}: a picture shows at most {limit}, got {value}; divide all sizes (ranks, "
            "tokens, window) by the same factor"
        )


def _sizes(arguments: argparse.Namespace, shards: Shards) -> Sizes:
    """Return the sizes of an attention call with batch 1.

    Inputs are bf16. Gradients and row statistics are sent in fp32.
    """
    if arguments.heads % arguments.kv_heads:
        raise ValueError(
            f"--kv-heads must divide --heads, got {arguments.kv_heads} and {arguments.heads}"
        )
    return Sizes(
        tokens=shards.seq_len // shards.size, batch=1, heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        width=arguments.width, value_width=arguments.width, itemsize=2, stat_itemsize=4,
        wire_itemsize=4, needs_grad=(True, True, True), key_tokens=shards.key_len // shards.size,
        values_are_keys=arguments.values_are_keys,
    )  # fmt: skip
