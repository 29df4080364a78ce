"""A child process that ends (SIGTERM) when its parent does, however the parent ends.

`spawn` runs this file as `python tether.py PARENT PIPE PROGRAM [ARG...]`; the program then takes its place: same pid,
same open files. A script and not a `preexec_fn`, which runs Python between fork and exec and can deadlock beside
threads. PIPE -1: Linux's parent-death signal. PIPE n: a pipe whose write end only the parent holds; a watcher reads it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def spawn(
    command: Sequence[str], pass_fds: Sequence[int] = (), by_pipe: bool = sys.platform != "linux", **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own (Ctrl-C is for the parent). `options` are Popen's, as are the errors.

    A thread starts it and waits for it: Linux sends the parent-death signal at the end of the *thread* that forked.
    """
    import subprocess
    import threading
    from concurrent.futures import Future

    born: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        read, write = os.pipe() if by_pipe else (-1, -1)
        fds = [*pass_fds, read] if by_pipe else pass_fds
        tethered = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(read), *command]
        try:
            process = subprocess.Popen(tethered, pass_fds=fds, start_new_session=True, **options)
        except (OSError, ValueError, TypeError) as error:
            born.set_exception(error)
        else:
            born.set_result(process)
            process.wait()
        for end in (read, write) if by_pipe else ():
            os.close(end)

    threading.Thread(target=keep, name=f"keeper of {command[0]}", daemon=True).start()
    return born.result()


def follow(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit("the process that started this is gone")


def watch(pipe: int) -> None:
    """Fork a watcher, which ends with the program too. It keeps no other file open: one may be a lock."""
    program = os.getpid()
    if os.fork():
        os.close(pipe)
        return
    os.closerange(0, pipe)
    os.closerange(pipe + 1, 1024)
    os.read(pipe, 1)  # returns when all write ends are closed: `keep` does so when the program has ended
    if os.getppid() == program:
        os.kill(program, signal.SIGTERM)
    os._exit(0)


def main() -> None:
    parent, pipe, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a parent that waits with sigwait() has SIGTERM blocked
    if int(pipe) < 0:
        follow(int(parent))
    else:
        watch(int(pipe))
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
