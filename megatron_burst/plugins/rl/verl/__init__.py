# SPDX-License-Identifier: Apache-2.0
"""BurstAttention for verl: importing this module installs it.

verl imports the module that a configuration names, in every worker, before it builds a model:

    actor_rollout_ref.model.external_lib: megatron_burst.plugins.rl.verl

From then on its Megatron engines take `override_transformer_config.burst`, fields of
`mb.BurstConfig`. It is the only module of the package that does something when it is imported.
`uninstall()` undoes it.
"""

from __future__ import annotations

from .engine import VERSIONS, install, uninstall

__all__ = ["VERSIONS", "install", "uninstall"]

install()
