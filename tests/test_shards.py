"""The plan partitions bytes exactly; shards are byte-equal, whole or refused; readers wait."""

import dataclasses
import json
import shutil
import threading

import datasets
import numpy as np
import pyarrow as pa
import pytest

from common.plan import InputRange, Plan, partition
from common.run import UserError, json_bytes
from common.shards import (
    LENGTH_EDGES,
    ShardWriter,
    TokenizedDataset,
    base_id,
    closing_files,
    is_held_out,
    record_key,
    row_batch,
    shard_name,
)
from common.store import Entry


def entries(*sizes):
    return [Entry(f"in-{number}.jsonl", size, "tag") for number, size in enumerate(sizes)]


@pytest.mark.parametrize("num_shards", [1, 2, 7, 40])
@pytest.mark.parametrize("whole", [(), ("in-1.jsonl", "in-3.jsonl")])
def test_the_plan_holds_every_byte_once_and_in_order(num_shards, whole):
    inputs = entries(1000, 50_000, 1, 30_000, 9000)
    shards = partition(inputs, num_shards=num_shards, whole=whole)
    assert len(shards) == num_shards
    ranges = [part for shard in shards for part in shard]
    for entry in inputs:
        mine = [(part.start, part.end) for part in ranges if part.key == entry.key]
        assert mine[0][0] == 0 and mine[-1][1] == entry.size
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in zip(mine, mine[1:], strict=False))
        assert entry.key not in whole or len(mine) == 1
    assert [part.key for part in ranges] == sorted(part.key for part in ranges)


def test_the_first_shard_is_small_and_the_others_equal():
    sizes = [
        sum(p.end - p.start for p in s)
        for s in partition(entries(10**7, 10**7), num_shards=5, whole=())
    ]
    assert sizes[0] == 200_000
    assert max(sizes[1:]) - min(sizes[1:]) <= 1
    huge = partition(entries(10**11), num_shards=500, whole=())
    assert sum(p.end - p.start for p in huge[0]) == 64_000_000


def make_plan(**changes):
    facts = dict(
        settings={"max_length": 512, "mask_token_id": 5, "vocab_size": 100},
        tokenizer_sha256="t",
        template_sha256="c",
        row_version=1,
        prompts=(),
        shards=((InputRange("a", 10, "e", 0, 10),), ()),
    )
    return Plan(**{**facts, **changes})


def test_the_plan_round_trips_and_changes_change_its_hash():
    plan = make_plan()
    assert Plan.from_bytes(plan.to_bytes()) == plan
    assert plan.to_bytes().endswith(b"\n")
    assert make_plan(tokenizer_sha256="u").sha256 != plan.sha256
    assert (plan.planned_bytes, plan.shard_bytes(1)) == (10, 0)
    for bad in (b"{}", b"no json", plan.to_bytes().replace(b'"version": 1', b'"version": 9')):
        with pytest.raises(UserError, match="plan.json"):
            Plan.from_bytes(bad)


def test_a_copy_of_the_inputs_trains_in_the_same_order():
    copied = make_plan(
        shards=tuple(
            tuple(dataclasses.replace(part, etag="later") for part in shard)
            for shard in make_plan().shards
        )
    )
    assert copied.sha256 != make_plan().sha256 and copied.order_key == make_plan().order_key
    assert make_plan(tokenizer_sha256="u").order_key != make_plan().order_key


def rows(count, seed=0):
    generator = np.random.default_rng(seed)
    for number in range(count):
        length = int(generator.integers(1, 300))
        yield (
            f"row-{number}",
            generator.integers(0, 100, size=length).astype(np.int32),
            generator.random(length) < 0.8,
            "math" if number % 3 else None,
        )


def batches(some_rows, size=700):
    """Rows as the record batches of encoded blocks, `size` in each."""
    some_rows = list(some_rows)
    for start in range(0, len(some_rows), size):
        ids, tokens, masks, sources = zip(*some_rows[start : start + size], strict=True)
        yield row_batch(
            ids, np.array(list(map(len, tokens))), np.concatenate(tokens), np.concatenate(masks),
            sources,
        )  # fmt: skip


