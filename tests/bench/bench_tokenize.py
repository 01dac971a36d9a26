"""Stage 1 against its goals: S3 to S3, against a bare encode loop, and against `datasets.map`.

Everything runs on this machine in one go, so read the ratios: `make bench-tokenize`. The corpus is
built on first use (tests/bench/corpus.py). S3 is rclone on loopback, a process of its own whose CPU
time is counted apart. Results go to .cache/bench/tokenize.json, the table to stdout.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import run
from common.chat import ChatTokenizer, EncodeSettings, row_texts
from common.machine import usable_cpus, usable_memory
from common.messages import RowRejected
from common.rows import Row, parse_line
from common.store import open_store
from tests.bench import corpus
from tests.qwen_vocabulary import CACHE
from tests.servers import free_port, rclone_command, serving

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".cache" / "bench"
SUBSET_ROWS = 6_000  # for the slow ways: the first rows of the corpus
REFERENCE_TOKENS_S, REFERENCE_WORKER_TOKENS_S = 4_800_000, 37_000
GOAL_TOKENS_S = 2 * REFERENCE_TOKENS_S
GOAL_TOKENS_CPU_S = 150 * REFERENCE_WORKER_TOKENS_S
GOAL_BARE_SHARE = 0.90
BATCH = 256
SETTINGS = EncodeSettings(
    max_length=4096,
    min_loss_tokens=16,
    thinking=True,
    preserve_thinking=False,
    no_reasoning="nonthinking",
    too_long="cut",
    mask_token_id=None,
)


# ---- ours


def tokenize(source: str, output: str, *flags: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run the script; what its runs/ record says."""
    command = [
        sys.executable, str(ROOT / "tokenize_completions.py"), "--input", source,
        "--output", output, "--tokenizer", str(CACHE), "--mask-token", "none", *flags,
    ]  # fmt: skip
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    (record,) = read_all(output, "runs/", environment)
    return record


def read_all(uri: str, start: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """The JSON objects under a URI whose keys begin with `start`, in order."""
    store = open_store(uri, endpoint_url=environment.get("AWS_ENDPOINT_URL"))
    keys = [entry.key for entry in store.list() if entry.key.startswith(start)]
    return [json.loads(store.read(key)) for key in keys if key.endswith(".json")]


def tokens_of(facts: dict[str, Any]) -> int:
    return facts["counts"]["tokens"]


def s3_to_s3(rounds: int) -> tuple[list[dict[str, Any]], float]:
    """The whole corpus through rclone, several times; the server's CPU seconds a round."""
    out = BENCH / "s3" / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    port = free_port()
    command = [*rclone_command(port, BENCH / "s3"), "--cache-dir", str(BENCH / "rclone")]
    shutil.rmtree(BENCH / "rclone", ignore_errors=True)  # or it would finish an earlier round
    with serving(command, port) as server:
        os.environ.update(server.environment)
        before = child_cpu_s("rclone")
        results, hashes = [], []
        for number in range(rounds):
            uri = f"s3://out/{number}"
            results.append(tokenize("s3://corpus/", uri, environment=server.environment))
            shards = read_all(uri, "shard-", server.environment)
            hashes.append([record["sha256"] for record in shards])
        server_cpu_s = (child_cpu_s("rclone") - before) / rounds
    assert all(one == hashes[0] for one in hashes), "two runs gave different bytes"
    shutil.rmtree(out)
    return results, server_cpu_s


def child_cpu_s(name: str) -> float:
    """CPU seconds of this process's living children whose program has this name."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        program, fields = text[text.index("(") + 1 : text.rindex(")")], text.split(")")[-1].split()
        if program == name and int(fields[1]) == os.getpid():
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


# ---- the same rows in other ways


def subset(folder: Path) -> Path:
    """A folder of a few corpus files' first lines, as many files as CPUs."""
    place = BENCH / "subset"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    count = SUBSET_ROWS // usable_cpus()
    for path in sorted(folder.iterdir())[: usable_cpus()]:
        with path.open("rb") as source, (place / path.name).open("wb") as target:
            target.writelines(itertools.islice(source, count))
    return place


def rows(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            for line in file:
                yield from (r for r in parse_line(line, fallback_id="") if isinstance(r, Row))


def bare_loop(texts: Sequence[str]) -> tuple[int, float]:
    """Tokens, and seconds in which as many processes as CPUs encode these texts, nothing else."""
    by_length = sorted(texts, key=len)  # so that the parts take equally long
    parts = [by_length[number :: usable_cpus()] for number in range(usable_cpus())]
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(len(parts) + 1)
    counts = fork.SimpleQueue()
    processes = [fork.Process(target=bare_encode, args=(part, ready, counts)) for part in parts]
    for process in processes:
        process.start()
    ready.wait()
    began = time.monotonic()
    tokens = sum(counts.get() for _ in parts)
    seconds = time.monotonic() - began
    for process in processes:
        process.join()
    return tokens, seconds


def bare_encode(texts: Sequence[str], ready: Any, counts: Any) -> None:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(CACHE / "tokenizer.json"))
    tokenizer.encode("warm up")
    ready.wait()
    tokens = 0
    for start in range(0, len(texts), BATCH):
        batch = tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in batch)
    counts.put(tokens)


