"""Runs one Python program that is not to be trusted: `python -I jail.py LIMITS`, a script that imports nothing of ours.

Linux only. The program may compute, read files, and write to its stdout. It has no network, starts no process, signals
none, and changes no file: Landlock (kernel 5.13 or later) refuses writing, seccomp the system calls, and capabilities
are given up. Its processor time, memory and output are limited, and it dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
LANDLOCK_CREATE, LANDLOCK_RESTRICT, CAPSET = "landlock_create_ruleset", "landlock_restrict_self", "capset"
WRITING = [0x1FF2, 0x3FF2, 0x7FF2]
"Landlock's rights but reading and executing, by version: 1, 2 with renaming between folders, 3 with truncating."

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
"AUDIT_ARCH_*"
CALLS = """
    landlock_create_ruleset 444 444; landlock_restrict_self 446 446; clone3 435 435; io_uring_setup 425 425;
    pidfd_open 434 434; pidfd_send_signal 424 424; fchmodat2 452 452; mount_setattr 442 442; open_tree 428 428;
    move_mount 429 429; socket 41 198; socketpair 53 199; clone 56 220; fork 57 -; vfork 58 -; execve 59 221;
    execveat 322 281; kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138;
    rt_tgsigqueueinfo 297 240; ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; chmod 90 -;
    fchmod 91 52; fchmodat 268 53; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54; utime 132 -;
    utimes 235 -; futimesat 261 -; utimensat 280 88; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7;
    setpriority 141 140; prlimit64 302 261; unshare 272 97; setns 308 268; mount 165 40; bpf 321 280;
    keyctl 250 219; perf_event_open 298 241; userfaultfd 323 282; capset 126 91; shmget 29 194; semget 64 190;
    msgget 68 186; mq_open 240 180; sched_setaffinity 203 122; sched_setscheduler 144 119
"""
"System calls with their numbers on x86_64 and aarch64. All are refused but those in ALLOWED."
ALLOWED = {LANDLOCK_CREATE, LANDLOCK_RESTRICT, "clone", "clone3"}
"Named above for another reason than to be refused."


def numbers_on(machine: str) -> dict[str, int]:
    """By name; OSError on other machines."""
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise OSError(errno.ENOSYS, f"no confinement for {sys.platform} on {machine}")
    column = 1 if machine == "x86_64" else 2
    named = [call.split() for call in CALLS.replace("\n", ";").split(";") if call.strip()]
    return {call[0]: int(call[column]) for call in named if call[column] != "-"}


def confine() -> None:
    """OSError where the machine has no such confinement."""
    machine = platform.machine()
    numbers = numbers_on(machine)
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _no_writing(libc, numbers)
    header, none = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    _call(libc.syscall(numbers[CAPSET], header, none), CAPSET)
    _no_calls(libc, numbers, X86_64 if machine == "x86_64" else AARCH64)


def _call(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _no_writing(libc: ctypes.CDLL, numbers: dict[str, int]) -> None:
    """A ruleset that handles all writing and allows it nowhere; what is open stays open."""
    version = _call(libc.syscall(numbers[LANDLOCK_CREATE], None, 0, 1), "Landlock")
    handled = ctypes.create_string_buffer(struct.pack("=Q", WRITING[min(version, len(WRITING)) - 1]), 8)
    ruleset = _call(libc.syscall(numbers[LANDLOCK_CREATE], handled, 8, 0), "Landlock")
    _call(libc.syscall(numbers[LANDLOCK_RESTRICT], ruleset, 0), "Landlock")
    os.close(ruleset)


def _no_calls(libc: ctypes.CDLL, numbers: dict[str, int], arch: int) -> None:
    """A seccomp filter in classic BPF: EPERM for what is named, threads allowed, other processes not."""
    load, equal, least, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the x32 calls of x86_64
    for name, number in numbers.items():
        if name not in ALLOWED:
            code += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    code += [
        (equal, 0, 1, numbers["clone3"]),
        (answer, 0, 0, unknown),
    ]  # libc then takes clone, whose flags can be read
    code += [(equal, 0, 3, numbers["clone"]), (load, 0, 0, 16), (has, 1, 0, 0x10000), (answer, 0, 0, refuse)]
    code += [(answer, 0, 0, allow)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(packed)))
    _call(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def main() -> None:
    """Program and test from a file that is open. Where there is no confinement, death by SIGUSR2, which no program that
    is confined can send."""
    limits = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(limits["program"]) as file:
        program, test = json.load(file)
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    sys.argv[1:] = []
    try:
        confine()
    except OSError as error:
        sys.stderr.write(str(error))
        os.kill(os.getpid(), signal.SIGUSR2)
    names = {"__name__": "__main__"}
    exec(compile(program, "program", "exec"), names)
    exec(compile(test, "test", "exec"), names)


if __name__ == "__main__":
    main()
