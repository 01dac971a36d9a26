"""What this process may use: CPUs and memory, as its control group and affinity allow."""

import os
import resource
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
WORKER_BYTES = 400_000_000  # a tokenizing worker's own memory at most, measured with long rows


def default_workers() -> tuple[int, str]:
    """How many workers fit this machine, and what sets the number: "CPUs" or "memory"."""
    cpus, memory = usable_cpus(), usable_memory()
    fitting = max(1, int(0.7 * memory) // WORKER_BYTES)
    return (cpus, "CPUs") if cpus <= fitting else (fitting, "memory")


def usable_cpus() -> int:
    """CPUs of the affinity mask, or fewer where a control group's quota says so."""
    cpus = float(len(os.sched_getaffinity(0)))
    quotas = [_pair(folder / "cpu.max") for folder in _groups("")]
    for folder in _groups("cpu"):
        quotas.append((_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")))
    for quota, period in quotas:
        if quota and period and quota > 0:
            cpus = min(cpus, quota / period)
    return max(1, int(cpus))


def usable_memory() -> int:
    """Bytes that can still be had: free on the machine, or under a control group's limit."""
    available = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available.append(int(line.split()[1]) * 1024)
    limits = [folder / "memory.max" for folder in _groups("")]
    limits += [folder / "memory.limit_in_bytes" for folder in _groups("memory")]
    available += [limit for path in limits if (limit := _number(path))]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        available.append(soft)
    return min(available)


def _groups(controller: str) -> list[Path]:
    """The folders of this process's control group and of every group above it.

    Of version 2, or of a version 1 controller ("cpu", "memory") in its own hierarchy.
    """
    found = (line.split(":", 2) for line in _lines(OWN_GROUPS))
    own = next((path for _, names, path in found if controller in names.split(",")), "/")
    root = GROUPS / controller
    group = root / own.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]


def _pair(path: Path) -> tuple[float | None, float | None]:
    words = " ".join(_lines(path)).split()
    if len(words) != 2 or words[0] == "max":
        return None, None
    return float(words[0]), float(words[1])


def _number(path: Path | str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path | str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
