"""Blocks of lines -> block files of token arrays; what the worker processes do.

Work runs in chunks of rows, one step after the other for all of them: parse, render, encode, mask;
so bulk encoding gets long lists and the time of each step can be told. Tokens never pass through a
pickle: an encoded block is a file of its own, and a shard is made of such files.
"""

import contextlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.assembling import AssembleTask, EncodedBlock, assemble
from common.chat import ChatTokenizer, Encoded, EncodeSettings, RowTexts, encode_rows, row_texts
from common.engines import Engine, first_difference, nasty_texts
from common.messages import MAX_ERROR, RowRejected
from common.prompts import SpooledPrompts
from common.reading import Block
from common.render import branch_cases
from common.rows import Reject, Row, parse_line
from common.run import UserError
from common.shards import row_batch
from common.timing import Clock
from common.workers import Ask, WorkerDied

CHUNK_LINES = 256
WATCHED_SHARE = 1000  # one row in so many is encoded both ways
CHECKED_LINES, CHECKED_CHARS = 300, 2_000_000
ENGINE, RENDERER = "fastokens", "the built-in renderer"


class ShortcutDiffers(Exception):
    """A fast way gave another result than the reference; `shortcut` is ENGINE or RENDERER."""

    def __init__(self, shortcut: str, where: str) -> None:
        super().__init__(shortcut, where)
        self.shortcut, self.where = shortcut, where


# ---- tasks: small, for they are pickled


@dataclass(frozen=True)
class EncodeTask:
    """Encode a block, whose bytes come with it, into the file `path`.

    killed: do not touch its lines, which killed two workers, but reject them.
    """

    key: str
    offset: int
    path: Path
    killed: bool = False


@dataclass(frozen=True)
class CheckTask:
    """Compare the shortcuts with their references, on a block's rows too when there is one."""

    key: str | None
    offset: int


@dataclass
class _Chunk:
    """Rows of some lines on their way: each with its line's number in the block and its offset."""

    rows: list[tuple[int, int, Row]] = field(default_factory=list)
    rejects: list[tuple[int, int, Reject]] = field(default_factory=list)
    texts: list[RowTexts | None] = field(default_factory=list)


