"""Stage 1: JSONL completions -> tokenized Arrow shards, on a CPU machine without torch.

Reads   .jsonl, .jsonl.gz and .jsonl.zst under --input (s3://... or a folder): the target's own
        completions, in any of the layouts listed in common/rows.py.
Writes  plan.json, shard-00000.arrow with its commit record shard-00000.json and so on,
        rejected/ (every line that could not be used, with place and reason), runs/ under --output.
Resume  run the same command again: committed shards are kept. The same inputs and settings give the
        same bytes, however many workers. --shards A:B does part of the plan on this machine.

  python tokenize_completions.py --input s3://bucket/completions/ --output s3://bucket/tokens/ \\
      --tokenizer ./Qwen3.6-27B

Reject reasons: {reasons}.
Exit codes: 0 done, 1 failed or too many rejects, 2 usage, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked child of rayon's threads would hang

import numpy as np

from common import run
from common.chat import ChatTokenizer, EncodeSettings
from common.encoding import EncodedBlock, Encoder, WorkerPool, spool_prompts
from common.lifetime import file_lock
from common.reading import Block, Reading, find_compressed, pieces, read_blocks
from common.rows import REASONS, ROW_VERSION
from common.shards import (
    PLAN_FILE,
    VERSION,
    InputRange,
    Plan,
    ShardWriter,
    closing_files,
    partition,
    record_key,
    shard_name,
)
from common.store import Entry, ObjectMissing, Store, add_store_arguments, open_store

DEFAULT_MASK_TOKEN = "<|audio_start|>"
SHARD_BYTES = 200_000_000
READS_AHEAD = 32  # pieces held or on their way: at most 256 MB, and 24 MB a download thread
UPLOADS_AHEAD = 4
INPUT_NAMES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
NO_REASONING_WARNING = 0.01
LOCK_FILE = ".lock"
OUR_FILES = re.compile(r"shard-\d{5,}\.(arrow|json)|rejected/shard-\d{5,}\.jsonl")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = run.make_parser((__doc__ or "").format(reasons=", ".join(REASONS)))
    group = parser.add_argument_group("input")
    group.add_argument("--input", required=True, help="s3://bucket/prefix or a folder")
    group.add_argument("--prompts", help="requests of batch outputs, joined by custom_id")
    add_store_arguments(group)
    group = parser.add_argument_group("tokens and masks")
    group.add_argument("--tokenizer", required=True, help="the target's folder or hub id")
    group.add_argument(
        "--turns",
        choices=("last", "all"),
        default="last",
        help="of a conversation, the last assistant turn or a row for each",
    )
    group.add_argument("--max-length", type=run.positive_int, default=4096, help="tokens a row")
    group.add_argument(
        "--min-loss-tokens", type=run.positive_int, default=16, help="a row with fewer is rejected"
    )
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="what the server did where a row does not say",
    )
    group.add_argument(
        "--preserve-thinking", action="store_true", help="the server kept the history's thoughts"
    )
    group.add_argument(
        "--no-reasoning",
        choices=("nonthinking", "empty", "reject"),
        default="nonthinking",
        help="a row without any reasoning field while thinking is on",
    )
    group.add_argument(
        "--mask-token",
        help=f"the drafter's mask token, which no row may hold, or none [{DEFAULT_MASK_TOKEN}]",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", required=True, help="s3://bucket/prefix or a folder")
    group.add_argument("--num-shards", type=run.positive_int, help="[one per 200 MB of input]")
    group.add_argument("--shards", metavar="A:B", help="do only these, B not included [all]")
    group.add_argument("--overwrite", action="store_true", help="replace another plan's dataset")
    group.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    group.add_argument(
        "--max-reject-rate", type=run.fraction, default=0.01, help="more rejects: exit 1; 1: never"
    )
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--workers",
        type=run.positive_int,
        default=len(os.sched_getaffinity(0)),
        help="encoding processes",
    )
    group.add_argument(
        "--download-threads", type=run.positive_int, default=16, help="reading threads"
    )
    group.add_argument("--work-dir", type=Path, help="local space for shards being written [/tmp]")
    args = parser.parse_args(argv)
    if args.shards:
        first, colon, last = args.shards.partition(":")
        if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
            parser.error(f"--shards {args.shards}: must be A:B with A < B, such as 0:8")
        args.shards = (int(first), int(last))
    if lies_inside(args.output, args.input):
        parser.error(
            f"--output {args.output} lies inside --input {args.input}: a rerun would read its "
            "files as inputs"
        )
    return args


def lies_inside(inner: str, outer: str) -> bool:
    """Whether one URI is the other, or under it."""
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(inner).resolve().is_relative_to(Path(outer).resolve())


# ---- plan


def list_inputs(store: Store, log: Any) -> list[Entry]:
    """The JSONL objects of a store; others are counted and left alone."""
    entries = store.list()
    inputs = [e for e in entries if e.size > 0 and e.key.endswith(INPUT_NAMES)]
    log.info(
        f"input={store.uri} objects={len(inputs):,} "
        f"bytes={run.format_bytes(sum(entry.size for entry in inputs))} "
        f"skipped={len(entries) - len(inputs)}"
    )
    if not inputs:
        raise run.UserError(
            f"--input {store.uri}: no {', '.join(INPUT_NAMES)} there ({len(entries)} other objects)"
        )
    return inputs


def make_plan(
    args: argparse.Namespace,
    tokenizer: ChatTokenizer,
    inputs: Sequence[Entry],
    compressed: dict[str, str],
    prompts: Sequence[Entry],
) -> Plan:
    """The plan of these inputs and flags."""
    total = sum(entry.size for entry in inputs)
    num_shards = args.num_shards or max(1, math.ceil(total / SHARD_BYTES))
    mask_token, mask_token_id = find_mask_token(args.mask_token, tokenizer)
    return Plan(
        settings={
            "mask_token": mask_token,
            "mask_token_id": mask_token_id,
            "max_length": args.max_length,
            "min_loss_tokens": args.min_loss_tokens,
            "no_reasoning": args.no_reasoning,
            "num_shards": num_shards,
            "preserve_thinking": args.preserve_thinking,
            "thinking": args.thinking,
            "turns": args.turns,
            "vocab_size": tokenizer.vocab_size,
        },
        tokenizer_sha256=tokenizer.tokenizer_sha256,
        template_sha256=tokenizer.template_sha256,
        row_version=ROW_VERSION,
        prompts=tuple(prompts),
        shards=partition(inputs, num_shards=num_shards, whole=compressed),
    )


def find_mask_token(name: str | None, tokenizer: ChatTokenizer) -> tuple[str | None, int | None]:
    """The mask token and its id; (None, None) for `none`, or where there is no default."""
    if name == "none":
        return None, None
    token_id = tokenizer.token_id(name or DEFAULT_MASK_TOKEN)
    if token_id is None and name is not None:
        raise run.UserError(f"--mask-token {name}: the tokenizer has no such token")
    return (None, None) if token_id is None else (name or DEFAULT_MASK_TOKEN, token_id)


def settle_plan(store: Store, plan: Plan, *, overwrite: bool) -> None:
    """Write the plan, or go on under an equal one. Raises UserError that shows what differs."""
    try:
        old_bytes = store.read(PLAN_FILE)
    except ObjectMissing:
        old_bytes = None
    if old_bytes == plan.to_bytes():
        return
    if old_bytes is not None and not overwrite:
        differences = "; ".join(plan_differences(Plan.from_bytes(old_bytes), plan))
        raise run.UserError(
            f"--output {store.uri} holds a dataset of another plan ({differences}).\n"
            "Choose another --output, or replace it with --overwrite"
        )
    if old_bytes is not None:
        delete_dataset(store)
    store.write(PLAN_FILE, plan.to_bytes())


def plan_differences(old: Plan, new: Plan) -> list[str]:
    """What differs between two plans, in words."""
    differences = [
        f"{key}: {old.settings.get(key)} -> {new.settings.get(key)}"
        for key in sorted({*old.settings, *new.settings})
        if old.settings.get(key) != new.settings.get(key)
    ]
    for name in ("tokenizer_sha256", "template_sha256", "row_version", "prompts"):
        if getattr(old, name) != getattr(new, name):
            differences.append(f"{name.removesuffix('_sha256')} changed")
    was, now = ({(p.key, p.etag) for s in plan.shards for p in s} for plan in (old, new))
    if was != now:
        differences.append(f"inputs: {len(was - now)} gone or changed, {len(now - was)} new")
    return differences


def delete_dataset(store: Store) -> None:
    """Remove what this script writes, records first, and nothing else."""
    ours = [entry.key for entry in store.list() if OUR_FILES.fullmatch(entry.key)]
    ours.sort(key=lambda key: not re.fullmatch(r"shard-\d+\.json", key))
    for key in ["dataset_info.json", "state.json", *ours]:
        store.delete(key)


def print_plan(plan: Plan, compressed: dict[str, str]) -> None:
    """--dry-run: one line a shard on stdout."""
    for index, parts in enumerate(plan.shards):
        size = run.format_bytes(plan.shard_bytes(index))
        print(f"{shard_name(index)}  {size:>8}  {len(parts)} inputs")
    print(
        f"{len(plan.shards)} shards, {run.format_bytes(plan.planned_bytes)}, {len(compressed)} "
        "compressed inputs (each is read by one thread and never cut)"
    )


# ---- writing


@dataclass
class Totals:
    """Sums over commit records, or over the blocks of a run so far."""

    shards: int = 0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    no_reasoning: int = 0
    duplicate_ids: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        self.shards += 1
        for name in ("rows", "tokens", "loss_tokens", "cut", "no_reasoning", "duplicate_ids"):
            setattr(self, name, getattr(self, name) + record[name])
        self.rejected.update(record["rejected"])

    def add_block(self, encoded: EncodedBlock) -> None:
        self.rows += len(encoded.ids)
        self.tokens += len(encoded.tokens)
        self.loss_tokens += int(encoded.mask.sum())

    @property
    def loss_share(self) -> float:
        return self.loss_tokens / max(1, self.tokens)

    @property
    def reject_rate(self) -> float:
        rejected = sum(self.rejected.values())
        return rejected / max(1, self.rows + rejected)


class OpenShard:
    """One shard on local disk while its blocks come in, in order."""

    def __init__(self, index: int, plan: Plan, folder: Path) -> None:
        self.index, self._plan = index, plan
        self._arrow = folder / f"{shard_name(index)}.arrow"
        self._rejected_path = folder / f"{shard_name(index)}.rejected"
        with local_disk(folder):
            self._writer = ShardWriter(self._arrow)
            self._rejected = self._rejected_path.open("w", encoding="utf-8")
        self._counts: Counter[str] = Counter()
        self._cut = self._no_reasoning = 0
        self._next_line: dict[str, int] = {}

    def add(self, part: InputRange, block: Block, encoded: EncodedBlock) -> None:
        """Append a block's rows and rejects."""
        ends = np.cumsum(encoded.lengths)
        first_line = self._next_line.get(part.key, 1)
        with local_disk(self._arrow.parent):
            for number, end in enumerate(ends):
                place = slice(end - encoded.lengths[number], end)
                self._writer.add(
                    encoded.ids[number],
                    encoded.tokens[place],
                    encoded.mask[place],
                    encoded.sources[number],
                )
            for number, facts in encoded.rejects:
                facts["line"] = first_line + number if part.start == 0 else None
                self._rejected.write(json.dumps(facts, ensure_ascii=True) + "\n")
                self._counts[facts["reason"]] += 1
        self._next_line[part.key] = first_line + block.data.count(b"\n")
        self._cut += encoded.cut
        self._no_reasoning += encoded.no_reasoning

    def close(self) -> dict[str, Any]:
        """Close the local files; the commit record."""
        with local_disk(self._arrow.parent):
            self._rejected.close()
            facts = self._writer.finish()
        return {
            "version": VERSION,
            "index": self.index,
            "plan_sha256": self._plan.sha256,
            "file": self._arrow.name,
            **facts,
            "rejected": dict(sorted(self._counts.items())),
            "cut": self._cut,
            "no_reasoning": self._no_reasoning,
        }

    def upload(self, store: Store, record: dict[str, Any]) -> dict[str, Any]:
        """Put rejects, shard and, last of all, the record that makes it exist."""
        store.upload(f"rejected/{shard_name(self.index)}.jsonl", self._rejected_path)
        store.upload(self._arrow.name, self._arrow)
        store.write(record_key(self.index), run.json_bytes(record))
        self._arrow.unlink()
        self._rejected_path.unlink()
        return record


