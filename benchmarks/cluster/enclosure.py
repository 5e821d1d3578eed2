"""Kernel namespaces that hold a whole emulated cluster and remove it when they end.

`enclosed(main)` runs `main` as process 1 of a PID namespace with its own network and mounts. When
that process ends, the kernel kills every rank and removes every link. It also ends if the process
outside ends or is killed. It needs no root if users may create user namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NEW_MOUNTS, NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x10000000, 0x20000000, 0x40000000
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# One link of each kind that a cluster needs, with all its settings.
TRIAL = """
link add trial type bridge
netns add trial
link add trial0 type veth peer name ib netns trial
link set trial0 master trial
link set dev trial0 gso_max_size 16384
"""


class Unavailable(RuntimeError):
    """This machine cannot emulate a cluster; the message has the reason and a remedy."""


def enclosed(main: Callable[[], int]) -> int:
    """Run `main` in its own namespaces and return its exit code, or 128 + signal.

    Call it before anything starts a thread.

    Raises:
        Unavailable: Namespaces are refused.
    """
    require_tools()
    refusal_reader, refusal_writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(refusal_reader)
        _become_outer(refusal_writer, main)
    os.close(refusal_writer)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _kill(child, number))
    with os.fdopen(refusal_reader) as pipe:
        refusal = pipe.read()
    code = _wait(child)
    if refusal:
        raise Unavailable(refusal)
    return code


def require_tools() -> None:
    """Raise Unavailable unless this is Linux with `ip` and `tc`."""
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"network namespaces are Linux's; this is {sys.platform}")
    for tool in ("ip", "tc", "mount"):
        if shutil.which(tool) is None:
            raise Unavailable(f"needs the program {tool}: install iproute2 (ip, tc) and mount")


def run(*words: str, stdin_text: str | None = None) -> str:
    """Run a program and return its output; raise Unavailable with its error."""
    process = subprocess.run(words, input=stdin_text, capture_output=True, text=True, check=False)
    if process.returncode:
        raise Unavailable(f"{' '.join(words)}: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


def _become_outer(refusal_writer: int, main: Callable[[], int]) -> None:
    """Enter the namespaces in the first child, then fork process 1 and wait for it."""
    try:
        _die_with_parent()
        _go_first()
        _enter()
    except (OSError, Unavailable) as error:
        os.write(refusal_writer, _refusal(error).encode())
        os._exit(1)
    first = os.fork()
    if first == 0:
        _be_first(refusal_writer, main)
    os.close(refusal_writer)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _kill(first, number))
    os._exit(_wait(first))


def _be_first(refusal_writer: int, main: Callable[[], int]) -> None:
    """Run as process 1 of the PID namespace: check the required features, then call `main`."""
    code = 1
    try:
        _die_with_parent()
        for number in FORWARDED:
            signal.signal(number, _stop)
        try:
            _prepare()
        except Unavailable as error:
            os.write(refusal_writer, _refusal(error).encode())
            os._exit(1)
        os.close(refusal_writer)
        tempfile.tempdir = "/run"  # files are removed with the namespaces
        code = main()
    except Unavailable as error:  # a feature that `_prepare` did not check
        print(_refusal(error), file=sys.stderr)
        code = 2
    except KeyboardInterrupt as stop:
        print(f"stopped by signal {stop}; the cluster is gone", file=sys.stderr)
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter() -> None:
    """Create mounts, network and PIDs; without rights, in a user namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = NEW_MOUNTS | NEW_NETWORK | NEW_PIDS
    if os.geteuid() == 0 and libc.unshare(namespaces) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(namespaces | NEW_USERS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _prepare() -> None:
    """Mount our own folders, and create one link to check the kernel's features."""
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "none", "/run")  # `ip netns` keeps its names here
    run("ip", "link", "set", "lo", "up")
    run("ip", "-batch", "-", stdin_text=TRIAL)
    run(
        "tc",
        "qdisc",
        "add",
        "dev",
        "trial0",
        "root",
        *["tbf", "rate", "1mbit", "burst", "32kb", "limit", "4mb"],
    )
    run("ip", "-batch", "-", stdin_text="link del trial0\nlink del trial\nnetns del trial\n")


def _refusal(error: Exception) -> str:
    """Return the reason and a remedy."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.ENOSPC, errno.EACCES):
        remedy = (
            "this machine refuses network namespaces to this user. Run it as root, or allow user "
            "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns); in a container, give it CAP_SYS_ADMIN"
        )
    elif "tbf" in str(error):
        remedy = "the kernel lacks the token bucket filter (CONFIG_NET_SCH_TBF)"
    else:
        remedy = "the kernel or container lacks something the links need (veth, bridge, mounts)"
    return f"{remedy} [{reason}]"


def _go_first() -> None:
    """Start a session with a higher priority, if allowed, so that other load affects timings less.

    If the kernel groups processes by session, `nice` of single processes has no effect.
    """
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-5")
    with contextlib.suppress(OSError):
        os.nice(-5)


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _stop(number: int, _: object) -> None:
    for forwarded_signal in FORWARDED:  # a second signal must not interrupt the cleanup
        signal.signal(forwarded_signal, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _wait(process: int) -> int:
    """Return the exit code of a child; handle signals that arrive meanwhile."""
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
