"""Start time of a process of this host, which tells it from a later process with the same number."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int | str) -> int:
    """Clock ticks from boot to the start of a process; 0 if it does not exist or is a zombie.

    A start in seconds since the epoch, as psutil gives it, is another one after every step of the clock: it is counted
    from the boot, whose date follows the clock.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    state, *fields = stat.rpartition(")")[2].split()  # behind the name, which may have spaces: fields 3 and on
    return 0 if state in "ZX" else int(fields[18])


def boot_id() -> str:
    """The kernel's name of the time since its boot; empty if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
