"""seccomp: system calls that no lesson needs, refused by the kernel (Linux 3.5 and newer).

Owns: the lists and the filter. Must not know: files, which Landlock keeps. Refused are programs, sockets, namespaces,
what reads, signals or limits another process, and memory that no limit counts (``memfd_create`` and its like).

The filter is a program for the kernel's packet filter: https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

from smoke.grade.landlock import libc

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, ERROR = 0x7FFF0000, 0x00050000
ANSWERS = {"allow": ALLOW, "refuse": ERROR | errno.EPERM, "unknown": ERROR | errno.ENOSYS}
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # where they stand in what the filter is shown
X32 = 0x40000000  # a second set of numbers on x86-64
NAMESPACES = 0x7E020000  # what `clone` is told to make new

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
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
# Calls that change another process unless their first argument is 0, which is the caller.
ON_ITSELF = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
SIGNAL_THREAD, CLONE, CLONE_3 = (234, 131), (56, 220), (435, 435)  # tgkill, and what starts threads and processes


def refuse_calls() -> bool:
    """Refuse the calls from here on; returns whether the system does so. The process has given up new rights before."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return False
    program = filter_program(machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return bool(libc().prctl(PR_SET_SECCOMP, MODE_FILTER, described, 0, 0) == 0)


def filter_program(machine: str, pid: int) -> bytes:
    """Return the filter of the process ``pid``.

    Refused are the calls of the list, those of another architecture, signals to another process and new namespaces.
    A filter does not see the flags of ``clone3``: so that call is unknown here, and libraries use ``clone``.
    """
    which = list(MACHINES).index(machine)
    lines: list[tuple[int, int, str, str]] = [  # an instruction, its value, where to go if it holds, and if it does not
        (LOAD, ARCHITECTURE, "", ""),
        (EQUAL, MACHINES[machine], "", "refuse"),
        (LOAD, NUMBER, "", ""),
        (AT_LEAST, X32, "refuse", ""),
        *((EQUAL, numbers[which], "refuse", "") for numbers in CALLS.values()),
        *((EQUAL, numbers[which], "on itself", "") for numbers in ON_ITSELF.values()),
        (EQUAL, SIGNAL_THREAD[which], "to itself", ""),
        (EQUAL, CLONE_3[which], "unknown", ""),
        (EQUAL, CLONE[which], "clone", "allow"),
    ]
    places = {}
    for name, (kind, value, held, otherwise) in {
        "on itself": (EQUAL, 0, "allow", "refuse"),
        "to itself": (EQUAL, pid, "allow", "refuse"),
        "clone": (ANY_BIT, NAMESPACES, "refuse", "allow"),
    }.items():
        places[name] = len(lines)
        lines += [(LOAD, ARGUMENT, "", ""), (kind, value, held, otherwise)]
    for name, answer in ANSWERS.items():
        places[name] = len(lines)
        lines.append((RETURN, answer, "", ""))

    def jump(start: int, name: str) -> int:
        return places[name] - start - 1 if name else 0

    packed = [(kind, jump(n, held), jump(n, other), value) for n, (kind, value, held, other) in enumerate(lines)]
    return b"".join(struct.pack("=HBBI", *line) for line in packed)
