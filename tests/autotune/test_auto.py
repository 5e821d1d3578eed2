"""Algorithm "auto" where groups exist: measured or given rates, one choice on all ranks, why."""

import re
from collections import Counter
from types import SimpleNamespace

import cases
import oracle
import pytest
import torch
import torch.distributed as dist
from no_sync import Launches

import megatron_burst as mb
from megatron_burst.autotune import measure
from megatron_burst.kernels import online_softmax, registry
from megatron_burst.kernels.base import Scoring
from megatron_burst.planning.prepare import WORKS_KEPT
from megatron_burst.plugins.testing import in_process

SLOW = mb.Rates(50e6, 12.5e6, latency=1e-4, compute=1e9)


def tensors(heads=8, kv_heads=8, rows=16, d=16, count=4):
    q = [torch.zeros(rows, 1, heads, d, requires_grad=True) for _ in range(count)]
    k = [torch.zeros(rows, 1, kv_heads, d, requires_grad=True) for _ in range(count)]
    return q, k, k


def planned(*shape, rates=SLOW, nodes=2, ulysses=1, **choices):
    groups = in_process.groups(inter=nodes, intra=4 // nodes, ulysses=ulysses)
    return in_process.prepare(
        *tensors(*shape), groups=groups, algorithm="auto", rates=rates, **choices
    )


def test_the_start_up_line_says_what_was_chosen_and_why():
    plan = planned()
    line = plan.describe()
    assert plan.algorithm in ("burst", "tile")  # between two nodes they send the same
    actual = re.search(
        rf"algorithm {plan.algorithm} \(auto: ([\d.]+) ms; (\w+) ([\d.]+) ms; the link between "
        r"nodes is the bottleneck; intra 50 MB/s, inter 12.5 MB/s, 100 us per message, compute "
        rf"1 GFLOP/s\) \| 2 per node x 2 nodes \| .*side {plan.side}",
        line,
    )
    assert actual, line
    assert float(actual[1]) < float(actual[3])


def test_given_rates_are_not_measured_and_measured_ones_are_kept():
    groups = in_process.groups(inter=2, intra=2)
    in_process.prepare(*tensors(), groups=groups, algorithm="auto", rates=SLOW)
    assert "speeds" not in groups.cache
    in_process.prepare(*tensors(), groups=groups, algorithm="auto")
    actual, speeds = groups.cache["rates"], dict(groups.cache["speeds"])
    assert actual is not None
    assert len(speeds) == 1
    in_process.prepare(*tensors(), groups=groups, algorithm="auto")
    assert groups.cache["rates"] is actual
    assert groups.cache["speeds"] == speeds
    assert in_process.prepare(*tensors(), groups=groups).choice is None


def test_few_key_heads_make_keys_travel_and_one_node_has_one_ring():
    assert planned(8, 2).side == "kv"
    assert planned(8, 8, mask=mb.masks.Window(3, 0)).side == "query"
    assert planned(8, 8, nodes=1).algorithm in ("ring", "tile")  # one level
    assert planned(8, 8, side="kv").side == "kv"
    assert planned(8, 8, head_chunks=8).head_chunks == 8


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (6, 3), (9, 9), (12, 6)])
def test_groups_of_heads_divide_whatever_heads_there_are(heads, kv_heads):
    assert kv_heads % planned(heads, kv_heads).head_chunks == 0


def test_on_groups_that_share_heads_the_ring_inside_is_chosen():
    assert planned(ulysses=4).algorithm == "ulysses"
    assert planned(ulysses=2).algorithm in ("ring", "hybrid")


def test_without_gradients_only_forward_counts():
    plan = planned(needs_grad=(False, False, False))
    assert plan.choice.taken.backward.seconds == 0.0


def test_a_choice_is_a_choice_of_before_there_were_groups():
    choice = mb.choose(ranks=4, intra=2, rates=SLOW, tokens=16, heads=8, width=16, itemsize=4)
    groups = in_process.groups(inter=2, intra=2, ulysses=choice.taken.ulysses)
    plan = in_process.prepare(*tensors(), groups=groups, **choice.keywords)
    assert plan.algorithm == choice.taken.algorithm
    assert choice.groups == {
        "intra": 2,
        "ulysses": groups.topology.ulysses,
        "placement": "head_first",
    }


