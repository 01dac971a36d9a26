"""Rows and plans for people: what will come of inputs, and what a row looks like."""

import itertools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common import run
from common.assembling import read_rows
from common.chat import ChatTokenizer
from common.encoding import Encoder, encode_surely
from common.plan import Plan
from common.reading import first_block
from common.shards import TokenizedDataset, shard_name
from common.store import Store

SAMPLE_FILES = 4  # what a dry run reads
SHOWN_CHARS = 2_000  # of prompt and loss part each
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
OPENING, CLOSING = "\u27e6", "\u27e7"  # around what the target is trained to draft, without colour


def marked_text(
    tokenizer: ChatTokenizer, ids: np.ndarray, mask: np.ndarray, *, longest: int | None
) -> str:
    """A row's text: prompt dimmed on a terminal, elsewhere the loss part in brackets.

    Of a part with more than `longest` characters the middle is left out.
    """
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = (DIM, NORMAL) if colour else (OPENING, CLOSING)
    parts = []
    pairs = zip(mask, ids, strict=True)
    for is_loss, stretch in itertools.groupby(pairs, key=lambda pair: pair[0]):
        text = tokenizer.decode([int(token) for _, token in stretch])
        if longest is not None and len(text) > longest:
            half = longest // 2
            text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
        marked = not is_loss if colour else is_loss
        parts.append(f"{before}{text}{after}" if marked else text)
    return "".join(parts)


def print_row(
    tokenizer: ChatTokenizer,
    row_id: str,
    ids: np.ndarray,
    mask: np.ndarray,
    *,
    where: str,
    longest: int | None = None,
) -> None:
    """A row on stdout: a line of facts, then its marked text."""
    marks = "dim = prompt" if sys.stdout.isatty() else f"{OPENING}loss part{CLOSING}"
    print(f"{where}  id={row_id}  tokens={len(ids)}  loss={int(mask.sum())}  ({marks})")
    print(marked_text(tokenizer, ids, mask, longest=longest))


def print_plan(
    source: Store,
    plan: Plan,
    compressed: Mapping[str, str],
    encoder: Encoder,
    folder: Path,
    num_workers: int,
) -> None:
    """Print the plan, and from a sample of the inputs what will come of it, and one row."""
    for index, parts in enumerate(plan.shards):
        size = run.format_bytes(plan.shard_bytes(index))
        print(f"{shard_name(index)}  {size:>8}  {len(parts)} inputs")
    print(
        f"{len(plan.shards)} shards, {run.format_bytes(plan.planned_bytes)}, "
        f"{len(compressed)} compressed inputs (each is read by one thread and never cut)"
    )
    read, rows, tokens, cpu_s = 0, 0, 0, 0.0
    shown = False
    for part in itertools.islice(itertools.chain(*plan.shards), SAMPLE_FILES):
        block = first_block(source, part, compressed.get(part.key))
        if block is None:
            continue
        (encoded,) = encode_surely(encoder, block, folder / "sample")
        read += len(block.data)
        rows, tokens = rows + encoded.rows, tokens + encoded.tokens
        cpu_s += sum(encoded.cpu_s.values())
        for number, row in enumerate(read_rows(encoded)):
            if number == 0 and not shown:
                print_row(encoder.tokenizer, *row, where=block.key, longest=SHOWN_CHARS)
                shown = True
        for reason, count in sorted(encoded.rejected.items()):
            print(f"{block.key}: {count} of {encoded.lines} lines rejected: {reason}")
    if not read:
        return
    scale = plan.planned_bytes / read
    print(
        f"about {run.format_count(rows * scale)} rows, {run.format_count(tokens * scale)} tokens, "
        f"{run.format_duration(cpu_s * scale / num_workers)} of encoding on {num_workers} "
        "workers (compressed inputs hold more than their bytes say)"
    )


def print_committed(
    place: str, tokenizer: ChatTokenizer, *, cache: Path, endpoint_url: str | None
) -> None:
    """Print one row, URI[:ROW], of a dataset or of one of its shards. Raises UserError."""
    uri, colon, number = place.rpartition(":")
    uri, row = (uri, int(number)) if colon and number.isdigit() else (place, 0)
    folder, _, name = uri.rpartition("/")
    only = re.fullmatch(r"shard-(\d{5,})\.arrow", name)
    dataset = TokenizedDataset(
        (folder or ".") if only else uri, cache_dir=cache, endpoint_url=endpoint_url
    )
    try:
        plan = dataset.wait_for_plan(timeout_s=0)
    except run.UserError as error:
        raise run.UserError(
            f"--inspect {place}: no dataset there; give URI, URI:ROW or URI/shard-00000.arrow:ROW"
        ) from error
    if plan.tokenizer_sha256 != tokenizer.tokenizer_sha256:
        raise run.UserError(f"{uri} was not tokenized with this tokenizer")
    before = 0
    for index in [int(only[1])] if only else range(len(plan.shards)):
        record = dataset.record(index)
        if record is not None and row < before + record["rows"]:
            shard, local = dataset.wait_for_shard(index, timeout_s=0), row - before
            ids, mask = shard.input_ids(local), shard.loss_mask(local)
            where = f"{shard_name(index)}:{local}"
            print_row(tokenizer, shard.ids[local], ids, mask, where=where)
            return
        before += record["rows"] if record is not None else 0
    raise run.UserError(f"--inspect {place}: only {before:,} rows are committed there")
