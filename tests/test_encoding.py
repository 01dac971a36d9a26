"""Workers that die are noticed at once, at the worst moments too."""

import contextlib
import os
import signal
from multiprocessing.connection import Connection

import numpy as np
import pytest

from common.encoding import EncodedBlock, WorkerPool
from common.reading import Block
from common.run import UserError


def double(block):
    """An encoder of 4 MB results, far more than a pipe holds."""
    if block.data == b"error":
        raise ZeroDivisionError("a fault of the encoder")
    if block.data == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    return EncodedBlock(tokens=np.full(1_000_000, 2 * block.offset, np.int32))


def blocks(count):
    return [Block("in.jsonl", number, b"", 0) for number in range(count)]


def results(pool, count):
    futures = [pool.submit(block) for block in blocks(count)]
    return [int(future.result(timeout=60).tokens[-1]) for future in futures]


def test_results_come_back_in_the_order_asked_for():
    with contextlib.closing(WorkerPool(double, 3)) as pool:
        assert results(pool, 20) == [2 * number for number in range(20)]


def test_a_worker_killed_halfway_through_its_result_is_replaced(tmp_path, monkeypatch):
    parent, flag, send = os.getpid(), tmp_path / "flag", Connection._send

    def cut_off(self, data, *rest):
        if os.getpid() != parent and len(data) > 1_000_000:
            with contextlib.suppress(FileExistsError):
                flag.touch(exist_ok=False)
                send(self, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return send(self, data, *rest)

    monkeypatch.setattr(Connection, "_send", cut_off)
    with contextlib.closing(WorkerPool(double, 2)) as pool:
        assert results(pool, 10) == [2 * number for number in range(10)]
    assert flag.exists()


def test_a_block_that_kills_two_workers_is_named_and_others_go_on():
    with contextlib.closing(WorkerPool(double, 2)) as pool:
        deadly = pool.submit(Block("in.jsonl", 77, b"die", 0))
        assert results(pool, 6) == [2 * number for number in range(6)]
        with pytest.raises(UserError, match="killed twice on in.jsonl at byte 77"):
            deadly.result(timeout=60)
        assert results(pool, 6) == [2 * number for number in range(6)]


def test_a_fault_in_the_encoder_comes_with_its_traceback():
    with contextlib.closing(WorkerPool(double, 1)) as pool:
        with pytest.raises(ZeroDivisionError) as caught:
            pool.submit(Block("in.jsonl", 0, b"error", 0)).result(timeout=60)
        assert "in double" in caught.value.__notes__[0]
        assert results(pool, 1) == [0]


def test_closing_ends_workers_that_are_at_work():
    pool = WorkerPool(double, 2)
    for block in blocks(200):
        pool.submit(block)
    processes = [worker.process for worker in pool._workers]
    pool.close()
    for process in processes:
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