class Encoder:
    """What every worker shares: made once, before the workers are forked."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        engine: Engine,
        settings: EncodeSettings,
        *,
        prompts: Path | None,
        all_turns: bool,
    ) -> None:
        self.tokenizer, self.engine = tokenizer, engine
        self.settings, self._all_turns = settings, all_turns
        self._prompts = None if prompts is None else SpooledPrompts(prompts)

    def drop(self, shortcut: str) -> None:
        """Do without a shortcut from here on."""
        if shortcut == ENGINE:
            self.engine = self.tokenizer.reference
        else:
            self.tokenizer = self.tokenizer.by_template_alone()

    def __call__(self, task: EncodeTask | AssembleTask | CheckTask, payload: bytes) -> Any:
        """Do a task; runs in a worker. Raises ShortcutDiffers, or UserError for a full disk."""
        if isinstance(task, CheckTask):
            return self.check_shortcuts(task, payload)
        try:
            if isinstance(task, AssembleTask):
                return assemble(task)
            return self.encode_block(task, payload)
        except OSError as error:
            place = (task.arrow if isinstance(task, AssembleTask) else task.path).parent
            raise UserError(
                f"--work-dir {place.parent}: cannot write there ({error.strerror or error})"
            ) from error

    # ---- a block

    def encode_block(self, task: EncodeTask, data: bytes) -> EncodedBlock:
        clock = Clock(whole_process=True)  # fastokens encodes in a thread of its own
        kept: list[tuple[Row, RowTexts | None, Encoded]] = []
        rejects: list[tuple[int, int, Reject]] = []
        lines = self._lines(task, data)
        while chunk_lines := list(itertools.islice(lines, CHUNK_LINES)):
            chunk = _killed(chunk_lines) if task.killed else self._parse(task, chunk_lines)
            clock.charge("parse")
            self._render(chunk)
            clock.charge("render")
            rows = [row for _, _, row in chunk.rows]
            encoded = encode_rows(rows, chunk.texts, self.tokenizer, self.engine, self.settings)
            clock.charge("encode")
            self._watch(task.key, chunk)
            clock.charge("check")
            for place, text, result in zip(chunk.rows, chunk.texts, encoded, strict=True):
                number, offset, row = place
                if isinstance(result, Encoded):
                    kept.append((row, text, result))
                else:
                    reject = Reject(row.id, result.reason, str(result))
                    chunk.rejects.append((number, offset, reject))
            rejects += chunk.rejects
            clock.charge("mask")
        return self._write(task, kept, rejects, data.count(b"\n"), clock)

    def _lines(self, task: EncodeTask, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Each line's number in the block, its offset in the input, and the line as it stands."""
        start = number = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1 or len(data)
            yield number, task.offset + start, data[start:end]
            start, number = end, number + 1

    def _parse(self, task: EncodeTask, lines: Sequence[tuple[int, int, bytes]]) -> _Chunk:
        chunk = _Chunk()
        for number, offset, line in lines:
            found = parse_line(
                line,
                fallback_id=f"{task.key}@{offset}",
                prompts=self._prompts,
                all_turns=self._all_turns,
            )
            for row in found:
                if isinstance(row, Reject):
                    chunk.rejects.append((number, offset, row))
                else:
                    chunk.rows.append((number, offset, row))
        return chunk

    def _render(self, chunk: _Chunk) -> None:
        """Fill in the texts of a chunk; rows that cannot be rendered leave it as rejects."""
        rendered = []
        for number, offset, row in chunk.rows:
            try:
                chunk.texts.append(row_texts(row, self.tokenizer, self.settings))
                rendered.append((number, offset, row))
            except RowRejected as error:
                chunk.rejects.append((number, offset, Reject(row.id, error.reason, str(error))))
        chunk.rows = rendered

    def _watch(self, key: str, chunk: _Chunk) -> None:
        """Compare the shortcuts with their references on one row in a thousand."""
        for (_, offset, row), texts in zip(chunk.rows, chunk.texts, strict=True):
            if texts and zlib.crc32(row.id.encode()) % WATCHED_SHARE == 0:
                self._compare(row, texts, f"{key}@{offset}")

    def _compare(self, row: Row, texts: RowTexts, where: str) -> None:
        tokenizer = self.tokenizer
        if tokenizer.fast_rendering:
            truth = row_texts(row, tokenizer.by_template_alone(), self.settings)
            if truth != texts:
                raise ShortcutDiffers(RENDERER, where)
        if self.engine is not tokenizer.reference:
            parts = [texts.prompt, texts.completion]
            with contextlib.suppress(TypeError, UnicodeEncodeError):  # rejected by both
                if first_difference(self.engine, tokenizer.reference, parts) is not None:
                    raise ShortcutDiffers(ENGINE, where)

    def _write(
        self,
        task: EncodeTask,
        kept: Sequence[tuple[Row, RowTexts | None, Encoded]],
        rejects: list[tuple[int, int, Reject]],
        lines: int,
        clock: Clock,
    ) -> EncodedBlock:
        ids, sources = [row.id for row, _, _ in kept], [row.source for row, _, _ in kept]
        tokens = np.concatenate([np.zeros(0, np.int32), *[e.input_ids for _, _, e in kept]])
        lengths = np.array([len(e.input_ids) for _, _, e in kept], dtype=np.int64)
        mask = _masks([encoded for _, _, encoded in kept], lengths)
        clock.charge("mask")
        task.path.touch()
        with task.path.open("r+b") as file:  # over an older block's: the stream has an end mark
            batch = row_batch(ids, lengths, tokens, mask, sources)
            with pa.ipc.new_stream(file, batch.schema) as stream:
                stream.write_batch(batch)
        result = EncodedBlock(
            path=task.path,
            lines=lines,
            rows=len(kept),
            tokens=len(tokens),
            loss_tokens=int(np.count_nonzero(mask)),
            cut=sum(encoded.cut for _, _, encoded in kept),
            no_reasoning=sum(text is not None and text.no_reasoning for _, text, _ in kept),
            unverified_history=sum(
                text is not None and text.unverified_history for _, text, _ in kept
            ),
            rejected=Counter(reject.reason for _, _, reject in rejects),
            cpu_s=clock.cpu_s,
        )
        if rejects:
            rejects.sort(key=lambda place: place[:2])
            result.rejects_path.write_text(
                "".join(_reject_line(task.key, *place) for place in rejects), encoding="utf-8"
            )
        clock.charge("arrow")
        return result

    # ---- before a run

    def check_shortcuts(self, task: CheckTask, data: bytes) -> str | None:
        """Compare engine and renderer with their references on fixed texts and a block's rows.

        The name of the shortcut that differs first, or None.
        """
        slow = self.tokenizer.by_template_alone()
        for case in branch_cases():
            for flags in itertools.product((False, True), repeat=3):
                if _rendered(self.tokenizer, case, flags) != _rendered(slow, case, flags):
                    return RENDERER
        texts = nasty_texts(self.tokenizer.added_tokens)
        if first_difference(self.engine, self.tokenizer.reference, texts) is not None:
            return ENGINE
        chars = 0
        lines = self._lines(EncodeTask(task.key or "", task.offset, Path()), data)
        for line in itertools.islice(lines, CHECKED_LINES):
            chunk = self._parse(EncodeTask(task.key or "", task.offset, Path()), [line])
            self._render(chunk)
            try:
                for (_, _, row), pair in zip(chunk.rows, chunk.texts, strict=True):
                    size = len(pair.prompt) + len(pair.completion) if pair else 0
                    if pair is not None and chars + size <= CHECKED_CHARS:
                        chars += size
                        self._compare(row, pair, str(task.key))
            except ShortcutDiffers as error:
                return error.shortcut
        return None


