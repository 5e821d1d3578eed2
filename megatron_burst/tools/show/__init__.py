"""`megatron-burst show`: draw masks, layouts, schedules and scans of states, as text or as PNG.

This module holds the flags and the size limits. `scene`, `packs` and `scans` compute what is drawn;
`text`, `pictures` and `timeline` draw it. rich and matplotlib are imported only when they
draw.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...layout import LAYOUTS
from ...schedule import rings
from ...schedule.algorithms import ALGORITHMS
from ...schedule.cost import Sizes
from ...schedule.tables import ROUTES, Grid
from .. import call_flags
from ..call_flags import check_positive
from . import language
from .balance import best_layout
from .packs import PackScene, pack_scene
from .scans import add_flags as add_scan
from .scans import scan_scene
from .scene import LayoutScene, MaskScene, Shards, schedule_scene
from .words import Scene

# The largest pictures that can be read: positions of a matrix or a strip, ranks of a timeline.
POSITIONS = {"text": 256, "png": 1024}
RANKS = {"text": 32, "png": 32}
PICTURES = {
    "mask": "the score matrix, coloured by the rank that computes each pair",
    "schedule": "what each rank computes and sends at each step",
    "layout": "which positions each rank holds",
    "documents": "which rank holds which part of packed documents, in three layouts",
    "scan": "how states of linear attention pass from rank to rank",
}
PACK = 1 << 20  # positions of packed documents, of which only runs are drawn

EPILOG = """\
masks:    full, causal, window(LEFT, RIGHT), dilated(STRIDE), prefix(N), documents(CU_SEQLENS),
          block_sparse(TABLE, BLOCK), random_blocks(BLOCK, SEED), dense(TABLE)
          joined by & and |, with ( ) as in Python: causal & (window(23) | prefix(4))
          LEFT and RIGHT: positions, None for no limit; RIGHT is 0 if not given
          CU_SEQLENS: cumulative document lengths, [0, 3, 8, 16]; TABLE: [[1, 0], [1, 1]]
layouts:  contiguous, zigzag, striped, block_striped(BLOCK),
          zigzag(CU_SEQLENS) for zigzag within each document, balanced(CU_SEQLENS);
          balanced alone takes the documents of --mask
lengths:  300, 20, 5 or random(SEED, MEDIAN), which fill --seq-len positions

