"""Stage 1 when things go wrong: bad networks, expired credentials, kills at any moment."""

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import zlib
from pathlib import Path

import pytest

from common.store import TEMPORARY
from tests.faulty_s3 import faulty
from tests.test_tokenize_script import FLAGS, SCRIPT, contents, run_script, tokenize
from tests.tiny_tokenizer import build_tiny_tokenizer

ODD_KEYS = [
    "a b+c.jsonl",
    "a%20b.jsonl",
    "caf\u00e9.jsonl",
    "cafe\u0301.jsonl",
    "q?#&=.jsonl",
    "tab\there.jsonl",
    "double//slash.jsonl",
    "\u65e5\u672c/\U0001f600.jsonl",
]


def make_line(number, answer="and so it goes on", **more):
    message = {"role": "assistant", "reasoning": "let me see", "content": f"{answer} {number}"}
    question = {"role": "user", "content": f"question {number}"}
    return json.dumps({"id": f"row-{number}", "messages": [question, message], **more})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Six files of 1,000 rows, 3 MB."""
    folder = tmp_path_factory.mktemp("in")
    for number in range(6):
        rows = (make_line(1000 * number + row, "word " * 80) for row in range(1000))
        (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def calm(inputs, tokenizer, tmp_path_factory):
    """What an undisturbed run makes of them, in eight shards."""
    folder = tmp_path_factory.mktemp("calm") / "out"
    tokenize(inputs, folder, tokenizer, "--num-shards", "8")
    return contents(folder)


def upload(server, folder, bucket):
    server.make_bucket(bucket)
    for path in folder.iterdir():
        server.client().upload_file(str(path), bucket, f"in/{path.name}")


def shards_of(files):
    """The shards, records and rejects of a dataset: what does not hold the inputs' etags."""
    return {key: data for key, data in files.items() if key.endswith((".arrow", ".jsonl"))}


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_a_bad_network_changes_no_byte(inputs, calm, tokenizer, kind, request):
    server, bucket = request.getfixturevalue(kind), f"bad-network-{kind}"
    upload(server, inputs, bucket)
    with faulty(server, seed=1, share=0.1) as endpoint:
        tokenize(
            f"s3://{bucket}/in", f"s3://{bucket}/out", tokenizer, "--num-shards", "8",
            "--endpoint-url", endpoint, environment=server.environment,
        )  # fmt: skip
    assert shards_of(server.objects(bucket, "out/")) == shards_of(calm)


def test_expired_credentials_stop_the_run_and_a_rerun_goes_on(inputs, calm, tokenizer, moto):
    upload(moto, inputs, "expired")
    flags = (
        "--input", "s3://expired/in", "--output", "s3://expired/out", "--tokenizer", tokenizer,
        *FLAGS, "--num-shards", "8",
    )  # fmt: skip
    with faulty(moto, share=0.0, expire_after=45) as endpoint:
        began = time.monotonic()
        result = run_script(*flags, "--endpoint-url", endpoint, environment=moto.environment)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "credentials expired" in last and "of 8 shards kept" in last, result.stderr
    assert time.monotonic() - began < 30
    before = {k: v for k, v in moto.objects("expired", "out/").items() if k.startswith("shard-")}
    result = run_script(*flags, environment=moto.environment)
    assert result.returncode == 0, result.stderr
    after = moto.objects("expired", "out/")
    assert shards_of(after) == shards_of(calm)
    assert all(after[key] == data for key, data in before.items())


def test_keys_are_taken_as_they_are(tokenizer, moto):
    moto.make_bucket("odd-keys")
    for number, key in enumerate(ODD_KEYS):
        row = make_line(number).encode() + b"\n"
        moto.client().put_object(Bucket="odd-keys", Key=f"in/{key}", Body=row + b"{bad\n")
    tokenize("s3://odd-keys/in", "s3://odd-keys/out", tokenizer, environment=moto.environment)
    files = moto.objects("odd-keys", "out/")
    record = json.loads(files["shard-00000.json"])
    assert (record["rows"], record["rejected"]) == (len(ODD_KEYS), {"not_json": len(ODD_KEYS)})
    rejects = files["rejected/shard-00000.jsonl"].decode().splitlines()
    assert {json.loads(line)["key"] for line in rejects} == set(ODD_KEYS)


def start(*flags, **options):
    command = list(map(str, (*SCRIPT, *flags)))
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


