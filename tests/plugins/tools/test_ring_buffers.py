"""The dry run of a pass counts the buffers that the executor takes."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.memory.live import LiveTensors
from megatron_burst.autotune.clusters import GPUS, Cluster
from megatron_burst.execution import joined
from megatron_burst.execution.buffers import Buffers
from megatron_burst.planning import pipeline
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.advise.account.operators import (
    ATTENTION,
    B,
    LayerSizes,
    core_ops,
)
from megatron_burst.plugins.tools.advise.account.rings import core_of, ring_held
from megatron_burst.plugins.tools.advise.account.tape import Half, Tape
from megatron_burst.plugins.tools.advise.forecast.attention_time import ring_of, ring_passes
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model
from megatron_burst.schedule.dry_run import dry_run

ROWS, WIDTH = 16, 8
JOINED = "kv joined", "dkv joined"  # beside the buffers


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    ("algorithm", "size", "intra"),
    [("ring", 4, 4), ("burst", 4, 2), ("burst", 8, 4), ("two_way", 4, 4), ("multicast", 4, 2),
     ("tile", 4, 4), ("prefetch", 4, 2), ("all_gather", 4, 4), ("double_ring", 8, 2),
     ("token_ring", 4, 4), ("prefetch, relay stream", 8, 4)],
)  # fmt: skip
@pytest.mark.parametrize("wire", [None, torch.float32], ids=["as summed", "narrow"])
def test_buffers_are_those_that_the_executor_makes(
    monkeypatch, layout, kv_heads, algorithm, size, intra, wire
):
    made, known = [], {}
    take = Buffers.take

    def counting(self, kind, rows):
        message = take(self, kind, rows)
        if id(message.room) not in known:  # kept, so that no other one gets its number
            known[id(message.room)] = message.room
            made.append((self.endpoint.rank, kind, max(rows, self.kinds[kind].longest)))
        return message

    monkeypatch.setattr(Buffers, "take", counting)
    groups = in_process.groups(inter=size // intra, intra=intra)
    algorithm, _, stream = algorithm.partition(", ")
    if stream:
        real = pipeline.visibility_of
        monkeypatch.setattr(pipeline, "visibility_of", lambda *of: replace(real(*of), streams=True))
    shape = (ROWS, 1, 4, WIDTH), (ROWS, 1, kv_heads, WIDTH)
    q, k, v = (
        [torch.randn(shape[s], dtype=torch.float64, requires_grad=True) for _ in range(size)]
        for s in (0, 1, 1)
    )
    plan = in_process.prepare(q, k, v, groups=groups, layout=layout, algorithm=algorithm,
                      grad_wire_dtype=wire)  # fmt: skip
    outs = in_process.attention(q, k, v, plan=plan)
    passes = {0: list(made)}
    made.clear()
    sum(out.sum() for out in outs).backward()
    passes[1] = list(made)
    for rank in range(size):
        for number, schedule in enumerate(plan.ranks[rank].schedules):
            found = dry_run(schedule, rank, wire=wire is not None, packed=True)
            took = Counter((kind, rows) for me, kind, rows in passes[number] if me == rank)
            expected = Counter()
            for moment in found.moments:
                expected |= Counter(
                    (kind, rows)
                    for kind, buffers in moment.items()
                    for rows in buffers
                    if kind not in JOINED
                )
            assert took == expected, (rank, number)


def test_keys_that_one_call_joins_are_counted(monkeypatch):
    """Received keys of all others exist beside their copies, and not beside the copies and the
    gradients."""
    found = {}
    compute = joined.compute

    def counting(call, ring):
        found[type(ring.compute).__name__, ring.me] = sum(part.rows for part in call.parts)
        compute(call, ring)

    monkeypatch.setattr(joined, "compute", counting)
    groups = in_process.groups(inter=2, intra=2)
    q = [torch.zeros(ROWS, 1, 2, WIDTH, requires_grad=True) for _ in range(4)]
    plan = in_process.prepare(q, q, q, groups=groups, algorithm="prefetch", side="kv")
    sum(out.sum() for out in in_process.attention(q, q, q, plan=plan)).backward()
    for rank in range(4):
        for schedule, name in zip(plan.ranks[rank].schedules, ("Forward", "Backward"), strict=True):
            held = dry_run(schedule, rank)
            copying, *after = (each for each in held.moments if "kv joined" in each)
            for kind in JOINED[: 1 + (name == "Backward")]:
                (rows,) = {each[kind] for each in held.moments if kind in each}
                assert rows == (found[name, rank],)
            assert len(copying["kv"]) == held.most["kv"]
            assert "dkv joined" not in copying
            assert not any("kv" in each for each in after)
    assert found["Forward", 3] > ROWS


@pytest.mark.parametrize("host", [False, True])
def test_keys_in_host_memory_are_joined_by_no_call(host):
    """As `Plan.chunked` runs `prefetch` forward with host memory; `advise` and `memory` count and
    time it so. Backward has the keys of each row chunk on the device."""
    model, cluster = Model("small", 1, 128, 8, 4, 256, 512, head_dim=16), Cluster(GPUS["h100"], 4)
    run = Settings(4096, cp=4, algorithm="prefetch", side="kv", sequence_chunks=2,
                   offload=float(host))  # fmt: skip
    asked = ring_of(model, cluster, run)
    assert asked.host is host
    both = ring_passes(asked)
    assert [both.forward.schedule.joined, both.backward.schedule.joined] == [not host, True]
    counted = ring_held("prefetch", "zigzag", 4, 4, "kv", False, False, host=run.keys_on_host)
    assert ["kv joined" in each.most for each in counted] == [not host, True]


def test_a_relay_stream_is_timed_and_counted():
    """Megatron refuses CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP, so relays run on a stream."""
    model, cluster = Model("small", 1, 128, 8, 4, 256, 512, head_dim=16), Cluster(GPUS["h100"], 16)
    run = Settings(65536, cp=16, algorithm="prefetch", side="kv", intra=8)
    buffer_bytes = []
    for setting in (run, replace(run, one_queue=False), replace(run, fsdp=True)):
        schedules = ring_passes(ring_of(model, cluster, setting))
        beside = setting is not run
        assert bool(schedules.forward.schedule.chains) is beside
        assert bool(schedules.backward.schedule.chains) is beside
        buffer_bytes.append(core_of(LayerSizes.of(model, setting), setting).backward)
    assert buffer_bytes[0] < buffer_bytes[1] == buffer_bytes[2]
    assert not replace(run, one_queue=False, path="cpu").relay_stream


# --- all tensors of a call ---------------------------------------------------------------------

MODEL, TOKENS = Model("small", 1, 512, 8, 2, 512, 1024), 128


def attention_peak():
    """Peak bytes of one call, forward and backward, on ranks that called before."""
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2)
    heads = MODEL.heads, MODEL.kv_heads, MODEL.kv_heads, MODEL.heads
    *inputs, dout = (torch.rand(TOKENS, 1, n, MODEL.head_dim).bfloat16() for n in heads)

    def call():
        leaves = [x.detach().requires_grad_() for x in inputs]
        mb.attention(*leaves, groups=groups, algorithm="burst").backward(dout)

    with LiveTensors() as live:
        call()
        before = live.bytes["device"]
        live.forget()
        call()
        return live.peak.bytes - before


@pytest.mark.world_size(4)
def test_the_memory_of_attention_is_that_of_the_account(ranks):
    run = Settings(4 * TOKENS, cp=4, intra=2, path="cpu")
    x, tape = LayerSizes.of(MODEL, run), Tape()
    given = {"q2": x.query, "k2": x.keys, "v2": x.values}
    given = {name: run.rows * width * B for name, width in given.items()}
    half = Half(ATTENTION, core_ops(x, run.rows, core_of(x, run)), given)
    half.forward(tape, grad=True)
    half.backward(tape)
    accounted = max(moment.bytes for moment in tape.moments)
    assert max(ranks(4).run(attention_peak)) == pytest.approx(accounted, rel=0.05)
