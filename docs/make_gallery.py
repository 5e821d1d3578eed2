"""Write docs/gallery.md and its pictures: `make gallery`.

Each picture is the output of one command `megatron-burst show`. The page prints the command above
the picture. `--check` reports whether gallery.md is up to date and writes nothing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from megatron_burst.cli import main as cli
from megatron_burst.plugins.tools import show
from megatron_burst.plugins.tools.show import words

DOCS = Path(__file__).parent
INTRO = """\
# What do masks, layouts and schedules look like?

Each command draws the picture below it, with the masks, layouts and schedules that a run uses.
`megatron-burst show mask --help` lists all options.

- **Mask**: in the left picture positions are in order, in the right picture they are sorted by
  rank. A visible pair has the colour of the rank that computes it. Small numbers are the steps of a
  ring. Imbalance is the work of the busiest rank of each step, divided by the mean of all ranks: at
  1.00 no rank waits.
- **Schedule**: time runs to the right. A box is one step of one rank, with a line of text for each
  pair of chunks: `q3 k1` means queries of rank 3 and keys of rank 1. The bar in a box shows the
  number of visible pairs; in the rest of the box the rank waits. An arrow is the transfer of a
  chunk, in the colour of the rank whose rows it has: filled for a copy, pale for a gradient,
  striped for a partial output. `3/8`: three of eight rows are sent. A dashed box is a step without
  work, a dashed arrow is a skipped transfer.
- **Scan of states** ([linear attention](linear-attention.md)): the top row has the pieces of the
  sequence, in the colours of their ranks. Each column is one round of messages, and an arrow is one
  message. Label s3 is the state at the start of piece 3. Label m3 is the map of piece 3: how the
  piece changes a state. Rounds with more than 8 messages have no labels. Red arrows cross between
  nodes.
- **Tree** ([prefix trees](trees.md)): a bar is a segment (consecutive tokens without a branch). The
  tree grows from left to right. In the mask, rows are in depth-first order.
"""


class Picture(NamedTuple):
    """One picture.

    Attributes:
        name: Name of the file, without extension.
        arguments: Arguments of `show`.
        text: Description above the command.
    """

    name: str
    arguments: str
    text: str


class Section(NamedTuple):
    title: str
    pictures: tuple[Picture, ...]
    text: str = ""  # text below the title


OWN_MASKS = f"""\
`--mask MODULE:NAME` draws your own mask. NAME is a mask, or a function without arguments that
returns a mask. The next commands use the masks in `docs/gallery_masks.py`; set `PYTHONPATH=docs`:

```python
{(DOCS / "gallery_masks.py").read_text(encoding="utf-8").split(chr(10), 2)[2]}```
"""
MIXED = "686,24,27,12,220,2,822,19,97,41,538,3,37,34,329,12,46,16,64,144,12,334,232,127,218"
PACKED = "--lengths 3,6,12,3,16,5,6,13"
SECTIONS = (
    Section("Causal", (
        Picture("layouts-causal", "layout --mask causal --ranks 8",
                "In layout contiguous the first ranks have little work. Zigzag is balanced, and "
                "striped is nearly balanced."),
    )),
    Section("Windows", (
        Picture("window-contiguous",
                "schedule --ranks 8 --mask window --left 11 --layout contiguous",
                "The layout is contiguous; the window has 12 tokens, a rank 8. A rank needs "
                "all rows of the previous rank, and three rows of the rank before that. In all "
                "other steps the rank has no work."),
    )),
    Section("Documents, prefixes, blocks, dilation", (
        Picture("documents-zigzag",
                "mask --lengths 19,8,37 --layout zigzag --ranks 4 --seq 64",
                "Zigzag over the whole pack needs no padding, but the balance depends on the "
                "document lengths."),
        Picture("documents-within",
                "mask --lengths 16,8,40 --layout zigzag --per-document --ranks 4 --seq 64",
                "Zigzag within each document, as in Megatron, is balanced. But document lengths "
                "must be multiples of 2 x ranks."),
        Picture("blocks-zigzag",
                "mask --mask gallery_masks:random_blocks --layout zigzag --ranks 8 --seq 128",
                "With a random table of visible blocks and zigzag, some ranks wait at every step."),
        Picture("blocks-striped",
                "mask --mask gallery_masks:random_blocks --layout block_striped --block 16 "
                "--ranks 8 --seq 128",
                "If each block is striped over all ranks, all pairs of shards have nearly equal "
                "work, for any table."),
    ), OWN_MASKS),
    Section("Algorithms", (
        Picture("ring-forward", "schedule --algorithm ring --nodes 2 --per-node 4",
                "One ring over two nodes: at every step two chunks cross between nodes, and all "
                "other ranks wait. Few ranks need the second half of a chunk, so messages become "
                "smaller on the way."),
        Picture("burst-forward", "schedule --algorithm burst --nodes 2 --per-node 4",
                "Algorithm burst: a chunk crosses between nodes once, while the receiving node "
                "computes with its own chunks."),
        Picture("burst-backward-query",
                "schedule --nodes 2 --per-node 2 --backward --side query --layout striped",
                "Backward with side query: a gradient is sent one step after its chunk. It crosses "
                "between nodes once, after the node has added all contributions."),
        Picture("all-gather-forward",
                "schedule --algorithm all_gather --nodes 2 --per-node 2 --lengths 10,7,15 "
                "--layout contiguous",
                "Algorithm all_gather starts all transfers at the beginning. It sends rows only to "
                "ranks that need them."),
    )),
    Section("Packed documents on several nodes", (
        Picture("documents-burst",
                f"schedule --algorithm burst --nodes 4 --per-node 2 --route ring {PACKED}",
                "Algorithm burst with `--route ring`: every node passes rows on to the next node, "
                "so a row crosses between nodes more than once."),
        Picture("documents-multicast",
                f"schedule --algorithm multicast --nodes 4 --per-node 2 {PACKED}",
                "Algorithm multicast with the same documents: a rank sends each of its rows once "
                "to each node that needs the row, and ranks of that node pass it on. Bytes between "
                "nodes are minimal for this layout."),
    )),
    Section("Packed documents of mixed lengths", (
        Picture("documents-balanced",
                f"layout --mask causal --lengths {MIXED} --nodes 2 --per-node 4",
                "One pack in four layouts. With `balanced` all ranks have the same number of "
                "tokens and nearly the same number of visible pairs. Most documents are whole on "
                "one rank."),
    )),
    Section("Tiles", (
        Picture("tile-forward", "schedule --algorithm tile --nodes 2 --per-node 4",
                "Algorithm tile: every rank computes attention of two query chunks to four key "
                "chunks. It sends partial outputs for queries of other ranks back to these ranks "
                "(striped arrows)."),
    )),
    Section("TokenRing", (
        Picture("token-ring-forward", "schedule --algorithm token_ring --ranks 4 --mask full",
                "Algorithm token_ring: ranks send queries around the ring, and each partial output "
                "directly back to the rank that owns the queries."),
    )),
    Section("States of linear attention", (
        Picture("scan-two-level", "scan --algorithm two_level --nodes 2 --per-node 4",
                "In zigzag, ranks 0 to 7 hold the pieces in this order, then ranks 6 to 0. The "
                "map of a piece computes the state after the piece from the state before it. "
                "States are cut into four parts, one for each rank of a node. First, a rank "
                "receives this part of all maps of its node. Then it sends this part of the state "
                "to the next node, and to the ranks of its node."),
    )),
    Section("Prefix trees", (
        Picture("tree-balanced",
                "tree --trajectories docs/gallery/tree.jsonl --nodes 2 --per-node 4",
                "Eight samples of one prompt, some with shared turns. All ranks hold the same "
                "number of rows, and compute nearly the same number of pairs. The keys and values "
                "of the prompt are sent to the other node once."),
    )),
)  # fmt: skip


def command(picture: Picture, file: str) -> list[str]:
    """Return the arguments of `megatron-burst` that draw a picture into a file."""
    words = shlex.split(picture.arguments)
    words = [str(DOCS.parent / word) if word.startswith("docs/") else word for word in words]
    return ["show", *words, "--out", file]


def numbers(picture: Picture) -> str:
    """Return the alternative text of a picture: the start of its caption, without transfers."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    scene = show.scene_of(parser.parse_args(command(picture, f"{picture.name}.png")[1:]))
    lines = [line for line in words.caption(scene)[:2] if not line.startswith(("hops:", "intra:"))]
    return "; ".join(lines)


def _wrapped(line: str) -> list[str]:
    """Return the lines of a command, broken before options."""
    first, *options = line.split(" --")
    lines = [first]
    for option in options:
        if len(f"{lines[-1]} --{option}") <= 90:
            lines[-1] += f" --{option}"
        else:
            lines.append(f"--{option}")
    return lines


def page() -> str:
    """Return the text of gallery.md."""
    parts = [INTRO]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        parts += [section.text] if section.text else []
        for picture in section.pictures:
            file = f"gallery/{picture.name}.png"
            line = f"megatron-burst show {picture.arguments} --out {picture.name}.png"
            code = " \\\n        ".join(_wrapped(line))
            parts.append(f"{picture.text}\n\n    {code}\n\n![{numbers(picture)}]({file})\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare gallery.md")
    check = parser.parse_args().check
    target = DOCS / "gallery.md"
    if check:
        same = target.exists() and target.read_text(encoding="utf-8") == page()
        print("docs/gallery.md is up to date" if same else "docs/gallery.md: run make gallery")
        return 0 if same else 1
    folder = DOCS / "gallery"
    folder.mkdir(exist_ok=True)
    pictures = [picture for section in SECTIONS for picture in section.pictures]
    for old in folder.glob("*.png"):
        if old.stem not in {picture.name for picture in pictures}:
            old.unlink()
    for picture in pictures:
        if cli.main(command(picture, str(folder / f"{picture.name}.png"))):
            return 1
    target.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