def test_kill_9_at_any_moment_and_again(inputs, calm, tokenizer, tmp_path):
    work, out, draw = tmp_path / "work", tmp_path / "out", random.Random(7)
    work.mkdir()
    flags = (
        "--input", inputs, "--output", out, "--tokenizer", tokenizer, *FLAGS,
        "--num-shards", "8", "--work-dir", work,
    )  # fmt: skip
    written = {}
    for _ in range(6):
        process = start(*flags)
        time.sleep(draw.uniform(0.3, 2.2))
        process.kill()
        process.wait()
        for path in out.glob("shard-*"):
            now = path.stat().st_mtime_ns
            if path.suffix == ".json":
                assert written.setdefault(path, now) == now  # committed once, never again
        time.sleep(1.5)  # orphaned workers notice within a second
    tokenize(inputs, out, tokenizer, "--num-shards", "8", "--work-dir", work)
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    assert contents(out) == calm
    assert not list(work.iterdir())


def workers_of(process):
    """The worker processes that have really begun to encode."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in map(int, children):
        stat = Path(f"/proc/{child}/stat")
        if stat.exists() and int(stat.read_text().rsplit(")", 1)[1].split()[11]) > 15:
            yield child


def test_a_stopped_worker_is_replaced(tokenizer, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    rows = (make_line(row, "word " * 200) for row in range(12_000))
    (source / "a.jsonl").write_text("\n".join(rows) + "\n")
    flags = ("--num-shards", "2", "--encoder", "tokenizers")
    process = start("--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer,
                    *FLAGS, *flags)  # fmt: skip
    stopped = None
    while stopped is None and process.poll() is None:
        stopped = next(workers_of(process), None)
        time.sleep(0.01)
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert process.wait(timeout=120) == 0, process.stderr.read()
    assert not Path(f"/proc/{stopped}").exists()
    tokenize(source, tmp_path / "calm", tokenizer, *flags)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


WRONG_FASTOKENS = '''
import importlib.machinery, importlib.util, sys
myself = sys.modules["fastokens"]
spec = importlib.machinery.PathFinder.find_spec(
    "fastokens", [entry for entry in sys.path if "site-packages" in entry]
)
real = importlib.util.module_from_spec(spec)
sys.modules["fastokens"] = real
spec.loader.exec_module(real)


class Tokenizer:
    """The real one, but wrong about one word, as a fault of a release would be."""

    @staticmethod
    def from_json_str(text):
        made = Tokenizer()
        made.real = real.Tokenizer.from_json_str(text)
        return made

    def no_truncation(self):
        self.real.no_truncation()

    def no_padding(self):
        self.real.no_padding()

    def encode_batch_flat(self, texts):
        return self.real.encode_batch_flat([text.replace("zebra", "zebrb") for text in texts])


sys.modules["fastokens"] = myself
'''


def watched_number():
    """A row's number whose id is among the one in a thousand that are encoded both ways."""
    return next(n for n in range(10**6, 2 * 10**6) if zlib.crc32(b"row-%d" % n) % 1000 == 0)


@pytest.fixture
def wrong_fastokens(tmp_path):
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "fastokens.py").write_text(WRONG_FASTOKENS)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("where", ["first rows", "later", "after a commit"])
def test_an_engine_that_proves_wrong_is_dropped_or_stops_the_run(
    tokenizer, tmp_path, wrong_fastokens, where
):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    lines = [make_line(row) for row in range(2000)]
    bad = make_line(watched_number(), "a zebra is striped")
    lines.insert(5 if where == "first rows" else 1900, bad)
    (source / "a.jsonl").write_text("\n".join(lines) + "\n")
    flags = (
        "--input", source, "--output", out, "--tokenizer", tokenizer, *FLAGS, "--num-shards", "2",
    )  # fmt: skip
    if where == "after a commit":
        assert run_script(*flags, "--shards", "0:1", environment=wrong_fastokens).returncode == 0
        result = run_script(*flags, environment=wrong_fastokens)
        assert result.returncode == 1 and "Traceback" not in result.stderr
        last = result.stderr.strip().splitlines()[-1]
        assert "fastokens differs" in last and "--encoder tokenizers --overwrite" in last
        return
    result = run_script(*flags, environment=wrong_fastokens)
    assert result.returncode == 0, result.stderr
    assert "fastokens differs from its reference" in result.stderr and "WARNING" in result.stderr
    tokenize(source, tmp_path / "calm", tokenizer, "--num-shards", "2", "--encoder", "tokenizers")
    assert contents(out) == contents(tmp_path / "calm")
    named = run_script(*flags, "--overwrite", "--encoder", "fastokens", environment=wrong_fastokens)
    if where == "first rows":
        shutil.rmtree(out)
        named = run_script(*flags, "--encoder", "fastokens", environment=wrong_fastokens)
        assert named.returncode == 1 and "use --encoder tokenizers" in named.stderr