# ---- the run


@dataclass(frozen=True)
class Job:
    """The parts of a run that do not change."""

    args: argparse.Namespace
    log: Any
    source: Store
    output: Store
    plan: Plan
    compressed: dict[str, str]
    folder: Path


def committed(job: Job, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The records of this plan's committed shards among these, by index."""

    def look(index: int) -> dict[str, Any] | None:
        try:
            record = json.loads(job.output.read(record_key(index)))
        except (ObjectMissing, ValueError):
            return None
        return record if record.get("plan_sha256") == job.plan.sha256 else None

    with ThreadPoolExecutor(job.args.download_threads) as pool:
        found = zip(indexes, pool.map(look, indexes), strict=True)
        return {index: record for index, record in found if record is not None}


def encoded_blocks(
    job: Job, indexes: Sequence[int], workers: WorkerPool, failures: dict[int, str]
) -> Generator[tuple[int, InputRange, Block, EncodedBlock], None, None]:
    """Every block of the shards, in order, read by threads and encoded by the workers.

    An input that cannot be read puts its shard into `failures`; the others go on.
    """
    todo = (
        (index, part, piece)
        for index in indexes
        for part in job.plan.shards[index]
        for piece in pieces(part, part.key in job.compressed)
    )
    reading: deque[tuple[int, InputRange, Reading]] = deque()
    encoding: deque[tuple[int, InputRange, Block, Future[EncodedBlock]]] = deque()
    stopped = threading.Event()
    with ThreadPoolExecutor(job.args.download_threads) as threads:
        try:
            while True:
                while len(reading) < READS_AHEAD and (item := next(todo, None)) is not None:
                    index, part, piece = item
                    blocks = read_blocks(job.source, piece, job.compressed.get(part.key))
                    reading.append((index, part, Reading(blocks, threads, stopped)))
                if not reading:
                    break
                index, part, ahead = reading[0]
                block = None
                try:
                    block = ahead.next_block()
                except run.UserError as error:
                    failures.setdefault(index, str(error))
                if block is None:
                    reading.popleft()
                    continue
                if len(encoding) >= 2 * job.args.workers + 2:
                    yield first_result(encoding)
                encoding.append((index, part, block, workers.submit(block)))
            while encoding:
                yield first_result(encoding)
        finally:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)


