"""One interface over folders and two real S3 servers; mistakes in a line or two."""

import contextlib
import os
import platform
from pathlib import Path

import pytest

from common.run import UserError
from common.store import ObjectMissing, open_store
from tests.servers import KEY, SECRET, free_port

KINDS = ("local", "moto", "rclone")


@pytest.fixture
def credentials(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture(params=KINDS)
def store(request, tmp_path, credentials):
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    server = request.getfixturevalue(request.param)
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    server.make_bucket(bucket)
    return open_store(f"s3://{bucket}/some/prefix/", endpoint_url=server.endpoint_url)


def test_objects_round_trip(store, tmp_path):
    store.write("a/one.bin", b"0123456789")
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    store.upload("a/two.bin", tmp_path / "file")
    assert store.read("a/one.bin") == b"0123456789"
    assert store.read("a/one.bin", 3, 7) == b"3456"
    assert store.read("a/one.bin", 8) == b"89"
    store.download("a/two.bin", tmp_path / "back/two.bin")
    assert (tmp_path / "back/two.bin").read_bytes() == b"x" * 100_000
    entries = store.list()
    assert [(entry.key, entry.size) for entry in entries] == [
        ("a/one.bin", 10),
        ("a/two.bin", 100_000),
    ]
    assert [entry.key for entry in store.list("a/t")] == ["a/two.bin"]
    store.delete("a/one.bin")
    store.delete("a/one.bin")
    assert [entry.key for entry in store.list()] == ["a/two.bin"]


def test_a_missing_object_is_said_so(store, tmp_path):
    with pytest.raises(ObjectMissing, match="nothing.bin"):
        store.read("nothing.bin")
    with pytest.raises(ObjectMissing, match="nothing.bin"):
        store.download("nothing.bin", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_reading_with_an_etag_notices_another_object(store):
    store.write("k", b"first")
    (entry,) = store.list()
    assert store.read("k", etag=entry.etag) == b"first"
    os.utime(Path(store.uri) / "k", ns=(1, 1)) if store.uri.startswith("/") else store.write(
        "k", b"other"
    )
    with pytest.raises(UserError, match="changed since"):
        store.read("k", etag=entry.etag)


def test_the_write_check_leaves_nothing_behind(store):
    store.check_writable()
    assert store.list() == []


@pytest.mark.parametrize(
    "name", ["with space+plus.jsonl", "ü-中文.jsonl", "u\u0308.jsonl", "%20.jsonl"]
)
def test_keys_are_opaque(store, name):
    store.write(name, b"x")
    assert [entry.key for entry in store.list()] == [name]
    assert store.read(name) == b"x"


def test_a_folder_that_cannot_be_listed_whole_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match="give the folder"):
        open_store(str(tmp_path / "a.jsonl")).list()
    (tmp_path / "gone.jsonl").symlink_to("/nonexistent")
    with pytest.raises(UserError, match=r"gone.jsonl: cannot read"):
        open_store(str(tmp_path)).list()
    (tmp_path / "gone.jsonl").unlink()
    (tmp_path / os.fsdecode(b"\xff.jsonl")).touch()
    with pytest.raises(UserError, match="UTF-8"):
        open_store(str(tmp_path)).list()


def test_a_write_removes_what_a_killed_process_left_and_nothing_of_a_live_one(tmp_path):
    stem = f".tmp-{platform.node()}"
    dead, live = tmp_path / f"{stem}-999999999-k", tmp_path / f"{stem}-{os.getppid()}-k"
    dead.touch(), live.touch()
    open_store(str(tmp_path)).write("k", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"k", live.name}


def test_processes_that_write_one_key_at_once_do_not_meet(tmp_path):
    store = open_store(str(tmp_path))
    children = []
    for _ in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            failed = 1
            with contextlib.suppress(Exception):
                for _ in range(100):
                    store.write("plan.json", b"x" * 1000)
                    store.check_writable()
                failed = 0
            os._exit(failed)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    assert [(entry.key, entry.size) for entry in store.list()] == [("plan.json", 1000)]


def test_listing_goes_past_one_page(moto, credentials):
    moto.make_bucket("pages")
    store = open_store("s3://pages/in", endpoint_url=moto.endpoint_url)
    client = moto.client()
    for number in range(1003):
        client.put_object(Bucket="pages", Key=f"in/{number:05d}", Body=b"")
    client.put_object(Bucket="pages", Key="in-other/x", Body=b"")
    assert [entry.key for entry in store.list()] == [f"{number:05d}" for number in range(1003)]


def test_a_large_upload_goes_in_parts_and_ranges_come_back(moto, credentials, tmp_path):
    moto.make_bucket("large")
    store = open_store("s3://large", endpoint_url=moto.endpoint_url)
    data = os.urandom(33_000_000)
    (tmp_path / "big").write_bytes(data)
    store.upload("big", tmp_path / "big")
    assert store.read("big", 15_999_990, 16_000_010) == data[15_999_990:16_000_010]
    store.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_a_forked_child_makes_a_client_of_its_own(moto, credentials):
    moto.make_bucket("fork")
    store = open_store("s3://fork", endpoint_url=moto.endpoint_url)
    store.write("a", b"1")
    parent = store._client
    child = os.fork()
    if child == 0:
        os._exit(0 if store._client is not parent and store.read("a") == b"1" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_mistakes_name_their_cause(moto, rclone, credentials, monkeypatch, tmp_path):
    def message(uri, endpoint_url):
        with pytest.raises(UserError) as caught:
            open_store(uri, endpoint_url=endpoint_url).list()
        assert len(str(caught.value).splitlines()) <= 2
        return str(caught.value)

    assert "no such bucket" in message("s3://nowhere/x", moto.endpoint_url)
    dead = f"http://127.0.0.1:{free_port()}"
    assert "--endpoint-url" in message("s3://bucket/x", dead)
    assert "http://host:port" in message("s3://bucket/x", "127.0.0.1:9000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "credentials" in message("s3://bucket/x", rclone.endpoint_url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no credentials" in message("s3://bucket/x", moto.endpoint_url)
    with pytest.raises(UserError, match="s3://bucket/prefix"):
        open_store("gs://bucket/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        open_store(str(tmp_path / "file" / "below")).check_writable()