def test_two_machines_side_by_side_make_one_dataset(inputs, calm, tokenizer, tmp_path):
    parts = ("0:5", "5:8")
    threads = [
        threading.Thread(
            target=tokenize,
            args=(inputs, tmp_path / "out", tokenizer, "--num-shards", "8", "--shards", part),
        )
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "out") == calm


def test_128_workers_make_the_same_bytes(inputs, calm, tokenizer, tmp_path):
    tokenize(inputs, tmp_path / "out", tokenizer, "--num-shards", "8", "--tokenize-workers", "128")
    assert contents(tmp_path / "out") == calm


def test_what_changed_since_the_plan_is_named(tokenizer, tmp_path):
    source, requests, out = tmp_path / "in", tmp_path / "requests", tmp_path / "out"
    copy = Path(shutil.copytree(tokenizer, tmp_path / "tokenizer"))
    for folder in (source, requests):
        folder.mkdir()
        (folder / "a.jsonl").write_text(make_line(1) + "\n")
    flags = ("--input", source, "--output", out, "--tokenizer", copy, "--prompts", requests, *FLAGS)
    assert run_script(*flags).returncode == 0

    def grow(path):
        path.write_bytes(path.read_bytes() + b"\n")

    changes = {
        "tokenizer changed": copy / "tokenizer.json",
        "template changed": copy / "chat_template.jinja",
        "prompts changed": requests / "a.jsonl",
        "inputs: 1 gone or changed": source / "a.jsonl",
    }
    for words, path in changes.items():
        before, times = path.read_bytes(), path.stat()
        grow(path)
        refused = run_script(*flags)
        assert refused.returncode == 1 and words in refused.stderr, (words, refused.stderr)
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "0 written, 1 kept" in run_script(*flags).stdout