def first_result(
    encoding: deque[tuple[int, InputRange, Block, Future[EncodedBlock]]],
) -> tuple[int, InputRange, Block, EncodedBlock]:
    index, part, block, future = encoding.popleft()
    return index, part, block, future.result()


def tokenize(
    job: Job, indexes: Sequence[int], workers: WorkerPool, seen: Totals
) -> list[dict[str, Any]]:
    """Write and commit the shards, uploading while later ones are encoded; their records.

    `seen` counts the rows of all blocks, committed or not yet.
    """
    records: list[dict[str, Any]] = []
    failures: dict[int, str] = {}
    began = time.monotonic()
    total_bytes = sum(job.plan.shard_bytes(index) for index in indexes)
    bar = run.Progress(job.log, total=total_bytes, unit="B")

    def report(upload: Future[dict[str, Any]]) -> None:
        records.append(upload.result())
        name = shard_name(records[-1]["index"])
        fields = progress_fields(len(records), len(indexes), seen, time.monotonic() - began)
        job.log.info(run.format_fields({**fields, "committed": name}))

    uploads: deque[Future[dict[str, Any]]] = deque()
    with (
        ThreadPoolExecutor(2) as uploaders,
        contextlib.closing(bar),
        contextlib.closing(encoded_blocks(job, indexes, workers, failures)) as blocks,
    ):
        pending = next(blocks, None)
        for index in indexes:
            shard = OpenShard(index, job.plan, job.folder)
            while pending is not None and pending[0] == index:
                _, part, block, encoded = pending
                shard.add(part, block, encoded)
                seen.add_block(encoded)
                elapsed = time.monotonic() - began
                fields = progress_fields(len(records), len(indexes), seen, elapsed)
                bar.update(block.stored, **fields)
                pending = next(blocks, None)
            record = shard.close()
            if index in failures:
                continue
            uploads.append(uploaders.submit(shard.upload, job.output, record))
            while len(uploads) > UPLOADS_AHEAD or (uploads and uploads[0].done()):
                report(uploads.popleft())
        while uploads:
            report(uploads.popleft())
    if failures:
        raise run.UserError(
            "; ".join(f"{shard_name(index)}: {text}" for index, text in failures.items())
        )
    return records


