# SPDX-License-Identifier: Apache-2.0
"""Scenes as text, with rich: the marks can be read without their colours."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...cli.console import unwrapped
from ...masks import Cover
from ...schedule.tables import Chunk
from ...units import byte_size
from . import words
from .colours import of_document, of_rank
from .packs import PADDING, Holding, PackScene
from .scans import ScanScene
from .scene import LayoutScene, MaskScene, ScheduleScene, share
from .trees import SAMPLED, TreeScene

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
HIDDEN = "·"
COVERS = {Cover.FULL: "■", Cover.PARTIAL: "◪", Cover.EMPTY: HIDDEN}
ARROWS = {"intra": "→", "inter": "⇒"}
LETTERS = string.ascii_letters  # of documents
STRIP = 64  # characters of a rank's tokens, at most
BAR = 24  # characters; the length of the busiest rank's bar


def show(scene: words.Scene) -> None:
    """Print a scene."""
    console = unwrapped()  # a terminal wraps a matrix better than rich does
    console.print(Text(words.title(scene), style="bold"))
    console.print(Text(words.subtitle(scene) + "\n", style="dim"))
    for part in DRAWERS[type(scene)](scene):
        console.print(part)
    for line in words.caption(scene):
        console.print(Text(line))


def _mask(scene: MaskScene) -> Iterator[RenderableType]:
    shards, order = scene.shards, scene.shards.order
    edges = set(shards.edges[1:-1].tolist())
    yield Text("global order", style="bold")
    yield _matrix(scene.computers, shards.size, set())
    yield Text("shard order: rank after rank", style="bold")
    yield _matrix(scene.computers[np.ix_(order, order)], shards.size, edges)
    yield _work({}, shards.work)


def _work(columns: Mapping[str, Sequence[int]], work: Sequence[int]) -> Table:
    """The numbers of each rank, and the visible pairs of its queries as a bar."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("rank", *columns, "visible pairs", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    most = max([*work, 1])
    for rank, pairs in enumerate(work):
        bar = Bar(most, 0, pairs, width=BAR, color=of_rank(rank, len(work)))
        numbers = (f"{each[rank]:,}" for each in columns.values())
        table.add_row(str(rank), *numbers, f"{pairs:,}", bar)
    return table


def _matrix(computers: np.ndarray, ranks: int, edges: set[int]) -> Text:
    """A digit for each visible pair, and rules before the rows and columns in `edges`."""
    text = Text(no_wrap=True)
    rule = "".join("┼─" if i in edges else "─" for i in range(len(computers)))
    for i, row in enumerate(computers.tolist()):
        if i in edges:
            text.append(rule + "\n", style="dim")
        for j, rank in enumerate(row):
            if j in edges:
                text.append("│", style="dim")
            _append_digit(text, rank, ranks)
        text.append("\n")
    return text


def _append_digit(text: Text, rank: int, ranks: int) -> None:
    if rank < 0:
        text.append(HIDDEN, style="dim")
    else:
        text.append(DIGITS[rank % len(DIGITS)], style=of_rank(rank, ranks))


def _layouts(scene: LayoutScene) -> Iterator[RenderableType]:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for shards in scene.rows:
        strip = Text(no_wrap=True)
        for rank in shards.holders.tolist():
            _append_digit(strip, rank, shards.size)
        table.add_row(shards.layout_text, strip)
    yield table
    yield Text()