def _masks(rows: Sequence[Encoded], lengths: np.ndarray) -> np.ndarray:
    """The loss masks of rows in one array, (T,) bool."""
    if any(row.ready_mask is not None for row in rows):
        return np.concatenate([row.loss_mask for row in rows])
    prompts = np.array([row.prompt_length for row in rows], dtype=np.int64)
    runs = np.stack([prompts, lengths - prompts], axis=1).ravel()
    return np.repeat(np.tile([False, True], len(rows)), runs)


def _killed(lines: Sequence[tuple[int, int, bytes]]) -> _Chunk:
    """Lines that killed two workers, as rejects."""
    error = "two workers died on this line (out of memory?)"
    return _Chunk(
        rejects=[
            (number, offset, Reject("", "worker_killed", error)) for number, offset, _ in lines
        ]
    )


def _reject_line(key: str, number: int, offset: int, reject: Reject) -> str:
    """A line of the rejected file; `line` is relative to the block until the shard is made."""
    facts = {
        "key": key,
        "line": number,
        "offset": offset,
        "id": reject.id or f"{key}@{offset}",
        "reason": reject.reason,
        "error": reject.error[:MAX_ERROR],
    }
    return json.dumps(facts, ensure_ascii=True) + "\n"


def _rendered(tokenizer: ChatTokenizer, case: list[dict[str, Any]], flags: Sequence[bool]) -> str:
    thinking, preserve_thinking, add_generation_prompt = flags
    try:
        return tokenizer.render(
            case,
            tools=None,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            add_generation_prompt=add_generation_prompt,
        )
    except RowRejected as error:
        return f"rejected: {error}"


# ---- calls for a WorkerPool


def encode_surely(ask: Ask, block: Block, path: Path) -> list[EncodedBlock]:
    """Encode a block; when its worker dies, by halves, down to the line that kills.

    That line is rejected after the second worker it kills, so every other line gets through.
    """
    try:
        return [ask(EncodeTask(block.key, block.offset, path), block.data)]
    except WorkerDied:
        pass
    middle = block.data.find(b"\n", len(block.data) // 2) + 1
    if not 0 < middle < len(block.data):
        middle = block.data.rfind(b"\n", 0, len(block.data) - 1) + 1
    if middle == 0:
        task = EncodeTask(block.key, block.offset, path)
        try:
            return [ask(task, block.data)]
        except WorkerDied:
            return [ask(EncodeTask(block.key, block.offset, path, killed=True), block.data)]
    left = Block(block.key, block.offset, block.data[:middle], block.stored)
    right = Block(block.key, block.offset + middle, block.data[middle:], 0)
    return [
        *encode_surely(ask, left, path.with_name(f"{path.name}a")),
        *encode_surely(ask, right, path.with_name(f"{path.name}b")),
    ]


def check_surely(ask: Ask, block: Block | None) -> str | None:
    """The shortcut that differs from its reference, if one does.

    Rows that kill two workers are left out: the run itself will reject the line that does.
    """
    if block is not None:
        for _ in range(2):
            with contextlib.suppress(WorkerDied):
                return ask(CheckTask(block.key, block.offset), block.data)
    try:
        return ask(CheckTask(None, 0), b"")
    except WorkerDied as error:
        raise UserError("workers die before they begin; is memory short?") from error


def assemble_surely(ask: Ask, task: AssembleTask) -> tuple[dict[str, Any], dict[str, float]]:
    """Make a shard; once more when the worker dies. Raises WorkerDied the second time."""
    try:
        return ask(task, b"")
    except WorkerDied:
        return ask(task, b"")
