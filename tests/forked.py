"""Runs of the scripts in processes that need not import torch again.

They are forked from a server that has, which takes most of the seconds of a short run; all else is
as from a shell: arguments, environment, exit code, output, signals.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import run

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train_dflash_online", "extract_hidden_online"])


def start(
    name: str, argv: Sequence[str], *, environment: Mapping[str, str], stdout: Path, stderr: Path
) -> multiprocessing.process.BaseProcess:
    """`python NAME.py ARGV`, its output appended to files."""
    arguments = (name, [str(word) for word in argv], dict(environment), str(stdout), str(stderr))
    process = FORKS.Process(target=_be, args=arguments)
    process.start()
    return process


def run_to_end(
    name: str, argv: Sequence[str], *, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """What subprocess.run gives for it, output captured."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(name, argv, environment=environment, stdout=out, stderr=err)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([name, *argv], timeout, stderr=err.read_bytes())
        return subprocess.CompletedProcess(
            [name, *argv], process.exitcode, out.read_text(), err.read_text()
        )


def _be(name: str, argv: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    for path, number in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [f"{name}.py", *argv]
    run.exit_with(importlib.import_module(name).main, skip_teardown=True)
