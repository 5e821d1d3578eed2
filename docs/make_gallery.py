"""Makes docs/gallery.md and its pictures: `make gallery`.

Every picture is one call of `megatron-burst show`, which the page prints above it. `--check` writes
nothing, and reports whether gallery.md is up to date.
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
# Gallery

Which rank computes what at which step, and what is sent, for masks, layouts and algorithms. The
command above each picture draws it from the masks, layouts and schedules that run;
`megatron-burst show mask --help` lists all options.

How to read a **mask**: left the score matrix in the order of the sequence, right with the
positions of each rank together. A pair that attends has the colour of the rank that computes it,
and small numbers are the steps of a ring. Imbalance is the work of the busiest rank over the
mean, step by step: at 1.00 no rank waits. A picture of **layouts** counts all steps together.

How to read a **schedule**: time runs to the right. A box is a step of a rank with a line for each
pair of chunks, such as q3 k1: the queries of rank 3 with the keys of rank 1. The bar in it is the
number of visible pairs; a full bar is the busiest step of the picture, and the rest of a box is
waiting. An arrow is a chunk from the time it is sent to the time it arrives, in the colour of its
owner: filled for a copy (k0, q0), pale for a gradient (dk0, dq0), striped for a partial output
(o0). It stands for all rows of its owner and is filled where rows are sent: `3/8` means three of
the owner's eight. Dashed boxes are idle, and dashed arrows are transfers that are skipped because
no rank needs the chunk.

How to read a **scan of states** ([linear attention](linear-attention.md)): on top are the pieces
of the sequence in the order of positions, in the colour of the rank that holds them. Below, a
column is a round: ranks send from its left side to its right side. s3 is the state that enters
piece 3, s3.1 part 1 of it, m3 what piece 3 does to any state; red arrows go to another node.

How to read a **tree** ([prefix trees](trees.md)): a bar is a run of tokens without a branch, at its
place on the path from the root, so that a trajectory is read from left to right. Its parts have the
colours of the ranks that hold them. The mask has the rows depth first: below each shared run is a
column, the queries of all its branches. Keys and values are counted once for every rank, and once
for every node, that needs them.
"""


class Picture(NamedTuple):
    """One picture: the name of its file, the arguments of `show`, and its description."""

    name: str
    arguments: str
    text: str


class Section(NamedTuple):
    title: str
    pictures: tuple[Picture, ...]
    text: str = ""  # below the title


