"""Workers that die are noticed at once, at the worst moments too; none of their work is lost."""

import contextlib
import functools
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from common import workers
from common.workers import WorkerDied, WorkerPool


def double(task, payload):
    """A handler of 4 MB results, far more than a pipe holds."""
    if task == "error":
        raise ZeroDivisionError("a fault of the handler")
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if task == "sleep":
        time.sleep(3600)
    return bytes([2 * task]) * 4_000_000 + payload


def call(task, payload=b""):
    return lambda ask: ask(task, payload)


def twice(task):
    def call_again(ask):
        try:
            return ask(task, b"")
        except WorkerDied:
            return ask(task, b"")

    return call_again


def results(pool, count):
    futures = [pool.submit(twice(number)) for number in range(count)]
    return [future.result(timeout=60)[0] for future in futures]


def test_results_come_back_whole_and_payloads_of_any_size_arrive():
    sizes = [0, 1, workers.CHUNK_BYTES, workers.CHUNK_BYTES + 1, 5_000_000]
    with contextlib.closing(WorkerPool(double, 3)) as pool:
        assert results(pool, 20) == [2 * number for number in range(20)]
        for size in sizes:
            data = os.urandom(size)
            assert pool.submit(call(1, data)).result(60)[4_000_000:] == data


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


def test_a_dead_worker_is_noticed_within_seconds_and_others_go_on():
    with contextlib.closing(WorkerPool(double, 2)) as pool:
        began = time.monotonic()
        deadly = pool.submit(call("die"))
        with pytest.raises(WorkerDied):
            deadly.result(timeout=60)
        assert time.monotonic() - began < 5
        assert results(pool, 6) == [2 * number for number in range(6)]


@pytest.mark.parametrize("task", ["stop", "sleep"])
def test_a_worker_that_gets_nowhere_is_killed(monkeypatch, task):
    monkeypatch.setattr(workers, "STOPPED_S", 0.5)
    monkeypatch.setattr(workers, "STUCK_S", 2.0)
    with contextlib.closing(WorkerPool(double, 1)) as pool:
        with pytest.raises(WorkerDied):
            pool.submit(call(task)).result(timeout=30)
        assert results(pool, 2) == [0, 2]


def test_a_worker_that_computes_for_long_is_left_alone(monkeypatch):
    monkeypatch.setattr(workers, "STUCK_S", 1.0)

    def compute(task, payload):
        until = time.process_time() + 3
        while time.process_time() < until:
            pass
        return "done"

    with contextlib.closing(WorkerPool(compute, 1)) as pool:
        assert pool.submit(call(0)).result(timeout=60) == "done"


def test_urgent_calls_go_first():
    order = []

    def note(name, ask):
        order.append(name)
        return ask(0, b"")

    with contextlib.closing(WorkerPool(double, 1)) as pool:
        futures = [pool.submit(functools.partial(note, n)) for n in range(5)]
        futures.append(pool.submit(functools.partial(note, "urgent"), urgent=True))
        for future in futures:
            future.result(60)
    assert order.index("urgent") <= 2


def test_a_fault_in_the_handler_comes_with_its_traceback():
    with contextlib.closing(WorkerPool(double, 1)) as pool:
        with pytest.raises(ZeroDivisionError) as caught:
            pool.submit(call("error")).result(timeout=60)
        assert "in double" in caught.value.__notes__[0]
        assert results(pool, 1) == [0]


def test_closing_ends_workers_that_are_at_work():
    pool = WorkerPool(double, 2)
    futures = [pool.submit(call(0)) for _ in range(200)]
    processes = [worker.process for worker in pool._workers]
    pool.close()
    assert all(process.exitcode == -signal.SIGKILL for process in processes)
    assert all(future.done() for future in futures)
