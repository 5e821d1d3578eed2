"""Write docs/gallery.md and its pictures: `make gallery`.

Every picture is one call of `megatron-burst show`, which the page prints above it. `--check`
reports whether gallery.md is up to date and writes nothing.
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

Each command below draws the picture under it, from the masks, layouts and schedules of a run.
`megatron-burst show mask --help` lists all options.

- **Mask**: left in sequence order, right sorted by rank. A visible pair has the colour of the rank
  that computes it; small numbers are the steps of a ring.
  Imbalance is the work of the busiest rank over the mean, step by step: at 1.00 no rank waits.
- **Schedule**: time runs to the right. A box is one step of one rank. It has a text
  line per pair of chunks: `q3 k1` means queries of rank 3 and keys of rank 1. The bar in a box is
  the number of visible pairs; the rest of the box is waiting. An arrow is a chunk in the colour of
  its owner: filled for a copy, pale for a gradient, striped for a partial output; `3/8` means three
  of eight rows. Dashed boxes are idle, dashed arrows are transfers that are skipped.
- **Scan of states** ([linear attention](linear-attention.md)): the pieces of the sequence
  are at the top, in the colour of their rank. A column is a round: s3 is the state that enters
  piece 3, m3 the map of piece 3. Red arrows are transfers to another node.
- **Tree** ([prefix trees](trees.md)): a bar is a segment, consecutive tokens without a branch, from
  left to right. The mask has the rows in depth-first order.
"""


class Picture(NamedTuple):
    """One picture.

    Attributes:
        name: Name of its file.
        arguments: Arguments of `show`.
        text: Its description.
    """

    name: str
    arguments: str
    text: str


class Section(NamedTuple):
    title: str
    pictures: tuple[Picture, ...]
    text: str = ""  # below the title


OWN_MASKS = f"""\
`--mask MODULE:NAME` draws your own mask: NAME is a mask or a function without arguments that
returns one. The commands below use `docs/gallery_masks.py` (`export PYTHONPATH=docs`):

```python
{(DOCS / "gallery_masks.py").read_text(encoding="utf-8").split(chr(10), 2)[2]}```
"""
MIXED = "686,24,27,12,220,2,822,19,97,41,538,3,37,34,329,12,46,16,64,144,12,334,232,127,218"
PACKED = "--lengths 3,6,12,3,16,5,6,13"
SECTIONS = (
    Section("Causal", (
        Picture("layouts-causal", "layout --mask causal --ranks 8",
                "Contiguous: the first ranks have little work. Zigzag is balanced, striped "
                "nearly."),
    )),
    Section("Windows", (
        Picture("window-contiguous",
                "schedule --ranks 8 --mask window --left 11 --layout contiguous",
                "Contiguous: a window of one and a half shards needs all rows of the chunk one hop "
                "away and three of its eight rows two hops away. All other steps are idle."),
    )),
    Section("Documents, prefixes, blocks, dilation", (
        Picture("documents-zigzag",
                "mask --lengths 19,8,37 --layout zigzag --ranks 4 --seq 64",
                "Zigzag over the whole pack: no padding; the balance depends on the document "
                "boundaries."),
        Picture("documents-within",
                "mask --lengths 16,8,40 --layout zigzag --per-document --ranks 4 --seq 64",
                "Zigzag within each document, as Megatron packs them: balanced, but documents must "
                "be multiples of 2 x ranks."),
        Picture("blocks-zigzag",
                "mask --mask gallery_masks:random_blocks --layout zigzag --ranks 8 --seq 128",
                "A random block table with zigzag: at every step some ranks wait."),
        Picture("blocks-striped",
                "mask --mask gallery_masks:random_blocks --layout block_striped --block 16 "
                "--ranks 8 --seq 128",
                "The same table with each block striped over all ranks: all pairs of shards have "
                "equal work, for any table."),
    ), OWN_MASKS),
    Section("Algorithms", (
        Picture("ring-forward", "schedule --algorithm ring --nodes 2 --per-node 4",
                "One ring over two nodes: at every step two chunks cross between nodes, and all "
                "other ranks wait. Fewer ranks need the later half of a chunk, so messages "
                "shrink."),
        Picture("burst-forward", "schedule --algorithm burst --nodes 2 --per-node 4",
                "Burst: a chunk crosses between nodes once, while the node computes with its own "
                "chunks."),
        Picture("burst-backward-query",
                "schedule --nodes 2 --per-node 2 --backward --side query --layout striped",
                "Backward, side query: a gradient is sent one step after its chunk. It crosses "
                "between nodes once, after the node has added all contributions."),
        Picture("all-gather-forward",
                "schedule --algorithm all_gather --nodes 2 --per-node 2 --lengths 10,7,15 "
                "--layout contiguous",
                "All-gather starts all sends at once, only to ranks that need the rows."),
    )),
    Section("Packed documents on several nodes", (
        Picture("documents-burst",
                f"schedule --algorithm burst --nodes 4 --per-node 2 --route ring {PACKED}",
                "Burst: rows for a distant node are forwarded by the nodes before it, so they "
                "cross between nodes more than once."),
        Picture("documents-multicast",
                f"schedule --algorithm multicast --nodes 4 --per-node 2 {PACKED}",
                "Multicast, same batch: the owner sends each row once to a node, whose ranks "
                "forward it. The bytes between nodes are minimal for this layout."),
    )),
    Section("Packed documents of mixed lengths", (
        Picture("documents-balanced",
                f"layout --mask causal --lengths {MIXED} --nodes 2 --per-node 4",
                "One pack in four layouts. Balanced gives every rank equally many tokens and "
                "nearly equally many pairs, with most documents whole on one rank."),
    )),
    Section("Tiles", (
        Picture("tile-forward", "schedule --algorithm tile --nodes 2 --per-node 4",
                "Every rank computes two query chunks with four key chunks. Partial outputs of "
                "other ranks' queries are sent back to these ranks (striped arrows)."),
    )),
    Section("TokenRing", (
        Picture("token-ring-forward", "schedule --algorithm token_ring --ranks 4 --mask full",
                "Queries are sent around the ring, and each partial output directly back to the "
                "rank of its queries."),
    )),
    Section("States of linear attention", (
        Picture("scan-two-level", "scan --algorithm two_level --nodes 2 --per-node 4",
                "Zigzag's chain visits the ranks in order and then in reverse. Each part of a "
                "state has one rank per node, which gathers the maps of the node's pieces, sends "
                "its part to the next node, and sends entering states to the ranks of its node."),
    )),
    Section("Prefix trees", (
        Picture("tree-balanced",
                "tree --trajectories docs/gallery/tree.jsonl --nodes 2 --per-node 4",
                "Eight samples of one prompt, some with shared turns. Every rank holds equally "
                "many rows and computes nearly equally many pairs. The prompt's keys and values "
                "cross to the other node once."),
    )),
)  # fmt: skip


def command(picture: Picture, file: str) -> list[str]:
    """Return the arguments of `megatron-burst` that draw a picture into a file."""
    words = shlex.split(picture.arguments)
    words = [str(DOCS.parent / word) if word.startswith("docs/") else word for word in words]
    return ["show", *words, "--out", file]


def numbers(picture: Picture) -> str:
    """Return the first facts of the picture's caption, as its alternative text."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    scene = show.scene_of(parser.parse_args(command(picture, f"{picture.name}.png")[1:]))
    return "; ".join(words.caption(scene)[:2])


def _wrapped(line: str) -> list[str]:
    """Return the lines of a command, which break before an option."""
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
