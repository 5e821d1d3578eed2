"""What one rank knows of states and maps during a scan, and what follows from it.

Decides how the content of a hop is found: a state was received, or is that of an earlier piece
carried on by maps that are known, of one piece or of a run of pieces. So algorithms are tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..schedule.scans.blocks import Blocks
from ..schedule.scans.hops import MAP, WHOLE
from .maps import Map
from .program import Hop


class Known:
    """States and maps of one rank, block by block.

    begins: of every piece, is it the first of its document? The state that enters it is zero here:
    the rank that holds it has an initial state in its map. own: piece -> its map.
    """

    def __init__(self, begins: list[bool], blocks: Blocks, own: Mapping[int, Map]):
        self._begins, self._blocks = begins, blocks
        self._states: dict[tuple[int, int], torch.Tensor] = {}  # (piece it enters, block)
        # (block, piece after its last) -> first piece -> map of the run
        self._runs: dict[tuple[int, int], dict[int, Map]] = {}
        for piece, found in own.items():
            for block in range(blocks.number):
                part = found.part(blocks.slices(block)) if blocks.number > 1 else found
                self._runs[block, piece + 1] = {piece: part}

    def learn(self, hop: Hop, arrived: list[torch.Tensor]) -> None:
        """Take in what a hop brought."""
        for block in self._each(hop.block):
            parts = Map(arrived[0] if len(arrived) > 1 else None, arrived[-1])
            if hop.block == WHOLE and self._blocks.number > 1:
                parts = parts.part(self._blocks.slices(block))
            if hop.kind == MAP:
                self._runs.setdefault((block, hop.last + 1), {})[hop.first] = parts
            else:
                self._states[hop.first, block] = parts.increment

    def content(self, hop: Hop) -> list[torch.Tensor]:
        """What a hop carries: a state, or the transition, if there is one, and increment of a
        map."""
        if hop.kind == MAP:
            maps = [self.map(hop.first, hop.last, block) for block in self._each(hop.block)]
            found = [each.increment for each in maps]
            if maps[0].transition is not None:
                transitions = [each.transition for each in maps if each.transition is not None]
                return [self._whole_transition(transitions), self.whole(found)]
            return [self.whole(found)]
        states = [self.state(hop.first, block) for block in self._each(hop.block)]
        assert all(state is not None for state in states), "a hop carries a state that is zero"
        return [self.whole(states)]

    def state(self, piece: int, block: int) -> torch.Tensor | None:
        """That which enters a piece; None for zero."""
        found = self._states.get((piece, block))
        if found is not None or self._begins[piece]:
            return found
        way = self._way(piece, block, lambda at: (at, block) in self._states or self._begins[at])
        state = self._states.get((way[0][0], block))
        for _, run in way:
            state = run(state)
        assert state is not None
        self._states[piece, block] = state
        return state

    def map(self, first: int, last: int, block: int) -> Map:
        """That of a run of pieces."""
        runs = self._runs.setdefault((block, last + 1), {})
        if first not in runs:
            way = self._way(last + 1, block, lambda at: at == first, first)
            whole = way[0][1]
            for _, run in way[1:]:
                whole = run.after(whole)
            runs[first] = whole
        return runs[first]

    def _way(self, end, block, arrived, least=0) -> list[tuple[int, Map]]:
        """Known runs, each with its first piece, that lead to before piece `end` from a piece that
        `arrived` says is one to begin at. Long runs are tried first."""
        after: dict[int, int] = {end: end}  # piece -> that at which the run from it ends
        open_ = [end]
        while open_:
            at = open_.pop()
            if at != end and arrived(at):
                break
            if at != end and self._begins[at]:
                continue
            firsts = self._runs.get((block, at), {})
            for first in sorted(firsts, reverse=True):
                if first not in after and first >= least:
                    after[first] = at
                    open_.append(first)
        else:
            raise AssertionError(f"no known maps lead to piece {end}")
        way = []
        while at != end:
            way.append((at, self._runs[block, after[at]][at]))
            at = after[at]
        return way

    def _each(self, block: int) -> range:
        """The blocks that a hop's block is."""
        return range(self._blocks.number) if block == WHOLE else range(block, block + 1)

    def whole(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """All blocks of a state [b, h, d, w], put together; of a single one itself."""
        if len(parts) == 1:
            assert parts[0] is not None
            return parts[0]
        some = next(part for part in parts if part is not None)
        state = some.new_zeros((some.shape[0], *self._blocks.sizes))
        for block, part in enumerate(parts):
            if part is not None:
                heads, rows, columns = self._blocks.slices(block)
                state[:, heads, rows, columns] = part
        return state

    def _whole_transition(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0]
        (heads, rows, _), some = self._blocks.sizes, parts[0]
        shape = {2: (heads,), 3: (heads, rows), 4: (heads, rows, rows)}[some.dim()]
        whole = some.new_empty((some.shape[0], *shape))
        for block, part in enumerate(parts):
            h, d, _ = self._blocks.slices(block)
            whole[(slice(None), h, d) if some.dim() == 3 else (slice(None), h)] = part
        return whole
