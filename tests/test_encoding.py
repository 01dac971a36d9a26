"""Blocks into shards: no row lost, none changed by how blocks were cut, poison lines rejected."""

import contextlib
import functools
import json
import os
import signal

import numpy as np
import pyarrow as pa
import pytest

from common import encoding
from common.assembling import AssembleTask, read_rows
from common.chat import ChatTokenizer, EncodeSettings
from common.encoding import (
    ENGINE,
    RENDERER,
    Encoder,
    EncodeTask,
    ShortcutDiffers,
    assemble_surely,
    check_surely,
    encode_surely,
)
from common.engines import FastEngine
from common.plan import InputRange
from common.reading import Block
from common.run import UserError
from common.workers import WorkerPool
from tests.test_engines import Twisted
from tests.tiny_tokenizer import build_tiny_tokenizer

SETTINGS = EncodeSettings(
    max_length=4096,
    min_loss_tokens=4,
    thinking=True,
    preserve_thinking=False,
    no_reasoning="nonthinking",
    too_long="cut",
    mask_token_id=None,
)


def make_line(number, answer="and so it goes on"):
    message = {"role": "assistant", "reasoning": "let me see", "content": f"{answer} {number}"}
    question = {"role": "user", "content": f"question {number}"}
    return json.dumps({"id": f"r{number}", "messages": [question, message]}).encode() + b"\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer.load(str(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture
def encoder(chat):
    engine = FastEngine(chat.tokenizer_json)
    return Encoder(chat, engine, SETTINGS, prompts=None, all_turns=False)


def make_shard(ask, blocks, folder, name):
    """The files of a shard made of blocks, and its part of the commit record."""
    part = InputRange("in.jsonl", 10**9, "tag", 0, 10**9)
    encoded = [
        (part, one)
        for number, block in enumerate(blocks)
        for one in encode_surely(ask, block, folder / f"{name}-{number}")
    ]
    task = AssembleTask(encoded, folder / f"{name}.arrow", folder / f"{name}.rejected")
    facts, _ = assemble_surely(ask, task)
    return (folder / f"{name}.arrow").read_bytes(), task.rejects.read_text(), facts


def cut(data, ends):
    cuts = [0, *ends, len(data)]
    return [
        Block("in.jsonl", start, data[start:end], end - start)
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]


def test_a_shard_does_not_depend_on_how_its_blocks_were_cut(encoder, tmp_path):
    lines = [make_line(number) for number in range(2500)]
    lines[7:7] = [b"{bad}\n", b"\n", b"\xff\n"]
    lines.append(b'{"cut')
    data = b"".join(lines)
    whole = make_shard(encoder, cut(data, []), tmp_path, "whole")
    ends = np.cumsum(list(map(len, lines)))[[0, 5, 6, 7, 8, 1000, 1001, 2400]].tolist()
    assert make_shard(encoder, cut(data, ends), tmp_path, "parts") == whole
    arrow, rejects, facts = whole
    with pa.ipc.open_stream(arrow) as stream:
        batches = list(stream)
    assert [batch.num_rows for batch in batches] == [1024, 1024, 452]
    assert [i for b in batches for i in b["id"].to_pylist()] == [f"r{n}" for n in range(2500)]
    places = [(r["line"], r["reason"]) for r in map(json.loads, rejects.splitlines())]
    assert places == [(8, "not_json"), (10, "invalid_utf8"), (2504, "cut_line")]
    assert facts["rows"] == 2500 and facts["rejected"] == dict.fromkeys(
        ("cut_line", "invalid_utf8", "not_json"), 1
    )


def test_rows_read_back_are_the_texts_with_the_completion_marked(encoder, chat, tmp_path):
    (block,) = encode_surely(encoder, cut(make_line(3), [])[0], tmp_path / "one")
    ((row_id, ids, mask),) = read_rows(block)
    assert row_id == "r3"
    assert chat.decode(ids[~mask].tolist()) == (
        "<|im_start|>user\nquestion 3<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert chat.decode(ids[mask].tolist()) == (
        "let me see\n</think>\n\nand so it goes on 3<|im_end|>"
    )


def deadly(encoder, task, payload):
    """An encoder that some lines kill, as an input that needs all memory would."""
    if b"deadly" in payload and not getattr(task, "killed", False):
        os.kill(os.getpid(), signal.SIGKILL)
    return encoder(task, payload)


