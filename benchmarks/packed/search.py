"""Best groups as in FlexSP: powers of two of neighbouring ranks, chosen for every batch.

FlexSP (arXiv 2412.01523) gives every micro-batch groups of many sizes and every group whole
documents, so that the slowest group is as fast as possible, by integer programming with a cost
model. Here the cost model is the simulator. The search is greedy (longest document first) for
several numbers of micro-batches and group sizes, then annealed. For few documents the search
returns the optimum; a test compares it with all plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .plans import Group, MicroBatch, Rings, together

TARGETS = (0.5, 0.7, 0.85, 1.0, 1.2, math.inf)  # maximum time of one document, relative to the mean


@dataclass
class _Open:
    size: int
    seconds: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def with_(self, rings: Rings, add: Sequence[int], drop: Sequence[int] = ()) -> _Open:
        """Return a copy with documents added and dropped."""
        lengths = [*self.lengths, *add]
        for length in drop:
            lengths.remove(length)
        tokens = self.tokens + (sum(add) - sum(drop)) / self.size
        squares = self.squares + float(sum(x * x for x in add) - sum(x * x for x in drop))
        seconds = rings.estimate(self.size, tokens, squares) if lengths else 0.0
        return _Open(self.size, seconds, tokens, squares, lengths)


def best(
    lengths: Sequence[int], ranks: int, rings: Rings, *, moves: int, seed: int = 0, largest: int
) -> list[MicroBatch]:
    """Return the fastest plan of the search; a rank holds at most the setting's tokens.

    Args:
        moves: Moves of each annealing run.
        largest: Ranks of the largest group.
    """
    documents = sorted(map(int, lengths), reverse=True)
    room = rings.setting.tokens
    fewest = math.ceil(sum(documents) / ranks / room)
    plans: list[list[MicroBatch]] = []
    for count in range(fewest, fewest + 4):
        mean = _least(documents, rings, largest) / ranks / count
        greedy_plans = [_greedy(documents, ranks, count, rings, mean * f, largest) for f in TARGETS]
        starts = sorted((plan for plan in greedy_plans if plan is not None), key=_seconds)[:2]
        annealed = [
            _annealed(start, ranks, rings, moves, np.random.default_rng((seed, i)), largest)
            for i, start in enumerate(starts)
        ]
        plans += [_plan(batches) for batches in annealed]
    return min(plans, key=lambda plan: together(plan, rings))


def _least(documents: Sequence[int], rings: Rings, largest: int) -> float:
    """Return seconds of all ranks if every document were alone on its best number of ranks."""
    room = rings.setting.tokens
    return sum(
        min(
            size * rings.estimate(size, length / size, float(length) ** 2)
            for size in _sizes(largest)
            if length <= size * room
        )
        for length in documents
    )


def _sizes(largest: int) -> list[int]:
    return [1 << i for i in range(largest.bit_length())]


def _greedy(
    documents: Sequence[int], ranks: int, count: int, rings: Rings, target: float, largest: int
) -> list[list[_Open]] | None:
    """Add documents, longest first, each to the group that then ends first.

    A new group has the fewest ranks on which the document takes at most `target`. None if a
    document does not fit.
    """
    room, free = rings.setting.tokens, [ranks] * count
    batches: list[list[_Open]] = [[] for _ in range(count)]
    groups: dict[int, list[_Open]] = {}
    seconds: dict[int, np.ndarray] = {size: np.empty(0) for size in _sizes(largest)}
    tokens: dict[int, np.ndarray] = {size: np.empty(0) for size in _sizes(largest)}
    for length in documents:
        fitting = [size for size in _sizes(largest) if length <= size * room]
        quick = [s for s in fitting if rings.estimate(s, length / s, float(length) ** 2) <= target]
        options: list[tuple[float, int, int, _Open]] = []
        for size in fitting:
            if not groups.get(size):
                continue
            fits = tokens[size] + length / size <= room
            group_index = int(np.where(fits, seconds[size], math.inf).argmin())
            if fits[group_index]:
                grown = groups[size][group_index].with_(rings, [length])
                options.append((grown.seconds, size, group_index, grown))
        batch = int(np.argmax(free))
        for size in quick[:1] or fitting[:1]:
            if free[batch] >= size:
                new_group = _Open(size).with_(rings, [length])
                options.append((new_group.seconds, size, -1, new_group))
        if not options:
            return None
        _, size, group_index, grown = min(options, key=lambda option: option[:3])
        if group_index < 0:
            free[batch] -= size
            batches[batch].append(grown)
            groups.setdefault(size, []).append(grown)
            seconds[size] = np.append(seconds[size], grown.seconds)
            tokens[size] = np.append(tokens[size], grown.tokens)
        else:
            vars(groups[size][group_index]).update(vars(grown))
            seconds[size][group_index], tokens[size][group_index] = grown.seconds, grown.tokens
    return batches


def _annealed(
    batches: list[list[_Open]],
    ranks: int,
    rings: Rings,
    moves: int,
    random: np.random.Generator,
    largest: int,
) -> list[list[_Open]]:
    """Move and exchange documents, and join, split and resize groups, starting at the slowest."""
    current = shortest = _seconds(batches)
    best_plan = [list(batch) for batch in batches]
    for move in range(moves):
        heat = 0.03 * shortest * (1 - move / moves) ** 2
        b, c = random.integers(len(batches), size=2)
        changed = _neighbour(batches, int(b), int(c), ranks, rings, random, largest)
        if changed is None:
            continue
        old_batches = {index: batches[index] for index in changed}
        for index, batch in changed.items():
            batches[index] = batch
        trial = _seconds(batches)
        if trial <= current or random.random() < math.exp((current - trial) / max(heat, 1e-12)):
            current = trial
            if current < shortest:
                shortest, best_plan = current, [list(batch) for batch in batches]
        else:
            for index, batch in old_batches.items():
                batches[index] = batch
    return best_plan


def _neighbour(
    batches: list[list[_Open]],
    b: int,
    c: int,
    ranks: int,
    rings: Rings,
    random: np.random.Generator,
    largest: int,
) -> dict[int, list[_Open]] | None:
    """Return micro-batches with a change in the slowest group of b, None if impossible."""
    if not batches[b]:
        return None
    room, kind = rings.setting.tokens, random.random()
    slow = max(batches[b], key=lambda group: group.seconds)
    if random.random() < 0.2:
        slow = batches[b][random.integers(len(batches[b]))]
    free = [ranks - sum(group.size for group in batch) for batch in batches]
    moved = slow.lengths[random.integers(len(slow.lengths))]
    other_groups = [group for group in batches[c] if group is not slow]
    new_batches: dict[int, list[_Open]] = {i: list(batches[i]) for i in {b, c}}
    new_batches[b].remove(slow)
    if kind < 0.1:  # move a document to free ranks
        size = 1 << int(random.integers(largest.bit_length()))
        if size > free[c] + (slow.size if b == c and len(slow.lengths) == 1 else 0):
            return None
        added = [_Open(size).with_(rings, [moved]), slow.with_(rings, [], [moved])]
        places = [c, b]
    elif kind < 0.25:  # change the size of the group
        size = slow.size * 2 if random.random() < 0.5 else slow.size // 2
        if not 1 <= size <= min(largest, free[b] + slow.size):
            return None
        added, places = [_Open(size).with_(rings, slow.lengths)], [b]
    elif kind < 0.35:  # split the group
        half = slow.size // 2
        if not half or len(slow.lengths) < 2:
            return None
        first_lengths = [x for x in slow.lengths if random.random() < 0.5]
        rest_lengths = list(slow.lengths)
        for length in first_lengths:
            rest_lengths.remove(length)
        added = [_Open(half).with_(rings, lengths) for lengths in (first_lengths, rest_lengths)]
        places = [b, b]
    elif not other_groups:
        return None
    else:
        partner = other_groups[random.integers(len(other_groups))]
        new_batches[c].remove(partner)
        if kind < 0.45 and b == c:  # join two groups
            if partner.size != slow.size or 2 * slow.size > largest:
                return None
            documents = [*slow.lengths, *partner.lengths]
            added, places = [_Open(2 * slow.size).with_(rings, documents)], [b]
        else:
            returned = [partner.lengths[random.integers(len(partner.lengths))]] * (kind > 0.7)
            added = [slow.with_(rings, returned, [moved]), partner.with_(rings, [moved], returned)]
            places = [b, c]
    if any(group.tokens > room * (1 + 1e-9) for group in added):
        return None
    for group, place in zip(added, places, strict=True):
        if group.lengths:
            new_batches[place].append(group)
    if any(sum(group.size for group in batch) > ranks for batch in new_batches.values()):
        return None
    return new_batches


def _seconds(batches: Sequence[Sequence[_Open]]) -> float:
    return sum(max((group.seconds for group in batch), default=0.0) for batch in batches)


def _plan(batches: Sequence[Sequence[_Open]]) -> list[MicroBatch]:
    return [[Group(g.size, tuple(g.lengths)) for g in batch] for batch in batches if batch]
