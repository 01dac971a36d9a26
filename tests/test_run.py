"""Flags, numbers for people, atomic files and exit codes, which all three scripts share."""

import argparse
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import run
from common.lifetime import Waiting

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (run.positive_int, [("7", 7), ("1_000", 1000)], ["0", "-1", "1.5", "x", ""]),
        (run.non_negative_int, [("0", 0)], ["-1", "x"]),
        (run.positive_float, [("6e-4", 6e-4)], ["0", "-1", "nan", "x"]),
        (run.fraction, [("0", 0.0), ("1", 1.0)], ["1.01", "-0.1", "nan"]),
        (run.int_list, [("1,16,31", (1, 16, 31)), ("0", (0,))], ["", "1,", "a,b", "-1"]),
    ],
)
def test_flag_types_take_good_values_and_refuse_bad_ones(kind, good, bad):
    for text, value in good:
        assert kind(text) == value
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            kind(text)


def test_numbers_for_people():
    assert [run.format_count(n) for n in (5, 12_345, 1_870_000, 1.87e9)] == [
        "5", "12,345", "1.87M", "1.87B",
    ]  # fmt: skip
    assert [run.format_bytes(n) for n in (512, 3.4e6, 1.2e9)] == ["512B", "3.4MB", "1.2GB"]
    assert [run.format_duration(s) for s in (8.2, 250, 11_100)] == ["8.2s", "4m10s", "3h05m"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    run.write_atomic(tmp_path / "a/b", b"first")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        run.write_atomic(tmp_path / "a/b", b"second")
    assert (tmp_path / "a/b").read_bytes() == b"first"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        ("run.UserError('disk full: free some')", 1, "error: disk full: free some"),
        ("run.UsageError('--x 1: too small')", 2, "error: --x 1: too small"),
        ("KeyboardInterrupt", 130, "interrupted"),
        ("run.Terminated", 143, "terminated"),
    ],
)
def test_failures_become_a_line_and_a_code(raised, code, text):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from common import run\ndef main(argv):\n    raise {raised}\nrun.exit_with(main)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == code
    assert text in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_waiting_line_comes_every_ten_seconds_and_at_once_when_a_new_wait_begins(caplog):
    caplog.set_level(logging.INFO)
    on_wait = Waiting(logging.getLogger("waits")).for_("shard 3", timeout_s=60, hint="look")
    for waited_s in (0, 5, 9, 10, 19, 300, 0, 9, 10):
        on_wait(waited_s)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" waited=")[2] for line in said] == [
        f"{waited_s}s of 60s; look" for waited_s in (0, 10, 300, 0, 10)
    ]
    assert all(line.startswith("waiting for='shard 3' since=") for line in said)
