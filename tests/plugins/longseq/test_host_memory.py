"""Host memory: equal bits come back, blocks of any length fit, errors name a limit that works."""

import gc
import math
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.plugins.longseq.host.arena import ALIGN, SLAB, Arena, OutOfHostMemory

MIB = 2**20


def memory(**given):
    return mb.HostMemory(64 * MIB, strict=True, device="cpu", **given)


def forms():
    """Yield tensors of every shape and order of strides that a layer may save."""
    base = torch.randn(6, 5, 4)
    return {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "columns": base[:, :, 1:3],
        "rows": base[2:5],
        "every_second": base[::2],
        "expanded": base[:, :1].expand(6, 5, 4),
        "one_row": base[:1],
        "bfloat16": base.bfloat16(),
        "double": base.double(),
        "integers": torch.arange(30).view(10, 3),
        "flags": base > 0,
        "empty": base[:0],
        "scalar": base.sum(),
    }


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.4, 1.0])
@pytest.mark.parametrize("name", forms())
def test_the_same_bits_shape_and_order_come_back(name, fraction):
    host, tensor = memory(), forms()[name]
    before = tensor.clone()
    moved = host.move(tensor, fraction)
    for _ in range(2):  # a second backward
        back = moved.get()
        assert torch.equal(back, before)
        assert back.dtype == tensor.dtype
        assert [*moved.shape] == [*tensor.shape]
        wanted = tensor if not host.used else torch.empty_like(tensor)
        assert back.stride() == wanted.stride()
    rows = math.ceil(fraction * len(tensor)) if tensor.dim() else 0
    nbytes = rows * tensor[0].numel() * tensor.element_size() if rows else 0
    assert (host.used, host.bytes_out, host.bytes_back) == (nbytes, nbytes, 2 * nbytes)
    assert host.mapped == (host.limit if nbytes else 0)
    del moved
    assert (host.used, host.peak) == (0, nbytes)


def test_what_is_left_alone():
    host = memory()

    class Quantised(torch.Tensor):
        pass

    marked = torch.randn(4, 4)
    marked._do_not_offload = True
    weight = torch.nn.Parameter(torch.randn(4, 4))
    left = [
        marked, weight, weight.t(), torch.randn(4, 4).as_subclass(Quantised),
        torch.randn(4, 4).to(torch.float8_e4m3fn), torch.randn(4, 4, device="meta"),
        torch.eye(4).to_sparse(), torch.randn(4, 4, dtype=torch.cfloat).conj(),
    ]  # fmt: skip
    for tensor in left:
        moved = host.move(tensor)
        assert not moved.moved
        assert moved.get().data_ptr() == tensor.data_ptr() if not tensor.is_sparse else True
    assert host.bytes_out == 0


def test_a_tensor_changed_in_place_after_it_was_moved_is_noticed():
    host = memory()
    tensor = torch.randn(8)
    moved = host.move(tensor)
    tensor.view(2, 4)[0] = 1
    with pytest.raises(RuntimeError, match="changed in place"):
        moved.get()
    before = tensor.clone()
    moved = host.move(tensor)
    moved.release()  # from here on it may be written over
    tensor.zero_()
    assert torch.equal(moved.get(), before)


def test_memory_moved_twice_travels_once_until_it_is_changed():
    host = memory()
    tensor = torch.randn(8, 4)
    moved = [host.move(x, shared=True) for x in (tensor, tensor.view(4, 8), tensor[2:4])]
    first, second, part = moved
    assert host.bytes_out == 128
    assert torch.equal(part.get(), tensor[2:4])
    assert torch.equal(first.get(), second.get().view(8, 4))
    assert host.bytes_back == 128  # held until all three had it
    tensor.add_(1)
    third = host.move(tensor, shared=True)
    assert host.bytes_out == 256
    assert torch.equal(third.get(), tensor)
    del first, second, part, third, moved
    assert host.used == 0
    assert not len(host._index)


def test_buffers_that_are_written_unseen_travel_each_time():
    host = memory()
    buffer, kept = torch.zeros(4), []
    for number in range(3):
        kept.append(host.move(buffer.fill_(number)))
        kept[-1].release()
        buffer.data.add_(1)  # as communication and kernels do: autograd does not count it
        kept.append(host.move(buffer))
        kept[-1].release()
    assert [int(moved.get()[0]) for moved in kept] == [0, 1, 1, 2, 2, 3]