def _packs(scene: PackScene) -> Iterator[RenderableType]:
    most = max(1, *(pairs for held in scene.held for pairs in held.work))
    each = max(len(rows) for held in scene.held for rows in held.rows)
    scale = -(-each // STRIP)
    if scale > 1:
        yield Text(f"a letter stands for {scale} tokens\n", style="dim")
    for held in scene.held:
        yield Text(held.name, style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for rank, pairs in enumerate(held.work):
            bar = Bar(most, 0, pairs, width=BAR, color=of_rank(rank, scene.grid.size))
            last_of_node = (rank + 1) % scene.grid.intra == 0 and rank + 1 < scene.grid.size
            table.add_row(
                str(rank), _documents(held, rank, scale), f"{pairs:,}", bar,
                end_section=last_of_node,
            )  # fmt: skip
        yield table
        yield Text()


def _documents(held: Holding, rank: int, scale: int) -> Text:
    """A letter for every so many tokens: the document of the one in their middle."""
    strip = Text(no_wrap=True)
    for start, stop, document in held.runs(rank):
        # Middles of the letters' tokens, scale // 2, scale // 2 + scale, ..., within the run.
        count = len(range(start + (scale // 2 - start) % scale, stop, scale))
        if document == PADDING:
            strip.append(HIDDEN * count, style="dim")
        else:
            letter = LETTERS[document % len(LETTERS)]
            strip.append(
                letter * count, style=of_document(held.pack.places[document], len(held.pack.real))
            )
    return strip


# --- scans of states -----------------------------------------------------------------------


def _scan(scene: ScanScene) -> Iterator[RenderableType]:
    """The chain, then who sends what to whom, round by round."""
    yield _chain(scene)
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column("rank", justify="right")
    for number in range(scene.rounds):
        table.add_column(f"round {number}")
    for rank in range(scene.grid.size):
        if rank and rank % scene.grid.intra == 0:
            table.add_section()
        style = of_rank(rank, scene.grid.size)
        cells = [_hops(scene, rank, number) for number in range(scene.rounds)]
        table.add_row(Text(str(rank), style=style), *cells)
    yield Text("")
    yield table
    yield Text("")


def _chain(scene: ScanScene) -> Text:
    """A column for each piece: its number, who holds it, and how many rows it has."""
    chain = scene.chains
    columns = [(str(i), str(chain.rank[i]), str(chain.table[i, 2])) for i in scene.pieces]
    text = Text(no_wrap=True)
    for row, name in enumerate(("piece", "rank", "rows")):
        text.append(f"{name:6}")
        for i, column in zip(scene.pieces, columns, strict=True):
            wide = max(map(len, column)) + 1
            first = chain.begins[i] if not scene.backward else chain.ends[i]
            text.append("|" if first and i != scene.pieces[0] else " ", style="dim")
            text.append(column[row].rjust(wide), style=of_rank(int(chain.rank[i]), chain.ranks))
        if row < 2:
            text.append("\n")
    return text


def _hops(scene: ScanScene, rank: int, number: int) -> Text:
    hops, named = scene.hops, []
    for hop in ((hops.round == number) & (hops.source == rank)).nonzero()[0]:
        arrow = ARROWS["inter" if scene.between[hop] else "intra"]
        named.append(f"{scene.name(hop)}{arrow}{hops.destination[hop]}")
    return Text(" ".join(named) or "·")


# --- trees ---------------------------------------------------------------------------------


def _tree(scene: TreeScene) -> Iterator[RenderableType]:
    """A line for each segment, at its place on the path; then the mask, and what ranks compute."""
    scale = -(-scene.depth // STRIP)
    if scale > 1:
        yield Text(f"a character of a bar stands for {scale} tokens\n", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for segment in scene.segments:
        strip = Text(" " * (segment.depth // scale), no_wrap=True)
        for start, stop, rank in scene.runs(segment):
            for _ in range(max(stop // scale - start // scale, scale == 1)):
                _append_digit(strip, rank, scene.grid.size)
        if not strip.plain.strip():  # shorter than a character
            _append_digit(strip, scene.runs(segment)[0][2], scene.grid.size)
        table.add_row(strip, f"rows {segment.begin:,} to {segment.stop - 1:,}")
    yield table
    computers, step = scene.sampled(SAMPLED["text"])
    each = "" if step == 1 else f", every {step} rows"
    yield Text(f"\nmask, depth first{each}", style="bold")
    yield _matrix(computers, scene.grid.size, set())
    yield _work({"rows": scene.rows}, scene.work)
    yield Text()


# --- schedules -----------------------------------------------------------------------------


def _schedule(scene: ScheduleScene) -> Iterator[RenderableType]:
    table = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1))
    table.add_column("")
    released = {} if scene.only is None else scene.released(scene.only)
    last = max([scene.steps - 1, *(hop.post for hop in scene.hops), *released])
    for boundary in range(last + 1):
        table.add_column(f"step {boundary}" if boundary < scene.steps else f"after {boundary}")
    width = scene.plan.grid.intra
    for rank in scene.ranks:
        cells = [_cell(scene, rank, at, released.get(at, [])) for at in range(last + 1)]
        last_of_node = rank % width == width - 1 and rank < scene.ranks[-1]
        table.add_row(f"rank {rank}", *cells, end_section=last_of_node)
    yield table
    yield Text()
    for line in _legend(scene):
        yield Text("   ".join(line), style="dim")
    yield Text()


def _legend(scene: ScheduleScene) -> Iterator[list[str]]:
    yield [
        f"{COVERS[Cover.FULL]} all visible",
        f"{COVERS[Cover.PARTIAL]} partly visible",
        f"{HIDDEN} nothing to compute",
    ]
    letter = words.LETTERS[next(iter(scene.families), scene.plan.side)]
    hops = [f"{letter}0{ARROWS['intra']}1 chunk of rank 0 sent to rank 1, within a node"]
    hops += [f"{ARROWS['inter']} between nodes"]
    hops += ["@n lands at boundary n instead of the next"]
    if any(scene.partial(hop.chunk) for hop in scene.hops):
        hops.append("n/m only n of its m rows")
    yield hops
    marks = [
        f"{words.LETTERS[family]} {words.FAMILIES[family]}, a whole chunk: "
        + byte_size(scene.bytes(Chunk(family, 0)))
        for family in scene.families
    ]
    if scene.only is not None:
        marks.append("-k0 released")
    yield marks


def _cell(scene: ScheduleScene, rank: int, boundary: int, released: list[Chunk]) -> Text:
    """The pairs computed after the boundary, then what is released and posted at it."""
    text = Text(no_wrap=True)
    cells = scene.cells(rank, boundary)
    for i, cell in enumerate(cells):
        pair = cell.pair
        label = f"q{pair.query} k{pair.key} {COVERS[cell.cover]}"
        style = of_rank(scene.owner(rank, pair), scene.size)
        text.append("\n" if i else "")
        text.append(" ".join([label, *scene.parts(pair)]),
                    style="dim" if cell.cover == Cover.EMPTY else style)  # fmt: skip
    if not cells and boundary < scene.steps:
        text.append(HIDDEN, style="dim")
    if released:
        text.append("\n" + " ".join(f"-{words.name_of(chunk)}" for chunk in released), style="dim")
    sends = [hop for hop in scene.hops if hop.src == rank and hop.post == boundary]
    sends.sort(key=lambda hop: (hop.chunk.accumulated, hop.link != "intra", hop.land))
    for hop in sends:
        late = f" @{hop.land}" if hop.land != hop.post + 1 else ""
        part = share(*scene.rows(hop.chunk))
        some = f" {part} {byte_size(scene.bytes(hop.chunk))}" if part else ""
        label = f"{words.name_of(hop.chunk)}{ARROWS[hop.link]}{hop.dst}{some}{late}"
        text.append(f"\n{label}", style="bold" if hop.link == "inter" else "")
    return text


DRAWERS: dict[type, Callable[[Any], Iterator[RenderableType]]] = {
    MaskScene: _mask,
    LayoutScene: _layouts,
    PackScene: _packs,
    ScanScene: _scan,
    ScheduleScene: _schedule,
    TreeScene: _tree,
}
