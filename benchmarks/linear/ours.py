"""mb.state_scan as one of the ways, with any of its algorithms."""

from __future__ import annotations

import megatron_burst as mb

from .settings import Setting
from .ways import Way


def way(setting: Setting, algorithm: str, groups: mb.Groups, rates: mb.Rates | None) -> Way:
    """The scan of a setting's maps by this algorithm; "auto" chooses by `rates`."""
    raise NotImplementedError(algorithm)