REFUSED = [
    ({"rates": "fast", "algorithm": "auto"}, "rates must be mb.Rates .* got 'fast'"),
    ({"rates": SLOW}, "rates require algorithm='auto', got algorithm='burst'"),
    ({"algorithm": "auto", "head_chunks": 3}, "head_chunks must divide the 8 key/value heads"),
    ({"algorithm": "auto", "side": "both"}, "side .*both"),
    ({"algorithm": "automatic"}, "algorithm must be one of .*, auto, got 'automatic'"),
]


@pytest.mark.parametrize(("choices", "words"), REFUSED)
def test_what_cannot_be_is_refused(choices, words):
    groups = in_process.groups(inter=2, intra=2)
    with pytest.raises(ValueError, match=words):
        in_process.prepare(*tensors(), groups=groups, **choices)


def test_what_is_measured_is_the_kernel_that_auto_takes_for_the_mask(monkeypatch):
    """As on a GPU, where it is another for windows."""
    takes = {mb.masks.Causal(): ("aten",), mb.masks.Window(3, 0): ("reference",)}
    monkeypatch.setattr(registry, "automatic", lambda device, mask: takes[mask])
    like = [torch.zeros(8, 1, 2, 8)] * 3
    for mask, expected in ((None, "aten"), (mb.masks.Window(3, 0), "reference")):
        groups = mb.Groups.single()
        mb.measure_rates(groups, like=like, mask=mask)
        assert [key[0] for key in groups.cache["speeds"]] == [expected]


class Compiled:
    """A kernel that takes no time but the clock's: 50 s for a size that it has not seen, else
    1 us a launch and 1 ns per row and column; backward takes twice as long as forward."""

    def __init__(self):
        self.now, self.seen = 0.0, Counter()

    def works_for(self, mask, pairs):
        return [()] * len(pairs)

    def forward(self, q, k, v, work, scoring, out, lse, max_logits=None):
        self.takes("forward", len(q), 1)

    def backward(self, rows, k, v, work, scoring, *totals):
        self.takes("backward", len(rows.q), 2)

    def takes(self, which, rows, times):
        first = not self.seen[which, rows]
        self.seen[which, rows] += 1
        self.now += 50.0 if first else times * (1e-6 + 1e-9 * rows**2)


def test_no_size_of_the_probe_is_timed_while_it_compiles(monkeypatch):
    kernel = Compiled()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: kernel.now)
    q, k, v = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 6)
    speed, launch = measure._speed(kernel, Scoring(1.0), q, k, v)
    assert launch == pytest.approx(3 * (1e-6 + 1e-9 * 8**2) / 2)
    # 2048 rows are the first of 64, 128, ... that take 10 ms: 3 * 2048**2 ns
    seconds = 3 * (1e-6 + 1e-9 * 2048**2) - 2 * launch
    assert speed == pytest.approx(3.5 * 2 * 4 * (8 + 6) * 2048**2 / seconds)
    assert {rows for _, rows in kernel.seen} == {8, 64, 128, 256, 512, 1024, 2048}
    assert min(kernel.seen.values()) >= 2


# --- between processes ---------------------------------------------------------------------


