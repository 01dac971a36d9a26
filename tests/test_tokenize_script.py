"""tokenize_completions.py as a person runs it: real processes, a real S3 server, real kills."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from common.chat import ChatTokenizer
from common.shards import Plan, TokenizedDataset
from demo import tokenizer as demo_tokenizer
from tests.servers import free_port

ROOT = Path(__file__).parent.parent
SCRIPT = [sys.executable, str(ROOT / "tokenize_completions.py")]
FLAGS = ("--min-loss-tokens", "4", "--tokenize-workers", "2", "--max-reject-rate", "1")


def line(number, text="and so on"):
    return json.dumps(
        {
            "id": f"row-{number}",
            "source": "math",
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"{text} {number}", "reasoning": "let me see"},
            ],
        }
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.build(folder)
    return str(folder)


@pytest.fixture
def inputs(tmp_path):
    """Eleven files, 330 rows and three bad lines; one of them gzipped under a plain name."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for number in range(10):
        rows = [line(30 * number + row, "word " * (row % 7)) for row in range(30)]
        if number == 3:
            rows.insert(4, "{not json}")
            rows.insert(9, json.dumps({"messages": []}))
        (folder / f"part-{number}.jsonl").write_text("\n".join(rows) + "\n")
    packed = gzip.compress("\n".join(line(number) for number in range(300, 330)).encode())
    (folder / "deep/packed.jsonl").write_bytes(packed + gzip.compress(b'\n{"messages": ["x"]'))
    (folder / "empty.jsonl").touch()
    (folder / "README.md").write_text("not data")
    return folder


def run_script(*flags, environment=None, **options):
    command = [*SCRIPT, *map(str, flags)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, **options
    )


