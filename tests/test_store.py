"""One interface over folders and two real S3 servers; mistakes in a line or two."""

import argparse
import collections
import contextlib
import datetime
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.run import UsageError, UserError
from common.s3 import CredentialsExpired, abort_left_uploads
from common.s3_uploads import read_upload_journal
from common.store import (
    ObjectMissing,
    add_store_arguments,
    add_store_write_arguments,
    open_store,
)
from tests.faulty_s3 import KINDS as FAULTS
from tests.faulty_s3 import faulty, requests_of
from tests.servers import KEY, PAGE_KEYS, SECRET, free_port

KINDS = ("local", "moto", "rclone")
SERVERS = ("moto", "rclone")
ODD_KEYS = (
    "a b%20c.jsonl",
    unicodedata.normalize("NFC", "\u00fc.jsonl"),
    unicodedata.normalize("NFD", "\u00fc.jsonl"),
    "x//y.jsonl",
    "q?r#s&t=u.jsonl",
    "tab\t.jsonl",
    "dir/",
    "./here.jsonl",
)


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
    uri = make_bucket(server, request)
    return open_store(f"{uri}/some/prefix/", endpoint_url=server.endpoint_url)


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
    for number in range(PAGE_KEYS + 100):
        client.put_object(Bucket="pages", Key=f"in/{number:05d}", Body=b"")
    client.put_object(Bucket="pages", Key="in-other/x", Body=b"")
    keys = [f"{number:05d}" for number in range(PAGE_KEYS + 100)]
    assert [entry.key for entry in store.list()] == keys
    with faulty(moto, seed=3, share=0.7, kinds=("cut", "cut_unsized", "cut_chunked")) as url:
        through = open_store("s3://pages/in", endpoint_url=url)
        for _ in range(3):
            assert [entry.key for entry in through.list()] == keys


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
    parent = store._bucket.client
    child = os.fork()
    if child == 0:
        os._exit(0 if store._bucket.client is not parent and store.read("a") == b"1" else 1)
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
    with pytest.raises(UserError, match="s3://bucket/prefix"):
        open_store("s3:/bucket/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        open_store(str(tmp_path / "file" / "below")).check_writable()


# ---- faults


@pytest.fixture(params=SERVERS)
def server(request, credentials):
    return request.getfixturevalue(request.param)


def make_bucket(server, request):
    return server.make_bucket(bucket_name(request))


def bucket_name(request):
    """The same in each run, so that a seed means the same faults."""
    return f"b{zlib.crc32(request.node.name.encode())}"


@pytest.mark.parametrize("fault", FAULTS)
def test_reads_are_whole_whatever_breaks(server, fault, request, tmp_path):
    uri, data = make_bucket(server, request), os.urandom(8_000_003)
    direct = open_store(uri, endpoint_url=server.endpoint_url)
    direct.write("k", data)
    direct.write("empty", b"")
    (entry,) = direct.list("k")
    log = tmp_path / "log"
    share = 0.4 if fault == "slowdown" else 1.0  # botocore waits for seconds each time
    with faulty(server, share=share, kinds=[fault], log=log) as url:
        store = open_store(uri, endpoint_url=url)
        assert store.read("k") == data
        assert store.read("k", etag=entry.etag) == data
        assert store.read("k", 17, 5_000_000, etag=entry.etag) == data[17:5_000_000]
        assert store.read("k", 7_000_000) == data[7_000_000:]
        assert store.read("empty") == store.read("empty", 0, 4) == b""
        store.download("k", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data
    assert fault in {noted["fault"] for noted in requests_of(log)}


def test_a_cut_read_goes_on_from_where_it_stopped(server, request, tmp_path):
    uri, data, log = make_bucket(server, request), os.urandom(8_000_000), tmp_path / "log"
    open_store(uri, endpoint_url=server.endpoint_url).write("k", data)
    with faulty(server, share=1, kinds=["cut"], log=log) as url:
        assert open_store(uri, endpoint_url=url).read("k") == data
    ranges = [noted["range"] for noted in requests_of(log)]
    assert ranges[:4] == ["", "bytes=4000000-", "bytes=6000000-", "bytes=7000000-"]


def test_a_read_never_mixes_two_objects_of_one_key(moto, credentials, request):
    uri = make_bucket(moto, request)  # not rclone: its overwrites are not atomic
    direct, over = open_store(uri, endpoint_url=moto.endpoint_url), threading.Event()
    contents, seen = [b"a" * 300_000, b"b" * 300_000], collections.Counter()
    direct.write("k", contents[0])

    def rewrite():
        while not over.is_set():
            for data in contents:
                direct.write("k", data)

    with ThreadPoolExecutor(1) as pool, faulty(moto, share=0.5, kinds=["cut"]) as url:
        store, writer = open_store(uri, endpoint_url=url), pool.submit(rewrite)
        try:
            while min(seen["whole"], seen["changed"]) < 3:
                try:
                    assert store.read("k") in contents
                    seen["whole"] += 1
                except UserError as error:
                    assert "changed" in str(error)
                    seen["changed"] += 1
        finally:
            over.set()
        writer.result()


def test_everything_arrives_through_a_bad_network(server, request, tmp_path):
    uri, log = make_bucket(server, request), tmp_path / "log"
    objects = {f"{number:03d}": os.urandom(50_000) for number in range(40)}
    (tmp_path / "big").write_bytes(os.urandom(40_000_000))
    with faulty(server, seed=5, share=0.25, log=log) as url, ThreadPoolExecutor(8) as pool:
        store = open_store(uri, endpoint_url=url)
        store.check_writable()
        list(pool.map(store.write, objects, objects.values()))
        store.upload("big", tmp_path / "big")
        assert [entry.key for entry in store.list()] == [*objects, "big"]
        assert list(pool.map(store.read, objects)) == list(objects.values())
        store.download("big", tmp_path / "back")
        list(pool.map(store.delete, objects))
        assert [entry.key for entry in store.list()] == ["big"]
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
    assert {noted["fault"] for noted in requests_of(log)} == {"", *FAULTS}


def test_an_outage_of_seconds_is_waited_for(moto, credentials, request):
    uri, port, keys = make_bucket(moto, request), free_port(), [str(number) for number in range(60)]
    with ThreadPoolExecutor(60) as pool:
        with faulty(moto, share=0, port=port) as url:
            store = open_store(uri, endpoint_url=url)
            list(pool.map(lambda key: store.write(key, key.encode()), keys))
        reads = [pool.submit(store.read, key) for key in keys]
        time.sleep(5)
        assert not any(read.done() for read in reads)
        with faulty(moto, share=0, port=port):
            assert [read.result().decode() for read in reads] == keys


def test_an_upload_whose_completion_is_not_heard_of_is_made_again(
    rclone, credentials, request, tmp_path
):
    # Asked to complete an upload again, rclone says NoSuchUpload; moto and AWS repeat their answer.
    uri, log, data = make_bucket(rclone, request), tmp_path / "log", os.urandom(17_000_000)
    (tmp_path / "big").write_bytes(data)
    with faulty(rclone, seed=1, share=0.5, kinds=["lost"], log=log) as url:
        store = open_store(uri, endpoint_url=url)
        for number in range(4):
            store.upload(str(number), tmp_path / "big")
            assert store.read(str(number)) == data
    lost = [noted for noted in requests_of(log) if noted["fault"] and noted["method"] == "POST"]
    assert any("uploadId" in noted["target"] for noted in lost)


# ---- credentials and the clock


@pytest.fixture
def credentials_file(credentials, monkeypatch, tmp_path):
    """Writes a credentials file, where these come from instead of the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(access_key):
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id={access_key}\naws_secret_access_key=secret\n"
        )

    write("first-key")
    return write


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired", "RequestExpired"])
def test_expired_credentials_end_soon_with_the_cure(moto, credentials_file, request, code):
    uri = make_bucket(moto, request)
    with faulty(moto, share=0, rules=[f"put:400:{code}"]) as url:
        store, began = open_store(uri, endpoint_url=url), time.monotonic()
        with pytest.raises(CredentialsExpired, match=r"^credentials expired.*rerun the same"):
            store.write("k", b"x")
        assert time.monotonic() - began < 10


def test_renewed_credentials_let_the_run_go_on(moto, credentials_file, request, tmp_path):
    uri, log = make_bucket(moto, request), tmp_path / "log"
    with faulty(moto, share=0, expire_after=10, log=log) as url:
        store = open_store(uri, endpoint_url=url)
        first = store._bucket.client
        for number in range(10):
            store.write(str(number), b"x")
        credentials_file("second-key")
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: store.write(str(number), b"y"), range(100)))
            assert list(pool.map(store.read, map(str, range(100)))) == [b"y"] * 100
        assert store._bucket.client is not first
    keys = [noted["access_key"] for noted in requests_of(log)]
    assert keys.count("first-key") <= 10 + 16 and set(keys) == {"first-key", "second-key"}


def test_credentials_that_expire_within_an_upload_leave_no_parts(
    moto, credentials_file, request, tmp_path
):
    uri, data, journal = make_bucket(moto, request), os.urandom(40_000_000), tmp_path / "journal"
    (tmp_path / "big").write_bytes(data)
    with faulty(moto, share=0, expire_after=2) as url:  # after the creation and a part
        store = open_store(uri, endpoint_url=url, upload_journal=journal)
        store._bucket.client  # noqa: B018 - made with the first credentials
        credentials_file("second-key")
        store.upload("big", tmp_path / "big")
        assert store.read("big") == data
    assert left_uploads(moto, uri) == [] == read_upload_journal(journal)
    with faulty(moto, share=0, expire_after=2) as url:
        store = open_store(uri, endpoint_url=url, upload_journal=journal)
        with pytest.raises(CredentialsExpired):
            store.upload("other", tmp_path / "big")
    # One upload for each pair of credentials, for the next run to abort.
    left = read_upload_journal(journal)
    assert {key for _, key, _, _ in left} == {"other"}
    assert abort_left_uploads(journal, endpoint_url=moto.endpoint_url) == len(left)
    assert left_uploads(moto, uri) == []


def test_a_wrong_clock_is_named(moto, credentials, request):
    uri = make_bucket(moto, request)
    server_time = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=3)
    told = f"<ServerTime>{server_time:%Y-%m-%dT%H:%M:%SZ}</ServerTime>"
    for more, text in ((told, "about 180 minutes behind"), ("", "clock of this machine is off")):
        with (
            faulty(moto, share=0, rules=[f"all:403:RequestTimeTooSkewed:{more}"]) as url,
            pytest.raises(UserError, match=rf"{text}.*set the clock"),
        ):
            open_store(uri, endpoint_url=url).list()


# ---- what stores refuse


def test_encryption_is_asked_for_by_every_write(moto, credentials, request, tmp_path):
    uri, log = make_bucket(moto, request), tmp_path / "log"
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "big").write_bytes(b"x" * 17_000_000)
    with faulty(moto, share=0, log=log) as url:
        store = open_store(uri, endpoint_url=url, sse="aws:kms", sse_kms_key="some-key")
        store.check_writable()
        store.write("put", b"x")
        for name in ("small", "big"):
            store.upload(name, tmp_path / name)
            store.read(name, etag=store.list(name)[0].etag)
    for name in ("put", "small", "big"):
        head = moto.client().head_object(Bucket=uri.removeprefix("s3://"), Key=name)
        assert head["ServerSideEncryption"] == "aws:kms" and head["SSEKMSKeyId"] == "some-key"
    puts = [noted for noted in requests_of(log) if noted["method"] in ("PUT", "POST")]
    asking = [noted for noted in puts if "x-amz-server-side-encryption" in noted["amz"]]
    assert len(asking) == 4  # probe, put, small and the creation; parts and completion cannot
    assert all("uploadId=" in noted["target"] for noted in puts if noted not in asking)


def test_flags_of_encryption_are_checked(tmp_path):
    parser = argparse.ArgumentParser()
    add_store_arguments(parser.add_argument_group("output"))
    add_store_write_arguments(parser.add_argument_group("more"))
    args = parser.parse_args(["--sse", "AES256", "--sse-kms-key", "k"])
    with pytest.raises(UsageError, match="needs --sse aws:kms"):
        open_store("s3://bucket", sse=args.sse, sse_kms_key=args.sse_kms_key)
    with pytest.raises(UsageError, match="only for s3://"):
        open_store(str(tmp_path), sse="AES256")


def test_no_write_sends_a_checksum(moto, credentials, request, tmp_path):
    uri = make_bucket(moto, request)
    (tmp_path / "big").write_bytes(b"x" * 17_000_000)
    with faulty(moto, share=0, refuse_checksums=True) as url:
        store = open_store(uri, endpoint_url=url)
        store.check_writable()
        store.write("k", b"x")
        store.upload("big", tmp_path / "big")
        assert store.read("big") == b"x" * 17_000_000


@pytest.mark.parametrize("answer", ["400:InvalidArgument", "501:NotImplemented"])
def test_a_refused_write_asks_about_checksums(moto, credentials, request, answer):
    uri = make_bucket(moto, request)
    with (
        faulty(moto, share=0, rules=[f"put:{answer}"]) as url,
        pytest.raises(UserError, match=r"store without checksum support\?"),
    ):
        open_store(uri, endpoint_url=url).write("k", b"x")


def test_missing_permissions_are_named(moto, credentials, request, tmp_path):
    uri = make_bucket(moto, request)
    (tmp_path / "big").write_bytes(b"x" * 17_000_000)
    calls = {
        "list": (lambda store: store.list(), "s3:ListBucket"),
        "get": (lambda store: store.read("k"), "s3:GetObject"),
        "put": (lambda store: store.check_writable(), "s3:PutObject.*--sse"),
        "delete": (lambda store: store.delete("k"), "s3:DeleteObject"),
    }
    for operation, (call, text) in calls.items():
        with faulty(moto, share=0, rules=[f"{operation}:403:AccessDenied"]) as url:
            with pytest.raises(UserError, match=f"access denied .*{text}") as caught:
                call(open_store(uri, endpoint_url=url))
            assert len(str(caught.value).splitlines()) == 1
    with (
        faulty(moto, share=0, rules=["put:403:AccessDenied"]) as url,
        pytest.raises(UserError, match="s3:PutObject"),
    ):
        open_store(uri, endpoint_url=url).upload("big", tmp_path / "big")


def test_the_write_check_needs_no_right_to_delete(moto, credentials, request):
    uri = make_bucket(moto, request)
    with faulty(moto, share=0, rules=["delete:403:AccessDenied"]) as url:
        open_store(uri, endpoint_url=url).check_writable()


@pytest.mark.parametrize(
    ("answer", "cure"),
    [
        ("400:AuthorizationHeaderMalformed:<Region>eu-west-9</Region>", "AWS_REGION=eu-west-9"),
        ("400:IllegalLocationConstraintException", "set AWS_REGION to the bucket's region"),
        ("301:PermanentRedirect:<Endpoint>b.s3.else.where</Endpoint>", "b.s3.else.where"),
    ],
)
def test_a_wrong_place_names_both_and_where_they_come_from(
    moto, credentials, request, monkeypatch, answer, cure
):
    uri = make_bucket(moto, request)
    with faulty(moto, share=0, rules=[f"all:{answer}"]) as url:

        def message(flag=None, **variables):
            with monkeypatch.context() as context:
                for name, text in variables.items():
                    context.setenv(name, text)
                with pytest.raises(UserError) as caught:
                    open_store(uri, endpoint_url=flag).list()
            text = str(caught.value)
            assert len(text.splitlines()) == 1
            assert url in text and uri in text and cure in text
            return text

        dead = f"http://127.0.0.1:{free_port()}"
        text = message(url, AWS_ENDPOINT_URL_S3=dead, AWS_REGION="eu-west-1")
        assert "(from --endpoint-url)" in text and "region eu-west-1 (from AWS_REGION)" in text
        text = message(
            AWS_ENDPOINT_URL_S3=url, AWS_ENDPOINT_URL=dead, AWS_DEFAULT_REGION="eu-west-2"
        )
        assert "(from AWS_ENDPOINT_URL_S3)" in text
        assert "region eu-west-2 (from AWS_DEFAULT_REGION)" in text
        text = message(AWS_ENDPOINT_URL=url)
        assert "(from AWS_ENDPOINT_URL)" in text and "us-east-1 (from the default)" in text


# ---- keys, threads


@pytest.mark.parametrize("kind", ["put", "upload"])
def test_odd_keys_are_opaque(moto, credentials, request, tmp_path, kind):
    store = open_store(f"{make_bucket(moto, request)}/in", endpoint_url=moto.endpoint_url)
    for number, key in enumerate(ODD_KEYS):
        (tmp_path / "file").write_text(str(number))
        if kind == "put":
            store.write(key, str(number).encode())
        else:
            store.upload(key, tmp_path / "file")
    assert len(set(ODD_KEYS)) == 8
    assert [entry.key for entry in store.list()] == sorted(ODD_KEYS)
    for number, key in enumerate(ODD_KEYS):
        store.download(key, tmp_path / "back")
        assert store.read(key).decode() == (tmp_path / "back").read_text() == str(number)
        assert key in [entry.key for entry in store.list(key)]
        store.delete(key)
    assert store.list() == []


def test_64_threads_fit_into_the_pool(rclone, credentials, request, caplog):
    uri = make_bucket(rclone, request)
    store = open_store(uri, endpoint_url=rclone.endpoint_url, max_connections=64)
    together = threading.Barrier(64)

    def use(number):
        together.wait()
        for _ in range(5):
            store.write(str(number), b"x")
            store.read(str(number))

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(64) as pool:
        list(pool.map(use, range(64)))
    assert "pool is full" not in caplog.text


def test_threads_that_ask_at_once_get_one_client(moto, credentials):
    store, together = (
        open_store("s3://bucket", endpoint_url=moto.endpoint_url),
        threading.Barrier(32),
    )

    def client(_):
        together.wait()
        return id(store._bucket.client)

    with ThreadPoolExecutor(32) as pool:
        assert len(set(pool.map(client, range(32)))) == 1


# ---- uploads of killed runs


def left_uploads(server, uri):
    answer = server.client().list_multipart_uploads(Bucket=uri.removeprefix("s3://"))
    return [(found["Key"], found["UploadId"]) for found in answer.get("Uploads", [])]


UPLOADER = """
import sys
from pathlib import Path
from common.store import open_store
uri, url, journal, path = sys.argv[1:]
open_store(uri, endpoint_url=url, upload_journal=Path(journal)).upload("shard.arrow", Path(path))
"""


def test_what_a_killed_upload_left_is_aborted_and_nothing_else(
    moto, credentials, request, tmp_path
):
    uri, journal = make_bucket(moto, request), tmp_path / "journal"
    (tmp_path / "big").write_bytes(b"x" * 64_000_000)
    with faulty(moto, share=0, bytes_per_s=5_000_000) as url:
        neighbour = moto.client().create_multipart_upload(
            Bucket=uri.removeprefix("s3://"), Key="in/shard.arrow"
        )["UploadId"]
        same_key = moto.client().create_multipart_upload(
            Bucket=uri.removeprefix("s3://"), Key="in/shard.arrow-2"
        )["UploadId"]
        process = subprocess.Popen(
            [sys.executable, "-c", UPLOADER, f"{uri}/in", url, journal, tmp_path / "big"]
        )
        deadline = time.monotonic() + 60
        while not read_upload_journal(journal):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        time.sleep(1)  # its parts are on the way
        process.kill()
        assert process.wait() == -signal.SIGKILL
    others = [("in/shard.arrow", neighbour), ("in/shard.arrow-2", same_key)]
    ((_, key, upload_id, endpoint),) = read_upload_journal(journal)
    assert sorted(left_uploads(moto, uri)) == sorted([*others, (key, upload_id)])
    assert endpoint.startswith("http://127.0.0.1:")  # the slow proxy's, which is gone
    with journal.open("ab") as file:
        file.write(b'{"event": "beg')  # a line that a power cut left
    assert abort_left_uploads(journal, endpoint_url=moto.endpoint_url) == 1
    assert sorted(left_uploads(moto, uri)) == sorted(others)
    assert not journal.exists()
    assert abort_left_uploads(journal, endpoint_url=moto.endpoint_url) == 0


def test_uploads_gone_already_are_no_mistake(server, request, tmp_path):
    uri, journal = make_bucket(server, request), tmp_path / "journal"
    store = open_store(uri, endpoint_url=server.endpoint_url, upload_journal=journal)
    for bucket in (uri.removeprefix("s3://"), "no-such-bucket"):
        store._bucket._uploads._note("begun", bucket, "k", "not-there")
    assert len(read_upload_journal(journal)) == 2
    assert abort_left_uploads(journal, endpoint_url=server.endpoint_url) == 0
    assert not journal.exists()


def test_the_journal_is_right_when_threads_upload_at_once(
    moto, credentials, request, tmp_path, monkeypatch
):
    monkeypatch.setattr("common.store.PART_BYTES", 5_300_000)
    uri, journal = make_bucket(moto, request), tmp_path / "journal"
    (tmp_path / "big").write_bytes(b"x" * 6_000_000)
    store = open_store(uri, endpoint_url=moto.endpoint_url, upload_journal=journal)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.upload(str(number), tmp_path / "big"), range(24)))
    lines = journal.read_text().splitlines()
    assert len(lines) == 48 and sum('"begun"' in line for line in lines) == 24
    assert read_upload_journal(journal) == [] == left_uploads(moto, uri)
    assert KEY not in journal.read_text() and SECRET not in journal.read_text()
