"""A disk that is soon full, where this user may mount one; nobody else sees it, and it goes with its processes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


def may_mount() -> bool:
    """Give this process mounts of its own, and say whether that worked; to be called before it has other threads."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        given = _libc.unshare(_NEW_MOUNTS) == 0
    else:
        given = _libc.unshare(_NEW_MOUNTS | _NEW_USER) == 0
        if given:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return given and _libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None) == 0


def mount(folder: Path, size: int) -> None:
    """Put a disk of so many bytes at a folder.

    Raises:
        OSError: with the system's reason.
    """
    if _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(folder))


def unmount(folder: Path) -> None:
    """Take it away again, with what is on it."""
    _libc.umount2(os.fsencode(folder), 2)