def tokenize(inputs, output, tokenizer, *flags, environment=None):
    result = run_script(
        "--input", inputs, "--output", output, "--tokenizer", tokenizer, *FLAGS, *flags,
        environment=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result


def contents(folder):
    """All files of a dataset that must be equal between equal runs."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {key: data for key, data in found.items() if not key.startswith("runs/")}


def test_rows_rejects_and_records_are_right(inputs, tmp_path, tokenizer):
    result = tokenize(inputs, tmp_path / "out", tokenizer, "--num-shards", "3")
    whole = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(whole) == 330
    assert sorted(whole["id"]) == sorted(f"row-{number}" for number in range(330))
    chat = ChatTokenizer.load(tokenizer)
    for row in (whole[0], whole[17], whole[329]):
        number = row["id"].removeprefix("row-")
        kept = [i for i, flag in zip(row["input_ids"], row["loss_mask"], strict=True) if flag]
        text = chat.decode(row["input_ids"])
        assert text.startswith(f"<|im_start|>user\nquestion {number}<|im_end|>")
        assert chat.decode(kept).startswith("let me see\n</think>\n\n")
        assert chat.decode(kept).endswith(f"{number}<|im_end|>")
        assert row["source"] == "math"
    records = [
        json.loads((tmp_path / f"out/shard-{index:05d}.json").read_bytes()) for index in range(3)
    ]
    plan = Plan.from_bytes((tmp_path / "out/plan.json").read_bytes())
    assert all(record["plan_sha256"] == plan.sha256 for record in records)
    assert sum(record["rows"] for record in records) == 330
    assert sum(record["tokens"] for record in records) == sum(map(len, whole["input_ids"]))
    assert sum(record["loss_tokens"] for record in records) == sum(map(sum, whole["loss_mask"]))
    rejected = [
        json.loads(text)
        for index in range(3)
        for text in (tmp_path / f"out/rejected/shard-{index:05d}.jsonl").read_text().splitlines()
    ]
    places = {(reject["key"], reject["line"], reject["reason"]) for reject in rejected}
    assert ("deep/packed.jsonl", 31, "cut_line") in places
    reasons = [reject["reason"] for reject in rejected if reject["key"] == "part-3.jsonl"]
    assert reasons == ["not_json", "no_messages"]
    data = (inputs / "part-3.jsonl").read_bytes()
    for reject in rejected:
        if reject["key"] == "part-3.jsonl":
            bad = data[reject["offset"] :].split(b"\n")[0]
            assert bad in (b"{not json}", b'{"messages": []}')
            assert reject["line"] in (5, 10, None)
    for text in ("samples", "330", "rejected", "cut_line", "loss tokens"):
        assert text in result.stdout
    for text in ("shards=3/3 samples=330 tokens=", " loss=", " samples/s=", " tokens/s="):
        assert text in result.stderr
    (run_json,) = (tmp_path / "out/runs").iterdir()
    assert json.loads(run_json.read_bytes())["counts"]["rows"] == 330


def test_bytes_do_not_depend_on_workers_or_on_who_did_which_part(inputs, tmp_path, tokenizer):
    tokenize(inputs, tmp_path / "one", tokenizer, "--num-shards", "4", "--tokenize-workers", "1")
    tokenize(inputs, tmp_path / "two", tokenizer, "--num-shards", "4", "--tokenize-workers", "3")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    for part in ("2:4", "0:1", "1:2"):
        tokenize(inputs, tmp_path / "three", tokenizer, "--num-shards", "4", "--shards", part)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    # every record appears once whatever the partition: one row less would show here
    tokenize(inputs, tmp_path / "many", tokenizer, "--num-shards", "23")
    rows = datasets.load_from_disk(str(tmp_path / "many"))
    assert rows["id"][:] == datasets.load_from_disk(str(tmp_path / "one"))["id"][:]


def test_a_killed_run_leaves_whole_shards_and_a_rerun_the_same_bytes(tmp_path, tokenizer):
    source = tmp_path / "in"
    source.mkdir()
    for number in range(6):
        rows = (line(1000 * number + row, "word " * 40) for row in range(1000))
        (source / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    tokenize(source, tmp_path / "calm", tokenizer, "--num-shards", "8")
    out = tmp_path / "out"
    command = [
        *SCRIPT, "--input", source, "--output", out, "--tokenizer", tokenizer, *FLAGS,
        "--num-shards", "8", "--work-dir", tmp_path / "work",
    ]  # fmt: skip
    (tmp_path / "work").mkdir()
    codes = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    for blow, expected in codes.items():
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        before = len(list(out.glob("shard-*.json")))
        deadline = time.monotonic() + 60
        while len(list(out.glob("shard-*.json"))) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(blow)
        code = process.wait(timeout=30)
        said = process.stderr.read().decode()
        assert code == expected and "Traceback" not in said, said
        assert (blow == signal.SIGKILL) != ("committed shards are kept" in said)
        assert not list(out.glob("state.json"))
        assert len(list((tmp_path / "work").iterdir())) == (1 if blow == signal.SIGKILL else 0)
        time.sleep(2.5 if blow == signal.SIGKILL else 0)  # orphaned workers notice within a second
    for record in out.glob("shard-*.json"):
        assert record.read_bytes() == (tmp_path / "calm" / record.name).read_bytes()
    result = tokenize(source, out, tokenizer, "--num-shards", "8")
    assert contents(out) == contents(tmp_path / "calm")
    assert " kept" in result.stdout and "0 kept" not in result.stdout
    assert "0 written, 8 kept" in tokenize(source, out, tokenizer, "--num-shards", "8").stdout


def test_a_killed_worker_costs_nothing(tmp_path, tokenizer):
    source = tmp_path / "in"
    source.mkdir()
    rows = (line(row, "word " * 40) for row in range(12_000))
    (source / "a.jsonl").write_text("\n".join(rows) + "\n")
    tokenize(source, tmp_path / "calm", tokenizer)
    command = [
        *SCRIPT, "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer, *FLAGS
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    killed = False
    while process.poll() is None and not killed:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            ticks = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[11]
            if int(ticks) > 20:  # it has really begun to encode
                os.kill(int(child), signal.SIGKILL)
                killed = True
                break
        time.sleep(0.01)
    assert killed
    assert process.wait(timeout=60) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_it_runs_where_torch_transformers_and_datasets_cannot_be_imported(
    inputs, tmp_path, tokenizer
):
    blocked = tmp_path / "blocked"
    for name in ("torch", "transformers", "datasets"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text("raise ImportError('not on this machine')\n")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    check = subprocess.run([sys.executable, "-c", "import torch"], env=environment)
    assert check.returncode != 0
    tokenize(inputs, tmp_path / "out", tokenizer, environment=environment)


def test_s3_in_and_out_give_the_same_shards(inputs, tmp_path, tokenizer, moto):
    moto.make_bucket("chain")
    client = moto.client()
    for path in inputs.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "chain", f"in/{path.relative_to(inputs)}")
    client.put_object(Bucket="chain", Key="in/deep/", Body=b"")
    tokenize("s3://chain/in", "s3://chain/out/", tokenizer, "--num-shards", "3",
             environment=moto.environment)  # fmt: skip
    tokenize(inputs, tmp_path / "local", tokenizer, "--num-shards", "3")
    listed = client.list_objects_v2(Bucket="chain", Prefix="out/")["Contents"]
    keys = {entry["Key"].removeprefix("out/") for entry in listed}
    assert {key for key in keys if not key.startswith("runs/")} == set(contents(tmp_path / "local"))
    for name in ("shard-00000.arrow", "shard-00002.arrow"):
        remote = client.get_object(Bucket="chain", Key=f"out/{name}")["Body"].read()
        assert remote == (tmp_path / "local" / name).read_bytes()


def test_prompts_are_joined_by_custom_id(tmp_path, tokenizer):
    answer = {"message": {"content": "an answer", "reasoning": "a thought"}}
    (tmp_path / "out.jsonl").write_text(
        "\n".join(
            json.dumps({"custom_id": f"c{n}", "response": {"body": {"choices": [answer]}}})
            for n in (2, 0, 9)
        )
    )
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests/in.jsonl").write_text(
        "\n".join(
            json.dumps(
                {"custom_id": f"c{n}", "body": {"messages": [{"role": "user", "content": f"q{n}"}]}}
            )
            for n in range(3)
        )
    )
    source = tmp_path / "in"
    source.mkdir()
    (tmp_path / "out.jsonl").rename(source / "out.jsonl")
    tokenize(source, tmp_path / "data", tokenizer, "--prompts", tmp_path / "requests")
    dataset = TokenizedDataset(str(tmp_path / "data"), cache_dir=tmp_path / "c")
    dataset.wait_for_plan(timeout_s=0)
    shard = dataset.wait_for_shard(0, timeout_s=0)
    chat = ChatTokenizer.load(tokenizer)
    assert shard.ids == ["c2", "c0"]
    assert "q2" in chat.decode(shard.input_ids(0).tolist())
    assert shard.record["rejected"] == {"no_prompt": 1}


def test_another_plan_is_refused_with_its_differences_and_overwrite_replaces(
    inputs, tmp_path, tokenizer
):
    out = tmp_path / "out"
    tokenize(inputs, out, tokenizer, "--num-shards", "5")
    for name in ("mine.txt", "shard-notes.json"):
        (out / name).write_text("keep me")
    before = contents(out)
    flags = ("--input", inputs, "--output", out, "--tokenizer", tokenizer, *FLAGS)
    refused = run_script(*flags, "--num-shards", "2", "--max-length", "64")
    assert refused.returncode == 1
    assert "max_length: 4096 -> 64" in refused.stderr and "--overwrite" in refused.stderr
    assert contents(out) == before
    tokenize(inputs, out, tokenizer, "--num-shards", "2", "--max-length", "64", "--overwrite")
    assert (out / "mine.txt").exists() and (out / "shard-notes.json").exists()
    assert len(list(out.glob("shard-*.arrow"))) == 2


def test_a_damaged_input_fails_the_run_after_the_others(inputs, tmp_path, tokenizer):
    path = inputs / "deep/packed.jsonl"
    path.write_bytes(path.read_bytes()[:60])
    out = tmp_path / "out"
    result = run_script(
        "--input", inputs, "--output", out, "--tokenizer", tokenizer, *FLAGS, "--num-shards", "6"
    )
    assert result.returncode == 1 and "deep/packed.jsonl" in result.stderr.splitlines()[-1]
    assert len(list(out.glob("shard-*.json"))) == 5
    assert not (out / "state.json").exists()


def test_every_turn_can_be_a_row_and_the_plan_remembers_it(tmp_path, tokenizer):
    source, talk = tmp_path / "in", []
    source.mkdir()
    for number in range(3):
        talk.append({"role": "user", "content": f"question {number}"})
        turn = {"role": "assistant", "content": f"answer {number}", "reasoning": "hm"}
        talk.append(turn)
    (source / "a.jsonl").write_text(json.dumps({"id": "talk", "messages": talk}) + "\n")
    tokenize(source, tmp_path / "out", tokenizer, "--turns", "all")
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert rows["id"][:] == ["talk/0", "talk/1", "talk/2"]
    chat = ChatTokenizer.load(tokenizer)
    for number, row in enumerate(rows):
        kept = [i for i, flag in zip(row["input_ids"], row["loss_mask"], strict=True) if flag]
        assert chat.decode(kept) == f"hm\n</think>\n\nanswer {number}<|im_end|>"
        assert chat.decode(row["input_ids"]).count("answer") == number + 1
    refused = run_script(
        "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer, *FLAGS
    )
    assert refused.returncode == 1 and "turns: all -> last" in refused.stderr


def test_dry_run_prints_the_plan_and_writes_nothing(inputs, tmp_path, tokenizer):
    result = run_script(
        "--input", inputs, "--output", tmp_path / "out", "--tokenizer", tokenizer,
        "--num-shards", "3", "--dry-run",
    )  # fmt: skip
    assert result.returncode == 0 and "shard-00002" in result.stdout
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_or_two_lines(inputs, tmp_path, tokenizer, moto, rclone):
    (tmp_path / "void").mkdir()
    (tmp_path / "file").touch()
    dead = f"http://127.0.0.1:{free_port()}"
    moto.make_bucket("there")
    good = {"--input": inputs, "--output": tmp_path / "o", "--tokenizer": tokenizer}
    wrong = {**rclone.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    cases = [
        ({"--input": "s3://nowhere/x"}, 1, "no such bucket", moto.environment),
        ({"--input": "s3://there/x"}, 1, "no .jsonl", moto.environment),
        ({"--input": "s3://there/x"}, 1, "credentials", wrong),
        ({"--input": "s3://x/y", "--endpoint-url": dead}, 1, "--endpoint-url", moto.environment),
        ({"--input": tmp_path / "void"}, 1, "no .jsonl", None),
        ({"--output": tmp_path / "file/below"}, 1, "cannot write", None),
        ({"--tokenizer": tmp_path / "void"}, 1, "tokenizer.json", None),
        ({"--mask-token": "<nothing>"}, 1, "--mask-token", None),
        ({"--shards": "0:99"}, 2, "--shards", None),
        ({"--shards": "3"}, 2, "--shards", None),
        ({"--tokenize-workers": "0"}, 2, "--tokenize-workers", None),
        ({"--output": inputs / "deep"}, 2, "lies inside --input", None),
        ({"--max-reject-rate": "0.001"}, 1, "--max-reject-rate", None),
        ({"--max-reject-rate": "0.001"}, 1, "--max-reject-rate", None),  # a rerun is no cure
    ]
    for changes, code, message, environment in cases:
        flags = [item for pair in {**good, **changes}.items() for item in pair]
        result = run_script(*flags, environment=environment)
        assert result.returncode == code, (changes, result.stderr)
        assert "Traceback" not in result.stderr
        last = "\n".join(result.stderr.strip().splitlines()[-2:])
        assert message in last, (changes, result.stderr)


def test_a_full_disk_is_one_line(inputs, tmp_path, tokenizer):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    flags = ("--input", inputs, "--output", tmp_path / "out", "--tokenizer", tokenizer, *FLAGS)
    result = run_script(*flags, preexec_fn=small_files)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "--work-dir" in result.stderr.splitlines()[-1]
    with (inputs / "huge.jsonl").open("wb") as file:
        file.truncate(10**13)
    result = run_script(*flags[:2], "--output", tmp_path / "other", *flags[4:], "--num-shards", "1")
    assert result.returncode == 1 and "20.0TB; name a larger disk" in result.stderr


def test_shards_are_plain_arrow_streams(inputs, tmp_path, tokenizer):
    tokenize(inputs, tmp_path / "out", tokenizer)
    with pa.ipc.open_stream((tmp_path / "out/shard-00000.arrow").read_bytes()) as stream:
        table = stream.read_all()
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    assert table.schema.field("loss_mask").type == pa.list_(pa.bool_())
