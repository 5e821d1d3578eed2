"""Stands in for pretrain_gpt.py where only its launching is tested: no torch, no Megatron.

Rank 0 writes a metrics file of the same form; --fail-on-rank N lets that rank raise.
"""

import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--metrics")
parser.add_argument("--train-iters", type=int, default=3)
parser.add_argument("--fail-on-rank", type=int)
args, _ = parser.parse_known_args()

rank = int(os.environ["RANK"])
print("a warning of no interest", file=sys.stderr)
if rank == args.fail_on_rank:
    raise ValueError("--burst-side is 'left': use query, kv or auto")
if rank == 0:
    with open(args.metrics, "w") as out:
        threads = os.environ["OMP_NUM_THREADS"]
        print(json.dumps({"run": {"startup": f"threads {threads}"}}), file=out)
        for step in range(1, args.train_iters + 1):
            print(json.dumps({"step": step, "loss": 1 / step, "grad_norm": 1.0}), file=out)
