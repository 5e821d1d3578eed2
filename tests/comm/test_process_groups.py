"""Process groups of a grid's rings: number, reuse, members and backend."""

import importlib
import itertools
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import megatron_burst as mb
from megatron_burst.comm import communicators, process_groups

CPU = torch.device("cpu")
NODES, COLUMNS = ([0, 1], [2, 3]), ([0, 2], [1, 3])
needs_nccl = pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL"), reason="torch was built without NCCL (Python 3.12 here)"
)


def qkv(rows=4, heads=4, grad=True):
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = rows, 1, heads, 8
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_(grad)
        for _ in range(3)
    ]


def given_groups():
    """Return the groups that Megatron has: all ranks, this rank's node, its index on all nodes."""
    me = dist.get_rank()
    everything = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], *NODES, *COLUMNS)]
    pick = [0, 1 + me // 2, 3 + me % 2]
    return [everything[i] for i in pick]


def registered():
    return len(c10d._world.pg_names)


# --- how many ------------------------------------------------------------------------------------


def carried(cases):
    """Return for each case on this rank: new process groups, groups of its grid, reused groups."""
    given, found = given_groups(), []
    for algorithm, ulysses, grad, reuse in cases:
        before = registered()
        groups = mb.Groups.from_topology(
            dist.group.WORLD, intra=2, ulysses=ulysses, reuse=given if reuse else ()
        )
        mb.attention(*qkv(grad=grad), groups=groups, algorithm=algorithm)
        carriers = set(groups.ring.channels.values())
        made = len(carriers - set(given))
        found.append((registered() - before, made, len(carriers & set(given))))
    return found


# by hand, for two nodes of two: (algorithm, ulysses, gradients, given) -> (made, given)
COUNTS = {
    ("ring", 1, True, False): (2, 0),  # one ring; activations and gradients
    ("ring", 1, False, False): (1, 0),
    ("burst", 1, True, False): (4, 0),  # within nodes and between them
    ("burst", 1, False, False): (2, 0),
    ("ulysses", 4, True, False): (1, 0),  # no ring
    ("hybrid", 2, True, False): (3, 0),  # ranks of a node share heads; a ring between nodes
    ("ring", 1, True, True): (1, 1),  # gradients have their own
    ("burst", 1, True, True): (2, 2),
    ("hybrid", 2, True, True): (1, 2),
}


def test_a_grid_has_the_communicators_that_its_algorithm_uses(ranks):
    for found in ranks(4).run(carried, list(COUNTS)):
        for case, (registered_, made, given) in zip(COUNTS, found, strict=True):
            assert (made, given) == COUNTS[case], case
            assert registered_ == made + 1, case  # and the one on the host


def dense(algorithm, ulysses, reuse):
    """Return the largest error of this rank's output and gradients, compared with the formula."""
    me, given = dist.get_rank(), given_groups()
    options = {"reuse": given} if reuse == "all" else {"reuse": given[1:]}
    if reuse == "hierarchical":
        groups = mb.Groups(intra=given[1], inter=given[2], reuse=given)
    else:
        groups = mb.Groups.from_topology(given[0], intra=2, ulysses=ulysses, **options)
    mine = qkv()
    draws = [torch.Generator().manual_seed(rank) for rank in range(4)]
    whole = [
        torch.cat([torch.randn(4, 1, 4, 8, generator=d, dtype=torch.float64) for d in draws])
        for _ in range(3)
    ]
    q, k, v = (x[:, 0].requires_grad_() for x in whole)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    wanted = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    wanted.square().sum().backward()
    worst = 0.0
    for _ in range(2):  # the second time on communicators that exist
        out = mb.attention(*mine, groups=groups, algorithm=algorithm, layout="contiguous")
        grads = torch.autograd.grad(out.square().sum(), mine)
        for got, right in zip((out, *grads), (wanted, q.grad, k.grad, v.grad), strict=True):
            worst = max(worst, (got[:, 0] - right[4 * me : 4 * me + 4]).abs().max().item())
    return worst


@pytest.mark.parametrize(
    ("algorithm", "ulysses", "reuse"),
    [("ring", 1, "all"), ("burst", 1, "hierarchical"), ("hybrid", 2, "all"),
     ("burst", 1, "not flat"), ("ulysses", 4, "all")],
)  # fmt: skip
def test_attention_on_given_groups_is_exact(ranks, algorithm, ulysses, reuse):
    assert max(ranks(4).run(dense, algorithm, ulysses, reuse)) < 1e-10


def batches_of_documents():
    """Return process groups after each batch, and its route, for packs that use both routes."""
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2)
    seen = []
    # zigzag: tokens 2 to 5 lie on ranks 1 and 2, two hops apart on the rings
    for ends in ([0, 16], [0, 2, 6, 8, 10, 12, 14, 16], [0, 16]):
        mask = mb.masks.Documents(ends) & mb.masks.Causal()
        plan = mb.prepare(*qkv(), groups=groups, mask=mask)
        mb.attention(*qkv(), plan=plan).sum().backward()
        seen.append((registered(), plan.schedules[0].route))
    return seen