def write_shard(folder, index, plan, count):
    path = folder / f"{shard_name(index)}.arrow"
    writer = ShardWriter(path)
    for batch in batches(rows(count, seed=index)):
        writer.add_batch(batch)
    record = {
        **writer.finish(), "version": 1, "index": index, "plan_sha256": plan.sha256,
        "file": path.name, "rejected": {}, "cut": 0, "no_reasoning": 0,
    }  # fmt: skip
    (folder / record_key(index)).write_bytes(json_bytes(record))
    return record


def test_shards_are_byte_equal_and_read_back_row_by_row(tmp_path):
    plan = make_plan()
    (tmp_path / "plan.json").write_bytes(plan.to_bytes())
    record = write_shard(tmp_path, 0, plan, 2500)
    first = (tmp_path / "shard-00000.arrow").read_bytes()
    assert write_shard(tmp_path, 0, plan, 2500) == record
    assert (tmp_path / "shard-00000.arrow").read_bytes() == first
    with pa.ipc.open_stream(first) as stream:
        assert [batch.num_rows for batch in stream] == [1024, 1024, 452]
    dataset = TokenizedDataset(str(tmp_path), cache_dir=tmp_path / "cache")
    dataset.wait_for_plan(timeout_s=0)
    shard = dataset.wait_for_shard(0, timeout_s=0)
    assert len(shard) == 2500 == record["rows"] and shard.lengths.sum() == record["tokens"]
    for number, (row_id, ids, mask, _) in enumerate(rows(2500)):
        assert shard.ids[number] == row_id
        np.testing.assert_array_equal(shard.input_ids(number), ids)
        np.testing.assert_array_equal(shard.loss_mask(number), mask)
    assert sum(record["lengths"]["counts"]) == 2500
    assert len(record["lengths"]["counts"]) == len(LENGTH_EDGES) + 1


def test_the_first_pair_of_supervised_tokens_is_found_in_every_row(tmp_path):
    plan = make_plan()
    (tmp_path / "plan.json").write_bytes(plan.to_bytes())
    masks = [
        [], [1], [1, 1], [0, 1], [1, 0], [1, 0, 1, 1], [], [0, 0, 0], [1, 1, 1], [0, 1, 1, 0], [1],
        [1], [],
    ] * 200  # fmt: skip
    path = tmp_path / "shard-00000.arrow"
    writer = ShardWriter(path)
    lengths, flat = np.array(list(map(len, masks))), np.concatenate(masks).astype(bool)
    ids = [str(number) for number in range(len(masks))]
    writer.add_batch(
        row_batch(ids, lengths, np.zeros(len(flat), np.int32), flat, [None] * len(ids))
    )
    record = {**writer.finish(), "plan_sha256": plan.sha256, "file": path.name}
    (tmp_path / record_key(0)).write_bytes(json_bytes(record))
    dataset = TokenizedDataset(str(tmp_path), cache_dir=tmp_path / "cache")
    dataset.wait_for_plan(timeout_s=0)
    naive = [
        next((at for at in range(len(mask) - 1) if mask[at] and mask[at + 1]), -1) for mask in masks
    ]
    assert dataset.wait_for_shard(0, timeout_s=0).first_pairs.tolist() == naive


def test_load_from_disk_and_load_dataset_open_it_with_an_empty_shard(tmp_path):
    plan = make_plan()
    records = [write_shard(tmp_path, 0, plan, 30), write_shard(tmp_path, 1, plan, 0)]
    for name, data in closing_files(records).items():
        (tmp_path / name).write_bytes(data)
    whole = datasets.load_from_disk(str(tmp_path))
    want = list(rows(30))
    assert len(whole) == 30 and whole[7]["input_ids"] == want[7][1].tolist()
    assert whole[7]["loss_mask"] == want[7][2].tolist() and whole[1]["source"] == "math"
    one = datasets.load_dataset(
        "arrow", data_files=str(tmp_path / "shard-00000.arrow"), split="train",
        cache_dir=str(tmp_path / "hf"),
    )  # fmt: skip
    assert one[7]["id"] == "row-7"


