"""Stage 1: JSONL completions -> tokenized Arrow shards, on a CPU machine without torch.

Reads   .jsonl, .jsonl.gz and .jsonl.zst under --input (s3://... or a folder): the target's own
        completions, in any of the layouts listed in common/rows.py.
Writes  plan.json, shard-00000.arrow with its commit record shard-00000.json and so on,
        rejected/ (every line that could not be used, with place and reason), runs/ under --output.
Resume  run the same command again: committed shards are kept. The same inputs and settings give the
        same bytes, however many workers. --shards A:B does part of the plan on this machine.

  python tokenize_completions.py --input s3://bucket/completions/ --output s3://bucket/tokens/ \\
      --tokenizer ./Qwen3.6-27B

A line is rejected when it
{reasons}

Exit codes: 0 done, 1 failed or too many rejects, 2 usage, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run
from common.chat import ChatTokenizer, EncodeSettings
from common.cluster import RayFlow, ShardSpec
from common.encoding import ENGINE, Encoder, ShortcutDiffers, check_surely
from common.engines import ENGINES, choose_engine
from common.machine import default_workers
from common.messages import REASONS
from common.pipeline import UPLOADS_AHEAD, BlockDone, Flow, ShardDone, ShardPipeline
from common.plan import Plan, check_plan, partition, settle_plan
from common.preview import print_committed, print_plan
from common.prompts import Prompts, spool_prompts
from common.reading import find_compressed, first_block
from common.report import StopWatch, Totals, print_summary, progress_fields
from common.rows import ROW_VERSION
from common.s3 import CredentialsExpired
from common.shards import closing_files, record_key, shard_name
from common.store import (
    Entry,
    ObjectMissing,
    Store,
    add_store_arguments,
    add_store_write_arguments,
    open_store,
)
from common.workers import WorkerPool
from common.workfolder import UPLOAD_JOURNAL, work_folder

DEFAULT_MASK_TOKEN = "<|audio_start|>"
SHARD_BYTES = 200_000_000
INPUT_NAMES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
NO_REASONING_WARNING = 0.01
CHECKED_FILES = 4  # in which rows are looked for to check the shortcuts on


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    reasons = "\n".join(f"  {name:<20} {meaning}" for name, meaning in REASONS.items())
    parser = run.make_parser((__doc__ or "").format(reasons=reasons))
    add_input_arguments(parser)
    add_token_arguments(parser)
    add_output_arguments(parser)
    add_machine_arguments(parser)
    args = parser.parse_args(argv)
    if args.inspect:
        return args
    for flag in ("input", "output"):
        if not getattr(args, flag):
            parser.error(f"--{flag} is needed (only --inspect does without)")
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


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument("--input", help="s3://bucket/prefix, a folder, or one .jsonl file")
    group.add_argument("--prompts", help="requests of batch outputs, joined by custom_id, likewise")
    add_store_arguments(group)


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--too-long",
        choices=("cut", "reject"),
        default="cut",
        help="a longer row: keep its first tokens, or none",
    )
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


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output", help="s3://bucket/prefix or a folder")
    add_store_write_arguments(group)
    group.add_argument("--num-shards", type=run.positive_int, help="[one per 200 MB of input]")
    group.add_argument("--shards", metavar="A:B", help="do only these, B not included [all]")
    group.add_argument("--overwrite", action="store_true", help="replace another plan's dataset")
    group.add_argument(
        "--dry-run", action="store_true", help="print the plan and a row as it would be, and exit"
    )
    group.add_argument(
        "--inspect", metavar="URI[:ROW]", help="print a row of a dataset or of one shard, and exit"
    )
    group.add_argument(
        "--max-reject-rate", type=run.fraction, default=0.01, help="more rejects: exit 1; 1: never"
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="ray: a task for each shard on the cluster that ray.init() finds",
    )
    group.add_argument(
        "--encoder",
        choices=ENGINES,
        default="auto",
        help="auto: fastokens while it gives the ids of tokenizers, which is checked throughout",
    )
    group.add_argument(
        "--tokenize-workers",
        type=run.positive_int,
        help="encoding processes [as many as CPUs and memory allow]",
    )
    group.add_argument(
        "--download-workers", type=run.positive_int, default=32, help="reading threads"
    )
    group.add_argument("--work-dir", type=Path, help="local space for shards being written [/tmp]")


def lies_inside(inner: str, outer: str) -> bool:
    """Whether one URI is the other, or under it."""
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(inner).resolve().is_relative_to(Path(outer).resolve())


# ---- plan


def split_file(uri: str) -> tuple[str, str]:
    """The folder of a URI, and the name in it when the URI names one JSONL file, else ""."""
    folder, slash, name = uri.rpartition("/")
    is_bucket = folder == "s3:/"
    is_file = name.endswith(INPUT_NAMES) and not is_bucket and not Path(uri).is_dir()
    return (folder + slash or ".", name) if is_file else (uri, "")


def list_inputs(store: Store, name: str, flag: str, log: Any) -> list[Entry]:
    """The JSONL objects of a store, or the one of that name; others are left alone and counted."""
    entries = [entry for entry in store.list(name) if not name or entry.key == name]
    inputs = [e for e in entries if e.size > 0 and e.key.endswith(INPUT_NAMES)]
    log.info(
        f"{flag.removeprefix('--')}={store.uri}{name} objects={len(inputs):,} "
        f"bytes={run.format_bytes(sum(entry.size for entry in inputs))} "
        f"skipped={len(entries) - len(inputs)}"
    )
    if not inputs:
        raise run.UserError(
            f"{flag} {store.uri}{name}: no {', '.join(INPUT_NAMES)} there "
            f"({len(entries)} other objects); rows are JSON, one a line, in files of these names"
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
            "too_long": args.too_long,
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


# ---- the run

Records = dict[int, dict[str, Any]]  # commit records by shard


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
    part: tuple[int, int]  # the shards asked for
    num_workers: int
    prompts: Prompts | None


def committed(job: Job, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The records of this plan's committed shards among these, by index.

    A shard whose file is gone or of another size is none, and is made again.
    """
    if not indexes:
        return {}
    sizes = {entry.key: entry.size for entry in job.output.list("shard-")}

    def look(index: int) -> dict[str, Any] | None:
        try:
            record = json.loads(job.output.read(record_key(index)))
            ours = record["plan_sha256"] == job.plan.sha256
            whole = sizes.get(record["file"]) == record["bytes"]
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return None
        if ours and not whole:
            job.log.warning(f"{record['file']} is not what its record says: made again")
        return record if ours and whole else None

    with ThreadPoolExecutor(job.args.download_workers) as pool:
        found = zip(indexes, pool.map(look, indexes), strict=True)
        return {index: record for index, record in found if record is not None}