OWN_MASKS = f"""\
`--mask MODULE:NAME` draws a mask of your own: NAME is a mask, or a function without arguments that
returns one. The commands below take `docs/gallery_masks.py`; first run `export PYTHONPATH=docs`:

```python
{(DOCS / "gallery_masks.py").read_text(encoding="utf-8").split(chr(10), 2)[2]}```
"""
MIXED = "686,24,27,12,220,2,822,19,97,41,538,3,37,34,329,12,46,16,64,144,12,334,232,127,218"
PACKED = "--lengths 3,6,12,3,16,5,6,13"
SECTIONS = (
    Section("Causal", (
        Picture("layouts-causal", "layout --mask causal --ranks 8",
                "The three layouts under a causal mask: contiguous leaves the first ranks idle, "
                "zigzag balances exactly, striped nearly."),
        Picture("causal-contiguous", "mask --mask causal --layout contiguous --ranks 8",
                "Contiguous: the last rank sees every key, and the first only its own. At each "
                "step one more rank has nothing to compute and waits."),
        Picture("causal-zigzag", "mask --mask causal --layout zigzag --ranks 8",
                "Zigzag: every rank holds an early and a late piece, which together see the same "
                "number of keys on all ranks."),
        Picture("causal-striped", "mask --mask causal --layout striped --ranks 8",
                "Striped: every pair of shards is a triangle, so all steps have nearly equal work, "
                "on any prefix of the sequence."),
    )),
    Section("Windows", (
        Picture("window-contiguous",
                "schedule --ranks 8 --mask window --left 11 --layout contiguous",
                "Contiguous: a window of one and a half shards needs the whole chunk one hop away "
                "and three of its eight rows two hops away. So the message shrinks on its way, and "
                "then stops; all other steps are idle."),
        Picture("window-zigzag", "schedule --ranks 8 --mask window --left 7 --layout zigzag",
                "Zigzag: the neighbours on both sides hold the pieces that a window needs, so the "
                "owners send their rows directly instead of round the ring."),
        Picture("window-striped", "mask --mask window --left 15 --layout striped --ranks 8",
                "Striped: every rank needs the keys of every other, so nothing is skipped, and all "
                "ranks have nearly the same work."),
    )),
    Section("Documents, prefixes, blocks, dilation", (
        Picture("documents-zigzag",
                "mask --lengths 19,8,37 --layout zigzag --ranks 4 --seq 64",
                "Packed documents under zigzag over the whole sequence: no document is padded, and "
                "the balance depends on where the documents end."),
        Picture("documents-within",
                "mask --lengths 16,8,40 --layout zigzag --per-document --ranks 4 --seq 64",
                "Zigzag within each document, as Megatron packs them: balanced, but every document "
                "must be a multiple of 2 x ranks."),
        Picture("prefix-zigzag", "mask --mask gallery_masks:prefix_lm --layout zigzag --ranks 8",
                "A prefix language model: all queries see the first 20 keys, the rest is causal."),
        Picture("blocks-zigzag",
                "mask --mask gallery_masks:random_blocks --layout zigzag --ranks 8 --seq 128",
                "A random block table under zigzag: some pairs of shards are empty, and at every "
                "step some rank waits."),
        Picture("blocks-striped",
                "mask --mask gallery_masks:random_blocks --layout block_striped --block 16 "
                "--ranks 8 --seq 128",
                "The same table with every block striped over all ranks: all pairs of shards look "
                "alike, for any table."),
        Picture("dilated-striped",
                "mask --mask gallery_masks:dilated_and_window --layout striped --ranks 8",
                "A dilated pattern and a short window: striped over eight ranks, some pairs of "
                "shards are empty and are skipped."),
    ), OWN_MASKS),
    Section("Algorithms", (
        Picture("ring-forward", "schedule --algorithm ring --nodes 2 --per-node 4",
                "One ring over two nodes: at every step two chunks cross between nodes, and the "
                "other ranks wait for them. Chunks shrink as they go: under zigzag the later half "
                "of a chunk is seen by fewer ranks."),
        Picture("burst-forward", "schedule --algorithm burst --nodes 2 --per-node 4",
                "Burst: a chunk crosses between nodes once, during the four steps in which the "
                "node computes with its own chunks."),
        Picture("burst-backward-query",
                "schedule --nodes 2 --per-node 2 --backward --side query --layout striped",
                "Backward with travelling queries: each gradient follows one step behind its "
                "chunk, and crosses between nodes once, after its node has added all its parts."),
        Picture("double-ring-backward",
                "schedule --algorithm double_ring --nodes 2 --per-node 2 --backward "
                "--side query --layout contiguous",
                "LoongTrain's double ring blocks while its gradients travel (red). The layout is "
                "contiguous, so that the picture has idle steps and left-out hops."),
        Picture("all-gather-forward",
                "schedule --algorithm all_gather --nodes 2 --per-node 2 --lengths 10,7,15 "
                "--layout contiguous",
                "All-gather starts all sends at once, but only to ranks that need the keys, and "
                "only of the rows that they see."),
    )),
    Section("Packed documents on several nodes", (
        Picture("documents-burst",
                f"schedule --algorithm burst --nodes 4 --per-node 2 --route ring {PACKED}",
                "Burst: what a node further along needs is carried through the nodes before it, so "
                "rows cross between nodes more than once."),
        Picture("documents-multicast",
                f"schedule --algorithm multicast --nodes 4 --per-node 2 {PACKED}",
                "Multicast, the same batch: the rows that a node needs cross to it once, from "
                "their owner, and are passed on within the node. The bytes between nodes are the "
                "least that this layout allows."),
    )),
    Section("Packed documents of mixed lengths", (
        Picture("documents-balanced",
                f"layout --mask causal --lengths {MIXED} --nodes 2 --per-node 4",
                "One pack in four layouts: zigzag of the pack gives some ranks much more work than "
                "others. Balanced gives every rank equally many tokens and nearly equally many "
                "pairs, with most documents whole on one rank."),
    )),
    Section("Tiles", (
        Picture("tile-forward", "schedule --algorithm tile --nodes 2 --per-node 4",
                "Two query chunks meet four key chunks on every rank. Where both come from others, "
                "the box has the colours of both, and the output goes back to the rank of the "
                "queries (striped), which merges it with its own."),
        Picture("tile-backward",
                "schedule --algorithm tile --nodes 2 --per-node 2 --backward --mask full",
                "Backward may take another tile than forward: both sides travel, and so do the "
                "gradients of both."),
    )),
    Section("Two ways round", (
        Picture("two-way-forward", "schedule --algorithm two_way --ranks 4 --mask full",
                "Each chunk in two halves, which go round the ring in opposite directions: a rank "
                "computes with two halves per step."),
        Picture("token-ring-forward", "schedule --algorithm token_ring --ranks 4 --mask full",
                "TokenRing: queries go round, and each partial output goes straight back to the "
                "rank of its queries, in the opposite direction."),
    )),
    Section("States of linear attention", (
        Picture("scan-two-level", "scan --algorithm two_level --nodes 2 --per-node 4",
                "Zigzag's chain goes up the ranks and back; the last rank's two pieces meet at the "
                "turn. Each part of a state has its rank in each node: it takes in the maps of "
                "the node's pieces, passes its part of the state on to the next node, and tells "
                "each piece of its node what enters there."),
    )),
    Section("Prefix trees", (
        Picture("tree-balanced",
                "tree --trajectories docs/gallery/tree.jsonl --nodes 2 --per-node 4",
                "Eight samples of one prompt, some of which share turns. Every rank holds as many "
                "rows and computes nearly as many pairs; the prompt lies on one node, and its keys "
                "and values cross to the other once."),
    )),
)  # fmt: skip


def command(picture: Picture, file: str) -> list[str]:
    """The arguments of `megatron-burst` that draw a picture into a file."""
    words = shlex.split(picture.arguments)
    words = [str(DOCS.parent / word) if word.startswith("docs/") else word for word in words]
    return ["show", *words, "--out", file]


def numbers(picture: Picture) -> str:
    """The caption of the picture, as its alternative text."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    scene = show.scene_of(parser.parse_args(command(picture, f"{picture.name}.png")[1:]))
    return "; ".join(words.caption(scene))


def page() -> str:
    """The text of gallery.md."""
    parts = [INTRO]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        parts += [section.text] if section.text else []
        for picture in section.pictures:
            file = f"gallery/{picture.name}.png"
            line = f"megatron-burst show {picture.arguments} --out {picture.name}.png"
            parts.append(f"{picture.text}\n\n    {line}\n\n![{numbers(picture)}]({file})\n")
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
