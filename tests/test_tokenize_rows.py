"""What a person is shown of rows, and rows at the edges: very long, doubtful, unfinished."""

import json

import datasets
import pytest

from common.chat import ChatTokenizer
from tests.test_tokenize_script import FLAGS, run_script, tokenize
from tests.tiny_tokenizer import build_tiny_tokenizer

MB = 1_000_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def talk(row_id, answer, question="What?", history=(), **more):
    turn = {"role": "assistant", "content": answer, "reasoning": "let me see"}
    messages = [*history, {"role": "user", "content": question}, turn]
    return json.dumps({"id": row_id, "messages": messages, **more}) + "\n"


def put(folder, *lines):
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def record_of(output):
    (path,) = output.glob("shard-*.json")
    return json.loads(path.read_bytes())


def run_of(output):
    return json.loads(max((output / "runs").iterdir()).read_bytes())


def test_a_dry_run_shows_a_row_as_it_would_be(tokenizer, tmp_path):
    source = put(tmp_path / "in", talk("one", "It is so.", "Is it?"), "{broken\n")
    result = run_script(
        "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer, *FLAGS,
        "--dry-run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "id=one" in result.stdout and "1 of 2 lines rejected: not_json" in result.stdout
    # as a server rendered it, and exactly what the target generated in brackets
    shown = (
        "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "\u27e6let me see\n</think>\n\nIt is so.<|im_end|>\u27e7"
    )
    assert shown in result.stdout
    assert "about 1 rows" in result.stdout and not (tmp_path / "out").exists()


def test_inspect_shows_a_committed_row_the_same_way(tokenizer, tmp_path):
    lines = [talk(f"row-{number}", f"It is {number}.") for number in range(5)]
    tokenize(put(tmp_path / "in", *lines), tmp_path / "out", tokenizer)
    for uri in (f"{tmp_path}/out:3", f"{tmp_path}/out/shard-00000.arrow:3"):
        result = run_script("--inspect", uri, "--tokenizer", tokenizer)
        assert result.returncode == 0, result.stderr
        assert "id=row-3" in result.stdout
        assert "<think>\n\u27e6let me see\n</think>\n\nIt is 3.<|im_end|>\u27e7" in result.stdout
    beyond = run_script("--inspect", f"{tmp_path}/out:5", "--tokenizer", tokenizer)
    assert beyond.returncode == 1 and "only 5 rows" in beyond.stderr
    other = build_tiny_tokenizer(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    wrong = run_script("--inspect", f"{tmp_path}/out", "--tokenizer", other)
    assert wrong.returncode == 1 and "was not tokenized with" in wrong.stderr


def test_rows_that_are_too_long_are_cut_or_rejected_as_asked(tokenizer, tmp_path):
    source = put(tmp_path / "in", talk("short", "yes " * 20), talk("long", "yes " * 500))
    limit = ("--max-length", "200")
    tokenize(source, tmp_path / "cut", tokenizer, *limit)
    rows = datasets.load_from_disk(str(tmp_path / "cut"))
    assert record_of(tmp_path / "cut")["cut"] == 1 and len(rows[1]["input_ids"]) == 200
    end = ChatTokenizer.load(tokenizer).token_id("<|im_end|>")
    assert rows[1]["input_ids"][-1] != end and rows[0]["input_ids"][-1] == end
    result = tokenize(source, tmp_path / "reject", tokenizer, *limit, "--too-long", "reject")
    record = record_of(tmp_path / "reject")
    assert (record["rows"], record["rejected"]) == (1, {"too_long": 1})
    assert "too_long" in result.stdout


def test_thoughts_of_the_history_that_nobody_can_verify_are_counted(tokenizer, tmp_path):
    earlier = [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "One.", "reasoning": "earlier thought"},
    ]
    kept = {"chat_template_kwargs": {"preserve_thinking": True}}
    source = put(
        tmp_path / "in",
        talk("kept", "Two.", history=earlier, **kept),
        talk("dropped", "Two.", history=earlier),
    )
    result = tokenize(source, tmp_path / "out", tokenizer)
    assert run_of(tmp_path / "out")["counts"]["rows"] == 2
    (line,) = [x for x in result.stdout.splitlines() if x.startswith("history thinking")]
    assert line.split()[-1] == "1"


def test_a_row_of_50_megabytes_takes_bounded_memory(tokenizer, tmp_path):
    huge = talk("huge", "so it goes, and on it goes\n" * (50 * MB // 28))
    source = put(tmp_path / "in", talk("before", "yes " * 9), huge, talk("after", "no " * 9))
    tokenize(source, tmp_path / "out", tokenizer)
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert rows["id"][:] == ["before", "huge", "after"]
    assert len(rows[1]["input_ids"]) == 4096 and record_of(tmp_path / "out")["cut"] == 1
    peaks = run_of(tmp_path / "out")["timings"]["peak_memory_bytes"]
    assert peaks["parent"] < 800 * MB and peaks["worker"] < 1500 * MB, peaks