def datasets_map(folder: Path) -> tuple[int, float]:
    """Tokens and seconds of the way most people write it; the rows as plain messages."""
    import datasets

    source = BENCH / "messages.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for row in rows(folder):
            turn: Any = row.completion
            message = {"role": "assistant", "content": turn.content}
            message["reasoning_content"] = turn.reasoning or ""
            file.write(json.dumps({"messages": [*row.prompt, message]}) + "\n")
    cache = BENCH / "hf"
    shutil.rmtree(cache, ignore_errors=True)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    data = datasets.load_dataset(
        "json", data_files=str(source), cache_dir=str(cache), split="train"
    )
    began = time.monotonic()
    done = data.map(naive_tokenize, num_proc=usable_cpus(), remove_columns=data.column_names)
    tokens = sum(done.with_format("numpy")["length"][:])
    seconds = time.monotonic() - began
    shutil.rmtree(cache)
    source.unlink()
    return int(tokens), seconds


def naive_tokenize(row: dict[str, Any]) -> dict[str, Any]:
    """apply_chat_template and a mask found by looking for the last assistant turn."""
    tokenizer = naive_tokenizer()
    ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)[:4096]
    start, marker = 0, naive_marker()
    for position in range(len(ids) - len(marker)):
        if ids[position : position + len(marker)] == marker:
            start = position + len(marker)
    mask = [0] * start + [1] * (len(ids) - start)
    return {"input_ids": ids, "loss_mask": mask, "length": len(ids)}


_NAIVE: dict[str, Any] = {}


def naive_tokenizer() -> Any:
    if "tokenizer" not in _NAIVE:
        from transformers import AutoTokenizer

        _NAIVE["tokenizer"] = AutoTokenizer.from_pretrained(str(CACHE))
    return _NAIVE["tokenizer"]


def naive_marker() -> list[int]:
    if "marker" not in _NAIVE:
        text = "<|im_start|>assistant\n"
        _NAIVE["marker"] = naive_tokenizer().encode(text, add_special_tokens=False)
    return _NAIVE["marker"]


def against_others(folder: Path) -> dict[str, Any]:
    """Ours with --encoder tokenizers between two bare loops, then with auto, then datasets.map."""
    place = subset(folder)
    tokenizer = ChatTokenizer.load(str(CACHE))
    texts = []
    for row in rows(place):
        try:
            pair = row_texts(row, tokenizer, SETTINGS)
        except RowRejected:
            continue
        texts += [pair.prompt, pair.completion] if pair else []
    out = str(BENCH / "ours")
    shutil.rmtree(out, ignore_errors=True)
    environment = dict(os.environ)
    first = bare_loop(texts)
    ours = tokenize(str(place), f"{out}/1", "--encoder", "tokenizers", environment=environment)
    second = bare_loop(texts)
    fast = tokenize(str(place), f"{out}/2", environment=environment)
    peer = datasets_map(place)
    shutil.rmtree(out)
    shutil.rmtree(place)
    return {"bare": [first, second], "ours": ours, "fast": fast, "datasets": peer}


# ---- the report


def machine() -> str:
    model = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    memory = run.format_bytes(usable_memory())
    return f"{usable_cpus()} CPUs of {model}, {memory} free, Python {platform.python_version()}"