def progress_fields(done: int, count: int, seen: Totals, elapsed_s: float) -> dict[str, str]:
    return {
        "shards": f"{done}/{count}",
        "samples": f"{seen.rows:,}",
        "tokens": run.format_count(seen.tokens),
        "loss": f"{seen.loss_share:.1%}",
        "samples/s": f"{seen.rows / elapsed_s:,.0f}",
        "tokens/s": run.format_count(seen.tokens / elapsed_s),
    }


def finish_dataset(job: Job, known: Mapping[int, dict[str, Any]]) -> None:
    """When every shard is committed, make the folder one that `datasets` opens."""
    unknown = [index for index in range(len(job.plan.shards)) if index not in known]
    records = {**known, **committed(job, unknown)}
    if len(records) < len(job.plan.shards):
        job.log.info(f"committed={len(records)}/{len(job.plan.shards)}; the rest is for other runs")
        return
    for name, data in closing_files([records[index] for index in sorted(records)]).items():
        job.output.write(name, data)


def print_summary(job: Job, totals: Totals, kept: int, seen: Totals, wall_s: float) -> None:
    """Sums over all shards asked for, kept ones included; rates over what was done now."""
    rejected = sum(totals.rejected.values())
    rows: list[tuple[str, Any]] = [
        ("shards", f"{totals.shards - kept} written, {kept} kept"),
        ("samples", f"{totals.rows:,}"),
        ("tokens", run.format_count(totals.tokens)),
        ("loss tokens", f"{totals.loss_share:.1%}"),
        ("cut at max length", f"{totals.cut:,}"),
        ("without reasoning", f"{totals.no_reasoning:,}"),
        ("duplicate ids", f"{totals.duplicate_ids:,}"),
        ("rejected", f"{rejected:,} ({totals.reject_rate:.2%})"),
        *[(f"  {reason}", f"{count:,}") for reason, count in sorted(totals.rejected.items())],
        ("wall time", run.format_duration(wall_s)),
        ("samples/s", f"{seen.rows / wall_s:,.0f}"),
        ("tokens/s", run.format_count(seen.tokens / wall_s)),
        ("output", job.output.uri),
    ]
    run.print_table("Tokenizing", rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    run.raise_on_sigterm()
    log = run.setup_logging("tokenize", debug=args.debug)
    started, began = run.utc_now(), time.monotonic()
    tokenizer = ChatTokenizer.load(args.tokenizer)
    connect = functools.partial(
        open_store, endpoint_url=args.endpoint_url, max_connections=args.download_threads + 8
    )
    source, output = connect(args.input), connect(args.output)
    prompts = connect(args.prompts) if args.prompts else None
    inputs = list_inputs(source, log)
    prompt_entries = list_inputs(prompts, log) if prompts else []
    compressed = find_compressed(source, inputs, args.download_threads)
    plan = make_plan(args, tokenizer, inputs, compressed, prompt_entries)
    if args.dry_run:
        print_plan(plan, compressed)
        return 0
    first, last = args.shards or (0, len(plan.shards))
    if last > len(plan.shards):
        raise run.UsageError(f"--shards {first}:{last}: the plan has {len(plan.shards)} shards")
    run.print_settings(log, {**vars(args), **plan.settings})
    output.check_writable()
    settle_plan(output, plan, overwrite=args.overwrite)
    with work_folder(args.work_dir) as folder:
        spool = folder / "prompts.sqlite" if prompts else None
        if prompts and spool:
            found = find_compressed(prompts, prompt_entries, args.download_threads)
            spool_prompts(prompts, prompt_entries, found, spool)
        job = Job(args, log, source, output, plan, compressed, folder)
        kept = committed(job, range(first, last))
        todo = [index for index in range(first, last) if index not in kept]
        check_space(job, todo)
        settings = EncodeSettings(
            max_length=args.max_length,
            min_loss_tokens=args.min_loss_tokens,
            thinking=args.thinking,
            preserve_thinking=args.preserve_thinking,
            no_reasoning=args.no_reasoning,
            mask_token_id=plan.settings["mask_token_id"],
        )
        encoder, seen = (
            Encoder(tokenizer, settings, prompts=spool, all_turns=args.turns == "all"),
            Totals(),
        )
        try:
            with contextlib.closing(WorkerPool(encoder, args.workers)) as workers:
                written = tokenize(job, todo, workers, seen)
        except (KeyboardInterrupt, run.Terminated):
            log.info("stopped; committed shards are kept: run the same command again to go on")
            raise
    records = kept | {record["index"]: record for record in written}
    finish_dataset(job, records)
    totals = Totals()
    for record in records.values():
        totals.add(record)
    facts = run.run_facts(
        settings=vars(args), started=started, counts={**vars(totals), "kept": len(kept)}
    )
    stamp = started.replace(":", "").replace("-", "")
    output.write(f"runs/{stamp}-{first}-{last}.json", run.json_bytes(facts))
    print_summary(job, totals, len(kept), seen, time.monotonic() - began)
    return verdict(args, log, totals)


def verdict(args: argparse.Namespace, log: Any, totals: Totals) -> int:
    """The exit code, and what deserves a second look."""
    if totals.no_reasoning > NO_REASONING_WARNING * max(1, totals.rows):
        log.warning(
            f"{totals.no_reasoning:,} rows have no reasoning field while thinking is on; they were "
            f"taken as --no-reasoning {args.no_reasoning}"
        )
    if totals.reject_rate <= args.max_reject_rate or args.max_reject_rate == 1:
        return 0
    raise run.UserError(
        f"{totals.reject_rate:.2%} of the rows were rejected, more than --max-reject-rate "
        f"{args.max_reject_rate}; the dataset is complete, see {args.output.rstrip('/')}/rejected/"
    )


@contextlib.contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """A folder of this run's own for shards being written; removed whatever happens.

    The run and its workers hold a lock in it, so that the next run removes what a killed one left.
    """
    place = parent or Path(tempfile.gettempdir())
    try:
        for left in place.glob(f"tokenize-*/{LOCK_FILE}"):
            with contextlib.suppress(OSError), file_lock(left):  # BlockingIOError: its run lives
                shutil.rmtree(left.parent)
        hidden = Path(tempfile.mkdtemp(prefix=".tokenize-", dir=place))
    except OSError as error:
        raise run.UserError(f"--work-dir {place}: {error.strerror}") from error
    (hidden / LOCK_FILE).touch()
    with file_lock(hidden / LOCK_FILE):  # before other runs can find it
        folder = hidden.rename(place / hidden.name.lstrip("."))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def local_disk(folder: Path) -> Iterator[None]:
    """Say what a full or broken disk under --work-dir means."""
    try:
        yield
    except OSError as error:
        raise run.UserError(
            f"--work-dir {folder.parent}: cannot write there ({error.strerror})"
        ) from error


def check_space(job: Job, todo: Sequence[int]) -> None:
    """Refuse a work folder that cannot hold the shards that are in hand at a time.

    A shard takes about the bytes of its input: 4.1 bytes a token against 4.3 of JSON.
    """
    needed = sum(sorted(map(job.plan.shard_bytes, todo))[-(UPLOADS_AHEAD + 2) :])
    free = shutil.disk_usage(job.folder).free
    if free < needed:
        raise run.UserError(
            f"--work-dir {job.folder.parent}: {run.format_bytes(free)} free, and shards being "
            f"written need about {run.format_bytes(needed)}; name a larger disk"
        )


if __name__ == "__main__":
    run.exit_with(main)
