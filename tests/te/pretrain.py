"""`megatron-burst pretrain --cpu SCRIPT ...`, as a script that a rank runs."""

import sys

from megatron_burst.cli.main import main

sys.exit(main(["pretrain", "--cpu", *sys.argv[1:]]))
