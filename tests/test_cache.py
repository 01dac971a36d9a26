"""One download a machine, checked, within a limit; what is read stays, what was cut short goes."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common import cache as caches
from common.cache import FileCache
from common.run import UserError
from common.shards import TokenizedDataset
from common.store import open_store
from tests.faulty_s3 import faulty, requests_of
from tests.test_shards import make_plan, write_shard

ROOT = Path(__file__).parent.parent
NAME = "set"

# Opens files one after another, says so, and keeps each until a line comes; "walk" waits for none.
READER = """
import hashlib, json, sys
from pathlib import Path
from common import store
from common.cache import FileCache
store.PART_BYTES = 100_000
uri, folder, limit, mode, *records = sys.argv[1:]
source, cache = store.open_store(uri), FileCache(Path(folder), limit_bytes=int(limit))
if mode == "blind":
    cache._free_bytes = lambda: 1 << 60
for record in map(json.loads, records):
    held = cache.open(source, record, name="set")
    print(hashlib.sha256(held.path.read_bytes()).hexdigest() == record["sha256"], flush=True)
    mode == "hold" and sys.stdin.readline()
    del held
"""


@pytest.fixture(scope="module")
def files(moto):
    """Six files of 300 kB in a bucket: its URI and their records."""
    uri, client = moto.make_bucket("cached"), moto.client()
    records = []
    for number in range(6):
        data = np.random.default_rng(number).bytes(300_000)
        client.put_object(Bucket="cached", Key=f"file-{number}", Body=data)
        records.append(
            {
                "file": f"file-{number}",
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    return uri, records


@pytest.fixture
def store(files, moto, monkeypatch):
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(files[0])


def reading(files, folder, records, *, endpoint_url, limit=10**9, mode="hold", before=()):
    """A process that reads; killed at the end."""
    command = [sys.executable, "-c", READER, files[0], str(folder), str(limit), mode]
    return subprocess.Popen(
        [*before, *command, *map(json.dumps, records)],
        cwd=ROOT,
        env={**os.environ, "AWS_ENDPOINT_URL": endpoint_url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def names_in(folder):
    """The whole files of a cache."""
    return {path.name for path in folder.glob(f"{NAME}/file-?")}


def gets_of(log, name):
    return [request for request in requests_of(log) if request["target"].endswith(name)]


def test_one_download_for_all_processes(files, store, moto, tmp_path):
    uri, records = files
    log = tmp_path / "log"
    with faulty(moto, share=0, bytes_per_s=500_000, log=log) as endpoint_url:
        readers = [
            reading(files, tmp_path / "c", records[:1], endpoint_url=endpoint_url, mode="walk")
            for _ in range(3)
        ]
        assert [reader.communicate(timeout=60)[0] for reader in readers] == ["True\n"] * 3
    assert len(gets_of(log, "file-0")) == 3, "three parts, each once"
    assert names_in(tmp_path / "c") == {"file-0"}


def test_waiting_for_another_process_is_told_and_can_be_ended(files, store, moto, tmp_path):
    uri, records = files
    waits = []

    def on_wait(waited_s):
        waits.append(waited_s)
        if len(waits) == 3:
            raise KeyboardInterrupt

    cache = FileCache(tmp_path / "c", limit_bytes=None)
    with faulty(moto, share=0, bytes_per_s=100_000) as endpoint_url:
        reader = reading(files, tmp_path / "c", records[:1], endpoint_url=endpoint_url)
        wait_until(lambda: tmp_path.glob("c/*/*.fetch"))
        with pytest.raises(KeyboardInterrupt):
            cache.open(store, records[0], name=NAME, on_wait=on_wait)
        assert waits == sorted(waits) and waits[2] < 1
        reader.send_signal(signal.SIGSTOP)  # it holds its lock, and only that file's
        assert_whole(cache.open(store, records[1], name=NAME), records[1])
        reader.kill()
        reader.communicate()
    assert_whole(cache.open(store, records[0], name=NAME), records[0])


def test_a_killed_download_leaves_nothing(files, store, moto, tmp_path):
    uri, records = files
    with faulty(moto, share=0, bytes_per_s=200_000) as endpoint_url:
        reader = reading(files, tmp_path / "c", records[:1], endpoint_url=endpoint_url)
        wait_until(lambda: list(tmp_path.glob(f"c/{NAME}/*.fetch/.tmp-*")))
        reader.kill()
        reader.communicate()
    assert list(tmp_path.glob(f"c/{NAME}/*.fetch/.tmp-*"))
    cache = FileCache(tmp_path / "c", limit_bytes=10**9)
    cache.open(store, records[1], name=NAME)
    assert not list(tmp_path.glob(f"c/{NAME}/*.fetch")), "another file's leftover goes as well"
    assert names_in(tmp_path / "c") == {"file-1"}
    assert_whole(cache.open(store, records[0], name=NAME), records[0])


@pytest.mark.parametrize("harm", ["cut", "one byte", "gone"])
def test_a_damaged_copy_is_fetched_again_even_by_the_same_process(files, store, tmp_path, harm):
    record = files[1][0]
    cache = FileCache(tmp_path, limit_bytes=None)
    path = cache.open(store, record, name=NAME).path
    if harm == "cut":
        os.truncate(path, 200_000)
    elif harm == "one byte":
        with path.open("rb+") as file:
            file.write(b"other bytes")
    else:
        path.unlink()
    assert_whole(cache.open(store, record, name=NAME), record)


def test_an_object_that_is_not_its_records_is_refused_and_not_kept(files, store, tmp_path):
    record = {**files[1][0], "sha256": "0" * 64}
    with pytest.raises(UserError, match="file-0 is not what its record says"):
        FileCache(tmp_path, limit_bytes=None).open(store, record, name=NAME)
    assert names_in(tmp_path) == set() and not list(tmp_path.glob("*/*.fetch"))


def test_an_unchanged_file_is_read_for_its_hash_once(files, store, tmp_path, monkeypatch):
    hashed = []
    real = caches.file_sha256
    monkeypatch.setattr(caches, "file_sha256", lambda path: hashed.append(path) or real(path))
    cache = FileCache(tmp_path, limit_bytes=None)
    for _ in range(3):
        cache.fetch_ahead(store, files[1][0], name=NAME)
        cache.open(store, files[1][0], name=NAME)
    assert len(hashed) == 1
    FileCache(tmp_path, limit_bytes=None).open(store, files[1][0], name=NAME)
    assert len(hashed) == 2, "a new run checks what an old one left"


def test_the_least_recently_used_leaves_first(files, store, tmp_path):
    records = files[1]
    cache = FileCache(tmp_path, limit_bytes=3 * 300_000)
    for number in (0, 1, 2, 0, 3):
        assert_whole(cache.open(store, records[number], name=NAME), records[number])
    assert names_in(tmp_path) == {"file-0", "file-2", "file-3"}


def test_a_file_in_use_anywhere_stays(files, store, moto, tmp_path):
    uri, records = files
    limit = 2 * 300_000
    reader = reading(files, tmp_path, records[:1], endpoint_url=moto.endpoint_url)
    try:
        assert reader.stdout.readline() == "True\n"
        cache = FileCache(tmp_path, limit_bytes=limit)
        for record in records[1:5]:
            cache.open(store, record, name=NAME)
            assert "file-0" in names_in(tmp_path) and len(names_in(tmp_path)) <= 2
        mine = cache.open(store, records[4], name=NAME)
        cache.fetch_ahead(store, records[5], name=NAME)
        assert names_in(tmp_path) == {"file-0", "file-4"}, "nothing is fetched ahead above it"
        cache.open(store, records[5], name=NAME)
        assert names_in(tmp_path) == {"file-0", "file-4", "file-5"}, "what is needed comes"
    finally:
        reader.communicate()
    cache.open(store, records[2], name=NAME)
    assert names_in(tmp_path) == {"file-4", "file-2"}, "and the limit holds again"
    assert_whole(mine, records[4])


def test_two_runs_share_a_small_cache(files, store, moto, tmp_path):
    uri, records = files
    orders = [np.random.default_rng(seed).permutation(np.arange(12) % 6) for seed in (1, 2)]
    runs = [
        reading(
            files,
            tmp_path,
            [records[number] for number in order],
            endpoint_url=moto.endpoint_url,
            limit=2 * 300_000,
            mode="walk",
        )
        for order in orders
    ]
    for run in runs:
        said, errors = run.communicate(timeout=60)
        assert (said, run.returncode) == ("True\n" * 12, 0), errors
    assert len(names_in(tmp_path)) <= 2 and not list(tmp_path.glob("*/*.fetch"))


@pytest.mark.parametrize("mode", ["walk", "blind"])
def test_a_full_disk_is_one_line_that_names_the_flags(files, store, moto, tmp_path, mode):
    """On a real file system of 700 kB; blind: it fills up only while the file comes."""
    mounting = ["unshare", "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=700k none {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*mounting, mount]).returncode:
        pytest.skip("needs a file system of its own")
    (tmp_path / "before").touch()
    reader = reading(
        files,
        tmp_path,
        files[1][:3] + files[1][:1],
        endpoint_url=moto.endpoint_url,
        limit=10**9,
        mode=mode,
        before=[*mounting, f'{mount} && exec "$@"', "sh"],
    )
    said, errors = reader.communicate(timeout=60)
    if mode == "walk":  # the disk's end is a limit too: the oldest file makes room
        assert (said, reader.returncode) == ("True\n" * 4, 0), errors
    else:
        assert said == "True\n" * 2
        last = errors.splitlines()[-1]
        assert "UserError: --cache-dir" in last and "--cache-gb" in last and "file-2" in last


def test_a_file_larger_than_the_disk_is_told_before_it_is_fetched(files, store, tmp_path):
    record = {**files[1][0], "bytes": 1 << 60}
    with pytest.raises(UserError, match="the disk is full, no room for file-0") as refused:
        FileCache(tmp_path, limit_bytes=None).open(store, record, name=NAME)
    assert len(str(refused.value).splitlines()) == 1


def test_a_folder_that_cannot_be_is_told(files, store, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--cache-dir .* cannot write there"):
        FileCache(tmp_path / "file", limit_bytes=None).open(store, files[1][0], name=NAME)


@pytest.fixture(scope="module")
def dataset(moto, tmp_path_factory):
    """A dataset of six shards in a bucket: its URI and the records."""
    folder, plan = tmp_path_factory.mktemp("shards"), make_plan(shards=((),) * 6)
    records = [write_shard(folder, number, plan, 300) for number in range(6)]
    (folder / "plan.json").write_bytes(plan.to_bytes())
    uri, client = moto.make_bucket("tokens"), moto.client()
    for path in folder.iterdir():
        client.upload_file(str(path), "tokens", path.name)
    return uri, records


def test_a_walk_over_all_shards_keeps_few_and_maps_fewer(dataset, store, tmp_path):
    uri, records = dataset
    limit = 5 * max(record["bytes"] for record in records) // 2
    reader = TokenizedDataset(uri, cache_dir=tmp_path, cache_bytes=limit)
    reader.wait_for_plan(timeout_s=0)
    row = None
    for index in [*range(6), *range(6)]:
        shard = reader.wait_for_shard(index, timeout_s=0)
        assert reader.wait_for_shard(index, timeout_s=0) is shard
        assert sum(map(len, map(shard.input_ids, range(len(shard))))) == records[index]["tokens"]
        assert mapped_shards() == {f"shard-{index:05}"}
        assert len(list(tmp_path.rglob("*.arrow"))) <= 2
        row = shard.input_ids(7)
        tokens = row.copy()
        del row, shard
    assert mapped_shards() == set()
    shard = reader.wait_for_shard(5, timeout_s=0)
    row = shard.input_ids(7)
    del shard
    for index in range(4):
        reader.wait_for_shard(index, timeout_s=0)
    np.testing.assert_array_equal(row, tokens)  # a row that is in flight outlives its file


def test_the_next_shard_comes_in_the_background(dataset, store, moto, tmp_path):
    uri, records = dataset
    reader = TokenizedDataset(uri, cache_dir=tmp_path / "c", cache_bytes=10**8)
    reader.wait_for_plan(timeout_s=0)
    reader.prefetch(2)
    wait_until(lambda: (tmp_path / "c").rglob("shard-00002.arrow"))
    assert mapped_shards() == set(), "it lies there, but is not open"
    assert len(reader.wait_for_shard(2, timeout_s=0)) == records[2]["rows"]


def test_a_limit_below_two_shards_is_refused_at_the_first(moto, store, tmp_path):
    part = make_plan().shards[0][0]
    shards = tuple((type(part)("in", 10**6, "e", 0, size),) for size in (1000, 100_000))
    plan = make_plan(shards=shards)
    uri, client = moto.make_bucket("uneven"), moto.client()
    record = write_shard(tmp_path, 0, plan, 10)
    client.put_object(Bucket="uneven", Key="plan.json", Body=plan.to_bytes())
    for name in ("shard-00000.arrow", "shard-00000.json"):
        client.upload_file(str(tmp_path / name), "uneven", name)
    for factor, refused in ((1.9, True), (2.1, False)):
        limit = int(factor * 100 * record["bytes"])
        reader = TokenizedDataset(uri, cache_dir=tmp_path / "c", cache_bytes=limit)
        reader.wait_for_plan(timeout_s=0)
        expected = pytest.raises(UserError, match=r"^--cache-gb .* two must fit")
        with expected if refused else contextlib.nullcontext():
            reader.wait_for_shard(0, timeout_s=0)


def assert_whole(held, record):
    assert hashlib.sha256(held.path.read_bytes()).hexdigest() == record["sha256"]


def mapped_shards():
    """The shards that this process has memory-mapped."""
    maps = Path("/proc/self/maps").read_text().split()
    return {Path(word).stem for word in maps if word.endswith(".arrow")}


def wait_until(there):
    deadline = time.monotonic() + 60
    while not list(there()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
