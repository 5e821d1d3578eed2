# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m megatron_burst`, the same program as `megatron-burst`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