def batch_of(folder, number, requests, answers):
    """A batch: its requests and its output, ids `request-N` as every client numbers them."""
    (folder / "req").mkdir(parents=True, exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    lines = [
        json.dumps({"custom_id": name, "body": {"messages": [{"role": "user", "content": text}]}})
        for name, text in requests
    ]
    (folder / "req" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    lines = []
    for name, text in answers:
        message = {"role": "assistant", "content": text, "reasoning": "hm"}
        body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        lines.append(json.dumps({"custom_id": name, "response": {"body": body}}))
    (folder / "out" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def reject_reasons(output):
    lines = "".join(path.read_text() for path in sorted((output / "rejected").iterdir()))
    return [json.loads(line) for line in lines.splitlines()]


def test_a_custom_id_of_two_batches_pairs_no_answer_with_the_wrong_question(tokenizer, tmp_path):
    long = "an answer that is long enough to count as one"
    batch_of(tmp_path, 1, [("request-1", "first?"), ("same", "both?")], [("request-1", long)])
    batch_of(tmp_path, 2, [("request-1", "second?"), ("same", "both?")],
             [("request-1", long), ("same", long)])  # fmt: skip
    both = tokenize(tmp_path / "out", tmp_path / "both", tokenizer, "--prompts", tmp_path / "req")
    assert "1 custom_ids of --prompts have different requests" in both.stderr
    rejects = reject_reasons(tmp_path / "both")
    assert [reject["reason"] for reject in rejects] == ["no_prompt", "no_prompt"]
    assert "each batch by itself" in rejects[0]["error"]
    # one batch by itself: a file is named as well as a folder
    tokenize(tmp_path / "out/1.jsonl", tmp_path / "one", tokenizer,
             "--prompts", tmp_path / "req/1.jsonl")  # fmt: skip
    shown = run_script("--inspect", f"{tmp_path}/one:0", "--tokenizer", tokenizer)
    assert "first?" in shown.stdout and "id=request-1" in shown.stdout


@pytest.mark.parametrize(
    "line",
    [
        '{"custom_id": ["a"], "body": {}}',
        '{"custom_id": 99999999999999999999999, "body": {}}',
        '{"custom_id": "request-1", "body": "text"}',
        '{"custom_id": "request-1", "body": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"custom_id": "\\ud800", "body": {}}',
    ],
)
def test_odd_lines_among_the_requests_are_left(tokenizer, tmp_path, line):
    batch_of(tmp_path, 1, [], [("request-1", "an answer that is long enough to count")])
    (tmp_path / "req" / "1.jsonl").write_text(line + "\n")
    tokenize(tmp_path / "out", tmp_path / "done", tokenizer, "--prompts", tmp_path / "req")
    assert [reject["reason"] for reject in reject_reasons(tmp_path / "done")] == ["no_prompt"]


def test_a_run_whose_plan_was_replaced_stops(inputs, tokenizer, tmp_path):
    flags = ("--encoder", "tokenizers", "--num-shards", "6")
    first = start("--input", inputs, "--output", tmp_path / "out", "--tokenizer", tokenizer,
                  *FLAGS, *flags, "--tokenize-workers", "1")  # fmt: skip
    while not (tmp_path / "out" / "shard-00000.json").exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    tokenize(inputs, tmp_path / "out", tokenizer, *flags, "--max-length", "64", "--overwrite")
    # the stopped one may hold a file that it is just writing
    second = {
        name: data for name, data in contents(tmp_path / "out").items() if TEMPORARY not in name
    }
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=120) == 1
    assert "another run has replaced the plan" in first.stderr.read().decode().splitlines()[-1]
    records = [json.loads(data) for name, data in contents(tmp_path / "out").items()
               if name.startswith("shard-") and name.endswith(".json")]  # fmt: skip
    plans = {record["plan_sha256"] for record in records}
    assert len(records) == 6 and len(plans) == 1
    # a shard that it was just putting in place is noticed and made again
    tokenize(inputs, tmp_path / "out", tokenizer, *flags, "--max-length", "64")
    third = contents(tmp_path / "out")
    assert third.keys() == second.keys()
    assert [name for name in second if third[name] != second[name]] == []


def test_overwrite_makes_everything_anew_and_lost_files_are_made_again(
    inputs, calm, tokenizer, tmp_path
):
    flags = ("--num-shards", "8")
    tokenize(inputs, tmp_path / "out", tokenizer, *flags)
    (tmp_path / "out" / "shard-00003.arrow").unlink()
    (tmp_path / "out" / "shard-00004.arrow").write_bytes(b"cut")
    (tmp_path / "out" / "shard-00005.json").write_text("[]")
    again = tokenize(inputs, tmp_path / "out", tokenizer, *flags)
    assert "3 written, 5 kept" in again.stdout
    assert "shard-00003.arrow is not what its record says" in again.stderr
    assert contents(tmp_path / "out") == calm
    anew = tokenize(inputs, tmp_path / "out", tokenizer, *flags, "--overwrite")
    assert "8 written, 0 kept" in anew.stdout and contents(tmp_path / "out") == calm


def test_a_second_signal_ends_it_at_once(inputs, tokenizer, tmp_path):
    """Whatever the first one's cleaning up is doing; and the next run cleans up after both."""
    slow = ("--encoder", "tokenizers", "--tokenize-workers", "1")  # else done before the signals
    for number in range(4):
        work = tmp_path / f"work-{number}"
        work.mkdir()
        process = start("--input", inputs, "--output", tmp_path / f"{number}", "--tokenizer",
                        tokenizer, *FLAGS, "--work-dir", work, *slow)  # fmt: skip
        while not list(work.glob("tokenize-*")):
            time.sleep(0.01)
        time.sleep(0.15 * number)
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        # the signal itself ends an interpreter that is about to end: 130 too in a shell
        assert process.wait(timeout=10) in (130, -signal.SIGINT)
        assert b"Traceback" not in process.stderr.read()
    tokenize(inputs, tmp_path / "out", tokenizer, "--work-dir", work)
    assert not list(work.iterdir())


def test_linked_folders_are_read_and_loops_end(tokenizer, tmp_path):
    source, other = tmp_path / "in", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    (other / "a.jsonl").write_text(make_line(1, "word " * 9) + "\n")
    (source / "more").symlink_to(other)
    (source / "loop").symlink_to(source)
    tokenize(source, tmp_path / "out", tokenizer)
    assert json.loads((tmp_path / "out" / "shard-00000.json").read_bytes())["rows"] == 1


def test_empty_names_and_odd_places_are_usage_errors(inputs, tokenizer, tmp_path):
    empty = run_script("--input", inputs, "--output", "", "--tokenizer", tokenizer)
    assert empty.returncode == 2 and "--output is needed" in empty.stderr.splitlines()[-1]
    nowhere = run_script("--inspect", tmp_path / "nothing:abc", "--tokenizer", tokenizer)
    assert nowhere.returncode == 1 and "no dataset there" in nowhere.stderr.splitlines()[-1]
