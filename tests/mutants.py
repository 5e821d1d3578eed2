"""Plants faults in copies of the package and demands that the tests catch every one.

`make mutants`, or `python tests/mutants.py [words of a mutant's name ...]`. Each mutant is one
edit of one file; a fault survives if the quick, in-process tests pass in spite of it. An edit
that no longer applies, or after which the tests cannot even start, is an error and not a catch:
then the list below has to follow the source, and nothing is run before it does.
`--sample 4` runs four of those whose tests take seconds.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds for the tests of one mutant; a busy machine took 300 for all of them
# Exit statuses of a test run that came to its end; a process that crashes has another one.
SURVIVED, CAUGHT = 50, 51
QUICK = (
    "layout", "masks", "tiles", "schedule", "merge", "consensus", "operation", "cost", "kernels",
    "flex", "flash_blocks", "rounded", "edges", "masks_of_other_keys", "other_keys_calls",
    "every", "row_chunks", "row_chunks_calls", "row_chunks_host", "simulator", "tile_grid",
    "bundles", "tables_oracle",
    "two_way", "packing", "trajectories", "balanced", "tree", "trees", "rows", "state_scan",
    "short_convolution", "linear_attention_ranks", "linear_trees", "linear_reverse",
    "own_masks", "sight", "sparse", "indexer_loss", "indexer_gradients", "sparse_joined",
    "one_call", "held", "uneven_steps", "other_keys",
)  # fmt: skip

# The tests to run first for the files of a folder, or for one file: most mutants do not live long.
NEAR = {
    "layout": "layout", "layout/layouts": "layout balanced", "layout/balanced": "balanced",
    "masks": "masks", "schedule": "schedule", "kernels": "kernels",
    "comm": "every", "execution": "every edges", "autotune": "simulator",
    "masks/tree": "tree", "masks/tiling": "tiles", "schedule/cost": "cost row_chunks",
    "schedule/sizes": "cost", "execution/row_chunks": "row_chunks_calls",
    "execution/host_keys": "row_chunks_host",
    "planning": "every row_chunks", "layout/row_chunks": "row_chunks",
    "schedule/head_shares": "every", "schedule/topology": "every", "execution/ulysses": "every",
    "comm/consensus": "consensus", "comm/operation": "operation", "comm/recent": "operation",
    "kernels/online_softmax": "merge",
    "kernels/flash": "flash_blocks", "kernels/block_lists": "flash_blocks",
    "kernels/flex": "flex", "kernels/flex_tables": "flex", "kernels/flex_programs": "flex",
    "kernels/rounded": "rounded", "kernels/operators_cuda": "rounded",
    "kernels/tile_grid": "tile_grid", "masks/seen": "bundles", "schedule/bundles": "bundles",
    "schedule/demand": "bundles held", "schedule/algorithms/two_way": "two_way",
    "schedule/algorithms/prefetch": "one_call",
    "schedule/algorithms/multicast": "schedule held uneven_steps",
    "schedule/algorithms/token_ring": "two_way", "schedule/algorithms/direct": "two_way",
    "packing": "packing", "plugins/rl/trajectories": "trajectories",
    "comm/rows": "rows", "linear_attention": "state_scan",
    "schedule/scans/blocks": "state_scan", "linear_attention/plan": "linear_attention_ranks",
    "linear_attention/request": "linear_attention_ranks",
    "linear_attention/short_convolution": "short_convolution",
    "linear_attention/program": "short_convolution",
    "linear_attention/operation": "linear_reverse linear_attention_ranks",
    "linear_attention/tree_scan": "linear_trees", "layout/pieces": "linear_trees linear_reverse",
    "execution/joined": "one_call sparse_joined", "plugins/sparse": "sparse",
    "plugins/sparse/sight": "sight", "plugins/sparse/pairs": "sight",
    "plugins/sparse/loss": "indexer_loss", "plugins/sparse/units": "sparse indexer_loss",
    "plugins/sparse/megatron": "indexer_gradients", "megatron": "indexer_gradients",
    "plugins/testing": "edges", "execution/joint": "other_keys_calls other_keys",
    "execution/key_sums": "other_keys_calls", "masks/compressed": "masks_of_other_keys",
    "planning/prepare": "other_keys_calls", "planning/automatic": "other_keys_calls",
    "attention": "every other_keys_calls",
}  # fmt: skip
SECONDS = {"layout", "balanced", "tiles", "consensus", "operation", "sight"}  # quick tests


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    why: str  # what goes wrong


_ALGORITHMS = "schedule/algorithms"
_MULTICAST, _RAILS = f"{_ALGORITHMS}/multicast.py", "schedule/rails.py"
_BURST, _DIRECT, _TWO_WAY = (f"{_ALGORITHMS}/{name}.py" for name in ("burst", "direct", "two_way"))

MUTANTS = [
    # tile grid
    Mutant("kernels/tile_grid.py", "(bottom - top == numbers.high(x.pair, block))", "True",
           "a tile of which some rows see all columns passes for wholly visible"),
    Mutant("kernels/tile_grid.py", "np.maximum(last - x.left, 0)", "np.maximum(m - x.left, 0)",
           "the left edge of a window passes for wholly visible"),
    Mutant("kernels/tile_grid.py", "start + begin * stride", "start + begin",
           "positions forget their stride"),
    Mutant("kernels/tile_grid.py", "np.clip(lowest, 0, width) + k.owner * width",
           "np.clip(lowest, 0, width) + (k.owner + 1) * width",
           "pieces of keys are compared with those of the next pair"),
    Mutant("kernels/tile_grid.py", "code[first[longer] + n]", "code[first[longer]]",
           "tiles that are alike in one part look alike"),
    Mutant("kernels/tile_grid.py", "np.maximum(parts.begin[of], row + parts.low[of])",
           "parts.begin[of]", "a table shows what is left of a window"),
    Mutant("kernels/tile_grid.py", "visible == numbers.high(pair, row) * columns",
           "visible == visible", "partly visible tiles pass for wholly visible"),
    Mutant("kernels/tile_grid.py", "np.argsort(-count", "np.argsort(count",
           "the shortest work is dealt first"),
    # simulator
    Mutant("autotune/simulator.py", "taken = rates.latency + ", "taken = ",
           "a message costs no latency"),
    Mutant("autotune/simulator.py", "self.free[wave.clocks[2:]] = end", "pass",
           "a NIC sends two messages at once"),
    Mutant("autotune/simulator.py",
           "self.free[wave.clocks].max", "self.free[wave.clocks[[0, 2, 3]]].max",
           "a message starts before its receiver is there"),
    Mutant("autotune/simulator.py", "np.maximum(sent, received)", "sent",
           "nobody waits for what is to arrive"),
    Mutant("autotune/simulator.py", "least, rates.launch)", "least, 0.0)",
           "calls of the kernel cost nothing"),
    Mutant("autotune/simulator.py", "programs[index >= head_chunks - deferred]", "programs[False]",
           "no head chunk computes its own pair last"),
    Mutant("autotune/prepared.py", "return pair_shares(self.schedule.tables)",
           "return 0 * pair_shares(self.schedule.tables) + 1",
           "each part of a pair takes as long as the pair"),
    Mutant("autotune/exchanges.py", "if wires.pairs:", "if False:",
           "links of one's own are not one's own"),
    Mutant("autotune/exchanges.py", "repeat * (grid.intra + grid.size) + away", "away",
           "of two messages between the same ranks one takes no time"),
    Mutant("autotune/exchanges.py", "away *= clash[exchange]", "away *= 0",
           "a rank sends all messages of an exchange at once"),
    Mutant("autotune/candidates.py", "or not workload.attended", "or True",
           "auto takes an algorithm whose backward computes elsewhere, for a selection"),
    Mutant("schedule/head_shares.py", "return min(2, count // 2)", "return 0",
           "no head chunk ends late"),
    Mutant("autotune/pair_counts.py", "limit + rows) - summed(limit)", "limit + rows)",
           "a band is counted as if it had no lower edge of columns"),
    Mutant("autotune/candidates.py", "PassWork(rates.backward * seconds", "PassWork(seconds",
           "backward computes no more than forward"),
    Mutant("schedule/sizes.py", "tokens=self.tokens * ulysses", "tokens=self.tokens",
           "ranks that share heads keep only their own rows"),
    Mutant("autotune/select.py", "candidates.sort(key=lambda candidate: candidate.seconds)",
           "candidates.sort(key=lambda candidate: -candidate.seconds)",
           "the runner-up is the slowest"),
    Mutant("autotune/select.py", "key=_simplicity", "key=lambda candidate: -candidate.sent.total",
           "of equals the one that sends most is taken"),
    # layout
    Mutant("layout/layouts.py", "2 * self.cp_size - 1 - rank\n        return",
           "2 * self.cp_size - rank\n        return", "zigzag takes the wrong back piece"),
    Mutant("layout/layouts.py", "Span(rank * length, 1, length), Span(late * length, 1, length)",
           "Span(late * length, 1, length), Span(rank * length, 1, length)",
           "zigzag holds its pieces in another order than Megatron"),
    Mutant("layout/layouts.py", "Span(rank, self.cp_size, seq_len // self.cp_size)",
           "Span(rank, 1, seq_len // self.cp_size)", "striped forgets its stride"),
    Mutant("layout/layouts.py", "self.start + self.stride * (self.length - 1)",
           "self.start + self.stride * self.length", "a span ends one position late"),
    # layout balanced
    Mutant("layout/layouts.py", "0 <= indices[0] <= indices[-1] < documents",
           "0 <= indices[0] <= indices[-1] <= documents",
           "a document behind the last may be padding"),
    Mutant("layout/balanced.py", "SLACK, MORE_SLACK = 1 / 64,", "SLACK, MORE_SLACK = 1 / 4,",
           "documents stay whole at the price of balance"),
    Mutant("layout/balanced.py", "PARTS if windowed else PARTS[:1]", "PARTS[:1]",
           "documents that are longer than a window count as of one density"),
    Mutant("layout/balanced.py", "fits = free >= lengths[document] - first",
           "fits = free >= 1", "a document goes where it has no room"),
    Mutant("layout/balanced.py", "min(length - stop, left + right)", "min(length - stop, left)",
           "rows of others between the two runs of a share are not counted"),
    Mutant("megatron/data/packed.py", "row_cost=cut.row_cost", "row_cost=None",
           "slow links leave no documents whole"),
    Mutant("layout/balanced.py", "front, back, base = (place + 1) // 2, place // 2,",
           "front, back, base = place // 2, (place + 1) // 2,",
           "the mirror order begins at the end"),
    Mutant("layout/balanced.py", "pairs[list(self.padding)] = 0", "pass", "padding has pairs"),
    Mutant("layout/balanced.py", "pool.pairs // (bins - index)", "pool.pairs // bins",
           "the last rank has what the others left"),
    Mutant("layout/balanced.py", "(n - m) * reach", "(n - m) * (reach + 1)",
           "the edge of a window is a token off"),
    Mutant("layout/balanced.py", "for end in (self.high, self.low + room):",
           "for end in ():", "documents are cut that could stay whole"),
    Mutant("layout/balanced.py", "begin + (first + 1) // 2", "begin + first // 2",
           "tokens in the front of a document are on two ranks"),
    Mutant("layout/balanced.py", "end - stop // 2", "end - (stop + 1) // 2",
           "tokens at the end of a document are on two ranks"),
    Mutant("layout/balanced.py", "(starts[1:] != stops[:-1]) | ", "",
           "pieces of a rank with others between them become one"),
    Mutant("layout/sharding.py", "np.argsort(np.concatenate(order))", "np.concatenate(order)",
           "unshard applies the permutation instead of undoing it"),
    # masks
    Mutant("masks/positions.py", "(ahead >= -self.reach.left)", "(ahead > -self.reach.left)",
           "a window loses its oldest key"),
    Mutant("masks/positions.py", "(nearest > right)", "(nearest >= right)",
           "cover drops a pair that touches the diagonal"),
    Mutant("masks/positions.py", "(farthest <= right)", "(farthest <= right + 1)",
           "cover promises FULL one position too early"),
    Mutant("masks/positions.py", "(left - ahead) // stride", "-((ahead - left) // stride)",
           "the left edge of a band rounds up"),
    Mutant("masks/positions.py", "known = stride == k_spans.stride", "known = stride == stride",
           "a band between spans of different strides"),
    Mutant("masks/positions.py", "common != 0", "common == 0",
           "dilated spans of another residue are thought visible"),
    Mutant("masks/tree.py", "np.less(q, self.out[k])", "np.less_equal(q, self.out[k])",
           "the row after a subtree sees it"),
    Mutant("masks/tree.py", "np.greater_equal(q_spans.start, self._latest",
           "np.greater_equal(q_spans.last, self._latest", "rows of a subtree are called hidden"),
    Mutant("masks/tree.py", "full & (q_high - k_low <= self.window)", "full",
           "windows of trees hide nothing from whole tiles"),
    Mutant("masks/tree.py", "return self.depths[q] - self.depths[k]", "return np.subtract(q, k)",
           "windows of trees count rows"),
    Mutant("layout/balanced.py", " + place * base", "", "segments of a tree see no ancestors"),
    Mutant("masks/tables.py", 'self.bounds, positions, side="right"',
           'self.bounds, positions, side="left"',
           "a document begins one position late"),
    Mutant("masks/tables.py", "empty = (last < first)", "empty = (last != first)",
           "spans that share a document are skipped"),
    Mutant("masks/tables.py", " | self._all_hidden(first, np.maximum(first, last))", "",
           "what only padding has in common is computed"),
    Mutant("masks/tables.py", " & ~self._hidden[document]", "", "padding sees padding"),
    Mutant("masks/tables.py", "visible == (bottom - top) * (stop - first)", "visible > 0",
           "a block table is FULL where it is partly visible"),
    Mutant("masks/base.py", "return self.inner(self.a.covers(",
           "return np.maximum(self.a.covers(", "& covers what either mask shows"),
    # band tiling, tiling
    Mutant("masks/diffusion.py", "k_clean, q_block > k_block", "k_clean, q_block >= k_block",
           "a noised block sees the clean copy of itself"),
    Mutant("masks/diffusion.py", "cover_where(q_last <= k_first, q_first > k_last)",
           "cover_where(q_last < k_first, q_first > k_last)", "hidden blocks are computed"),
    Mutant("masks/diffusion.py", "clean.first // self.block + 1)", "clean.first // self.block + 2)",
           "queries of a block are not sent keys of the block before"),
    Mutant("masks/diffusion.py", "((others == 1) & own)", "(others == 1)",
           "a frame that queries do not see counts as visible"),
    Mutant("masks/tiling.py", "begin = max(0, -right)  #", "begin = 0  #",
           "rows above the triangle are computed"),
    Mutant("masks/tiling.py", "stop = min(rows, left + 1, columns - right)",
           "stop = min(rows, left + 1, columns - right + 1)",
           "a triangle reaches past its last column"),
    Mutant("masks/tiling.py", "stop = min(rows, left + 1, columns - right)",
           "stop = min(rows, left + 2, columns - right)",
           "a triangle reaches past the left edge of a window"),
    Mutant("masks/tiling.py", "yield BandTile((middle, end), (begin + right, middle + right))",
           "yield BandTile((middle, end), (begin, middle))",
           "the squares of a triangle are shifted"),
    Mutant("masks/tiling.py",
           "(ahead >= low) & (ahead <= high)", "(ahead > low) & (ahead <= high)",
           "the slanted edge of a window loses its oldest key"),
    Mutant("masks/tiling.py", "order = np.lexsort((j, i))", "order = np.arange(len(i))",
           "pairs that see something are in the order of keys"),
    Mutant("masks/tiling.py", "equal & (top[1:] == bottom[:-1])", "equal",
           "full tiles with a gap between their rows are joined"),
    Mutant("masks/tiling.py", "& (left[1:] == right[:-1])", "& (left[1:] >= right[:-1])",
           "full tiles with a gap between their columns are joined"),
    Mutant("masks/tiling.py", "np.searchsorted(q.last, viewers.first)",
           "np.searchsorted(q.start, viewers.first)", "an earlier query span is left out"),
    Mutant("masks/tiling.py", "first.stop != second.start", "False",
           "rectangles that do not touch are joined"),
    Mutant("masks/tiling.py", "for first in range(min(every, length))", "for first in range(1)",
           "only one residue class is computed"),
    # schedule: the rings
    Mutant(_BURST, "(owner // width + self.ways[1] * node)",
           "(owner // width + 2 * self.ways[1] * node)",
           "chunks skip a node"),
    Mutant(_BURST, "(owner + self.ways[2] * member)", "(owner - self.ways[2] * member)",
           "chunks come from the wrong neighbour"),
    Mutant(_BURST, "self._bytes(axis, row_bytes) >= bytes_unreversed",
           "self._bytes(axis, row_bytes) < bytes_unreversed",
           "rings turn the dearer way"),
    Mutant(_BURST, "gradient and blocks else width)", "gradient and blocks else width + 1)",
           "the other node's chunk lands after it is needed"),
    Mutant(_BURST, "step >= length - hops", "step > length - hops",
           "gradients set out a rank too late"),
    Mutant(_BURST, "step < hops", "step <= hops", "chunks go one hop too far"),
    Mutant(_BURST, "post = step + gradient", "post = step", "a gradient leaves before its step"),
    Mutant(_BURST, "width + (width > 1) if gradient", "width if gradient",
           "the node's sum leaves before its last part has landed"),
    Mutant(_BURST, "reduce(np.logical_or, np.moveaxis", "reduce(np.logical_and, np.moveaxis",
           "rows that one rank of a node wants do not reach the node"),
    Mutant(_BURST, 'family, "inter", owner', 'family, "flat", owner',
           "what crosses between nodes leaves the rail"),
    Mutant("schedule/demand.py", "np.concatenate([np.full(len(home), ALL), rows])",
           "np.concatenate([np.ones(len(home), dtype=int), rows])",
           "only a part of the own chunk is computed with"),
    Mutant("schedule/algorithms/burst.py", "blocks=True", "blocks=False",
           "double_ring overlaps its gradients"),
    # schedule: straight, both ways, TokenRing
    Mutant(_DIRECT, "owner, step + 1, land)", "owner, step, land)",
           "a gradient goes straight home before it is computed"),
    Mutant(_DIRECT, "np.maximum(step - ahead, 0)", "step - 0 * ahead",
           "chunks are sent when they are needed, and not a step ahead"),
    Mutant("schedule/algorithms/direct.py", "ahead=demand.grid.size", "ahead=1",
           "all_gather waits with its sends"),
    Mutant("schedule/algorithms/direct.py", ", at_end=True)", ")",
           "all_gather waits for every gradient a step later"),
    Mutant(_TWO_WAY, "step + (family != self.demand.side)", "step",
           "a gradient of a half leaves before its step"),
    Mutant(_TWO_WAY, "np.pad(later[:, 1:], ((0, 0), (0, 1)))", "later",
           "halves and queries go one hop too far"),
    Mutant("schedule/demand.py", "else (travelling, keys)", "else (queries, keys)",
           "sets of halves are read as sets of bundles"),
    Mutant("schedule/algorithms/token_ring.py", "rank, owner, step + 1, step + 2)",
           "rank, owner, step, step + 1)", "a partial output goes back before it is computed"),
    Mutant("schedule/algorithms/token_ring.py", "if getattr(demand.row_bytes, family):",
           "if demand.row_bytes.dkv:", "partial outputs stay where they are"),
    Mutant(_TWO_WAY, "ways[2 * ahead <= back] = WAYS[0]", "ways[2 * ahead <= back] = WAYS[1]",
           "rows that the next rank alone sees go all the way round"),
    Mutant(_TWO_WAY, "np.logical_or.accumulate(self.users, axis=1)", "self.users",
           "a gradient stops where nobody adds to it"),
    # schedule: what is wanted
    Mutant("schedule/bundles.py", "users[np.arange(len(owner)), owner] = False", "pass",
           "owners are sent their own rows"),
    Mutant("schedule/bundles.py", "apart = first[1:] != stop[:-1]", "apart = first[1:] >= 0",
           "rows that follow each other are two ranges"),
    Mutant("schedule/bundles.py", "np.lexsort((first, bundle))\n    runs",
           "np.argsort(first)\n    runs", "rows do not travel by bundle"),
    Mutant("schedule/bundles.py", "(np.right_shift(bits, bit) & 1)", "np.right_shift(bits, bit)",
           "rows of a bundle count as often as a larger one's bit says"),
    Mutant("schedule/bundles.py", "if bits < 0:", "if False:", "a shard travels in bundles' order"),
    Mutant("schedule/bundles.py", "(rows * (part + 1) + turn)", "(rows * (part + 1))",
           "rows between two parts are in none"),
    Mutant("schedule/bundles.py", "max(_most(self.size) // parts, 1)", "_most(self.size)",
           "parts have bits beyond the last"),
    Mutant("schedule/bundles.py", "unused = users.shape[1] - np.count_nonzero",
           "unused = np.count_nonzero", "what most ranks want comes last"),
    Mutant("schedule/bundles.py", "united(users[order], begin, count)[index]",
           "users[order][begin][index]", "of joined bundles only the first one's ranks remain"),
    Mutant("masks/seen.py", "q.length + right)", "q.length + right - 1)",
           "the newest key that is seen is not wanted"),
    Mutant("masks/seen.py", "k.length + left)", "k.length + left - 1)",
           "the last query that sees is not wanted"),
    Mutant("masks/seen.py", "np.maximum(-right, 0)", "np.maximum(-right - 1, 0)",
           "a query row that sees nothing is wanted"),
    Mutant("masks/seen.py", "(left + right >= 0)", "(left + right > 0)",
           "a band of one key is thought empty"),
    Mutant("masks/seen.py", "(q.stride != k.stride) | ~viewers.exact[j]", "~viewers.exact[j]",
           "a band in positions is read as one in rows"),
    Mutant("masks/seen.py", "np.where(bands.known, bands.left, FAR)", "bands.left",
           "what is no band is read as one"),
    Mutant("masks/seen.py", "viewers.first, keys.start - viewers.right",
           "viewers.first, keys.last - viewers.right", "who sees only the first keys is missed"),
    Mutant("masks/seen.py", "viewers.first, keys.last - viewers.right",
           "viewers.first, keys.start - viewers.right", "a piece seen in part is seen whole"),
    Mutant("masks/seen.py", "np.ones_like(start), last + 1 - start)",
           "np.ones_like(start), last - start)",
           "the last of a group of queries is not asked about"),
    Mutant("masks/seen.py", "top = np.maximum.accumulate(queries.last)", "top = queries.last",
           "a long piece of queries hides behind a short one"),
    Mutant("masks/seen.py", "local = -((start[index] - breaks[at]) // stride[index])",
           "local = (breaks[at] - start[index]) // stride[index]",
           "pieces are cut a row too early"),
    Mutant("masks/seen.py", "spans.first[index] + local, piece", "spans.first[index], piece",
           "pieces forget where they begin"),
    Mutant("schedule/demand.py", "-(-limits[1] // grain)", "limits[1] // grain",
           "rows up to a step of the grain are lost"),
    Mutant("schedule/demand.py",
           "np.repeat(rank, count)] = True", "np.repeat(rank, count)] = False",
           "pieces that are wanted in part are wanted by nobody"),
    Mutant("schedule/demand.py", "covers_piece[piece[covers], rank[covers]] = True", "pass",
           "parts that are all of a piece are lost"),
    Mutant("schedule/demand.py", "query=owner, key=rank,", "query=rank, key=owner,",
           "the query side computes kv pairs"),
    # schedule: one rank's program
    Mutant("schedule/tables.py", "src // self.intra != dst // self.intra",
           "src % self.intra != dst % self.intra", "link classes are confused"),
    Mutant("schedule/program.py", "max(hop.land, hop.post + 1)", "hop.post",
           "a chunk is given up while it is in flight"),
    Mutant("schedule/program.py", "pair.key_rows, step + 1)", "pair.key_rows, step)",
           "keys are given up before they are computed with"),
    Mutant("schedule/program.py", "pair.query_rows, step + 1)", "pair.query_rows, step)",
           "queries are given up before they are computed with"),
    Mutant("schedule/program.py", "max(last_use[part], until)", "until",
           "the last use that is looked at decides"),
    Mutant("schedule/program.py", "and chunk.rows & rows", "and chunk.rows == rows",
           "a message of which a part is passed on is given up"),
    Mutant("schedule/program.py", "(moved.src == rank) | (moved.dst == rank)", "moved.src == rank",
           "nobody makes room for what is to come"),
    Mutant("schedule/program.py", "pairs[own] = max([tables.steps, *posted])\n        end",
           "pairs[own] = 0\n        end", "the own pair does not wait for the last gradient"),
    Mutant("schedule/program.py", "end = max(end, pairs[own] + 1)", "end = pairs[own] + 1",
           "a program ends before its last gradient lands"),
    # multicast
    Mutant(_MULTICAST, "(MulticastPaths, demand.side, demand.grid)",
           "(MulticastPaths, demand.grid)", "queries travel on the paths of keys"),
    Mutant("planning/pipeline.py", "replace(schedule, visibility=replace(schedule.visibility))",
           "replace(schedule)", "a plan keeps the paths of all ranks"),
    Mutant(_MULTICAST, "np.where(paths.use != 0, hops, 0), np.maximum)",
           "0 * paths.use, np.maximum)",
           "a rank computes before the rows can be there"),
    Mutant(_MULTICAST, "step + 1 + self.within * paths.peer", "step + 1",
           "a node's sum leaves before its peers' parts have landed"),
    Mutant("schedule/demand.py", "before]).max(initial=0) > room:",
           "before]).max(initial=0) > 9 * room:",
           "rows are sent ahead into room that nobody has"),
    Mutant(_MULTICAST, "self.within = self.demand.ahead(", "_ = self.demand.ahead(",
           "ranks wait for those that are slow at a step"),
    Mutant(_MULTICAST, "done[way, node] + self.between)", "done[way, node])",
           "a node's sum leaves before that of a node farther on has landed"),
    Mutant(_MULTICAST, "step.reshape(-1)[hops.peers] + 1", "step.reshape(-1)[hops.peers]",
           "a gradient leaves before its step"),
    Mutant(_RAILS, "targets[np.arange(len(node)), node] = False", "pass",
           "a node gets its own rows from outside"),
    Mutant(_RAILS, "busy |= (targets & (received.T[index] > most)).any(axis=1)", "pass",
           "rails that receive too much stay busy"),
    Mutant(_RAILS, "key = np.where(second[relayed, None], nodes - 1 - key, key)", "pass",
           "the same nodes pass on both halves"),
    Mutant(_RAILS, "shares[at] += moved", "pass", "no rows leave a busy rail"),
    Mutant(_RAILS, "back = number >= left[owner[bundle]]", "back = number < 0",
           "an owner has more bundles than a set has bits"),
    Mutant(_RAILS, "return (sent > HOT * received.max(initial=0))[bundles.owner]",
           "return np.zeros(len(bundles.owner), dtype=bool)",
           "a hot owner sends to all of its node itself"),
    # merge
    Mutant("kernels/online_softmax.py", 'lse.masked_fill(lse == float("-inf"), 0.0)', "lse",
           "rows that saw nothing turn into NaN"),
    Mutant("kernels/online_softmax.py", "torch.logaddexp(lse, new, out=lse)",
           "torch.log(torch.exp(lse) + torch.exp(new), out=lse)", "large scores overflow"),
    Mutant("kernels/online_softmax.py", "torch.logaddexp(lse, new, out=lse)", "pass",
           "lse forgets what was merged"),
    Mutant("kernels/online_softmax.py", "share.unsqueeze(-1))", "1.0)",
           "what was there loses its weight"),
    Mutant("kernels/online_softmax.py", "lse.clamp_min(torch.finfo(lse.dtype).min)", "lse",
           "rows that neither part saw turn into NaN"),
    Mutant("kernels/online_softmax.py",
           "torch.float64 if dtype == torch.float64 else torch.float32", "dtype",
           "bf16 is summed in bf16"),
    # ring
    Mutant("execution/buffers.py", "message.flat.zero_()  # all", "pass  # all",
           "gradient sums start with what a buffer held"),
    Mutant("execution/buffers.py",
           "if target.place.whole and target.total not in self._totals and kind",
           "if target.place.whole and kind", "what arrives replaces a sum"),
    Mutant("execution/ring.py",
           "leaving.append((payload, message))",
           "self._free_sent(payload, message)",
           "a gradient buffer is reused while it is in flight"),
    Mutant("planning/build.py",
           "Channel(hop.ring, hop.chunk.accumulated)",
           "Channel(hop.ring, False)", "gradients and activations share a communicator"),
    Mutant("execution/ring.py", "[(shape, wire) for", "[(shape, total) for",
           "grad_wire_dtype is ignored"),
    Mutant("execution/ring.py",
           "out = self.out if call.queries.owner == self.me else None",
           "out = self.out", "visiting queries are given the output of the local ones"),
    Mutant("execution/ring.py", "slice(i * chunk_kv_heads, (i + 1) * chunk_kv_heads)",
           "slice(i * chunk_heads, (i + 1) * chunk_heads)",
           "a chunk of query heads meets another chunk's keys"),
    Mutant("execution/buffers.py",
           "self._totals[target.total] = _RowTotals(Message(None, sums), target.total.rows, write)",
           "pass",
           "every chunk of rows forgets the key gradients of the one before"),
    Mutant("execution/host_keys.py", "return moved if moved.moved else _DeviceCopy(tensor)",
           "return moved", "keys that host memory does not take are in a buffer used again"),
    Mutant("execution/row_chunks.py", "rows = Rows(q, dout, lse, delta)\n",
           "rows = Rows(q, dout, lse, delta * 0)\n", "delta of a row chunk is lost among heads"),
    Mutant("execution/row_chunks.py",
           "self._dsink = gradient if self._dsink is None else self._dsink + gradient",
           "self._dsink = gradient", "the sink learns from the last chunk of rows alone"),
    Mutant("execution/row_chunks.py", "out.index_copy_(0, recompute.own_kept, stored[0].detach())",
           "pass", "kept rows of a chunk are not put back"),
    Mutant("planning/pipeline.py", "row_demands.append(RowDemand(rows, queries",
           "row_demands.append(RowDemand(None if rows is None else rows[::-1].copy(), queries",
           "a chunk takes its rows in another order than its spans"),
    Mutant("schedule/cost.py", "for s in passes)", "for s in passes[:1])",
           "side auto counts one chunk"),
    Mutant("planning/pipeline.py", "replace(all_rows, queries=visible.queries)", "visible",
           "the first chunk brings only what it needs itself into host memory"),
    Mutant("layout/row_chunks.py", "taken + inwards + 1", "taken + 1",
           "a block that has one end of a document begins with the rows farther out"),
    Mutant("schedule/sizes.py", "back += query * self.itemsize + stats", "pass",
           "queries that come again among heads are not counted"),
    # kernels
    Mutant("kernels/aten.py", "largest = wide_dout.abs().amax(dim=-1, keepdim=True)",
           "largest = torch.ones_like(wide_dout[..., :1])",
           "the stand-in of tiny gradients underflows"),
    Mutant("kernels/aten.py",
           "torch.where(largest == 0, torch.ones_like(largest), largest)", "largest",
           "the stand-in of a zero row is NaN"),
    Mutant("kernels/aten.py", 'stats = stats.masked_fill(blind, float("-inf"))', "pass",
           "rows blind in a table weigh as if they saw something"),
    Mutant("kernels/rounded.py", " + np.array(first, dtype=np.int32)", "",
           "sequences of a call begin at the first row of the shard"),
    Mutant("kernels/rounded.py", "rounded_up(max(rows, columns))", "rounded_up(rows)",
           "keys are more than the rows of a call"),
    Mutant("kernels/rounded.py", "            start, longest = i, length\n",
           "            start = i\n", "short documents after a long one take too many calls"),
    Mutant("kernels/rounded.py", " and row * self.total < OFFSETS", "",
           "offsets of large tensors overflow"),
    Mutant("kernels/rounded.py", "triangle=span.triangle", "triangle=False",
           "rows of packed documents see later tokens"),
    Mutant("kernels/operators_cuda.py", "F.pad(stats, (0, q.shape[0] - stats.shape[1]))", "stats",
           "cuDNN reads statistics beyond their memory"),
    Mutant("kernels/operators_cuda.py", "F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x",
           "x", "every number of rows is a graph of its own"),
    Mutant("kernels/operators.py", "-(-count // 4) * 4", "count",
           "cumulative columns are not aligned"),
    Mutant("kernels/block_lists.py", "-(-columns // BLOCK) + 1", "-(-columns // BLOCK)",
           "a mask function takes a row of table numbers for the next one"),
    Mutant("kernels/block_lists.py", "0 * grid.bits[:1]", "grid.bits[:1]",
           "a mask function shows all of a hidden tile"),
    Mutant("kernels/flash.py", 'self._lists(visibility.blocks, "columns", q, v)',
           'self._lists(visibility.blocks, "rows", q, v)', "backward gets the lists of forward"),
    Mutant("kernels/flash.py", 'if by == "rows" and major != 9 else ""', 'if by == "rows" else ""',
           "a kernel for sm_90 calls a mask function for 32 keys at once"),
    Mutant("kernels/flex.py", "rows.delta * -LN2", "rows.delta * LN2",
           "FlexAttention's backward adds delta"),
    Mutant("kernels/flex.py", "rows.lse / LN2", "rows.lse * 1",
           "FlexAttention's backward takes a natural log-sum-exp for one to base 2"),
    Mutant("kernels/flex.py", "arrays.kind,", "\"rows\",",
           "a program with intervals of columns serves every mask"),
    Mutant("kernels/flex_programs.py", "(n < end[m])", "(n <= end[m])",
           "every row sees a column too many"),
    Mutant("kernels/flex_programs.py", "(m < end[n])", "(m <= end[n])",
           "a row sees the branch before its own"),
    Mutant("kernels/flex_programs.py", "(word >> (n % WORD))", "(word >> (m % WORD))",
           "a bit table is read by rows"),
    Mutant("kernels/flex_programs.py", "(1 - torch.tanh(score / self.softcap) ** 2)", "1",
           "the gradient of FlexAttention forgets the softcap"),
    Mutant("kernels/flex_programs.py", "*(x * LN2 for x in kept)", "*kept",
           "FlexAttention's log-sum-exp stays to base 2"),
    Mutant("kernels/flex_tables.py", "dtype=np.int32)\n    number[grid.full",
           "dtype=np.int32) * 0\n    number[grid.full", "invisible blocks have the full table"),
    Mutant("kernels/flex_tables.py", "if (np.where(count > 0, end - first, 0) != count).any():",
           "if False:", "gaps between blocks are visible"),
    Mutant("kernels/flex_tables.py", "(end - first)[..., 0], 0) != count", "count, 0) != count",
           "gaps within a block are visible"),
    Mutant("kernels/flex_tables.py", "tiles[:, side], tiles[:, 1 - side]\n",
           "tiles[:, side], tiles[:, side]\n", "lists name the wrong blocks"),
    Mutant("kernels/flex_tables.py", "1 << nothing.bit_length()", "nothing + 1",
           "every tree is a shape of its own"),
    Mutant("kernels/reference.py", "(dp - delta.unsqueeze(-1)) * scoring.scale",
           "(dp - delta.unsqueeze(-1))", "gradients of scores are not scaled"),
    Mutant("kernels/reference.py", "lse.masked_fill(lse == float(\"-inf\"), 0.0)", "lse",
           "the reference's blind rows are NaN"),
    Mutant("kernels/reference.py", "ds = ds * (1 -", "ds = ds * (0.5 -",
           "the gradient of softcap is wrong"),
    # sinks, head parallelism
    Mutant("kernels/online_softmax.py",
           "out.mul_(torch.exp(lse - _finite(total)).unsqueeze(-1))", "pass",
           "a sink takes no weight from the values"),
    Mutant("kernels/online_softmax.py", "return -(torch.exp(sink", "return (torch.exp(sink",
           "the gradient of a sink has the wrong sign"),
    Mutant("execution/ulysses.py", "total.add_(copy", "total.copy_(copy",
           "copies of a key head overwrite each other's gradient"),
    Mutant("schedule/head_shares.py", "peer * self.heads // self.size", "peer % self.heads",
           "ranks take another key head than their queries need"),
    Mutant("schedule/topology.py",
           "return ring * self.ulysses + index", "return index * self.ulysses + ring",
           "ulysses groups are not where they were said to be"),
    Mutant("schedule/rings.py", "self.side, self.grid, self.row_bytes", "self.grid, self.row_bytes",
           "one side travels on what the other one does"),
    Mutant("schedule/cost.py", "bundles.users.sum(axis=1)", "(2 * bundles.users.sum(axis=1))",
           "a side that sends less is not looked at"),
    Mutant("schedule/rings.py", "product((False, True), (", "product((False,), (",
           "gradients have no communicator"),
    # agreement, cost, comm
    Mutant("comm/consensus.py", "if header.digests == first.digests:", "if True:",
           "ranks that differ are not noticed"),
    Mutant("comm/consensus.py", "if header.bad:", "if False:", "one rank's error stays its own"),
    Mutant("comm/operation.py", "attempt(build, request)", "build(request)",
           "a rank that cannot build its plan leaves the others waiting"),
    Mutant("megatron/attention/plans_ahead.py", "if facts != identity(request.facts):",
           "if facts is None:", "a plan for other facts is used"),
    Mutant("megatron/attention/plans_ahead.py", "    except Exception:", "    except KeyError:",
           "an error of the thread is raised on one rank only"),
    Mutant("megatron/data/loader.py", "if self._left > 0 and", "if",
           "a step reads a batch of the next step"),
    Mutant("comm/operation.py", "    operation.agree(plan if", "    (plan if",
           "plans that differ are not compared"),
    Mutant("comm/operation.py", "key = identity(request.facts)", "key = 0",
           "another request gets the cached plan"),
    Mutant("comm/recent.py", "return self.keep(key, self[key]) if", "return self[key] if",
           "a cache forgets what is used all the time"),
    Mutant("schedule/sizes.py", "stats = 2 * self.batch", "stats = self.batch",
           "one of lse and delta is not counted"),
    Mutant("schedule/cost.py",
           "best = min(best or", "best = max(best or", "auto takes the side with more bytes"),
    Mutant("schedule/sizes.py", "return self.forward if schedule.row_bytes.out else self.backward",
           "return self.backward", "forward's queries are counted with dO"),
    Mutant("schedule/cost.py", "((of_keys, tables.keys), (~of_keys, tables.queries))",
           "((of_keys, tables.queries), (~of_keys, tables.keys))",
           "rows of queries are counted as those of keys"),
    Mutant("schedule/cost.py", "transfers.where(transfers.src == rank)",
           "transfers.where(transfers.dst == rank)",
           "a rank's bytes are those that it receives"),
    Mutant("schedule/cost.py", "(copy + gradient) < min(hops)", "(copy + gradient) <= min(hops)",
           "direct sends are taken where nodes get as many bytes"),
    Mutant("autotune/prepared.py", "return rows / np.bincount(meeting, rows)[meeting]",
           "return 1 / times[meeting]", "parts of a pair count alike, whatever their rows"),
    Mutant("schedule/cost.py",
           "for rank in topology.ulysses_group(member)]", "for rank in [member]]",
           "ranks that share heads are counted with a part of their rows"),
    Mutant("plugins/testing/local.py", "        self.mailboxes.clear()", "        pass",
           "a failed call's messages stay"),
    Mutant("comm/transport.py",
           "t.nbytes", "t.numel()", "elements pass for bytes"),
    # packing
    Mutant("packing/solver.py", "with_room = self.room >= length", "with_room = self.room >= 0",
           "documents go where there is no room"),
    Mutant("packing/solver.py", "fits = (tokens <= self.room[target]) & ", "fits = ",
           "an exchange leaves a micro-batch overfull"),
    Mutant("packing/solver.py", "self.busy[target] + attention)", "self.busy[target])",
           "an exchange forgets what the other gets"),
    Mutant("packing/solver.py", "            bins.exchange()\n", "",
           "documents stay where they were put first"),
    Mutant("packing/solver.py", "order[1::2] = order[1::2, ::-1].copy()", "pass",
           "the first rank gets the busiest micro-batch every time"),
    Mutant("layout/balanced.py", "return m * (m - 1) // 2 + (n - m) * (reach or 0)",
           "return m * (m - 2) // 2 + (n - m) * (reach or 0)", "a document has too few pairs"),
    Mutant("plugins/rl/trajectories.py", " if i > start else (full_work[i], rows[i])", "",
           "the first trajectory of a run counts without its prefix"),
    Mutant("plugins/rl/trajectories.py", "used + fresh[i] > capacity", "used + rows[i] > capacity",
           "shared tokens fill a micro-batch twice"),
    Mutant("packing/work.py", "pairs += layers *", "pairs +=", "layers are not counted"),
    # rows of others, and states
    Mutant("comm/rows.py", "_sums_in(t.dtype) if exchange.home is not None else t.dtype", "t.dtype",
           "gradients of copies add up in bfloat16"),
    Mutant("comm/rows.py", "result.index_add_(0,", "result.index_copy_(0,",
           "of a row's copies one gives its gradient"),
    Mutant("comm/rows.py", "DeviceRoute(forward_route.receives, forward_route.sends, rows)",
           "DeviceRoute(forward_route.sends, forward_route.receives, rows)",
           "gradients go where rows went"),
    Mutant("linear_attention/maps.py", "return Map(transition, self(first.increment))",
           "return Map(transition, first(self.increment))", "maps follow one another backwards"),
    Mutant("linear_attention/maps.py", "transition = self.transition @ first.transition",
           "transition = first.transition @ self.transition",
           "matrices multiply the wrong way round"),
    Mutant("linear_attention/maps.py", "    return transition.mT\n", "    return transition\n",
           "a matrix is not turned in backward"),
    Mutant("linear_attention/maps.py", "(-2, -1) if transition.dim() == entering.dim() - 2 else -1",
           "-1 if transition.dim() == entering.dim() - 2 else -2",
           "a factor's gradient is summed along another dimension"),
    Mutant("linear_attention/maps.py", "(heads, rows) if transition.dim() == 3 else (heads,)",
           "(heads,)", "a block of rows gets the factors of all"),
    Mutant("linear_attention/scan.py", "and document in initial:\n            own_map",
           "and False:\n            own_map", "other ranks never hear of an initial state"),
    Mutant("linear_attention/scan.py", "entering[index] = initial[document]", "pass",
           "an initial state does not enter its document"),
    Mutant("linear_attention/scan.py", "torch.stack([states[i] for states in of_ranks]).sum(0)",
           "of_ranks[0][i]", "gradients of final states count on one rank alone"),
    Mutant("linear_attention/scan.py", "            for document in self.empty:\n",
           "            for document in ():\n", "an empty document loses its initial state"),
    Mutant("linear_attention/scan.py", "for document in job.finals.empty if final is not None",
           "for document in () if final is not None",
           "an empty document's initial state has no gradient"),
    Mutant("linear_attention/scan.py", "gradient(decay, scanned.entering, entering)",
           "gradient(decay, entering, scanned.entering)", "a matrix gets its gradient turned"),
    Mutant("linear_attention/program.py", "nth[:, None] * reach + np.arange(reach)",
           "nth[:, None] * reach + np.arange(reach)[::-1]", "rows before a piece are turned"),
    Mutant("linear_attention/program.py", "np.arange(f, f + n) + i * reach", "np.arange(f, f + n)",
           "windows end at rows of other pieces"),
    Mutant("linear_attention/plan.py", "True if final else not ends", "not ends",
           "the last piece's state is not asked for"),
    Mutant("linear_attention/plan.py", "width**-0.5 if scale is None", "1.0 if scale is None",
           "queries are not scaled"),
    Mutant("linear_attention/tree_scan.py", "leaving.index_add_(0, level.nth",
           "leaving.index_copy_(0, level.nth", "of a segment's children one gives its gradient"),
    Mutant("layout/pieces.py", "np.where(parents < 0, -1, last)", "pieces.before",
           "a segment continues the one above it in the rows"),
    Mutant("layout/pieces.py", "rows[rank] - first - length, rows", "first, rows",
           "reversed pieces lie at the rows of the forward pieces"),
    Mutant("linear_attention/operation.py", "return forward + backward.flip(0)",
           "return forward + backward", "outputs of the reverse way belong to other rows"),
    Mutant("schedule/scans/blocks.py", "parts = zip((heads, rows, columns)",
           "parts = zip((heads, columns, rows)", "blocks of columns pass for blocks of rows"),
    # sparse: which units are selected
    Mutant("plugins/sparse/indexer.py", "selected_units = (distance == 0)",
           "selected_units = (distance == 1)",
           "the block before a query is selected in place of its own"),
    Mutant("plugins/sparse/indexer.py",
           "rows if work.order is None else rows.index_select(0, order)",
           "rows", "index keys of a chunk are taken as they lie"),
    Mutant("plugins/sparse/indexer.py",
           'new = new.masked_fill(~at.seen[:, None, None], float("-inf"))',
           "pass", "units that a query does not see are selected"),
    Mutant("plugins/sparse/indexer.py", "return selected_units & at.seen", "return selected_units",
           "a block is always selected, also where it is hidden"),
    Mutant("plugins/sparse/indexer.py", "new.nan_to_num(finite.min,", "new.nan_to_num(finite.max,",
           "a score that is not a number is the best"),
    Mutant("plugins/sparse/indexer.py", "row = torch.arange(rows.start, rows.stop, device=device)",
           "row = torch.arange(rows.stop - rows.start, device=device)",
           "each tile of queries begins at the first"),
    Mutant("plugins/sparse/indexer.py", "[:, None, None] >= ends", "[:, None, None] > ends",
           "a query does not see the mean that ends at it"),
    Mutant("plugins/sparse/indexer.py", "at.units.to(torch.int32)",
           "(at.units - at.units[0]).to(torch.int32)",
           "units are counted from the first of their chunk"),
    Mutant("plugins/sparse/top_k.py",
           "all_units, order = torch.sort(all_units, dim=-1, stable=True)",
           "order = torch.arange(all_units.shape[-1], device=new.device).expand_as(all_units)",
           "of equal scores the one that came first is taken"),
    Mutant("plugins/sparse/top_k.py", "torch.sort(new, dim=-1, descending=True, stable=True)",
           "torch.sort(new.flip(-1), dim=-1, descending=True, stable=True)",
           "scores of a chunk belong to other units"),
    Mutant("plugins/sparse/top_k.py", "torch.cat([scores, new], -1)",
           "torch.cat([torch.full_like(scores, -1.0), new], -1)",
           "the scores of what was selected before are lost"),
    Mutant("plugins/sparse/top_k.py", '.masked_fill(new == float("-inf"), NOTHING)', "",
           "a query takes hidden units where it has room"),
    Mutant("plugins/sparse/units.py", "(part_size, dim=0) / part_size", "(part_size, dim=0)",
           "each key of a mean gets the gradient of all"),
    Mutant("plugins/sparse/units.py", "Documents(bounds // block, pads)",
           "Documents(bounds[[0, -1]] // block)",
           "blocks see those of other documents"),
    Mutant("plugins/sparse/units.py", "Span(span.start // block, 1,", "Span(span.start, 1,",
           "units are counted in positions"),
    Mutant("plugins/sparse/plans.py", "(self.attention_store, (key, label))",
           "(self.attention_store, (key, None))",
           "a checkpoint gives a layer the selection of another"),
    # sparse: attention over a selection
    Mutant("plugins/sparse/kernels.py",
           "dq[tile] += (ds @ gathered.keys)", "dq[tile] = (ds @ gathered.keys)",
           "queries have the gradient of their last pair"),
    Mutant("plugins/sparse/kernels.py", "padded = F.pad(dout, (0, q.shape[-1] - width))",
           "padded = torch.zeros_like(q)", "a latent has no gradient as a value"),
    Mutant("plugins/sparse/kernels.py",
           "(dout @ gathered.values.mT).sub_(delta)", "(dout @ gathered.values.mT)",
           "the gradient of a softmax forgets its sum"),
    Mutant("plugins/sparse/kernels.py", "self.rows.index_add_(0, index, grads",
           "self.rows.index_copy_(0, index, grads",
           "of the queries of a key one gives it a gradient"),
    Mutant("plugins/sparse/kernels.py", "sums.add_to_(grad)", "pass",
           "gradients that are summed apart are dropped"),
    Mutant("plugins/sparse/kernels.py", "units.permute(0", "units.flip(3).permute(0",
           "rows of a block get the gradients of its others"),
    Mutant("plugins/sparse/kernels.py",
           "seen = work.sees(rows, unit_positions) & present.unsqueeze(-1)",
           "seen = present.unsqueeze(-1).expand_as(unit_positions).clone()",
           "hidden keys of a selected block are attended to"),
    Mutant("plugins/sparse/kernels.py", "seen &= (torch.arange(width, device=at.device) < counts)",
           "(torch.arange(width, device=at.device) < counts)",
           "places without a unit attend to the first of the row once more"),
    Mutant("plugins/sparse/kernels.py", "dvalues + dkeys[..., :width]", "dvalues",
           "a latent has no gradient as a key in the columns of its value"),
    Mutant("plugins/sparse/kernels.py", "self.selection.ids.index_select(0, rows)",
           "self.selection.ids[-len(rows) :]",
           "a recompute attends to what other rows have selected"),
    Mutant("plugins/sparse/attention.py", "if recomputes else None", "if not recomputes else None",
           "a recompute takes the rows of its queries for others"),
    Mutant("plugins/sparse/kernels.py",
           "rows = slice(outer.start + tile.start, outer.start + tile.stop)",
           "rows = tile", "each tile of a tile of queries begins at the first"),
    Mutant("plugins/sparse/kernels.py", "present.cumsum(dim=-1).sub_(1)", "present.cumsum(dim=-1)",
           "the first key of each row is lost"),
    Mutant("plugins/sparse/pairs.py", "if (firsts[:, 0] % block).any() or (firsts", "if (firsts",
           "blocks that begin within those of a selection pass for whole"),
    # sparse: one call for chunks that are there together
    Mutant("execution/joined.py", "tensor.copy_(rows[at])", "tensor.copy_(rows[: len(tensor)])",
           "chunks get each other's gradients"),
    Mutant("execution/joined.py", "shared_spans(shards) if in_order", "shards[0] if in_order",
           "a call has the keys of one chunk alone"),
    Mutant("execution/joined.py", "else chain(*shards)", "else chain(*shards[::-1])",
           "keys of a call lie under the positions of others"),
    Mutant("execution/joined.py", "places[order] = np.arange(len(order))", "places[:] = order",
           "keys are not brought in the order in which they are planned"),
    Mutant("execution/joined.py", "leaving.get(chunk, 0) <= step.index", "True",
           "a chunk is let go of while it is sent on"),
    Mutant("execution/joined.py", "if part.last:\n            ring", "if False:\n            ring",
           "what arrived lies beside its copy to the end"),
    Mutant("schedule/algorithms/prefetch.py", "ready.max(axis=0)", "0",
           "keys of others are computed with as they come, in several calls"),
    Mutant(_MULTICAST, "if demand.visibility.joined:", "if False:",
           "no two chunks of a node are there together"),
    Mutant(_DIRECT, "if at_end and demand.visibility.joined:", "if False:",
           "gathered keys are attended to chunk by chunk"),
    Mutant("autotune/simulator.py", "np.maximum(total, least) + launch", "total + least + launch",
           "the model adds reading to computing"),
    Mutant("autotune/candidates.py", "q = sizes.width + out * latent", "q = sizes.width",
           "the model reads the part of queries that travels"),
    # sparse: the indexer's loss
    Mutant("plugins/sparse/loss.py", "p = total / total.sum(", "p = total + 0 * total.sum(",
           "what the heads look at is not normalised"),
    Mutant("plugins/sparse/loss.py", "dist.all_reduce(total, group=part.tp_group)", "pass",
           "each tensor-parallel rank sees its own heads alone"),
    Mutant("plugins/sparse/loss.py", "log.exp().masked_fill(unused, 0.0) - p",
           "p - log.exp().masked_fill(unused, 0.0)", "the indexer learns to look elsewhere"),
    Mutant("plugins/sparse/loss.py",
           "self.dweights[rows] += grads[2]", "self.dweights[rows] = grads[2]",
           "weights have the gradient of their last chunk"),
    Mutant("plugins/sparse/loss.py", "slope * dloss.unsqueeze(-1)", "slope",
           "the loss counts 1 whatever it is multiplied by"),
    Mutant("plugins/sparse/loss.py", "present &= of_units.gather(-1, at)", "pass",
           "what the mask hides takes part in the loss"),
    Mutant("plugins/sparse/loss.py",
           "dk.index_add_(0, order, rows_of_parts", "dk.add_(rows_of_parts",
           "gradients of index keys go to rows in the order of positions"),
    Mutant("plugins/sparse/loss.py", "self.dq[rows] += grads[0]", "self.dq[rows] = grads[0]",
           "index queries have the gradient of their last chunk"),
    Mutant("plugins/sparse/megatron/index_loss.py",
           "losses.shape[0] * losses.shape[1]", "losses.numel()",
           "a row with more selections counts less"),
    Mutant("plugins/sparse/megatron/index_loss.py", "_MICRO_BATCHES, 1)", "None, 1)",
           "micro-batches are summed where the model's losses are averaged"),
    Mutant("plugins/sparse/megatron/index_loss.py", "scale = config.grad_scale_func(scale)", "pass",
           "the loss of an indexer is not scaled as the model's"),
    Mutant("plugins/sparse/megatron/index_loss.py",
           "total if config.calculate_per_token_loss else mean",
           "mean if config.calculate_per_token_loss else total",
           "losses are averaged where the model's are summed"),
    Mutant("plugins/sparse/megatron/dsa.py", "if not per_token:", "if per_token:",
           "losses per token are averaged, and others are summed"),
    Mutant("plugins/sparse/megatron/dsa.py", "rows if real is None else rows * real", "rows",
           "padding has a loss"),
    Mutant("plugins/sparse/megatron/dsa.py",
           "group if per_token else None", "None if per_token else group",
           "ranks' losses are summed where they are averages"),
    Mutant("plugins/sparse/megatron/dsa.py", "if store is not None and store.filled:", "if False:",
           "a recompute shares the selection of another micro-batch"),
    Mutant("plugins/sparse/megatron/dsa.py", "selection = self._selections[self.source_layer]",
           "selection = next(iter(self._selections.values()))",
           "a layer shares the selection of another source"),
    Mutant("plugins/sparse/megatron/dsa.py", "np.where(seen, positions, -1)", "positions",
           "a loss over all keys is over padding too"),
    # sparse: what queries see
    Mutant("plugins/sparse/sight.py", "q + mask.reach.right + 1", "q + mask.reach.right",
           "a query does not see itself"),
    Mutant("plugins/sparse/sight.py",
           "return q - mask.reach.left,", "return q - mask.reach.left + 1,",
           "a window is one position short"),
    Mutant("plugins/sparse/sight.py", "(k >= low) & (k < high)", "(k >= low) & (k <= high)",
           "a query sees the position after itself"),
    Mutant("masks/tables.py", "self.key_bounds[document - 1], self.key_bounds[document]",
           "self.key_bounds[document - 1], self.key_bounds[document] + 1",
           "a document sees the first position of the next"),
    Mutant("plugins/sparse/sight.py", "if not (touch | no_a | no_b).all():", "if False:",
           "two intervals pass for one, with what lies between"),
    Mutant("plugins/sparse/sight.py", "depths[k] <= self.window", "depths[k] < self.window",
           "a window of a tree is one level short"),
    # keys of another sequence, and joint calls
    Mutant("execution/function.py",
           "orders = chunk.order, rank_plan.key_order, rank_plan.key_order\n        shard",
           "orders = (chunk.order,) * 3\n        shard",
           "keys of another sequence are sorted as the queries after the all-to-all"),
    Mutant("execution/key_sums.py", "for part in received[1:]", "for part in received[2:]",
           "a sum of replicated keys' gradients leaves a rank out"),
    Mutant("execution/key_sums.py", "own = own.to(rank_plan.wire_dtype).expand(ranks, -1)",
           "own = parts",
           "ranks keep different sums of replicated keys' gradients"),
    Mutant("planning/prepare.py", "if not key_layout.sum_gradients or groups", "if groups",
           "gradients of replicated keys are summed without request"),
    Mutant("planning/prepare.py", "request.key_layout, tuple(map(tuple, ring.queries))",
           "tuple(map(tuple, ring.queries))",
           "plans are reused for another layout of the keys"),
    Mutant("planning/pipeline.py",
           "if isinstance(request.key_layout, Replicated):\n            return",
           "if False:\n            return",
           "replicated keys are computed once for every rank"),
    Mutant("planning/pipeline.py",
           "[layout.spans(rank, request.key_len) for rank in ranks]",
           "[layout.spans(rank, request.key_len) for rank in ranks[::-1]]",
           "the order of shared keys has the ranks reversed"),
    Mutant("schedule/sizes.py", "key_tokens=self.key_rows * ulysses", "key_tokens=self.key_rows",
           "ranks that share heads count only their own keys"),
    Mutant("schedule/cost.py", "-(-elements // len(links))", "elements // len(links)",
           "the last part of a sum of gradients counts less"),
    Mutant("schedule/cost.py", "if not seq_len:", "if False:",
           "a ring without keys has positions of keys"),
    Mutant("masks/compressed.py", "(q_spans.last - first) // step + 1",
           "(q_spans.last - first) // step", "the last window that a query sees is not sent"),
    Mutant("masks/compressed.py", "if key_len < windows:", "if False:",
           "a sequence may have fewer keys than windows"),
    Mutant("masks/tables.py", "np.equal(document, self.document_of_key(k))",
           "np.equal(document, self.document(k))",
           "keys of another sequence have the documents of the queries"),
    Mutant("masks/seen.py", "cut_at(shards[1], key_breaks)", "cut_at(shards[1], breaks)",
           "keys are cut where the queries' documents begin"),
    Mutant("execution/joint.py", "(rank_plan.key_order,) * 2\n        key_set",
           "(order,) * 2\n        key_set", "keys of a joint call are sorted as the queries"),
    Mutant("execution/joint.py", "ring.outputs(rings, q.dtype, sink)",
           "ring.outputs(rings, q.dtype, None if sink is None else sink + 0.6931471805599453)",
           "a joint call adds the sink once per set"),
    Mutant("execution/joint.py", "delta = row_delta(dout, out, lse.dtype)",
           "delta = row_delta(dout, out, lse.dtype) / len(calls)",
           "delta of a joint call covers one set only"),
    Mutant("execution/joint.py", '_accumulate(rings, "dquery", sums)',
           '_accumulate(rings, "dquery", [])', "dq of a joint call covers the last set only"),
    Mutant("execution/joint.py", "if sums and len(sums) != len(rings):", "if False:",
           "sets of another number of head chunks are added head by head"),
    Mutant("attention.py", "if store is not None and store.fraction:\n        raise",
           "if False:\n        raise",
           "a checkpoint that keeps outputs recomputes a joint call instead"),
]  # fmt: skip


def stale(mutants):
    """A line for each edit that does not apply: its file has the old text not exactly once."""
    for mutant in mutants:
        path = ROOT / "megatron_burst" / mutant.file
        text = path.read_text() if path.exists() else None
        times = "there is no such file" if text is None else f"{text.count(mutant.old)} times in it"
        if text is None or text.count(mutant.old) != 1:
            yield f"megatron_burst/{mutant.file}: {times}: {mutant.old!r} ({mutant.why})"


def planted(mutant, folder):
    """A copy of the package and its tests in `folder`, with the fault in it."""
    shutil.copytree(ROOT / "megatron_burst", folder / "megatron_burst")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    for name in ("helpers", "fuzz"):
        shutil.copytree(ROOT / "tests" / name, folder / "tests" / name)
    for path in (ROOT / "tests").glob("**/test_*.py"):
        if path.stem.removeprefix("test_") in QUICK:
            home = folder / path.relative_to(ROOT).parent
            home.mkdir(parents=True, exist_ok=True)
            for data in path.parent.glob("*.json"):
                shutil.copy(data, home)
            for used in (path, path.with_name("conftest.py")):
                if used.exists():
                    shutil.copy(used, home)
    if mutant is not None:
        path = folder / "megatron_burst" / mutant.file
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))


def nearest(file):
    """The names of the tests that are about a file: its own entry in NEAR, or that of the nearest
    folder."""
    name = Path(file.removesuffix(".py"))
    return next(NEAR[str(p)] for p in (name, *name.parents) if str(p) in NEAR).split()


def tests_for(mutant):
    """The quick tests in two runs, those of the mutated file first: collecting all files takes
    longer than most mutants live."""
    first = nearest(mutant.file) if mutant else QUICK[:1]
    for names in (first, [name for name in QUICK if name not in first]):
        found = [path for name in names for path in ROOT.glob(f"tests/**/test_{name}.py")]
        yield [str(path.relative_to(ROOT)) for path in found]


def run_tests(mutant, folder):
    """In a process of its own: pytest on the copy; what it prints goes to a file there."""
    os.chdir(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    with open(folder / "log", "w") as log, redirect_stdout(log), redirect_stderr(log):
        import pytest

        how = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        how += ["--hypothesis-profile", "mutants"]
        for tests in tests_for(mutant):
            if status := pytest.main([*how, *tests]):
                break
        used = Path(sys.modules["megatron_burst"].__file__)
        print(f"tested {used}")
    os._exit(SURVIVED + int(status) if folder in used.parents else 1)


def judge(mutant):
    """(verdict, seconds, last lines of the log) of one mutant; None is the package as it is."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name).resolve()
        planted(mutant, folder)
        process = multiprocessing.get_context("fork").Process(
            target=run_tests, args=(mutant, folder)
        )
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        status = process.exitcode
        tail = (folder / "log").read_text()[-1500:]
    verdict = {SURVIVED: "survived", CAUGHT: "caught"}.get(status, f"broken (status {status})")
    return verdict, time.monotonic() - start, tail


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of a mutant's file and what goes wrong")
    parser.add_argument("--sample", type=int, help="so many, of those with tests of seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    asked = parser.parse_args(argv)
    outdated = list(stale(MUTANTS))
    for line in outdated:
        print(f"does not apply: {line}")
    if outdated:
        return 1
    chosen = [m for m in MUTANTS if all(word in f"{m.file} {m.why}" for word in asked.words)]
    if asked.sample is None:
        return run([None, *chosen])
    quick = [m for m in chosen if SECONDS.issuperset(nearest(m.file))]
    # Without the package as it is: who runs a sample runs the tests as well.
    return run(random.Random(asked.seed).sample(quick, min(asked.sample, len(quick))))


def run(jobs):
    """Judge these mutants, None being the package as it is; the exit status."""
    # Imported once here, so that a forked test run starts at once; none of it is under test.
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    start, bad = time.monotonic(), []
    with ThreadPoolExecutor(2) as pool:
        for mutant, (verdict, seconds, tail) in zip(jobs, pool.map(judge, jobs), strict=True):
            name = f"{mutant.file}: {mutant.why}" if mutant else "the package as it is"
            wanted = "caught" if mutant else "survived"
            said = "passes" if mutant is None and verdict == wanted else verdict
            print(f"{said:<14} {seconds:5.1f} s  {name}", flush=True)
            if verdict != wanted:
                bad.append(mutant)
                print(tail)
    planted = len([mutant for mutant in jobs if mutant])
    caught = planted - len([mutant for mutant in bad if mutant])
    print(f"{caught} of {planted} planted faults caught in {time.monotonic() - start:.0f} s")
    return 1 if bad or not planted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
