"""The requests of --prompts on local disk, to be looked up by custom_id: batch APIs answer without.

Spooled once before the workers start; each worker opens the file for itself.
"""

import contextlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.messages import RowRejected
from common.plan import InputRange
from common.reading import read_blocks
from common.store import Entry, Store

# a second request of another body makes the first one unusable too
PUT_REQUEST = """insert into requests values (?, ?) on conflict (custom_id)
    do update set body = case when body = excluded.body then body end"""


@dataclass(frozen=True)
class Prompts:
    """The objects of --prompts, and the compression of those that are compressed."""

    uri: str
    entries: tuple[Entry, ...]
    compressed: Mapping[str, str]


def spool_prompts(store: Store, prompts: Prompts, path: Path) -> int:
    """Put the requests of --prompts on disk, to be looked up by custom_id; other lines are left.

    How many custom_ids have more than one request: ids are unique within a batch only.
    """
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table requests (custom_id text primary key, body text)")
        for entry in prompts.entries:
            whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
            for block in read_blocks(store, whole, prompts.compressed.get(entry.key)):
                for line in block.data.split(b"\n"):
                    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                        request = json.loads(line)
                        custom_id, body = request["custom_id"], request["body"]
                        if isinstance(custom_id, str) and isinstance(body, dict):
                            text = json.dumps(body, sort_keys=True)
                            database.execute(PUT_REQUEST, (custom_id, text))
        query = "select count(*) from requests where body is null"
        return database.execute(query).fetchone()[0]


class SpooledPrompts:
    """The requests that `spool_prompts` put into `path`: custom_id -> request, None without one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None

    def __call__(self, custom_id: str) -> dict[str, Any] | None:
        """Raises RowRejected for an id that several different requests have."""
        if self._database is None:  # opened in the worker: connections do not survive a fork
            self._database = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)
        query = "select body from requests where custom_id = ?"
        found = self._database.execute(query, (custom_id,)).fetchone()
        if found == (None,):
            raise RowRejected(
                "no_prompt",
                f"--prompts has different requests with custom_id {custom_id}: tokenize each batch "
                "by itself",
            )
        return json.loads(found[0]) if found else None
