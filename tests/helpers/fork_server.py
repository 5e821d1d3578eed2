"""Processes that are forked from one that has imported what they need.

Imports take longer than most of these processes run. `serve` is the loop of the server,
`ForkServer` is the server from outside.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

from workers import start_server

ANSWERS = "ANSWERS"  # variable with the file descriptor for answers


class Finished(NamedTuple):
    """The exit code of a process and what it printed; -9 if it was killed at its limit."""

    code: int
    output: str
    errors: str


class ForkServer:
    """A server process that runs `serve`, started by `launched` or `forked`.

    Args:
        folder: folder for logs and outputs.
        requests: text stream to the standard input of the server.
        answers: text stream from the server; modules print to its standard output.
        wait: called when the streams are closed; returns when the server has ended.
    """

    def __init__(self, folder, requests, answers, wait):
        self.folder, self.count = folder, 0
        self.requests, self.answers, self.wait = requests, answers, wait

    @classmethod
    def launched(cls, folder, command, environment):
        """Start a new interpreter with the words of a command and additional variables."""
        answers, end = os.pipe()
        with (folder / "server.log").open("w") as log:
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[end],
                env=os.environ | environment | {ANSWERS: str(end)}, cwd=folder,
            )  # fmt: skip
        os.close(end)
        return cls(folder, server.stdin, os.fdopen(answers), server.wait)

    @classmethod
    def forked(cls, folder, function, *args):
        """Fork a process from the server of the ranks; `function(*args)` must call `serve`.

        The server has imported Megatron if a collected test needs it.
        """
        start_server()
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        log = str(folder / "server.log")
        server = context.Process(target=_call, args=(there, log, function, args))
        server.start()
        there.close()
        requests, answers = (os.fdopen(os.dup(here.fileno()), mode) for mode in ("w", "r"))
        here.close()
        return cls(folder, requests, answers, server.join)

    def run(self, tasks, limit):
        """Run a process for each task, all at once, and return how each finished.

        Args:
            tasks: keyword arguments of the function that was passed to `serve`.
            limit: seconds after which processes are killed.
        """
        self.count += 1
        named = [str(self.folder / f"{self.count}-{index}") for index in range(len(tasks))]
        request = {"tasks": tasks, "limit": limit, "files": named}
        print(json.dumps(request), file=self.requests, flush=True)
        answer = self.answers.readline()
        assert answer, (self.folder / "server.log").read_text()
        return [
            Finished(code, Path(f"{name}.out").read_text(), Path(f"{name}.err").read_text())
            for code, name in zip(json.loads(answer), named, strict=True)
        ]

    def close(self):
        self.requests.close()
        self.answers.close()
        self.wait()


def _call(connection, log, function, args):
    """Call a function that reads requests from a connection and answers there."""
    os.environ[ANSWERS] = str(os.dup(connection.fileno()))
    os.dup2(connection.fileno(), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    connection.close()
    sys.stdin = os.fdopen(0)
    function(*args)


def serve(run):
    """Read requests from the standard input until it ends.

    Args:
        run: called with the arguments of a task in a process of its own; returns an exit code.
    """
    answers = os.fdopen(int(os.environ[ANSWERS]), "w")
    for line in sys.stdin:
        request = json.loads(line)
        children = [
            _fork(run, task, name)
            for task, name in zip(request["tasks"], request["files"], strict=True)
        ]
        print(json.dumps(_wait(children, request["limit"])), file=answers, flush=True)
    os._exit(0)  # an interpreter with torch takes seconds to end


def _fork(run, task, name):
    child = os.fork()
    if child:
        return child
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = 1
    try:
        code = run(**task)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()  # os._exit would leave without a message
    finally:
        util._exit_function()  # processes that this one started (for a checkpoint) end with it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children, limit):
    """Return exit codes; processes that take too long are killed (-9)."""
    codes, end = dict.fromkeys(children), time.monotonic() + limit
    while None in codes.values():
        for child in [child for child, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return list(codes.values())
