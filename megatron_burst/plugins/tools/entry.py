# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `tools`."""

from ...registry import Command, Plugin

PLUGIN = Plugin(
    public={
        "Advice": "advise.advice:Advice",
        "Model": "advise.shapes.model:Model",
        "Settings": "advise.settings:Settings",
        "advise": "advise.advice:advise",
        "simulate": "advise.simulate:simulate",
    },
    commands={
        "advise": Command("advise.command", "find the fastest settings on a cluster"),
        "calibrate": Command("calibrate", "measure a cluster, for `advise --cluster`"),
        "memory": Command("memory", "estimate the memory of a training run, item by item"),
        "show": Command("show", "draw masks, layouts and schedules"),
        "trace": Command("trace", "record when each rank computes, sends and waits"),
    },
    hooks={"gpu_report": "gpu_report"},
)
