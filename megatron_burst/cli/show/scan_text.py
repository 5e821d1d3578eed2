"""A scan of states as text: the chain, and a row of hops for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .colours import of_rank
from .scans import ScanScene

ARROWS = ("→", "⇒")  # within a node, between nodes


def parts(scene: ScanScene) -> Iterator[RenderableType]:
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
        cells = [_cell(scene, rank, number) for number in range(scene.rounds)]
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
        text.append("\n" * (row < 2))
    return text


def _cell(scene: ScanScene, rank: int, number: int) -> Text:
    hops, found = scene.hops, []
    for hop in ((hops.round == number) & (hops.source == rank)).nonzero()[0]:
        arrow = ARROWS[int(scene.between[hop])]
        found.append(f"{scene.name(hop)}{arrow}{hops.destination[hop]}")
    return Text(" ".join(found) or "·")
