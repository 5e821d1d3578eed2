# SPDX-License-Identifier: Apache-2.0
"""Import of Megatron modules whose path depends on Megatron's version.

The modules contain layers with a state, and sparse attention. Callers name a module relative to the
older packages (`PACKAGES`), such as "dsa" or "gated_delta_net.gdn". `MOVED` maps these names to
newer paths. The newer path is tried first: if both exist, the older module only re-exports names.
"""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = (
    "megatron.core.ssm",
    "megatron.core.transformer.experimental_attention_variant",
)
# Megatron-LM pull requests 7239 and 7380 (September 2026). Pull request 7380 has a test with a
# table of deprecated paths. Kernels moved to `core/ops` earlier than the classes that call them.
_SSM, _ATTENTION = "megatron.core.ops.ssm", "megatron.core.ops.attention"
MOVED = {
    "absorbed_mla": f"{_ATTENTION}.mla",
    "dsa": f"{_ATTENTION}.dsa.modules",
    "dsa_loss": "megatron.core.transformer.dsa_loss",
    "gated_delta_net": f"{_SSM}.gated_delta.modules",
    "gated_delta_net.common": f"{_SSM}.gated_delta.common",
    "gated_delta_net.gdn": f"{_SSM}.gated_delta.gdn",
    "gated_delta_net.gdn2": f"{_SSM}.gated_delta.gdn2",
    "gated_delta_product": f"{_SSM}.gdp.mixer",
    "mamba_layer": "megatron.core.transformer.mamba_layer",
    "mamba_mixer": f"{_SSM}.mamba2.mixer",
    "mlp_layer": "megatron.core.transformer.mlp_layer",
}


def find(name: str) -> Any:
    """Import and return the module `name` from the first path that exists; None if none exists."""
    for path in _paths(name):
        if (present := imported(path)) is not None:
            return present
    return None


def module(name: str) -> Any:
    """Import and return the module `name` from the first path that exists.

    Raises:
        RuntimeError: No path exists; the message names Megatron's version and the paths.
    """
    present = find(name)
    if present is None:
        import megatron.core

        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no module {name}: it is not at "
            f"{' or '.join(_paths(name))}; this version of megatron_burst does not support it: "
            "use a tested version (megatron-burst doctor)"
        )
    return present


def imported(path: str) -> Any:
    """Import and return the module at `path`; None if it or a parent package does not exist."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
    return None


def _paths(name: str) -> list[str]:
    newer = [MOVED[name]] if name in MOVED else []
    return newer + [f"{package}.{name}" for package in PACKAGES]
