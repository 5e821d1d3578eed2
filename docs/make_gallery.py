"""Makes docs/gallery.md and its pictures: `make gallery`.

Every picture is one call of `megatron-burst show`, printed above it; nothing is drawn by hand.
`--check` writes nothing and says whether gallery.md is what this script would write.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from megatron_burst.cli import main as cli
from megatron_burst.cli import show
from megatron_burst.cli.show import words

DOCS = Path(__file__).parent
INTRO = """\
# Gallery

Who computes what, at which step, what moves, and what is left out: mask by layout by algorithm.
Every picture is drawn by the command above it from the masks, layouts and schedules that run;
`make gallery` draws them all again. `megatron-burst show --help` says what else can be drawn, and
without `--png` the same comes as text.

How to read a **mask**: on the left the score matrix in the order of the sequence, on the right the
same with the positions of each rank together; a pair that attends has the colour of the rank that
computes it, the small numbers say at which step of a ring. Imbalance is the busiest rank over the
mean, step by step: 1.00 means that nobody waits.

How to read a **schedule**: time runs to the right, a box is a step of a rank, the bar in it how
many pairs are visible (a full bar is the busiest step of the picture; what it leaves free is
waiting), an arrow below is a chunk under way, from where it is posted to where it lands, in the
colour of its owner. Dashed is what is skipped, or not sent because nobody needs it.
"""


class Picture(NamedTuple):
    """One picture: its file's name, the arguments of `show`, and what to see in it."""

    name: str
    arguments: str
    text: str


class Section(NamedTuple):
    title: str
    pictures: tuple[Picture, ...]


SECTIONS = (
    Section("Causal", (
        Picture("layouts-causal", "layout --mask causal --ranks 8",
                "The three layouts, and what a causal mask makes of them: contiguous leaves the "
                "first ranks idle, zigzag is exact, striped nearly."),
        Picture("causal-contiguous", "mask --mask causal --layout contiguous --ranks 8",
                "Contiguous: the last rank sees every key and the first its own only; at each "
                "step more ranks have nothing to do, and wait."),
        Picture("causal-zigzag", "mask --mask causal --layout zigzag --ranks 8",
                "Zigzag: an early piece and a late one together see the same number of keys on "
                "every rank."),
        Picture("causal-striped", "mask --mask causal --layout striped --ranks 8",
                "Striped: every pair of shards is a triangle, so every step is alike, on any "
                "prefix of the sequence."),
    )),
    Section("Windows", (
        Picture("window-contiguous",
                "schedule --ranks 8 --mask 'causal & window(7)' --layout contiguous",
                "Contiguous: a window no longer than a shard needs the neighbour's keys, one hop; "
                "all other steps are skipped."),
        Picture("window-zigzag", "schedule --ranks 8 --mask 'causal & window(7)' --layout zigzag",
                "Zigzag: the pieces that a window needs are at the neighbours on both sides, so "
                "they are sent directly, not round the ring."),
        Picture("window-striped", "mask --mask 'causal & window(15)' --layout striped --ranks 8",
                "Striped: everybody needs everybody's keys, so nothing is skipped, and every rank "
                "has nearly the same work."),
    )),
    Section("Documents, prefixes, blocks, dilation", (
        Picture("documents-zigzag",
                "mask --mask 'documents([0, 19, 27, 64]) & causal' --layout zigzag --ranks 4 "
                "--seq-len 64",
                "Packed documents over the whole sequence's zigzag: no document is padded, and the "
                "balance depends on where the documents end."),
        Picture("documents-within",
                "mask --mask 'documents([0, 16, 24, 64]) & causal' --ranks 4 --seq-len 64 "
                "--layout 'zigzag([0, 16, 24, 64])'",
                "Zigzag within each document, as Megatron packs them: balanced, for documents that "
                "are multiples of 2 x ranks."),
        Picture("prefix-zigzag", "mask --mask 'causal | prefix(20)' --layout zigzag --ranks 8",
                "A prefix language model: everyone sees the first 20 keys, the rest is causal."),
        Picture("blocks-zigzag",
                "mask --mask 'causal & random_blocks(16)' --layout zigzag --ranks 8 --seq-len 128",
                "A random block table under zigzag: steps differ, some pairs are empty, somebody "
                "always waits."),
        Picture("blocks-striped",
                "mask --mask 'causal & random_blocks(16)' --layout 'block_striped(16)' --ranks 8 "
                "--seq-len 128",
                "The same table with every block striped over all ranks: whatever the table, every "
                "pair of shards looks alike."),
        Picture("dilated-striped",
                "mask --mask 'causal & (dilated(4) | window(3))' --layout striped --ranks 8",
                "A dilated pattern beside a short window: striped by eight, whole pairs of shards "
                "are empty and are skipped."),
    )),
    Section("Algorithms", (
        Picture("ring-forward", "schedule --algorithm ring --nodes 2 --ranks-per-node 4",
                "One ring over two nodes: at every step two chunks cross between nodes, and the "
                "others wait for them."),
        Picture("burst-forward", "schedule --algorithm burst --nodes 2 --ranks-per-node 4",
                "Burst: a chunk crosses between nodes once, during the four steps that the node "
                "spends on its own chunks."),
        Picture("burst-backward-query",
                "schedule --nodes 2 --ranks-per-node 4 --backward --side query --layout striped",
                "Backward with queries travelling: each gradient follows one step behind its chunk "
                "and crosses between nodes once, when its node has added all it has."),
        Picture("burst-backward-kept",
                "schedule --nodes 2 --ranks-per-node 4 --backward --side kv --kv-cache 1",
                "Backward with all visiting keys kept from forward: only gradients travel."),
        Picture("double-ring-backward",
                "schedule --algorithm double_ring --nodes 2 --ranks-per-node 2 --backward "
                "--side query --layout contiguous",
                "LoongTrain's double ring waits where its gradients land (red); contiguous and "
                "causal, so that skipped steps and hops left out can be seen."),
        Picture("all-gather-forward",
                "schedule --algorithm all_gather --nodes 2 --ranks-per-node 2 --mask "
                "'documents([0, 10, 17, 32]) & causal' --layout contiguous",
                "All-gather starts every send at once, but only to ranks that need the keys."),
    )),
)  # fmt: skip


def command(picture: Picture, file: str) -> list[str]:
    """The arguments of `megatron-burst` that draw a picture into a file."""
    return ["show", *shlex.split(picture.arguments), "--png", file]


def numbers(picture: Picture) -> str:
    """What stands at the foot of the picture, for those who cannot see it."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    scene = show.scene_of(parser.parse_args(command(picture, f"{picture.name}.png")[1:]))
    return "; ".join(words.caption(scene))


def page() -> str:
    """The text of gallery.md."""
    parts = [INTRO]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        for picture in section.pictures:
            file = f"gallery/{picture.name}.png"
            line = f"megatron-burst show {picture.arguments} --png {picture.name}.png"
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