def one_call(ulysses, placement, kv_heads):
    """On every rank: (what was chosen, rates, error against the oracle, bytes off the plan's)."""
    groups = mb.Groups.from_topology(
        dist.group.WORLD, intra=2, ulysses=ulysses, placement=placement
    )
    problem = cases.Problem("causal", (4, kv_heads), 1, (4, 4), 32)
    inputs, truths = cases.solve(problem)
    rows = oracle.permutation("zigzag", groups.size, 32)[groups.rank]
    q, k, v, dout = (x[rows].clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = mb.prepare(*leaves, groups=groups, algorithm="auto")
    out = mb.attention(*leaves, plan=plan)
    grads = torch.autograd.grad(out, leaves, dout)
    error = max(oracle.worst(x, y[rows]) for x, y in zip((out, *grads), truths, strict=True))
    there, back = plan.traffic()
    sent = groups.counters
    off = sent.intra - there.intra - back.intra, sent.inter - there.inter - back.inter
    return plan.choice.keywords, plan.choice.rates, error, off


@pytest.mark.parametrize(
    ("ulysses", "placement"),
    [(1, "head_first"), (2, "head_first"), (2, "context_first"), (4, "head_first")],
)
def test_all_ranks_measure_and_choose_the_same(ranks, ulysses, placement):
    answers = ranks(4).run(one_call, ulysses, placement, 2)
    for call, rates, error, off in answers:
        assert (call, rates) == answers[0][:2]
        assert error < cases.TOLERANCE
        assert off == (0, 0)
        assert 1e6 < rates.intra < 1e12
        assert 1e6 < rates.inter < 1e12
        assert rates.latency > 0
        assert 0 < rates.posting < 0.1


def disagreeing(how):
    """On every rank: the words it is refused with. None of them may wait for another."""
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2)
    q = torch.zeros(16, 1, 8, 16)
    first = groups.rank == 0
    choices = {"algorithm": "auto"}
    if how == "rates":
        choices["rates"] = SLOW if first else mb.Rates(1e6, 1e6, compute=1e9)
    elif how == "rates on one":
        choices |= {"rates": SLOW} if first else {}
    elif how == "algorithm":
        choices["algorithm"] = "auto" if first else "burst"
    elif how == "shape" and first:
        q = torch.zeros(16, 1, 8)
    try:
        mb.prepare(q, q, q, groups=groups, **choices)
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rates", "ranks disagree: rank 0 has rates Rates"),
        ("rates on one", "ranks disagree: rank 0 has rates Rates"),
        ("algorithm", "ranks disagree: rank 0 has algorithm 'auto'"),
        ("shape", r"rank 0: q must be \[s, b, heads, width\]"),
    ],
)
def test_ranks_that_mean_different_things_are_told_so_before_anything_is_measured(
    ranks, how, words
):
    for answer in ranks(4).run(disagreeing, how):
        assert re.match(words, answer)


def measured_like(bad):
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2)
    q = torch.zeros(16, 1, 8, 16)
    like = (q, q) if bad and groups.rank == 1 else (q, q, q)
    try:
        found = mb.measure_rates(groups, like=like)
    except ValueError as error:
        return str(error)
    assert groups.cache["rates"].compute is None
    return found


def test_measuring_is_the_same_on_all_ranks_and_refused_on_all(ranks):
    actual = ranks(4).run(measured_like, False)
    assert len(set(actual)) == 1
    assert actual[0].compute > 1e6
    for words in ranks(4).run(measured_like, True):
        assert re.match(r"rank 1: like must be q, k, v", words)


def test_what_is_the_same_in_every_micro_batch_is_made_once():
    """Schedules and work of a described mask; another mask, layout or kernel has its own."""
    groups = in_process.groups(inter=2, intra=2)

    def made(**choices):
        return in_process.prepare(*tensors(), groups=groups, **choices).rank_plan.forward.steps

    first = made()
    assert made() is first
    assert made(mask=mb.masks.Causal()) is first
    others = [made(mask=mb.masks.Window(3, 0)), made(layout="striped"), made(kernel="reference")]
    assert all(other is not first for other in others)
    assert made(mask=mb.masks.Window(4, 0)) is not others[0]

    class Mine(mb.masks.Causal):
        """Its repr does not say all there is to say."""

        def __repr__(self):
            return "Causal()"

    assert not (Mine() & mb.masks.Causal()).cacheable
    assert made(mask=Mine()) is not first
    packed = mb.masks.Documents([0, 16, 64]) & mb.masks.Causal()
    assert made(mask=packed) is not made(mask=packed)

    class Turned(mb.layout.Layout):
        """Contiguous, but begun by another rank; its name and size do not say by which."""

        def __init__(self, by):
            super().__init__(4)
            self.by = by

        def spans(self, rank, seq_len):
            rows = seq_len // 4
            return (mb.layout.Span((rank + self.by) % 4 * rows, 1, rows),)

    turned = [made(layout=Turned(by)) for by in (1, 2)]
    assert turned[0] is not turned[1]
    for n in range(WORKS_KEPT):
        made(mask=mb.masks.Window(5 + n, 0))
    assert made() is not first
    assert len(groups.cache["works"]) == WORKS_KEPT