def tokenize(job: Job, indexes: Sequence[int], flow: Flow, seen: Totals, records: Records) -> None:
    """Write and commit the shards; `records` gets theirs.

    `seen` counts the rows of all blocks, committed or not yet.
    """
    total = sum(job.plan.shard_bytes(index) for index in indexes)
    bar = run.Progress(job.log, total=total, unit="B")
    began = time.monotonic()
    with contextlib.closing(bar), contextlib.closing(flow.events(indexes)) as events:
        for event in events:
            stored = 0
            if isinstance(event, BlockDone):
                seen.add_block(event.encoded)
                stored = event.stored
            if isinstance(event, ShardDone):
                records[event.record["index"]] = event.record
            elapsed = time.monotonic() - began
            fields = progress_fields(len(records), len(indexes), seen, flow, elapsed)
            bar.update(stored, **fields)
            if isinstance(event, ShardDone):
                name = shard_name(event.record["index"])
                job.log.info(run.format_fields({**fields, "committed": name}))
    if flow.failures:
        raise run.UserError(
            "; ".join(f"{shard_name(index)}: {text}" for index, text in flow.failures.items())
        )


def finish_dataset(job: Job, known: Mapping[int, dict[str, Any]]) -> None:
    """When every shard is committed, make the folder one that `datasets` opens."""
    unknown = [index for index in range(len(job.plan.shards)) if index not in known]
    records = {**known, **committed(job, unknown)}
    if len(records) < len(job.plan.shards):
        job.log.info(f"committed={len(records)}/{len(job.plan.shards)}; the rest is for other runs")
        return
    check_plan(job.output, job.plan)
    for name, data in closing_files([records[index] for index in sorted(records)]).items():
        job.output.write(name, data)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    run.raise_on_signals()
    log = run.setup_logging("tokenize", debug=args.debug)
    if args.inspect:
        tokenizer = ChatTokenizer.load(args.tokenizer)
        with work_folder(args.work_dir) as cache:
            print_committed(args.inspect, tokenizer, cache=cache, endpoint_url=args.endpoint_url)
        return 0
    started, began = run.utc_now(), time.monotonic()
    with work_folder(args.work_dir) as folder:
        job, encoder = prepare(args, log, folder)
        if args.dry_run:
            print_plan(job.source, job.plan, job.compressed, encoder, folder, job.num_workers)
            return 0
        first, last = job.part
        kept = committed(job, range(first, last))
        todo = [index for index in range(first, last) if index not in kept]
        check_space(job, todo)
        try:
            written, seen, timings = tokenize_checked(job, encoder, todo, kept, began)
        except (KeyboardInterrupt, run.Terminated):
            log.info("stopped; committed shards are kept: run the same command again to go on")
            raise
    records = kept | written
    finish_dataset(job, records)
    totals = Totals()
    for record in records.values():
        totals.add(record)
    facts = run.run_facts(
        settings=vars(args), started=started, counts={**vars(totals), "kept": len(kept)}
    )
    facts |= {"encoder": encoder.engine.name, "timings": timings}
    stamp = started.replace(":", "").replace("-", "")
    job.output.write(f"runs/{stamp}-{first}-{last}.json", run.json_bytes(facts))
    print_summary(totals, len(kept), seen, timings, job.output.uri)
    return verdict(args, log, totals)