def test_documents_that_change_make_no_communicators_in_mid_run(ranks):
    """A device that is full during training has no memory for them."""
    for seen in ranks(4).run(batches_of_documents):
        assert {route for _, route in seen} == {"ring", "direct"}
        assert len({count for count, _ in seen}) == 1


# --- together, or not at all ---------------------------------------------------------------------


def told(make):
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def unlike_the_others(what):
    world, odd = dist.group.WORLD, dist.get_rank() == 1
    over_all, other = (dist.new_group(list(range(4))) for _ in range(2))
    first, *_ = [dist.new_group([rank]) for rank in range(4)]  # the others are not in it
    reuse = {
        "reuse": [over_all] if odd else (),
        "another": [other if odd else over_all],
        "not a member": [first],
        "no list": world,
    }.get(what, ())
    try:
        groups = mb.Groups.from_topology(world, intra=2, reuse=reuse)
    except ValueError as error:
        return str(error)
    return told(lambda: mb.attention(*qkv(), groups=groups, algorithm="ring"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("reuse", "rank 0 has intra=2, ulysses=1, placement='head_first', reuse=no groups"),
        ("another", "for the ranks [0, 1, 2, 3], rank 1 and rank 0 pass different process groups"),
        ("not a member", "reuse=groups of other ranks"),
        ("no list", "reuse must be a list of process groups, got ProcessGroup"),
    ],
)  # fmt: skip
def test_ranks_that_would_wait_for_each_other_are_told_so(ranks, what, words):
    pool = ranks(4)
    messages = pool.run(unlike_the_others, what)
    pool.close()
    assert len(set(messages)) == 1
    assert words in messages[0]


# --- the device that init_process_group binds ----------------------------------------------------


class Splitting(dist.ProcessGroupGloo):
    """gloo that torch treats as NCCL, so that communicators are split off."""

    supports_splitting = True

    def eager_connect_single_device(self, device):
        pass


def meet_again(backend, folder):
    """Restart torch.distributed; on two ranks."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)


def bound_to_a_device(folder):
    """Return from what torch would split a grid's communicators, and the bound devices."""
    sources, kept, stock = [], [], c10d._get_split_source

    def make(options, _):
        made = Splitting(options.store, options.group_rank, options.group_size, options.timeout)
        kept.append(made)  # torch knows it by its own class once nobody holds it
        return made

    dist.Backend.register_backend("split", make, extended_api=True, devices=["cpu", "cuda"])
    meet_again("split", folder)
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")  # as device_id does where there is a GPU
    groups = mb.Groups.flat(world)
    with mock.patch.object(
        c10d, "_get_split_source", lambda *given: sources.append(stock(*given)) or sources[-1]
    ):
        mb.attention(*qkv(), groups=groups).sum().backward()
    made = set(groups.ring.channels.values())
    return (
        [source is not None for source in sources],
        [str(group.bound_device_id) for group in made],
        str(world.bound_device_id),
    )


def test_no_communicator_is_split_off_that_of_the_world(ranks, tmp_path):
    """Splitting waits for every rank of the job, and ranks of other grids do not take part."""
    pool = ranks(2)
    for sources, bound, world in pool.run(bound_to_a_device, str(tmp_path)):
        assert not any(sources)
        assert bound == [world] * 2 == ["cuda:0"] * 2  # activations and gradients of one ring
    pool.close()


# --- backends ------------------------------------------------------------------------------------


def without_a_backend(backend, folder):
    meet_again(backend, folder)
    groups = mb.Groups.flat(dist.group.WORLD)
    q, k, v = qkv()
    mb.attention(q, k, v, groups=groups, algorithm="auto").sum().backward()
    refused = told(lambda: mb.attention(*(x.to("meta") for x in (q, k, v)), groups=groups))
    return dist.get_backend(), groups.backend, groups.devices, q.grad.isfinite().all(), refused


@pytest.mark.parametrize(
    ("backend", "torchs_word"), [(None, "undefined"), ("cpu:gloo", "cpu:gloo")]
)
def test_groups_of_a_world_made_without_a_single_backend(ranks, tmp_path, backend, torchs_word):
    pool = ranks(2)
    for found in pool.run(without_a_backend, backend, str(tmp_path)):
        word, ours, devices, finite, refused = found
        assert (word, ours, devices, bool(finite)) == (torchs_word, "cpu:gloo", ("cpu",), True)
        assert refused == (
            "rank 0: groups: backend cpu:gloo sends cpu tensors, got meta tensors; move them to cpu"
        )
    pool.close()


def of_devices(config):
    with mock.patch.object(dist, "get_backend_config", return_value=config):
        return process_groups.backends(None)


