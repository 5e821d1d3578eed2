"""The limit of host memory, and the fraction of saved tensors that is moved."""

import resource

import pytest

import megatron_burst as mb
from megatron_burst.plugins.longseq.host import mover
from megatron_burst.recompute.host_limits import choose_fraction, host_limit

MIB = 2**20


def machine(root, group="0::/job\n", **files):
    """Create a /proc and /sys with 1000 KiB available."""
    for name, text in {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n",
        "proc/self/cgroup": group,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("group", "files", "wanted"),
    [
        ("0::/job\n", {}, 1024000),
        ("0::/job\n", {f"{V2}/job/memory.max": "max\n"}, 1024000),
        ("0::/job\n", {f"{V2}/job/memory.max": "500000\n"}, 500000),
        ("0::/a/b\n", {f"{V2}/a/memory.max": "400000"}, 400000),  # of a group around it
        ("0::/gone\n", {f"{V2}/memory.max": "300000"}, 300000),  # in a container
        (
            "0::/job\n",
            {
                f"{V2}/job/memory.max": "500000",
                f"{V2}/job/memory.current": "200000",
                f"{V2}/job/memory.stat": "anon 50000\ninactive_file 150000\n",
            },
            450000,
        ),
        ("5:cpu,memory:/job\n", {f"{V1}/job/memory.limit_in_bytes": "600000"}, 600000),
        ("5:memory:/job\n", {f"{V1}/job/memory.limit_in_bytes": f"{2**63 - 4096}"}, 1024000),
        ("3:cpu:/job\n", {f"{V1}/job/memory.limit_in_bytes": "600000"}, 1024000),
    ],
)
def test_the_limit_is_the_smallest_of_what_is_there(tmp_path, group, files, wanted):
    assert host_limit(root=machine(tmp_path, group, **files)) == int(0.8 * wanted)


def test_the_memlock_limit_does_not_count(tmp_path):
    """CUDA's driver pins memory beyond the memlock limit of a process, which is usually 8 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 1 << 16 if hard == resource.RLIM_INFINITY else min(1 << 16, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (low, hard))
    try:
        assert host_limit(root=machine(tmp_path)) == int(0.8 * 1024000)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_default_limit_is_shared_by_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setattr(mover, "host_limit", lambda: 8 * MIB)
    assert mb.HostMemory(device="cpu", ranks=4).limit == 2 * MIB


def test_fraction_by_link_and_by_memory():
    # 80 bytes per layer; the link takes 100 bytes in a layer's forward.
    assert choose_fraction(80, 2.0, 50, 1e9, 8) == (1.0, "none", 1.0, 1.0)
    assert choose_fraction(200, 2.0, 50, 1e9, 8)[:2] == (0.5, "link")
    # 8 layers on each of 4 ranks leave 2560 bytes.
    assert choose_fraction(80, 2.0, 50, 640, 8, 4)[:2] == (0.25, "host")
    assert choose_fraction(0, 1.0, 1.0, 1, 8) == (1.0, "none", 1.0, 1.0)
    assert choose_fraction(3, 1.0, 1.0, 1e9, 8).fraction == 0.333
    with pytest.raises(ValueError, match="rate must be a number >= 0, got -1"):
        choose_fraction(80, 2.0, -1, 1e9, 8)
