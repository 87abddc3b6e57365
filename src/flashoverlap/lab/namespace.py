"""Linux namespaces through libc, and the small program that enters one and becomes the rank's command.

Run as a file (`python -I -S namespace.py PARENT USER_FD NET_FD COMMAND...`) it needs nothing but the standard library.
Doing this in a fresh process rather than between fork and exec keeps it safe in a parent that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def _call(name: str, *arguments: int) -> None:
    """Calls a libc function that takes integers and returns -1 with errno; raises OSError naming it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_ulong(a) if name == "prctl" else ctypes.c_int(a) for a in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces of the given kinds (os.unshare is Python 3.12)."""
    _call("unshare", flags)


def setns(fd: int, kind: int) -> None:
    """Moves this process into the namespace that `fd` stands for (os.setns is Python 3.12)."""
    _call("setns", fd, kind)


def new_network() -> int:
    """Moves this process into a new network namespace and returns a descriptor that keeps it alive."""
    unshare(CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def become_user_root() -> int:
    """Moves this process into a new user namespace, where it may make networks, and returns its descriptor.

    The user keeps its own number inside, so that files and names look as they do outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; ends it now if that has happened already."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("flashoverlap lab: the lab ended before its rank began")


def become_command(parent: int, user_fd: int, net_fd: int, command: list[str]) -> None:
    """Enters the namespaces (a descriptor of -1 means stay) and becomes `command`, which dies with `parent`.

    [Note: order of entering] The user namespace comes first, since it gives the right to enter the network. The death
    signal comes after both, since the kernel forgets it whenever a process gains rights.
    """
    if user_fd >= 0:
        setns(user_fd, CLONE_NEWUSER)
    if net_fd >= 0:
        setns(net_fd, CLONE_NEWNET)
    for fd in {user_fd, net_fd} - {-1}:
        os.close(fd)
    die_with(parent)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on.
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        become_command(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    except OSError as error:
        print(f"flashoverlap lab: cannot start {sys.argv[4]!r}: {error}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