@pytest.mark.parametrize("places", [[0], [599], [5, 6, 300]])
def test_lines_that_kill_workers_are_rejected_and_all_others_kept(encoder, tmp_path, places):
    lines = [make_line(number) for number in range(600)]
    for place in places:
        lines[place] = make_line(place, answer="deadly")
    (block,) = cut(b"".join(lines), [])
    handler = functools.partial(deadly, encoder)
    with contextlib.closing(WorkerPool(handler, 2)) as pool:
        call = functools.partial(make_shard, blocks=[block], folder=tmp_path, name="shard")
        arrow, rejects, facts = pool.submit(call).result(120)
    assert facts["rows"] == 600 - len(places)
    assert facts["rejected"] == {"worker_killed": len(places)}
    for reject, place in zip(map(json.loads, rejects.splitlines()), places, strict=True):
        assert reject["line"] == place + 1
        assert block.data[reject["offset"] :].startswith(lines[place])
    others = [line for number, line in enumerate(lines) if number not in places]
    calm = make_shard(encoder, cut(b"".join(others), []), tmp_path, "calm")
    assert arrow == calm[0]


def test_the_start_check_outlives_lines_that_kill_workers(encoder):
    (block,) = cut(make_line(0) + make_line(1, answer="deadly"), [])
    with contextlib.closing(WorkerPool(functools.partial(deadly, encoder), 1)) as pool:
        assert pool.submit(functools.partial(check_surely, block=block)).result(120) is None
    with contextlib.closing(WorkerPool(lambda task, payload: os._exit(1), 1)) as pool:
        lost = pool.submit(functools.partial(check_surely, block=block))
        assert isinstance(lost.exception(120), UserError)


def test_a_lone_surrogate_that_only_shows_in_tool_arguments_costs_one_row(encoder, tmp_path):
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    bad = json.dumps({"id": "bad", "messages": talk}).encode() + b"\n"
    _, rejects, facts = make_shard(
        encoder, cut(make_line(1) + bad + make_line(2), []), tmp_path, "shard"
    )
    assert facts["rows"] == 2 and facts["rejected"] == {"lone_surrogate": 1}
    assert json.loads(rejects)["line"] == 2


def test_a_row_that_an_engine_gets_wrong_is_noticed(chat, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "WATCHED_SHARE", 1)
    twisted = Encoder(chat, Twisted(chat.reference), SETTINGS, prompts=None, all_turns=False)
    good, bad = make_line(1), make_line(2, answer="a zebra is striped")
    encode_surely(twisted, cut(good, [])[0], tmp_path / "good")
    with pytest.raises(ShortcutDiffers) as caught:
        twisted(EncodeTask("in.jsonl", 50, tmp_path / "bad"), good + bad)
    assert (caught.value.shortcut, caught.value.where) == (ENGINE, f"in.jsonl@{50 + len(good)}")
    twisted.drop(ENGINE)
    assert encode_surely(twisted, cut(good + bad, [])[0], tmp_path / "now")[0].rows == 2


def test_one_row_in_a_thousand_is_watched(chat, tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(Encoder, "_compare", lambda self, row, texts, where: compared.append(row))
    watching = Encoder(chat, chat.reference, SETTINGS, prompts=None, all_turns=False)
    data = b"".join(make_line(number) for number in range(5000))
    encode_surely(watching, cut(data, [])[0], tmp_path / "block")
    assert 1 <= len(compared) <= 15


def test_the_start_check_finds_a_wrong_engine_and_a_wrong_renderer(chat, encoder, monkeypatch):
    (block,) = cut(make_line(1) + make_line(2, answer="a zebra is striped"), [])
    assert check_surely(encoder, block) is None and check_surely(encoder, None) is None
    twisted = Encoder(chat, Twisted(chat.reference), SETTINGS, prompts=None, all_turns=False)
    assert check_surely(twisted, None) is None  # no nasty text shows it: the run's own rows do
    assert check_surely(twisted, block) == ENGINE

    def wrong(messages, **flags):
        return "not what the template says"

    monkeypatch.setattr("common.chat.fast_render", wrong)
    assert check_surely(encoder, None) == RENDERER
    encoder.drop(RENDERER)
    assert check_surely(encoder, block) is None
