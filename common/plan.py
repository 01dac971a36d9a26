"""The plan of a tokenized dataset: which bytes of which inputs make which shard, and how.

plan.json is written first and never changes: a rerun, or another machine, goes on under an equal
plan only. It holds no time, host or worker count.
"""

import bisect
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.run import UserError, json_bytes
from common.store import Entry, Store, read_if_there

VERSION = 1
FIRST_SHARD_SHARE, FIRST_SHARD_BYTES = 0.01, 64_000_000  # small, so that training starts early
PLAN_FILE = "plan.json"
OUR_FILES = re.compile(r"shard-\d{5,}\.(arrow|json)|rejected/shard-\d{5,}\.jsonl")


@dataclass(frozen=True)
class InputRange:
    """Bytes [start, end) of one input; a line belongs to the range that holds its first byte."""

    key: str
    size: int
    etag: str
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """What every shard is made of, and with what settings; the content of plan.json."""

    settings: Mapping[str, Any]
    tokenizer_sha256: str
    template_sha256: str
    row_version: int
    prompts: tuple[Entry, ...]
    shards: tuple[tuple[InputRange, ...], ...]

    def to_bytes(self) -> bytes:
        return json_bytes(
            {
                "version": VERSION,
                "settings": dict(self.settings),
                "tokenizer_sha256": self.tokenizer_sha256,
                "template_sha256": self.template_sha256,
                "row_version": self.row_version,
                "prompts": [dataclasses.asdict(entry) for entry in self.prompts],
                "shards": [
                    {"index": index, "inputs": [dataclasses.asdict(part) for part in parts]}
                    for index, parts in enumerate(self.shards)
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Plan":
        """Raises UserError for a plan of another version or none at all."""
        try:
            facts = json.loads(data)
            if facts["version"] != VERSION:
                raise UserError(f"plan.json: version {facts['version']}, this code reads {VERSION}")
            return cls(
                settings=facts["settings"],
                tokenizer_sha256=facts["tokenizer_sha256"],
                template_sha256=facts["template_sha256"],
                row_version=facts["row_version"],
                prompts=tuple(Entry(**entry) for entry in facts["prompts"]),
                shards=tuple(
                    tuple(InputRange(**part) for part in shard["inputs"])
                    for shard in facts["shards"]
                ),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"plan.json is not one of ours ({error!r})") from error

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def order_key(self) -> str:
        """What seeds the order of rows in training: the same for copies of the same inputs.

        sha256 of the plan without etags; those of local files are times.
        """
        parts = [[dataclasses.replace(part, etag="") for part in shard] for shard in self.shards]
        prompts = [dataclasses.replace(entry, etag="") for entry in self.prompts]
        bare = dataclasses.replace(self, prompts=tuple(prompts), shards=tuple(map(tuple, parts)))
        return bare.sha256

    @property
    def planned_bytes(self) -> int:
        return sum(self.shard_bytes(index) for index in range(len(self.shards)))

    def shard_bytes(self, index: int) -> int:
        return sum(part.end - part.start for part in self.shards[index])


def partition(
    entries: Sequence[Entry], *, num_shards: int, whole: Collection[str]
) -> tuple[tuple[InputRange, ...], ...]:
    """Cut sorted inputs into contiguous shards of near-equal bytes, the first about 1 % of them.

    Keys in `whole` (compressed ones) are never cut and belong to the shard that their first byte
    falls in, so a shard may be empty.
    """
    total = sum(entry.size for entry in entries)
    first = min(FIRST_SHARD_BYTES, int(total * FIRST_SHARD_SHARE)) if num_shards > 1 else total
    rest = (total - first) / max(1, num_shards - 1)
    starts = [0, *[first + round(rest * index) for index in range(num_shards - 1)]]
    shards: list[list[InputRange]] = [[] for _ in range(num_shards)]
    offset = 0
    for entry in entries:
        cuts = sorted({start - offset for start in starts if 0 < start - offset < entry.size})
        if entry.key in whole:
            cuts = []
        for start, end in zip([0, *cuts], [*cuts, entry.size], strict=True):
            index = bisect.bisect_right(starts, offset + start) - 1
            shards[index].append(InputRange(entry.key, entry.size, entry.etag, start, end))
        offset += entry.size
    return tuple(map(tuple, shards))


def settle_plan(store: Store, plan: Plan, *, overwrite: bool) -> None:
    """Write the plan, or go on under an equal one. Raises UserError that shows what differs.

    With `overwrite` whatever is there is removed, shards of an equal plan too.
    """
    old_bytes = read_if_there(store, PLAN_FILE)
    if old_bytes == plan.to_bytes() and not overwrite:
        return
    if old_bytes is not None and not overwrite:
        differences = "; ".join(plan_differences(Plan.from_bytes(old_bytes), plan))
        raise UserError(
            f"--output {store.uri} holds a dataset of another plan ({differences}).\n"
            "Choose another --output, or replace it with --overwrite"
        )
    if old_bytes is not None:
        delete_dataset(store)
    store.write(PLAN_FILE, plan.to_bytes())


def check_plan(store: Store, plan: Plan) -> None:
    """Raises UserError when another run has replaced the plan that this one works by."""
    if read_if_there(store, PLAN_FILE) != plan.to_bytes():
        raise UserError(f"{store.uri}: another run has replaced the plan; this one stops")


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
