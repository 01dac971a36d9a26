"""Hidden states in files: written once for the first rows of a dataset, read like a server's.

`hidden.json` says what was written: a Description, the dataset's plan, the number of rows. Then
hidden-00000.safetensors and so on, each with a commit record, hold `hidden` (T, L*H) bfloat16,
with a final one `final` (T, H) too, `offsets` (n + 1,) int64 and `keys` (n, 32) uint8: of each row
the sha256 of its int32 token ids, by which it is found again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from common.cache import FileCache, HeldFile
from common.run import UserError, json_bytes
from common.store import Store, open_store, read_if_there
from common.target import Taps
from common.wire import Description

VERSION = 1
ANY_NUMBER = 1 << 62  # of tokens: nothing is computed for a request
PLAN_FILE = "hidden.json"


@dataclass(frozen=True)
class StoredPlan:
    """What a folder of hidden states holds; equal plans give equal files."""

    description: Description
    data_sha256: str  # of the tokenized dataset's plan
    num_rows: int

    def to_bytes(self) -> bytes:
        return json_bytes({"version": VERSION, **dataclasses.asdict(self)})

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> "StoredPlan":
        """Raises UserError for what is no plan."""
        try:
            facts = json.loads(data)
            description = Description.from_json(json.dumps(facts["description"]).encode())
            return cls(description, facts["data_sha256"], facts["num_rows"])
        except (ValueError, KeyError, TypeError, UserError) as error:
            raise UserError(
                f"{PLAN_FILE} is damaged, or of another version of this program: remove what is "
                "there and write it again"
            ) from error

    def differences(self, other: "StoredPlan") -> list[str]:
        """What differs, field by field."""
        mine, others = self._facts(), other._facts()
        return [
            f"{name} is {mine[name]}, not {others[name]}"
            for name in mine
            if mine[name] != others[name]
        ]

    def _facts(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        return {**facts.pop("description"), **facts}


def record_key(index: int) -> str:
    """The key of the commit record of a shard's hidden states."""
    return f"hidden-{index:05}.json"


def read_record(store: Store, index: int) -> dict[str, Any] | None:
    """The commit record of a file; None while it has none."""
    data = read_if_there(store, record_key(index))
    return None if data is None else json.loads(data)


def row_key(document: np.ndarray) -> np.ndarray:
    """sha256 of a row's int32 token ids, as 32 bytes."""
    digest = hashlib.sha256(np.ascontiguousarray(document, "<i4").tobytes()).digest()
    return np.frombuffer(bytearray(digest), np.uint8)


class StoredHiddenStates:
    """Hidden states out of files; those of any row that was not written are refused."""

    def __init__(self, uri: str, *, cache_dir: Path, endpoint_url: str | None = None) -> None:
        """Raises UserError when nothing is there, or not all of it."""
        self._store = open_store(uri, endpoint_url=endpoint_url)
        data = read_if_there(self._store, PLAN_FILE)
        if data is None:
            raise UserError(
                f"--hidden-states {uri}: neither HOST:PORT, nor colocated, nor a place that "
                f"extract_hidden_online.py --output wrote (no {PLAN_FILE} there)"
            )
        try:
            self._plan = plan = StoredPlan.from_bytes(data)
        except UserError as error:
            raise UserError(f"--hidden-states {uri}: {error}") from error
        self.description = dataclasses.replace(plan.description, max_tokens_per_request=ANY_NUMBER)
        self.num_rows, self.data_sha256 = plan.num_rows, plan.data_sha256
        self._places: dict[bytes, tuple[int, int, int]] = {}
        self._files: list[Any] = []
        self._held: list[HeldFile] = []
        cache = FileCache(cache_dir / "hidden", limit_bytes=None)  # a run needs all of them
        found = 0
        while found < plan.num_rows:
            record = read_record(self._store, len(self._files))
            if record is None or record["plan_sha256"] != plan.sha256:
                raise UserError(
                    f"{uri}: only {found:,} of {plan.num_rows:,} rows are written; run "
                    "extract_hidden_online.py again"
                )
            self._held.append(cache.open(self._store, record, name=plan.sha256[:16]))
            self._note_rows(safe_open(self._held[-1].path, framework="pt"))
            found += record["rows"]

    def _note_rows(self, file: Any) -> None:
        keys, offsets = file.get_tensor("keys").numpy(), file.get_tensor("offsets").tolist()
        for row, key in enumerate(keys):
            self._places[key.tobytes()] = (len(self._files), offsets[row], offsets[row + 1])
        self._files.append(file)

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        answer: Future[Taps] = Future()
        try:
            hidden = torch.cat([self._read("hidden", document) for document in documents])
            last = None
            if final:
                last = torch.cat([self._read("final", document) for document in documents])
            answer.set_result(Taps(hidden, last))
        except UserError as error:
            answer.set_exception(error)
        return answer

    def _read(self, name: str, document: np.ndarray) -> torch.Tensor:
        if name == "final" and not self.description.final:
            raise UserError(f"{self._store.uri}: written without --final")
        place = self._places.get(row_key(document).tobytes())
        if place is None:
            raise UserError(
                f"{self._store.uri} has no hidden states of a row of {len(document)} tokens: they "
                f"were written for the first {self._plan.num_rows:,} rows of the data with plan "
                f"{self._plan.data_sha256[:12]}"
            )
        number, start, end = place
        return self._files[number].get_slice(name)[start:end]

    def close(self) -> None:
        pass