def test_the_device_of_an_exchange_is_that_of_its_tensors():
    assert of_devices("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert of_devices("cuda:nccl") == {"cuda": "nccl"}
    assert of_devices("cpu:gloo,cuda:gloo,mps:gloo") == {"cpu": "gloo"}  # gloo sends no CUDA tensor


# --- options and memory --------------------------------------------------------------------------


def refused_options():
    flat = mb.Groups.from_topology
    return [told(lambda n=n: flat(dist.group.WORLD, intra=2, nccl_max_ctas=n)) for n in (0, 4)]


def test_a_limit_that_would_have_no_effect_is_refused(ranks):
    for zero, four in ranks(2).run(refused_options):
        assert zero == "nccl_max_ctas must be an integer >= 1 or None, got 0"
        assert four.startswith(
            "nccl_max_ctas=4 requires NCCL, but the backend of these groups is gloo"
        )


def asked_of_torch():
    """Return the options of communicators of grids with NCCL: timeout, priority, maximum blocks.

    The groups are made with gloo.
    """
    asked, stock = [], dist.new_group

    def new_group(ranks, *, backend, pg_options, **named):
        asked.append((backend, pg_options, named["timeout"]))
        return stock(ranks, backend="gloo", **named)

    with (
        mock.patch.object(communicators, "backends", return_value={"cpu": "nccl"}),
        mock.patch.object(dist, "new_group", new_group),
    ):
        for most in (None, 4):
            groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, nccl_max_ctas=most)
            mb.attention(*qkv(), groups=groups).sum().backward()
    default = dist.ProcessGroupNCCL.Options().config.max_ctas
    return [
        backend if options is None else (
            options._timeout == timeout, options.is_high_priority_stream,
            None if options.config.max_ctas == default else options.config.max_ctas,
        )
        for backend, options, timeout in asked
    ]  # fmt: skip


@needs_nccl
def test_options_of_the_rings_nccl_communicators(ranks):
    """torch warns if the timeout in the options differs from the group's timeout."""
    for asked in ranks(2).run(asked_of_torch):
        assert asked == [
            "gloo", (True, True, None), (True, True, None), "gloo", (True, True, 4), (True, True, 4)
        ]  # fmt: skip


def memory_told(sizes):
    """Return the start-up lines of a grid on a device with these memory sizes, and on the CPU."""
    lines = []
    for taken in (iter(sizes), itertools.repeat(None)):
        with mock.patch.object(communicators, "memory_taken", lambda _, taken=taken: next(taken)):
            groups = mb.Groups.from_topology(dist.group.WORLD, intra=1, reuse=[dist.group.WORLD])
            mb.prepare(*qkv(grad=False), groups=groups)
            lines.append(mb.prepare(*qkv(), groups=groups).describe().split(" | ")[-1])
    return lines


def test_the_start_up_line_says_what_communicators_took(ranks):
    """The first plan sends no gradients; the memory of the second is added."""
    sizes = [2**20, 2**20 * 65, 2**20 * 80, 2**20 * 180]
    for gpu, cpu in ranks(2).run(memory_told, sizes):
        assert cpu == "communicators: 1 made (inter gradients), reused groups for inter"
        assert gpu == f"{cpu}, 164 MiB of device memory before any message"


# --- their end -----------------------------------------------------------------------------------


def gloo_threads():
    """Return the ids of the threads of this process that run collectives of gloo."""
    names = Path("/proc/self/task").glob("*/comm")
    return {name.parent.name for name in names if name.read_text() == "pt_gloo_runloop\n"}


def kept_after_the_end(folder, nn_first):
    """Return process groups and threads that remain after `destroy_process_group()`.

    The script still holds its groups, plan and loss. nn_first: torch.distributed.nn was imported
    before.
    """
    before = gloo_threads()  # other tests may have left some
    meet_again("gloo", folder)
    functional = importlib.import_module("torch.distributed.nn.functional")
    if nn_first:
        importlib.reload(functional)  # as when an optimizer imports it after init_process_group
    node = dist.new_group([0, 1])
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, reuse=[node])
    q, k, v = qkv()
    plan = mb.prepare(q, k, v, groups=groups)
    loss = mb.attention(q, k, v, plan=plan).sum()
    loss.backward()
    alive = {name: weakref.ref(group) for group, name in c10d._world.pg_names.items()}
    carriers = len(groups.carriers)
    del node
    dist.destroy_process_group()
    kept = [name for name, group in alive.items() if group() is not None]
    threads = len(gloo_threads() - before)
    try:
        groups.check()
    except ValueError as error:
        refused = str(error)
    store = dist.FileStore(f"{folder}/after", 2)
    dist.init_process_group(
        "gloo", store=store, rank=groups.rank, world_size=2, timeout=timedelta(seconds=60)
    )
    return len(alive), carriers, kept, threads, refused


@pytest.mark.parametrize("nn_first", [False, True])
def test_nothing_outlives_destroy_process_group(ranks, tmp_path, nn_first):
    """gloo's threads abort the process if they need the interpreter's lock while Python ends."""
    for alive, carriers, kept, threads, refused in ranks(2).run(
        kept_after_the_end, str(tmp_path), nn_first
    ):
        assert alive == 4  # of all ranks, given, the grid's own, for gradients
        assert carriers == 2
        assert kept == []
        assert threads == 0
        assert "the process groups of this mb.Groups were destroyed" in refused
