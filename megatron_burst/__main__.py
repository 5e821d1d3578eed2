# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_burst` is `megatron-burst`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
