"""Acts out schedule tables over all ranks, row by row: what is right is stated here a second time.

`act_out` goes from boundary to boundary with chunks as sets of rows. Any broken rule is an
AssertionError that says who broke it, when, and with which rows. Nothing of the package decides
anything here: from it come plain columns of numbers, and names. For small shapes, since every pair
of a query row and a key row is counted.

The rules:
- At a boundary a rank waits for what lands there, releases, starts what is posted there, waits for
  what blocks (lands where it was posted), and then computes the pairs of the step.
- Every query row and key row that see each other meet in exactly one pair, both by the rows that
  the pair names and by those it computes with: all rows of every message with a named row.
- A copy comes from its owner, or out of one message that its sender has; no row reaches a rank
  twice, or to no use. A partial result is sent by ranks that added something to each row of it, not
  by the owner; every contribution comes home once, and nothing is left behind.
- Who may exchange what: the ring's members, never a rank with itself; on every communicator all
  ranks take the batches of a boundary in one order, so that nobody waits for ever (`deadlocks`).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

FAMILIES = ("kv", "query", "dkv", "dquery", "out")
RINGS = ("flat", "inter", "intra")
PARTIAL = ("dkv", "dquery", "out")


def dense(mask, q_shards, k_shards=None):
    """bool [queries, keys]: what sees what, rows in the order of the ranks and of their shards."""
    q, k = (_positions(shards) for shards in (q_shards, k_shards or q_shards))
    return np.array(mask.visible(q[:, None], k[None, :]), dtype=bool).reshape(len(q), len(k))


def _positions(shards):
    spans = [span for shard in shards for span in shard]
    parts = [start + stride * np.arange(length) for start, stride, length in spans]
    return np.concatenate([np.zeros(0, dtype=int), *parts])


def act_out(schedule, grid, seen, *, row_bytes=None, programs=None):
    """Play a schedule (or tables, with `row_bytes`: of each family, 0 where it does not travel).

    seen: bool [queries, keys], as of `dense`. programs: of every rank its boundaries; they take the
    place of the columns, with which they must agree but for the steps of own pairs, and they also
    release. Returns the `Play`, for what else a test asks of it.
    """
    tables = getattr(schedule, "tables", schedule)
    row_bytes = schedule.row_bytes if row_bytes is None else row_bytes
    play = Play(tables, grid, seen, row_bytes)
    steps = _of_tables(tables)
    if programs is not None:
        columns, steps = steps, _of_programs(programs)
        _same(columns, steps)
    for at, todo in enumerate(steps):
        play.boundary(at, todo)
    play.finish(released=programs is not None)
    stuck = deadlocks([hop for todo in steps for hop in todo.posts], grid)
    assert not stuck, stuck
    return play


class Hop(NamedTuple):
    family: str
    owner: int
    bits: int
    src: int
    dst: int
    ring: str
    post: int
    land: int

    def __str__(self):
        return (
            f"{self.family} of {self.owner} (set {self.bits:#x}) from rank {self.src} to rank "
            f"{self.dst} on {self.ring}, boundary {self.post} to {self.land}"
        )


class Meeting(NamedTuple):
    """A pair: `rank` computes with these sets of rows of the chunks of two owners."""

    rank: int
    query: int
    key: int
    query_bits: int
    key_bits: int

    def __str__(self):
        return f"rank {self.rank}: queries of {self.query} with keys of {self.key}"


@dataclass
class Todo:
    """What happens at one boundary over all ranks."""

    posts: list = field(default_factory=list)
    releases: list = field(default_factory=list)  # (rank, family, owner, bits)
    pairs: list = field(default_factory=list)


def _of_tables(tables):
    """The columns, by boundary."""
    steps = defaultdict(Todo)
    for family, owner, bits, src, dst, ring, post, land in _lines(tables.transfers):
        hop = Hop(FAMILIES[family], owner, bits, src, dst, RINGS[ring], post, land)
        assert 0 <= post <= land, f"{hop}: it lands before it is posted"
        steps[post].posts.append(hop)
        steps[land]  # there is such a boundary
    for rank, step, query, key, *bits in _lines(tables.pairs):
        pair = Meeting(rank, query, key, *bits)
        assert 0 <= step < tables.steps, f"{pair} at step {step} of {tables.steps}"
        steps[step].pairs.append(pair)
    return [steps[at] for at in range(max(steps, default=0) + 1)]


def _lines(table):
    columns = [np.asarray(column).tolist() for column in table]
    return list(zip(*columns, strict=True))


def _of_programs(programs):
    """What all ranks do, by boundary; every hop is in the programs of both its ends, no other."""
    steps = [Todo() for _ in range(max(len(program) for program in programs))]
    ends = defaultdict(list)
    for rank, program in enumerate(programs):
        for at, boundary in enumerate(program):
            assert boundary.index == at, f"rank {rank}: boundary {boundary.index} is number {at}"
            for chunk, *rest, _, post, land in boundary.posts:  # without the link class
                hop = Hop(*chunk, *rest, post, land)
                assert 0 <= post <= land, f"{hop}: it lands before it is posted"
                assert post == at, f"{hop}: rank {rank} starts it at boundary {at}"
                assert rank in (hop.src, hop.dst), f"{hop}: rank {rank} has no part in it"
                assert land < len(program), f"{hop}: the program of rank {rank} ends before"
                ends[hop].append(rank)
                if rank == hop.src:
                    steps[at].posts.append(hop)
            steps[at].releases += [(rank, *chunk) for chunk in boundary.release]
            steps[at].pairs += [Meeting(rank, *pair) for pair in boundary.pairs]
    for hop, ranks in ends.items():
        both = sorted((hop.src, hop.dst))
        assert sorted(ranks) == both, f"{hop}: it is in the programs of ranks {ranks}"
    return steps


def _same(columns, steps):
    """The programs have every transfer and every pair of the columns, and start and compute them
    when these say, but for pairs of own chunks."""
    for what, among in (
        ("hop", lambda at, todo: todo.posts),
        ("pair", lambda at, todo: [(at * (p.query != p.key), p) for p in todo.pairs]),
    ):
        wanted, found = (
            Counter(each for at, todo in enumerate(which) for each in among(at, todo))
            for which in (columns, steps)
        )
        assert wanted == found, (
            f"{what}s in tables only: {[*map(str, wanted - found)]}; in programs only: "
            f"{[*map(str, found - wanted)]}"
        )
    for way in {(hop.src, hop.dst, hop.ring) for todo in columns for hop in todo.posts}:
        orders = [
            [hop for todo in which for hop in todo.posts if (hop.src, hop.dst, hop.ring) == way]
            for which in (columns, steps)
        ]
        assert orders[0] == orders[1], f"not in the tables' order: {[*map(str, orders[1])]}"


class _Rows:
    """Which rows a set of an owner's bundles stands for; by themselves they are a partition."""

    def __init__(self, bundles, size):
        numbers, owners = (np.asarray(x).tolist() for x in (bundles.number, bundles.owner))
        rows, seen = ([{} for _ in range(size)] for _ in range(2))
        for bundle, first, count in _lines(bundles.runs):
            owner, number = owners[bundle], numbers[bundle]
            assert 0 <= number < 63, f"bundle {number} of rank {owner} has no bit in an int64"
            assert seen[owner].setdefault(number, bundle) == bundle, "two bundles of one number"
            for row in range(first, first + count):
                assert row not in rows[owner], f"row {row} of rank {owner} is in two bundles"
                rows[owner][row] = number
        for owner, found in enumerate(rows):
            assert sorted(found) == list(range(len(found))), f"rank {owner} lacks rows in bundles"
        self.numbers = [np.array([of[row] for row in range(len(of))], dtype=int) for of in rows]
        self.count = [len(of) for of in rows]
        self.base = np.concatenate([[0], np.cumsum(self.count)]).astype(int)

    def of(self, owner, bits, who):
        """bool [rows of the owner]; who: for the message."""
        numbers = self.numbers[owner]
        assert bits > 0, f"{who}: {bits} is no set of rows of another rank's chunk"
        there = {int(number) for number in numbers}
        unknown = [bit for bit in range(63) if bits >> bit & 1 and bit not in there]
        assert not unknown, f"{who}: rank {owner} has no bundles {unknown}"
        return np.array([bool(bits >> int(number) & 1) for number in numbers], dtype=bool)

    def slice(self, owner):
        return slice(self.base[owner], self.base[owner + 1])


