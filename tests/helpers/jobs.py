"""Jobs on ranks that one process forks after it has imported what they need.

`Jobs` is the process from outside. In its script, `serve_jobs` runs one function per rank.
"""

import os
import sys

import torch
from fork_server import ForkServer, serve
from ranks import ENVIRONMENT, free_port, of_torchrun

LIMIT = 240  # seconds of a job


class Jobs:
    """A process that runs jobs.

    Args:
        folder: folder for logs and outputs, in which ranks run.
        script: script that calls `serve_jobs`.
        words: arguments of the script.
        paths: folders in which the script finds modules besides those of `ranks.ENVIRONMENT`.
        variables: further environment variables.
    """

    def __init__(self, folder, script, words=(), paths=(), variables=None):
        path = os.pathsep.join([*map(str, paths), ENVIRONMENT["PYTHONPATH"]])
        environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | (variables or {})
        command = [sys.executable, str(script), *map(str, words)]
        self.server = ForkServer.launched(folder, command, environment)

    def run(self, world, launched=True, **work):
        """Run a job; return the exit status and what each rank printed.

        `launched`: ranks have the environment that torchrun gives them.
        """
        port = free_port() if launched else None
        tasks = [
            {"rank": rank, "world": world, "port": port, "work": work} for rank in range(world)
        ]
        done = self.server.run(tasks, LIMIT)
        return max(abs(rank.code) for rank in done), [rank.output + rank.errors for rank in done]

    def close(self):
        self.server.close()


def serve_jobs(job):
    """Run `job(work)` on every rank of the jobs that `Jobs` sends."""

    def run(rank, world, port, work):
        if port is not None:
            os.environ |= of_torchrun(rank, world, port)
        job(work)
        return 0

    torch.set_num_threads(1)
    serve(run)