def test_the_time_of_a_call_counts_its_launches(monkeypatch):
    """On a clock that ticks at every operator: what the merge takes more is half of it in the rate
    of launches, because a call is a forward or a backward."""
    merge, x, extra = online_softmax.merge_, torch.ones(8, 1, 2, 16), [0]

    def slower(out, lse, *part):
        for _ in range(extra[0]):
            out.add_(0.0)
        merge(out, lse, *part)

    monkeypatch.setattr("megatron_burst.kernels.aten.merge_", slower)
    with Launches("cpu") as ticks:
        clock = SimpleNamespace(perf_counter=lambda: float(ticks.total))
        monkeypatch.setattr(measure, "time", clock)
        actual = []
        for extra[0] in (0, 40):
            actual.append(measure._speed(registry.make("aten", x, x, x), Scoring(0.25), x, x, x)[1])
    # aten: forward, backward, six for the merge and three sums
    assert actual[0] >= (1 + 6 + 1 + 3) / 2
    assert actual[1] - actual[0] == 40 / 2


def in_bf16(rates, dtype=torch.bfloat16, **choices):
    """(plan of rank 0, gradients of k on all ranks) of a call whose queries stay: gradients of keys
    travel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        [torch.randn(32, 1, 8, 16, generator=generator).to(dtype) for _ in range(4)]
        for _ in range(4)
    )
    groups = in_process.groups(inter=2, intra=2)
    for x in (*q, *k, *v):
        x.requires_grad_()
    plan = in_process.prepare(
        q, k, v, groups=groups, algorithm="auto", side="kv", rates=rates, **choices
    )
    torch.autograd.backward(in_process.attention(q, k, v, plan=plan), dout)
    return plan.ranks[0], [x.grad for x in k]


def test_gradients_travel_in_bf16_where_links_bind_alone():
    fast = mb.Rates(1e15, 1e15, compute=1e6)
    for rates, name, wire in ((SLOW, "bf16", torch.bfloat16), (fast, "fp32", torch.float32)):
        plan, grads = in_bf16(rates, grad_wire_dtype="auto")
        assert plan.options.grad_wire_dtype is wire
        assert plan.choice.keywords["grad_wire_dtype"] == name
        assert f"gradients are sent in {name}" in plan.describe()
        named, expected = in_bf16(rates, grad_wire_dtype=wire)
        assert plan.traffic("kv") == named.traffic("kv")
        assert all(map(torch.equal, grads, expected))
    # The default stays what sums have.
    assert in_bf16(SLOW)[0].options.grad_wire_dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_only_gradients_of_bf16_tensors_are_rounded_to_it(dtype):
    plan, _ = in_bf16(SLOW, dtype, grad_wire_dtype="auto")
    assert plan.options.grad_wire_dtype is online_softmax.accumulation_dtype(dtype)
    # What Megatron gives to the next plan in place of "auto".
    named = plan.choice.keywords.get("grad_wire_dtype")
    assert named == (None if dtype is torch.float64 else "fp32")


def test_the_dtype_of_travelling_gradients_goes_by_a_forecast():
    with pytest.raises(ValueError, match=r"grad_wire_dtype='auto' .*algorithm='burst'; use one"):
        in_process.prepare(*tensors(), groups=in_process.groups(intra=4), grad_wire_dtype="auto")
    with pytest.raises(ValueError, match=r"--burst-wire-dtype.* --context-parallel-algo auto, got"):
        mb.BurstConfig(wire_dtype="auto")
    config = mb.BurstConfig(wire_dtype="auto", algorithm="auto")
    assert config.keywords()["grad_wire_dtype"] == "auto"