@dataclass
class _Part:
    """A message of copies that a rank holds."""

    bits: int
    rows: np.ndarray
    used: np.ndarray  # which of them were computed with or passed on


class _Sum:
    """Partial results of one owner's rows at one rank: which rows of the other side are counted in
    each, and to which rows anything was added at all (maybe nothing visible)."""

    def __init__(self, rows, others):
        self.counted = np.zeros((rows, others), dtype=bool)
        self.touched = np.zeros(rows, dtype=bool)

    def add(self, counted, touched, who):
        twice = np.argwhere(self.counted & counted)
        assert not len(twice), f"{who}: row {twice[0][0]} counts row {twice[0][1]} a second time"
        self.counted |= counted
        self.touched |= touched

    def take(self, rows):
        taken = np.where(rows[:, None], self.counted, False)
        self.counted[rows], self.touched[rows] = False, False
        return taken


class Play:
    """All ranks of one schedule: what they hold, what is on its way, what has been computed.

    held: (rank, family, owner) -> parts. sums: (rank, family, owner) -> partial results.
    named, computed: how often each query row met each key row.
    most_held: the most messages of copies that a rank had or was receiving. most_partial: of each
    family, the most partial results that it had (with its own), was sending or receiving.
    """

    def __init__(self, tables, grid, seen, row_bytes):
        self.grid, self.size = grid, grid[0] * grid[1]
        self.rows = {"query": _Rows(tables.queries, self.size)}
        self.rows["kv"] = _Rows(tables.keys, self.size)
        for partial, of in (("dkv", "kv"), ("dquery", "query"), ("out", "query")):
            self.rows[partial] = self.rows[of]
        self.bytes = {family: getattr(row_bytes, family) for family in FAMILIES}
        self.seen = np.asarray(seen, dtype=bool)
        wanted = int(self.rows["query"].base[-1]), int(self.rows["kv"].base[-1])
        assert self.seen.shape == wanted, f"seen is {self.seen.shape}, the bundles have {wanted}"
        self.named, self.computed = (np.zeros(wanted, dtype=int) for _ in range(2))
        self.held, self.sums = defaultdict(list), {}
        self.arrived = {}  # (rank, family, owner) -> bool [rows]
        self.flying = []  # (hop, rows, counted, touched)
        self.hops, self.pairs = [], []
        self.most_held, self.most_partial = 0, dict.fromkeys(PARTIAL, 0)

    def boundary(self, at, todo):
        """Land, release, post, land what blocks, compute."""
        self._land(at)
        for release in todo.releases:
            self._release(*release)
        for hop in todo.posts:
            self._post(hop)
        self._measure()
        self._land(at)
        for pair in todo.pairs:
            self._compute(at, pair)

    def finish(self, released):
        """Everything was computed, and every result is at home."""
        for what, count in (("named", self.named), ("computed", self.computed)):
            missing = np.argwhere(self.seen & (count == 0))
            assert not len(missing), f"never {what}: {self._pair_of_rows(*missing[0])}"
        for family in PARTIAL:
            for owner in range(self.size) if self.bytes[family] else ():
                self._at_home(family, owner)
        for (rank, family, owner), total in self.sums.items():
            left = np.flatnonzero(total.touched) if rank != owner else []
            assert not len(left), f"rank {rank} keeps row {left[0]} of {family} of {owner}"
        for (rank, family, owner), parts in self.held.items():
            for part in parts:
                vain = np.flatnonzero(part.rows & ~part.used)
                assert released or not len(vain), self._unused(rank, family, owner, vain)
                assert not released, f"rank {rank} never releases {family} of {owner}"

    # --- copies ---

    def _receive(self, rank, family, owner, bits, rows, who):
        before = self.arrived.setdefault((rank, family, owner), np.zeros_like(rows))
        twice = np.flatnonzero(before & rows)
        assert not len(twice), f"{who}: row {twice[0]} comes a second time"
        before |= rows
        self.held[rank, family, owner].append(_Part(bits, rows, np.zeros_like(rows)))

    def _source(self, hop, rows):
        """The rows are in one message that the sender has, or they are its own."""
        if hop.src == hop.owner:
            return
        parts = self.held[hop.src, hop.family, hop.owner]
        whole = [part for part in parts if not (rows & ~part.rows).any()]
        assert whole, f"{hop}: the sender has these rows in no one message ({len(parts)} held)"
        whole[0].used |= rows

    def _release(self, rank, family, owner, bits):
        who = f"rank {rank} releases {family} of {owner} (set {bits:#x})"
        parts = self.held[rank, family, owner]
        found = [part for part in parts if part.bits == bits]
        assert len(found) == 1, f"{who}: it has no such message"
        for hop, sent, _ in self.flying:
            busy = (hop.src, hop.family, hop.owner) == (rank, family, owner)
            assert not (busy and (sent & found[0].rows).any()), f"{who} while it is sent: {hop}"
        vain = np.flatnonzero(found[0].rows & ~found[0].used)
        assert not len(vain), self._unused(rank, family, owner, vain)
        parts.remove(found[0])

    @staticmethod
    def _unused(rank, family, owner, rows):
        return (
            f"rank {rank} received {family} of {owner}, rows {rows.tolist()}, unused: it neither "
            "computes with them nor sends them on"
        )

    # --- transfers ---

    def _post(self, hop):
        self._check_ends(hop)
        rows = self.rows[hop.family].of(hop.owner, hop.bits, hop)
        counted = None
        if hop.family in PARTIAL:
            assert hop.src != hop.owner, f"{hop}: what the owner itself adds never travels"
            total = self._sum(hop.src, hop.family, hop.owner)
            empty = np.flatnonzero(rows & ~total.touched)
            assert not len(empty), f"{hop}: nothing was added to row {empty[0]}"
            counted = total.take(rows)
        else:
            assert hop.dst != hop.owner, f"{hop}: the owner has it"
            self._source(hop, rows)
        self.flying.append((hop, rows, counted))
        self.hops.append(hop)

    def _check_ends(self, hop):
        inter, intra = self.grid
        ends = (hop.src, hop.dst)
        assert all(0 <= rank < inter * intra for rank in (*ends, hop.owner)), f"{hop}: no such rank"
        assert hop.src != hop.dst, f"{hop}: to itself"
        node, index = ({f(rank) for rank in ends} for f in (lambda r: r // intra,
                                                             lambda r: r % intra))  # fmt: skip
        members = {"flat": True, "intra": len(node) == 1, "inter": len(index) == 1}[hop.ring]
        assert members, f"{hop}: they are not members of one ring"
        assert self.bytes[hop.family], f"{hop}: {hop.family} does not travel in this pass"

    def _land(self, at):
        landing = [flight for flight in self.flying if flight[0].land == at]
        self.flying = [flight for flight in self.flying if flight[0].land != at]
        for hop, rows, counted in landing:
            if hop.family in PARTIAL:
                self._sum(hop.dst, hop.family, hop.owner).add(counted, rows, hop)
            else:
                self._receive(hop.dst, hop.family, hop.owner, hop.bits, rows, hop)

    # --- pairs ---

    def _compute(self, at, pair):
        who = f"{pair} at step {at}"
        q_named, q_rows = self._taken(pair.rank, "query", pair.query, pair.query_bits, who)
        k_named, k_rows = self._taken(pair.rank, "kv", pair.key, pair.key_bits, who)
        block = self.rows["query"].slice(pair.query), self.rows["kv"].slice(pair.key)
        seen = self.seen[block]
        for count, q, k in ((self.named, q_named, k_named), (self.computed, q_rows, k_rows)):
            count[block] += seen & q[:, None] & k
            twice = np.argwhere(count[block] > 1)
            assert not len(twice), f"{who}: a second time: query row, key row {twice[0].tolist()}"
        counted = seen & q_rows[:, None] & k_rows
        for family, owner, named, found in (
            ("out", pair.query, q_named, counted),
            ("dquery", pair.query, q_named, counted),
            ("dkv", pair.key, k_named, counted.T),
        ):
            if self.bytes[family]:
                others = pair.key if family != "dkv" else pair.query
                self._contribute(pair.rank, family, owner, others, named, found, who)
        self.pairs.append((at, pair))

    def _taken(self, rank, family, owner, bits, who):
        """bool [rows] twice: those named, and those of all messages in which some of them came."""
        rows = self.rows[family]
        if rank == owner:
            assert bits == -1, f"{who}: the own {family} chunk is taken whole, not set {bits:#x}"
            return (np.ones(rows.count[owner], dtype=bool),) * 2
        named = rows.of(owner, bits, who)
        found = np.zeros_like(named)
        for part in self.held[rank, family, owner]:
            if (part.rows & named).any():
                found |= part.rows
                part.used |= part.rows & named
        lacking = np.flatnonzero(named & ~found)
        assert not len(lacking), f"{who}: it does not have row {lacking[:1]} of {family} of {owner}"
        return named, found

    # --- partial results ---

    def _sum(self, rank, family, owner):
        others = self.rows["query" if family == "dkv" else "kv"]
        new = _Sum(self.rows[family].count[owner], int(others.base[-1]))
        return self.sums.setdefault((rank, family, owner), new)

    def _contribute(self, rank, family, owner, others, named, found, who):
        total = self._sum(rank, family, owner)
        counted = np.zeros_like(total.counted)
        counted[:, self.rows["query" if family == "dkv" else "kv"].slice(others)] = found
        total.add(counted, named | found.any(axis=1), f"{who}: {family} of {owner}")

    def _at_home(self, family, owner):
        seen = self.seen.T if family == "dkv" else self.seen
        wanted = seen[self.rows[family].slice(owner)]
        lost = np.argwhere(wanted & ~self._sum(owner, family, owner).counted)
        assert not len(lost), (
            f"{family} of {owner}: row {lost[0][0]} came home without what row {lost[0][1]} adds "
            f"({len(lost)} contributions are lost)"
        )

    # --- words and numbers ---

    def _pair_of_rows(self, query, key):
        i, j = (int(np.searchsorted(self.rows[f].base, row, side="right")) - 1
                for f, row in (("query", query), ("kv", key)))  # fmt: skip
        return (
            f"query row {query - self.rows['query'].base[i]} of rank {i}, key row "
            f"{key - self.rows['kv'].base[j]} of rank {j}"
        )

    def _measure(self):
        copies, partial = Counter(), Counter()
        for (rank, _, _), parts in self.held.items():
            copies[rank] += len(parts)
        for (rank, family, _), total in self.sums.items():
            partial[family, rank] += bool(total.touched.any())
        for hop, *_ in self.flying:
            if hop.family in PARTIAL:
                partial.update([(hop.family, hop.src), (hop.family, hop.dst)])
            else:
                copies[hop.dst] += 1
        self.most_held = max([self.most_held, *copies.values()])
        for (family, _), count in partial.items():
            self.most_partial[family] = max(self.most_partial[family], count)