def prepare(args: argparse.Namespace, log: Any, folder: Path) -> tuple[Job, Encoder]:
    """Everything before the work, checked: stores, plan (which is laid down), encoder."""
    tokenizer = ChatTokenizer.load(args.tokenizer)
    connect = functools.partial(
        open_store, endpoint_url=args.endpoint_url, max_connections=args.download_workers + 24
    )
    source_uri, source_name = split_file(args.input)
    source = connect(source_uri)
    output = connect(
        args.output,
        sse=args.sse,
        sse_kms_key=args.sse_kms_key,
        upload_journal=folder / UPLOAD_JOURNAL,
    )
    inputs = list_inputs(source, source_name, "--input", log)
    compressed = find_compressed(source, inputs, args.download_workers)
    prompts = None
    if args.prompts:
        prompts_uri, name = split_file(args.prompts)
        store = connect(prompts_uri)
        entries = list_inputs(store, name, "--prompts", log)
        packed = find_compressed(store, entries, args.download_workers)
        prompts = Prompts(prompts_uri, tuple(entries), packed)
    plan = make_plan(args, tokenizer, inputs, compressed, prompts.entries if prompts else ())
    first, last = part = args.shards or (0, len(plan.shards))
    if last > len(plan.shards):
        raise run.UsageError(f"--shards {first}:{last}: the plan has {len(plan.shards)} shards")
    engine = choose_engine(args.encoder, tokenizer.reference, tokenizer.tokenizer_json, log.info)
    num_workers = args.tokenize_workers or fitting_workers(log)
    job = Job(args, log, source, output, plan, compressed, folder, part, num_workers, prompts)
    facts = {"tokenize_workers": num_workers, "encoder": engine.name}
    run.print_settings(log, {**vars(args), **plan.settings, **facts})
    if not args.dry_run:
        output.check_writable()
        settle_plan(output, plan, overwrite=args.overwrite)
    spool = None
    if prompts:
        spool = folder / "prompts.sqlite"
        if several := spool_prompts(connect(prompts.uri), prompts, spool):
            log.warning(f"{several:,} custom_ids of --prompts have different requests: not used")
    settings = EncodeSettings(
        max_length=args.max_length,
        min_loss_tokens=args.min_loss_tokens,
        thinking=args.thinking,
        preserve_thinking=args.preserve_thinking,
        no_reasoning=args.no_reasoning,
        too_long=args.too_long,
        mask_token_id=plan.settings["mask_token_id"],
    )
    all_turns = args.turns == "all"
    return job, Encoder(tokenizer, engine, settings, prompts=spool, all_turns=all_turns)


def fitting_workers(log: Any) -> int:
    """As many workers as the machine takes, with a word when memory is what sets the number."""
    num_workers, capped_by = default_workers()
    if capped_by != "CPUs":
        log.warning(f"only {num_workers} tokenizing workers: {capped_by} allows no more")
    return num_workers


