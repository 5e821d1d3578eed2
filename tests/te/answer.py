"""How a script that a rank runs answers a test: `script FUNCTION JSON` prints what FUNCTION(*JSON)
returns, behind FOUND; a failure with its traceback, which a forked rank would swallow."""

import json
import sys
import traceback

import torch.distributed as dist


def main(functions, prepare=lambda: None):
    """functions: name -> function, of which the first word of the command names one. prepare: is
    called before it, with a process group."""
    name, words = sys.argv[1:]
    try:
        dist.init_process_group("gloo")
        prepare()
        print("FOUND " + json.dumps(functions[name](*json.loads(words))))
    except Exception:
        traceback.print_exc()
        raise