@pytest.mark.parametrize("harm", ["cut at a batch", "one byte", "gone"])
def test_a_damaged_shard_is_refused(tmp_path, harm):
    plan = make_plan()
    (tmp_path / "plan.json").write_bytes(plan.to_bytes())
    write_shard(tmp_path, 0, plan, 1500)
    path = tmp_path / "shard-00000.arrow"
    if harm == "cut at a batch":  # a valid, shorter stream
        writer = ShardWriter(path)
        for batch in batches(list(rows(1500))[:1024]):
            writer.add_batch(batch)
        writer.finish()
    elif harm == "one byte":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    dataset = TokenizedDataset(str(tmp_path), cache_dir=tmp_path / "cache")
    dataset.wait_for_plan(timeout_s=0)
    with pytest.raises(UserError, match="not what its record says"):
        dataset.wait_for_shard(0, timeout_s=0)


def test_readers_wait_for_the_record_not_for_the_file(tmp_path):
    plan = make_plan()
    dataset = TokenizedDataset(str(tmp_path / "data"), cache_dir=tmp_path / "cache")
    with pytest.raises(UserError, match="plan.json did not appear within 0 s"):
        dataset.wait_for_plan(timeout_s=0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/plan.json").write_bytes(plan.to_bytes())
    dataset.wait_for_plan(timeout_s=0)
    record = write_shard(tmp_path / "data", 0, plan, 5)
    (tmp_path / "data/shard-00000.json").unlink()
    waits = []
    threading.Timer(
        0.5, lambda: (tmp_path / "data/shard-00000.json").write_text(json.dumps(record))
    ).start()
    shard = dataset.wait_for_shard(0, timeout_s=10, poll_s=0.05, on_wait=waits.append)
    assert len(shard) == 5 and len(waits) > 3
    with pytest.raises(UserError, match="shard-00001 did not appear"):
        dataset.wait_for_shard(1, timeout_s=0)


def test_a_record_of_another_plan_stops_the_reader(tmp_path):
    (tmp_path / "plan.json").write_bytes(make_plan().to_bytes())
    write_shard(tmp_path, 0, make_plan(template_sha256="other"), 5)
    dataset = TokenizedDataset(str(tmp_path), cache_dir=tmp_path / "cache")
    dataset.wait_for_plan(timeout_s=0)
    with pytest.raises(UserError, match="another plan"):
        dataset.wait_for_shard(0, timeout_s=0)


def test_shards_in_s3_are_cached_and_a_damaged_copy_is_fetched_again(moto, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    uri, plan = moto.make_bucket("shards"), make_plan()
    write_shard(tmp_path, 0, plan, 40)
    client = moto.client()
    client.put_object(Bucket="shards", Key="plan.json", Body=plan.to_bytes())
    for name in ("shard-00000.arrow", "shard-00000.json"):
        client.upload_file(str(tmp_path / name), "shards", name)

    def read():
        dataset = TokenizedDataset(uri, cache_dir=tmp_path / "c", endpoint_url=moto.endpoint_url)
        dataset.wait_for_plan(timeout_s=0)
        return dataset.wait_for_shard(0, timeout_s=0)

    assert len(read()) == 40
    (copy,) = (tmp_path / "c").rglob("*.arrow")
    copy.write_bytes(b"damaged")
    assert len(read()) == 40
    client.delete_object(Bucket="shards", Key="shard-00000.arrow")
    assert len(read()) == 40, "a whole cached copy needs no download"
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(UserError):
        read()


def test_held_out_rows_follow_their_base_id():
    assert base_id("abc#1/12") == base_id("abc") == "abc"
    assert base_id("a/b#c") == "a/b#c"
    chosen = [is_held_out(f"row{n}", seed=0, fraction=0.1) for n in range(5000)]
    assert 0.08 < np.mean(chosen) < 0.12
    assert chosen != [is_held_out(f"row{n}", seed=1, fraction=0.1) for n in range(5000)]
    for n in range(200):
        assert is_held_out(f"row{n}#3", seed=0, fraction=0.1) == chosen[n]
    assert not is_held_out("x", seed=0, fraction=0.0) and is_held_out("x", seed=0, fraction=1.0)
