"""Figures, settings and files that no run could have are refused by name, where they come in."""

import math
from dataclasses import replace

import pytest

from megatron_burst.advisor.clusters import GPUS, Cluster
from megatron_burst.autotune.rates import Rates

# --- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, True, "1"])
@pytest.mark.parametrize("name", ["memory", "peak", "host_link", "nvlink", "memory_rate", "nic",
                                  "attention", "linear", "small"])  # fmt: skip
def test_figures_that_no_gpu_has(name, value):
    with pytest.raises(ValueError, match=f"^gpu h100: {name} .*: {value!r}"):
        replace(GPUS["h100"], **{name: value})


@pytest.mark.parametrize("value", [math.nan, -1, math.inf, True])
@pytest.mark.parametrize("name", ["nics", "nic_rate", "host_rate", "host_memory", "reserve",
                                  "spread", "host_update", "overlap"])  # fmt: skip
def test_figures_that_no_cluster_has(name, value):
    with pytest.raises(ValueError, match=f"^cluster: {name} {value!r} must be a "):
        replace(Cluster("h100", 8), **{name: value})


@pytest.mark.parametrize(
    ("figures", "said"),
    [({"host_update": 0.0, "overlap": 1.5},
      "host_update 0.0 must be a finite number above 0; overlap 1.5 must be a fraction"),
     ({"gpus": 8.0}, "--gpus 8.0 --per-node 8: whole numbers from 1"),
     ({"per_node": 0}, "--gpus 8 --per-node 0: whole numbers from 1")],
)  # fmt: skip
def test_all_figures_of_a_cluster_are_named(figures, said):
    with pytest.raises(ValueError, match=said):
        replace(Cluster("h100", 8), **figures)


@pytest.mark.parametrize(
    ("name", "value"),
    [("exchange", 1.01), ("exchange", math.inf), ("nic", math.inf), ("backward", math.inf),
     ("slowdown", math.inf), ("intra", math.nan), ("copying", -1.0)],
)  # fmt: skip
def test_rates_that_no_link_has(name, value):
    with pytest.raises(ValueError, match=rf"^rates: {name} .*got {value!r}"):
        replace(Rates(1.0, math.inf, compute=math.inf), **{name: value})
