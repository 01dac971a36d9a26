"""How many workers fit: affinity, and the quotas and limits of control groups, old and new."""

import subprocess
import sys

import pytest

from common import machine


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A control group tree to write into; `own` is what /proc/self/cgroup says."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))

    def make(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_the_affinity_mask_is_what_counts():
    command = "from common.machine import usable_cpus; print(usable_cpus())"
    told = subprocess.check_output(["taskset", "-c", "0", sys.executable, "-c", command], text=True)
    assert told == "1\n"


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/job/step\n", {"job__step__cpu_DOT_max": "max 100000\n"}, 64),
        ("0::/job/step\n", {"job__step__cpu_DOT_max": "250000 100000\n"}, 2),
        ("0::/job/step\n", {"job__cpu_DOT_max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu_DOT_max": "1600000 100000\n"}, 16),
        (
            "4:cpu,cpuacct:/slurm/1\n0::/x\n",
            {
                "cpu__slurm__1__cpu_DOT_cfs_quota_us": "800000\n",
                "cpu__slurm__1__cpu_DOT_cfs_period_us": "100000\n",
            },
            8,
        ),
        (
            "4:cpu:/\n",
            {"cpu__cpu_DOT_cfs_quota_us": "-1\n", "cpu__cpu_DOT_cfs_period_us": "100000\n"},
            64,
        ),
        ("", {}, 64),
    ],
)
def test_cpu_quotas(groups, own, files, cpus):
    groups(own, **files)
    assert machine.usable_cpus() == cpus


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("0::/job\n", "job__memory_DOT_max"),
        ("0::/job/step\n", "job__memory_DOT_max"),
        ("9:memory:/job\n", "memory__job__memory_DOT_limit_in_bytes"),
    ],
)
def test_memory_limits_set_the_number_of_workers(groups, own, name):
    groups(own, **{name: "2000000000\n"})
    assert machine.usable_memory() == 2_000_000_000
    assert machine.default_workers() == (3, "memory")
    groups(own, **{name: "max\n"})
    assert machine.usable_memory() > 2_000_000_000