def tokenize_checked(
    job: Job, encoder: Encoder, todo: Sequence[int], kept: Records, began: float
) -> tuple[Records, Totals, dict[str, Any]]:
    """Tokenize with the shortcuts that prove right: records, totals of all blocks, timings.

    A shortcut that differs from its reference is dropped, with a word, as long as nothing is
    committed that it may have touched. Raises UserError when something is.
    """
    if todo and (wrong := check_first_rows(job, encoder, todo)) is not None:
        drop_shortcut(job, encoder, wrong, "before the run")
    while True:
        seen, written, watch = Totals(), Records(), StopWatch(began)
        flow, pool = make_flow(job, encoder)
        try:
            tokenize(job, todo, flow, seen, written)
            return written, seen, watch.timings(flow, pool)
        except ShortcutDiffers as error:
            if kept or committed(job, todo):
                raise run.UserError(
                    f"{error.shortcut} differs from its reference on {error.where}, and shards "
                    "are committed already; make them anew with --encoder tokenizers --overwrite"
                ) from error
            drop_shortcut(job, encoder, error.shortcut, error.where)
        except CredentialsExpired as error:
            done, count = len(kept) + len(written), len(kept) + len(todo)
            raise run.UserError(f"{error}; {done} of {count} shards kept") from error


def make_flow(job: Job, encoder: Encoder) -> tuple[Flow, WorkerPool | None]:
    """What makes the shards: this machine's processes, or a cluster's."""
    if job.args.executor == "ray":
        return RayFlow(shard_spec(job, encoder)), None
    pool = WorkerPool(encoder, job.num_workers)
    pipeline = ShardPipeline(
        job.source,
        job.output,
        job.plan,
        job.compressed,
        folder=job.folder,
        pool=pool,
        download_workers=job.args.download_workers,
    )
    return pipeline, pool


def shard_spec(job: Job, encoder: Encoder) -> ShardSpec:
    args, tokenizer = job.args, encoder.tokenizer
    return ShardSpec(
        source=job.source.uri,
        output=args.output,
        store_options={"endpoint_url": args.endpoint_url},
        output_options={"sse": args.sse, "sse_kms_key": args.sse_kms_key},
        plan=job.plan,
        compressed=job.compressed,
        tokenizer_json=tokenizer.tokenizer_json,
        template=tokenizer.template,
        fast_rendering=tokenizer.fast_rendering,
        engine="tokenizers" if encoder.engine is tokenizer.reference else "fastokens",
        encode_settings=encoder.settings,
        all_turns=args.turns == "all",
        prompts=job.prompts,
        download_workers=args.download_workers,
    )


def check_first_rows(job: Job, encoder: Encoder, todo: Sequence[int]) -> str | None:
    """The shortcut that differs from its reference on the run's first rows, found in a process.

    None when all is well. The parent stays free of the threads that encoding starts.
    """
    block = None
    for part in itertools.islice(
        itertools.chain(*(job.plan.shards[index] for index in todo)), CHECKED_FILES
    ):
        with contextlib.suppress(run.UserError):  # an unreadable input is the run's affair
            block = first_block(job.source, part, job.compressed.get(part.key))
        if block is not None:
            break
    with contextlib.closing(WorkerPool(encoder, 1)) as pool:
        return pool.submit(functools.partial(check_surely, block=block)).result()


def drop_shortcut(job: Job, encoder: Encoder, shortcut: str, where: str) -> None:
    if shortcut == ENGINE and job.args.encoder == "fastokens":
        raise run.UserError(
            f"--encoder fastokens: its ids differ from those of tokenizers ({where}); use "
            "--encoder tokenizers"
        )
    job.log.warning(f"{shortcut} differs from its reference ({where}) and is not used")
    encoder.drop(shortcut)


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
        f"{args.max_reject_rate}: see {args.output.rstrip('/')}/rejected/ for why. The shards are "
        "complete; where they will do, raise --max-reject-rate (1: never fails) and rerun"
    )


def check_space(job: Job, todo: Sequence[int]) -> None:
    """Refuse a work folder that cannot hold the shards that are in hand at a time.

    A shard takes about the bytes of its input (4.1 bytes a token against 4.3 of JSON), and its
    blocks as much once more while it is made of them.
    """
    needed = 2 * sum(sorted(map(job.plan.shard_bytes, todo))[-(UPLOADS_AHEAD + 2) :])
    free = shutil.disk_usage(job.folder).free
    if free < needed:
        raise run.UserError(
            f"--work-dir {job.folder.parent}: {run.format_bytes(free)} free, and shards being "
            f"written need about {run.format_bytes(needed)}; name a larger disk"
        )


if __name__ == "__main__":
    run.exit_with(main)
