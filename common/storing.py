"""Hidden states into files: the first rows of a dataset, in the format of common/stored.py."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from common.cache import file_sha256
from common.lifetime import file_lock, make_folder
from common.run import UserError, format_bytes, json_bytes
from common.shards import TokenizedDataset
from common.store import Store, read_if_there
from common.stored import PLAN_FILE, VERSION, StoredPlan, read_record, record_key, row_key
from common.target import Taps
from common.wire import ColocatedHiddenStates, Description

FILE_BYTES = 1_000_000_000  # of one file, or of one row


def first_rows(
    dataset: TokenizedDataset,
    limit: int,
    *,
    timeout_s: float,
    waiting: Callable[..., Callable[[float], None]] | None = None,
) -> Iterator[np.ndarray]:
    """Token ids of the first rows in plan order, waiting for shards that are not there yet."""
    left = limit
    for index in range(dataset.num_shards):
        if left == 0:
            return
        on_wait = None if waiting is None else waiting(f"shard {index}", timeout_s=timeout_s)
        shard = dataset.wait_for_shard(index, timeout_s=timeout_s, on_wait=on_wait)
        for row in range(min(left, len(shard))):
            yield shard.input_ids(row)
        left -= min(left, len(shard))


def token_bytes(description: Description) -> int:
    """Of one token's hidden states: bfloat16, the tapped layers and perhaps the final one."""
    return 2 * description.hidden_size * (len(description.layers) + description.final)


@contextlib.contextmanager
def only_writer(output: str) -> Iterator[None]:
    """Refuse a second writer of a local folder; on S3 the plan is looked at before each file."""
    with contextlib.ExitStack() as held:
        if "://" not in output:
            make_folder(Path(output))
            try:
                held.enter_context(file_lock(Path(output) / ".lock"))
            except BlockingIOError as error:
                raise UserError(
                    f"--output {output}: another process writes there; wait for it, or name "
                    "another folder"
                ) from error
        yield


def settle_stored_plan(output: Store, plan: StoredPlan) -> None:
    """Lay down the plan, or find the same one there. Raises UserError when it is another."""
    if read_if_there(output, PLAN_FILE) is None:
        output.write(PLAN_FILE, plan.to_bytes())
    check_stored_plan(output, plan)


def check_stored_plan(output: Store, plan: StoredPlan) -> None:
    """Raises UserError when the output is, or has become, that of another plan."""
    there = read_if_there(output, PLAN_FILE)
    if there is None:
        raise UserError(f"{output.uri}: {PLAN_FILE} was removed while hidden states were written")
    if there == plan.to_bytes():
        return
    try:
        differences = StoredPlan.from_bytes(there).differences(plan)
    except UserError as error:
        raise UserError(f"{output.uri}: {error}") from error
    raise UserError(
        f"{output.uri} holds other hidden states: its {'; its '.join(differences)}: name another "
        "--output"
    )


def write_hidden_states(
    rows: Iterator[np.ndarray],
    hidden_states: ColocatedHiddenStates,
    output: Store,
    plan: StoredPlan,
    *,
    folder: Path,
    on_rows: Callable[[int, int], None],
) -> None:
    """Write what is not committed yet.

    `on_rows(rows, tokens)` is called as soon as those are computed, before their file is whole, or
    once for all rows of a file that is there.
    """
    file_tokens = FILE_BYTES // token_bytes(plan.description)
    for index, documents in enumerate(_loads(rows, max_tokens=file_tokens)):
        tokens = sum(map(len, documents))
        record = read_record(output, index)
        if record is not None and record["plan_sha256"] == plan.sha256:
            on_rows(len(documents), tokens)
        else:
            name = f"hidden-{index:05}.safetensors"
            path = folder / name
            save_file(_tensors(documents, hidden_states, on_rows), path)
            check_stored_plan(output, plan)  # another writer may have begun at the same time
            output.upload(name, path)
            record = {
                "version": VERSION,
                "index": index,
                "plan_sha256": plan.sha256,
                "file": name,
                "rows": len(documents),
                "tokens": tokens,
                "bytes": path.stat().st_size,
                "sha256": file_sha256(path),
            }
            output.write(record_key(index), json_bytes(record))
            path.unlink()
    check_stored_plan(output, plan)


def committed_bytes(output: Store, plan: StoredPlan) -> int:
    """Of the files that earlier runs have written."""
    total = index = 0
    while (record := read_record(output, index)) and record["plan_sha256"] == plan.sha256:
        total += record["bytes"]
        index += 1
    return total


def _loads(rows: Iterable[np.ndarray], *, max_tokens: int) -> Iterator[list[np.ndarray]]:
    """Rows in order, as many at a time as have so many tokens together, or one."""
    load: list[np.ndarray] = []
    tokens = 0
    for row in rows:
        if load and tokens + len(row) > max_tokens:
            yield load
            load, tokens = [], 0
        load.append(row)
        tokens += len(row)
    if load:
        yield load


def _tensors(
    documents: Sequence[np.ndarray],
    hidden_states: ColocatedHiddenStates,
    on_rows: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    have = hidden_states.description
    parts: list[Taps] = []
    for request in _loads(documents, max_tokens=have.max_tokens_per_request):
        taps = hidden_states.compute(request, final=have.final)
        parts.append(Taps(taps.hidden.cpu(), None if taps.final is None else taps.final.cpu()))
        on_rows(len(request), sum(map(len, request)))
    tensors = {
        "hidden": torch.cat([part.hidden for part in parts]),
        "offsets": torch.tensor(np.cumsum([0, *map(len, documents)]), dtype=torch.int64),
        "keys": torch.from_numpy(np.stack([row_key(document) for document in documents])),
    }
    if have.final:
        tensors["final"] = torch.cat([part.final for part in parts if part.final is not None])
    return tensors


def check_room(output: str, size: int, folder: Path) -> None:
    """Refuse what disks cannot hold: `size` more in a local output, a file in the work folder."""
    needs = [(folder, "--work-dir", min(size, FILE_BYTES))]
    if "://" not in output:
        needs.append((Path(output), "--output", size))
    for place, flag, needed in needs:
        free = shutil.disk_usage(place).free
        if free < needed:
            raise UserError(
                f"{flag} {place}: {format_bytes(free)} free, and the hidden states need "
                f"{format_bytes(needed)}; a smaller --limit, or a larger disk"
            )