# --- batches --------------------------------------------------------------------------------


def by_rings(rank, batch):
    """The order in which every rank starts the batches of a boundary."""
    _, ring, partial, land = batch
    return ring, partial, land


def deadlocks(hops, grid, order=by_rings):
    """What never ends, in words; "" if all does.

    Of one boundary, the messages of a ring, of copies or of partial results, that land together are
    a batch, complete when all its messages are. A rank's batches run one after the other, and its
    host waits at a boundary for what lands there.
    """
    peers = defaultdict(set)  # (rank, batch) -> with whom it exchanges
    for hop in hops:
        batch = hop.post, hop.ring, hop.family in PARTIAL, hop.land
        peers[hop.src, batch].add(hop.dst)
        peers[hop.dst, batch].add(hop.src)
    todo = []  # of each rank: ("start" or "wait", batch)
    for rank in range(grid[0] * grid[1]):
        mine = [batch for other, batch in peers if other == rank]
        mine.sort(key=lambda batch: (batch[0], order(rank, batch)))
        events = [(post, 1, "start", (post, *rest)) for post, *rest in mine]
        # A batch that lands where it was posted is waited for behind all that start there.
        events += [(batch[3], 2 if batch[0] == batch[3] else 0, "wait", batch) for batch in mine]
        todo.append([event[2:] for event in sorted(events, key=lambda event: event[:2])])
    queues, done = [[] for _ in todo], set()
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(todo):
            while events and (events[0][0] == "start" or (rank, events[0][1]) in done):
                what, batch = events.pop(0)
                queues[rank] += [batch] * (what == "start")
                moved = True
        heads = {(rank, queue[0]) for rank, queue in enumerate(queues) if queue}
        for rank, batch in heads:
            if all((peer, batch) in heads | done for peer in peers[rank, batch]):
                done.add((rank, batch))
                queues[rank].pop(0)
                moved = True
    stuck = [f"rank {rank} at {events[0]}" for rank, events in enumerate(todo) if events]
    return f"deadlock: {'; '.join(stuck)}" * bool(stuck)
