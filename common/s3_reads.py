"""Verified reads of S3 objects: of the length that the store tells, resumed where an answer breaks.

A read is of one version of an object, by its etag, however many requests it takes.
"""

import re
import time
from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from common.run import UserError
from common.s3 import ATTEMPTS, Bucket, CutAnswer, RangePastEnd, changed

# A body comes in one piece, which saves copying it (8 MB: 3 ms of CPU instead of 11), and after a
# cut in small ones, because a reset connection loses the piece under way.
WHOLE_BYTES = 64_000_000
CHUNK_BYTES = 1_000_000


@dataclass(frozen=True)
class Part:
    """Some bytes of an object, and the size and etag of the whole."""

    data: bytes
    size: int
    etag: str


class _Reading:
    """The bytes [start, end) of an object as they come in, over as many requests as it takes."""

    def __init__(self, uri: str, key: str, start: int, end: int | None, etag: str | None) -> None:
        self._place = uri, key
        self._start, self._end = start, end
        self._etag, self._size = etag, 0
        self._chunks: list[bytes] = []
        self.was_cut = False
        self.position, self._needs_range = start, bool(start) or end is not None

    def options(self) -> dict[str, str]:
        """Range and IfMatch of the next request."""
        options = {"IfMatch": f'"{self._etag}"'} if self._etag else {}
        if self._needs_range or self.position:
            last = "" if self._end is None else str(self._end - 1)
            options["Range"] = f"bytes={self.position}-{last}"
        return options

    def take(self, answer: dict[str, Any]) -> Part | None:
        """Read an answer's body; None when more is to come, CutAnswer when it broke off."""
        body = answer["Body"]
        # Some servers ignore IfMatch (rclone 1.75.2).
        etag = answer.get("ETag", "").strip('"')
        if self._etag is not None and etag != self._etag:
            body.close()
            raise UserError(changed(*self._place))
        self._etag = etag
        stop = self._stop(answer)
        try:
            step = CHUNK_BYTES if self.was_cut else WHOLE_BYTES
            while self.position < stop and (chunk := body.read(min(step, stop - self.position))):
                self._chunks.append(chunk)
                self.position += len(chunk)
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            raise CutAnswer from error
        if self.position != stop:
            body.close()
            raise CutAnswer
        body.read()  # hands the connection back
        if stop < min(self._size, stop if self._end is None else self._end):
            return None
        return Part(b"".join(self._chunks), self._size, etag)

    def _stop(self, answer: dict[str, Any]) -> int:
        """Where this answer's bytes end in the object, whose size is noted."""
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.get("ContentRange", ""))
        if found:
            first, last, self._size = (int(text) for text in found.groups())
            if first == self.position and (self._end is None or last < self._end):
                return last + 1
        elif "ContentLength" not in answer or answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
            # A body without a length ends in the same way cut and whole; a range's answer tells.
            self._needs_range = True
            answer["Body"].close()
            raise CutAnswer
        elif self.position == 0 and (self._end is None or answer["ContentLength"] <= self._end):
            self._size = answer["ContentLength"]
            return self._size
        answer["Body"].close()
        uri, key = self._place
        raise UserError(f"{uri}: {key}: the store answers another range than asked for")


def read_range(
    bucket: Bucket, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None
) -> Part:
    """Bytes [start, end) of an object, of the length that the store tells, resumed after cuts."""
    reading, cuts = _Reading(bucket.uri, key, start, end, etag), 0
    while True:
        before = reading.position
        try:
            part = reading.take(
                bucket.call(
                    lambda client: client.get_object(**bucket.at(key), **reading.options()), key
                )
            )
            if part is not None:
                return part
        except RangePastEnd:
            return _nothing_there(bucket, key, start, etag)
        except CutAnswer as cut:
            reading.was_cut = True
            cuts = 1 if reading.position > before else cuts + 1
            if cuts == ATTEMPTS:
                raise UserError(
                    f"{bucket.uri}: {key}: the connection broke {ATTEMPTS} times while reading, or "
                    "answers tell no length; check the network and rerun"
                ) from cut
            time.sleep(min(8.0, 0.05 * 2**cuts))


def _nothing_there(bucket: Bucket, key: str, start: int, etag: str | None) -> Part:
    """The end of the object before `start`, provided that it is the object of that etag."""
    head = bucket.call(lambda client: client.head_object(**bucket.at(key)), key)
    found = head["ETag"].strip('"')
    if (etag is not None and found != etag) or head["ContentLength"] > start:
        raise UserError(changed(bucket.uri, key))
    return Part(b"", head["ContentLength"], found)
