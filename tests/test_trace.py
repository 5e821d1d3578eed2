"""Traces: what is noted, added up and drawn, and the command that does it."""

import itertools
import json
import subprocess
import sys
from collections import Counter, defaultdict

import cases
import pytest
import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg

import megatron_burst as mb
from megatron_burst.cli.main import main
from megatron_burst.cli.trace import files, picture, record
from megatron_burst.cli.trace.record import Event
from megatron_burst.schedule.algorithms import ALGORITHMS

EVENTS = (
    Event(0, "intra", "b", 12.0, 13.0),
    Event(0, "intra", "a", 12.5, 14.0),
    Event(0, "intra", "z", 10.0, 11.0),
    Event(0, "compute", "forward", 10.0, 12.0),
    Event(1, "wait", "a", 11.0, 11.5),
)
TRACE = files.Trace("two ranks", EVENTS, (("forward", 10.0, 14.0),))


def test_busy_counts_what_overlaps_once():
    assert (TRACE.begin, TRACE.end, TRACE.ranks) == (10.0, 14.0, [0, 1])
    assert TRACE.busy(0, "intra") == 3.0  # 10 to 11, and 12 to 14
    assert TRACE.busy(0, "compute") == 2.0
    assert TRACE.busy(1, "intra") == 0.0


def test_events_survive_the_disk(tmp_path):
    files.save(TRACE, tmp_path / "new" / "events.json")
    assert files.load(tmp_path / "new" / "events.json") == TRACE


def test_chrome_gets_a_process_per_rank_and_microseconds(tmp_path):
    files.save_chrome(TRACE, tmp_path / "chrome.json")
    entries = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in entries if e["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (0, "compute"), (1, "wait")} <= names
    (forward,) = [e for e in entries if e["name"] == "forward"]
    assert (forward["pid"], forward["tid"], forward["ts"], forward["dur"]) == (0, 0, 0.0, 2e6)


def test_the_command_draws_events_that_were_kept(tmp_path, capsys):
    files.save(TRACE, tmp_path / "events.json")
    words = ["trace", "--events", str(tmp_path / "events.json"), "--png", str(tmp_path / "t.png")]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_passes_do_not_overlap():
    """However short a pass is beside the others; three short ones need a third row."""
    marks = [("forward", 10.0, 10.1), ("backward", 10.1, 10.2), ("forward", 10.2, 14.0)]
    figure = picture._figure(files.Trace("two ranks", EVENTS, tuple(marks)))
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [t for t in figure.axes[0].texts if t.get_text().endswith(" ms")]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert [text.get_text() for text in texts] == [
        "forward, 100 ms", "backward, 100 ms", "forward, 3800 ms",
    ]  # fmt: skip
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.y1 < figure.bbox.y1 for box in boxes)


def test_profilers_see_pairs_and_waits_by_name():
    groups = mb.Groups.in_process(intra=2)
    shards = [[torch.randn(8, 1, 2, 4, requires_grad=True) for _ in range(2)] for _ in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outs = mb.attention(*shards, groups=groups, side="query")
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    names = {event.name for event in profile.events()}
    assert {
        f"attention {way}: queries of rank {query}, keys of rank {key}"
        for way in ("forward", "backward, side query")
        for query in range(2)
        for key in range(2)
    } <= names
    assert "attention forward: wait, boundary 1" in names


def test_the_command_runs_ranks_and_notes_every_stream(tmp_path):
    """Two nodes of one rank: each computes two pairs forward and two backward, and of the three
    exchanges (keys; keys and their gradients) all cross nodes."""
    path = tmp_path / "events.json"
    words = "trace --nodes 2 --ranks-per-node 1 --tokens 32 --heads 2 --kv-heads 2 --width 8"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_burst", *words.split(), "--side", "kv",
         "--save-events", str(path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trace = files.load(path)
    assert [name for name, _, _ in trace.marks] == ["forward", "backward"]
    for rank in (0, 1):
        streams = [event.stream for event in trace.events if event.rank == rank]
        counts = {stream: streams.count(stream) for stream in record.STREAMS}
        assert counts == {"compute": 4, "intra": 0, "inter": 3, "wait": 3}
    assert all(event.begin <= event.end for event in trace.events)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say what to write: --png FILE, --chrome FILE or --save-events FILE"),
        ("--png x.png --nodes 0", "--nodes must be at least 1, got 0"),
        ("--png x.png --nodes 5 --ranks-per-node 4", "at most 16 processes, got 20"),
        ("--png x.png --events pyproject.toml", "pyproject.toml holds no trace of megatron-burst"),
        ("--png x.png --events nowhere.json", "No such file"),
    ],
)
def test_what_the_command_refuses(words, said, capsys):
    assert main(["trace", *words.split()]) == 2
    assert said in capsys.readouterr().err


def same_result():
    """On every rank: does tracing change a bit, and does what it noted fit the counters?"""
    groups = cases.groups_on_rank(2, 2)
    torch.manual_seed(dist.get_rank())
    leaves = [torch.randn(8, 1, 4, 8, requires_grad=True) for _ in "qkv"]
    plan = mb.prepare(*leaves, groups=groups, head_chunks=2)
    tracing, events = record.traced(plan)
    results = []
    for each in (plan, tracing):
        out = mb.attention(*leaves, plan=each)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    return [torch.equal(x, y) for x, y in zip(*results, strict=True)], len(events)


def test_tracing_changes_no_bit(ranks):
    """Each of two ulysses groups: 4 pairs forward and 4 backward; 3 exchanges forward, 6 backward,
    each on one link and waited for once."""
    assert ranks(4).run(same_result) == [([True] * 4, 2 * (8 + 9 + 9))] * 4


def noted(algorithm):
    """On every rank: how many events of each stream, and how many its tables say."""
    groups, rank = cases.groups_on_rank(2, 2), dist.get_rank()
    leaves = [torch.randn(8, 1, 2, 8, requires_grad=True) for _ in "qkv"]
    plan = mb.prepare(*leaves, groups=groups, algorithm=algorithm)
    tracing, events = record.traced(plan)
    mb.attention(*leaves, plan=tracing).sum().backward()
    told = Counter()
    for schedule in plan.schedules:
        told["compute"] += int((schedule.tables.pairs.rank == rank).sum())
        started = defaultdict(set)
        for hop in (*schedule.sends(rank), *schedule.receives(rank)):
            started[hop.post, hop.ring, hop.chunk.accumulated, hop.land].add(hop.link)
        told["wait"] += len(started)
        told.update(link for links in started.values() for link in links)
    return Counter(event.stream for event in events), told


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_events_are_those_of_the_tables(algorithm, ranks):
    """Several pairs at a step, chunks in parts and partial outputs included."""
    for seen, told in ranks(4).run(noted, algorithm):
        assert seen == told


def test_ranks_without_clocks_of_their_own_are_refused():
    groups = mb.Groups.in_process(intra=2)
    x = [torch.zeros(4, 1, 2, 4)] * 2
    plan = mb.prepare(x, x, x, groups=groups)
    with pytest.raises(ValueError, match=r"one gloo process per rank.*in_process"):
        record.traced(plan)