# --- the arena -----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40 * ALIGN), st.booleans(), st.integers(0, 99)), max_size=60)
)
def test_blocks_of_random_lengths_never_overlap_and_all_come_back(steps):
    arena, held, peak = Arena(4 * MIB, strict=True), [], 0
    for nbytes, drop, which in steps:
        if drop and held:
            block, mark = held.pop(which % len(held))
            assert (block.bytes() == mark).all()
            del block
        mark = len(held) % 200
        block = arena.take(nbytes)
        assert block.bytes().numel() == nbytes
        block.bytes().fill_(mark)
        held.append((block, mark))
        del block
        peak = max(peak, arena.used)
        assert arena.used == sum(block.nbytes for block, _ in held)
    assert all((block.bytes() == mark).all() for block, mark in held)
    assert arena.peak == peak
    held.clear()
    assert arena.used == 0
    for slab in arena._slabs:  # merged again
        assert [(gap.start, gap.size) for gap in slab.gaps] == [(0, slab.size)]


def test_the_smallest_gap_is_taken_and_lengths_may_change():
    arena = Arena(32 * ALIGN)
    blocks = [arena.take(n * ALIGN) for n in (3, 1, 2, 1, 1)]
    assert arena.mapped == 32 * ALIGN
    starts = [block.start // ALIGN for block in blocks]
    assert starts == [0, 3, 4, 6, 7]
    blocks[0] = blocks[2] = None
    again = arena.take(2 * ALIGN - 5)
    assert again.start // ALIGN == 4  # and not 0, where three are free
    blocks[1] = None  # joins the three before it
    assert arena.take(4 * ALIGN).start == 0


def test_out_of_memory_names_the_flag_and_a_size_that_would_do():
    host = mb.HostMemory(2 * MIB, device="cpu", ranks=4)
    first = host.move(torch.zeros(MIB + ALIGN, dtype=torch.uint8))
    with pytest.raises(OutOfHostMemory, match="--burst-host-memory") as told:
        host.move(torch.zeros(MIB, dtype=torch.uint8))
    enough = int(str(told.value).split("--burst-host-memory ")[1].split()[0])
    assert torch.equal(first.get(), torch.zeros(MIB + ALIGN, dtype=torch.uint8))
    assert host.used == MIB + ALIGN
    larger = mb.HostMemory(enough // 4, device="cpu")
    held = [larger.move(torch.zeros(n, dtype=torch.uint8)) for n in (MIB + ALIGN, MIB)]
    assert larger.used == sum(moved.nbytes for moved in held)
    del first
    again = host.move(torch.zeros(2 * MIB, dtype=torch.uint8))  # the next step is right
    assert host.used == again.nbytes


def test_idle_slabs_make_room_for_a_longer_one(monkeypatch):
    monkeypatch.setattr("megatron_burst.plugins.longseq.host.arena.SLAB", mmap.PAGESIZE)
    pinned = []

    def pin(address, size):
        pinned.append(address)
        return lambda: pinned.remove(address)

    arena = Arena(4 * mmap.PAGESIZE, pin=pin)
    blocks = [arena.take(mmap.PAGESIZE) for _ in range(4)]
    assert len(pinned) == 4
    owned = blocks[2].bytes()
    assert arena.owns(owned)
    assert not arena.owns(owned.clone())
    blocks.clear()
    assert arena.take(3 * mmap.PAGESIZE).nbytes == 3 * mmap.PAGESIZE
    assert len(pinned) == len(arena._slabs) == 1
    del arena
    gc.collect()
    assert not pinned


def test_rates_are_those_of_the_copies():
    host = memory(rate=4 * MIB)
    assert host.rates() == (None, None)
    moved = host.move(torch.zeros(MIB // 8, dtype=torch.uint8))
    moved.get()
    assert all(0 < rate <= 4 * MIB * 1.01 for rate in host.rates())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"limit": 0}, "limit"), ({"limit": 1.5}, "limit"), ({"limit": True}, "limit"),
        ({"rate": 0}, "rate"), ({"rate": -1.0}, "rate"), ({"rate": "fast"}, "rate"),
        ({"ranks": 0}, "ranks"), ({"device": "gpu"}, "device"), ({"device": "meta"}, "device"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(given, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        mb.HostMemory(**{"limit": MIB, "device": "cpu", **given})
    with pytest.raises(ValueError, match=r"tensor must be a torch\.Tensor, got list"):
        memory().move([1, 2])
    for fraction in (-0.1, 1.1, "half", True):
        with pytest.raises(ValueError, match="fraction must be a fraction from 0 to 1"):
            memory().move(torch.zeros(4), fraction)


def test_at_most_a_sixteenth_of_what_is_used_is_mapped_in_vain():
    """Gaps at the ends of slabs may be too short for a block. The memory is never touched."""
    arena, blocks = Arena(16 * 2**30), []
    for _ in range(4096):
        blocks.append(arena.take(MIB))
        assert arena.mapped - arena.used <= SLAB + arena.mapped / 15
    assert arena.used == len(blocks) * MIB