examples:
  megatron-burst show mask --mask 'causal & window(23)' --layout striped --ranks 8
  megatron-burst show schedule --algorithm burst --nodes 2 --ranks-per-node 4
  megatron-burst show schedule --backward --side query --png backward.png
  megatron-burst show layout --mask causal --ranks 4
  megatron-burst show scan --algorithm two_level --nodes 2 --ranks-per-node 4
  megatron-burst show documents --lengths 300,20,5,60,40,31 --ranks 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `show`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    pictures = parser.add_subparsers(dest="picture", metavar="PICTURE", required=True)
    for name, meaning in PICTURES.items():
        sub = pictures.add_parser(name, help=meaning, epilog=EPILOG,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        add = sub.add_argument
        if name == "documents":
            add("--lengths", required=True, metavar="LENGTHS",
                help="tokens of each document: 300,20,5 or random(SEED, MEDIAN)")  # fmt: skip
        if name != "scan":
            mask = None if name == "layout" else "causal"
            add("--mask", default=mask, metavar="MASK", help="which pairs attend, for example "
                f"'causal & window(1023)' (default: {mask or 'none, and no work is drawn'})",
            )  # fmt: skip
        if name != "documents":
            layout = None if name == "layout" else "zigzag"
            add("--layout", default=layout, metavar="LAYOUT",
                help=f"which positions each rank holds (default: {layout or 'all'})")  # fmt: skip
        add("--ranks", type=int, metavar="N", help="ranks on one node (default: 4)")
        add("--nodes", type=int, metavar="N", help="number of nodes, with --ranks-per-node")
        add("--ranks-per-node", type=int, metavar="N", help="ranks on each node")
        add("--seq-len", type=int, metavar="N",
            help="length of the sequence (default: 8 positions per rank)")  # fmt: skip
        add("--png", type=Path, metavar="FILE", help="write a PNG file instead of text")
        if name == "schedule":
            _add_schedule(sub)
        elif name == "scan":
            add_scan(sub)


def _add_schedule(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--algorithm", default="burst", choices=ALGORITHMS, help="default: burst")
    add("--backward", action="store_true", help="draw backward instead of forward")
    call_flags.add_side(sub)
    add("--route", default="auto", choices=("auto", *ROUTES), help="chunks travel round the ring, "
        "or directly from their owners (default: fewer bytes)")  # fmt: skip
    add("--kv-cache", type=float, default=0.0, metavar="FRACTION", help="fraction of travelling "
        "keys and values that forward keeps for backward (default: 0)")  # fmt: skip
    add("--rank", type=int, metavar="N", help="draw only this rank")
    call_flags.add_heads(sub, width=128)


def run(arguments: argparse.Namespace) -> None:
    """Draw what the flags ask for. Raises ValueError for bad flags."""
    scene = scene_of(arguments)
    if arguments.png is None:
        from . import text

        text.show(scene)
        return
    if arguments.png.suffix != ".png":
        raise ValueError(f"--png: the name of the file must end in .png, got {arguments.png}")
    call_flags.check_place(arguments.png, "--png")
    from . import pictures

    pictures.draw(scene, arguments.png)
    print(arguments.png)


def scene_of(arguments: argparse.Namespace) -> Scene:
    """The scene that the flags describe. Raises ValueError for flags that do not fit together."""
    grid = _grid(arguments)
    kind = "text" if arguments.png is None else "png"
    check_positive(arguments, ("seq_len", "heads", "kv_heads", "width"))
    if arguments.picture == "documents":
        _at_most("--ranks", grid.size, RANKS[kind], kind)
        return _documents(arguments, grid)
    seq_len = 8 * grid.size if arguments.seq_len is None else arguments.seq_len
    if arguments.picture in ("schedule", "scan"):
        _at_most("--ranks", grid.size, RANKS[kind], kind)
    else:
        _at_most("--seq-len", seq_len, POSITIONS[kind], kind)
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
        kv_cache=arguments.kv_cache, only=arguments.rank,
    )  # fmt: skip


def _documents(arguments: argparse.Namespace, grid: Grid) -> PackScene:
    """Documents, filled up with padding to what zigzag of the pack can cut."""
    multiple = 2 * grid.size
    wanted = arguments.seq_len or 64 * grid.size
    if wanted > PACK:
        raise ValueError(f"--seq-len: packs of at most {PACK} tokens are drawn, got {wanted}")
    lengths = language.lengths(arguments.lengths, wanted)
    total = sum(lengths)
    if total > (arguments.seq_len or PACK):
        raise ValueError(f"--lengths: {total} tokens do not fit into {arguments.seq_len or PACK}")
    seq_len = arguments.seq_len or -(-total // multiple) * multiple
    if seq_len % multiple:
        raise ValueError(f"--seq-len must be a multiple of {multiple} here, got {seq_len}")
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
    nodes, per_node = arguments.nodes, arguments.ranks_per_node
    if (nodes is None) != (per_node is None):
        raise ValueError("--nodes and --ranks-per-node go together; give both, or --ranks")
    if nodes is not None and arguments.ranks not in (None, nodes * per_node):
        raise ValueError(
            f"--ranks {arguments.ranks} is not --nodes {nodes} x --ranks-per-node {per_node}"
        )
    check_positive(arguments, ("ranks", "nodes", "ranks_per_node"))
    if nodes is None:
        return Grid(1, 4 if arguments.ranks is None else arguments.ranks)
    return Grid(nodes, per_node)


def _at_most(flag: str, value: int, limit: int, kind: str) -> None:
    if value > limit:
        more = flag == "--seq-len" and kind == "text"
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