def report(facts: corpus.Facts, runs: list[dict[str, Any]], server_cpu_s: float) -> dict[str, Any]:
    best = min(runs, key=lambda facts: facts["timings"]["work_s"])
    times, tokens = best["timings"], tokens_of(best)
    steps = dict(sorted(times["steps_cpu_s"].items(), key=lambda item: -item[1]))
    run.print_table("Corpus", [
        ("chats, files, bytes", f"{facts.chats:,}, {facts.files}, {run.format_bytes(facts.bytes)}"),
        ("rows kept, rejected",
         f"{best['counts']['rows']:,}, {sum(best['counts']['rejected'].values()):,}"),
        ("tokens, a row", f"{tokens:,}, {tokens / best['counts']['rows']:,.0f}"),
        ("rows cut at 4,096", f"{best['counts']['cut']:,}"),
        ("text of the sources", f"{facts.pool_chars:,} characters, each used {facts.reuse:.1f} "
         "times on average"),
    ])  # fmt: skip
    run.print_table(f"Where the CPU time goes ({tokens:,} tokens)", [
        *[(name, f"{seconds:6.2f} s  {seconds / sum(steps.values()):5.1%}")
          for name, seconds in steps.items()],
        ("all our processes", f"{times['work_cpu_s']:6.2f} s"),
        ("the S3 server", f"{server_cpu_s:6.2f} s (not ours)"),
        *[(f"waiting for {name}", f"{seconds:6.2f} s (wall)")
          for name, seconds in times["waiting_s"].items()],
    ])  # fmt: skip
    return {
        "tokens": tokens,
        "tokens_s": [tokens_of(r) / r["timings"]["work_s"] for r in runs],
        "tokens_cpu_s": [tokens_of(r) / r["timings"]["work_cpu_s"] for r in runs],
        "startup_s": [r["timings"]["startup_s"] for r in runs],
        "steps_cpu_s": steps,
        "server_cpu_s": server_cpu_s,
        "peak_memory_bytes": times["peak_memory_bytes"],
        "encoder": best["encoder"],
    }


def verdicts(result: dict[str, Any], others: dict[str, Any]) -> list[tuple[str, str]]:
    """Each goal with its figure; fills the ratios into `result`."""
    bare_s = sum(seconds for _, seconds in others["bare"]) / len(others["bare"])
    bare = others["bare"][0][0] / bare_s
    ours = tokens_of(others["ours"]) / others["ours"]["timings"]["work_s"]
    fast = tokens_of(others["fast"]) / others["fast"]["timings"]["work_s"]
    peer = others["datasets"][0] / others["datasets"][1]
    # Rows are cut after they are encoded: the bare loop's tokens are what both have encoded.
    uncut = others["bare"][0][0] / tokens_of(others["ours"])
    result |= {"bare_tokens_s": bare, "bare_share": ours * uncut / bare, "datasets_tokens_s": peer}
    result |= {"times_datasets": fast / peer, "times_datasets_same_encoder": ours / peer}
    best, best_cpu = max(result["tokens_s"]), max(result["tokens_cpu_s"])
    memory = result["peak_memory_bytes"]

    def goal(met: bool, text: str) -> str:
        return f"{text}  {'met' if met else 'MISSED'}"

    return [
        ("S3 to S3", goal(best >= GOAL_TOKENS_S, f"{best / 1e6:.1f} M tokens/s, goal 9.6")),
        ("of the reference's 128 workers", f"{best / REFERENCE_TOKENS_S:.1f} times"),
        ("per CPU-second", goal(best_cpu >= GOAL_TOKENS_CPU_S,
         f"{best_cpu / 1e6:.1f} M tokens, goal 5.55")),
        ("of a reference worker", f"{best_cpu / REFERENCE_WORKER_TOKENS_S:.0f} times"),
        ("with --encoder tokenizers", goal(result["bare_share"] >= GOAL_BARE_SHARE,
         f"{result['bare_share']:.1%} of a bare encode loop, goal 90 %")),
        ("bare encode loop", f"{bare / 1e6:.2f} M tokens/s on the same CPUs"),
        ("datasets.map", f"{peer / 1e6:.3f} M tokens/s; ours {fast / peer:.0f} times that, "
         f"{ours / peer:.1f} times with the same encoder"),
        ("start-up", f"{min(result['startup_s']):.1f} s, not in these rates"),
        ("peak memory", f"parent {run.format_bytes(memory['parent'])}, "
         f"largest worker {run.format_bytes(memory['worker'])}"),
        ("encoder", result["encoder"]),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=run.positive_int, default=100_000)
    parser.add_argument("--rounds", type=run.positive_int, default=2)
    args = parser.parse_args()
    log = run.setup_logging("bench")
    folder = BENCH / "s3" / "corpus"
    log.info(f"corpus of {args.chats:,} chats (built on first use, about a minute)")
    facts = corpus.build(folder, chats=args.chats, files=40)
    runs, server_cpu_s = s3_to_s3(args.rounds)
    others = against_others(folder)
    result = report(facts, runs, server_cpu_s)
    table = verdicts(result, others)
    run.print_table(f"Tokenizing on {machine()}", table)
    BENCH.mkdir(parents=True, exist_ok=True)
    result |= {"machine": machine(), "corpus": vars(facts)}
    (BENCH / "tokenize.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
