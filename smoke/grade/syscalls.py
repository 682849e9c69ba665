"""seccomp: system calls that no lesson needs, refused by the kernel (Linux 3.5 and newer).

Owns: the list and the filter. Must not know: files, which Landlock keeps. Refused are programs, sockets, other
processes' memory, namespaces, and memory that no limit of a process counts (``memfd_create`` and its like).

The filter is a program for the kernel's packet filter: https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

import ctypes
import errno
import platform
import struct
import sys

from smoke.grade.landlock import libc

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions
NUMBER, ARCHITECTURE = 0, 4  # where they stand in what the filter is shown
X32 = 0x40000000  # a second set of numbers on x86-64

# The kernel's name of the machine, and its numbers of the calls.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}


def refuse_calls() -> bool:
    """Refuse the calls from here on; returns whether the system does so. The process has given up new rights before."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return False
    program = filter_program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return bool(libc().prctl(PR_SET_SECCOMP, MODE_FILTER, described, 0, 0) == 0)


def filter_program(machine: str) -> bytes:
    """Return the filter: calls of another architecture and those of the list are refused, all others allowed."""
    numbers = [pair[list(MACHINES).index(machine)] for pair in CALLS.values()]
    checks = [(AT_LEAST, X32), *((EQUAL, number) for number in numbers)]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 0, len(checks) + 2, MACHINES[machine]), (LOAD, 0, 0, NUMBER)]
    for index, (kind, value) in enumerate(checks):
        lines.append((kind, len(checks) - index, 0, value))  # on a match, jump to the last line
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
