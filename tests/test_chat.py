"""Ids and masks: golden cases through Qwen3.6's own template, and inputs that broke others."""

import hashlib
import json

import numpy as np
import pytest

from common.chat import ChatTokenizer, EncodeSettings, encode_rows, row_texts
from common.messages import RowRejected
from common.rows import Reject, parse_line
from common.run import UserError
from demo import tokenizer as demo_tokenizer
from tests.qwen_vocabulary import DATA, qwen_tokenizer_folder

CASES = DATA / "cases"
SETTINGS = EncodeSettings(
    max_length=4096,
    min_loss_tokens=1,
    thinking=True,
    preserve_thinking=False,
    no_reasoning="nonthinking",
    too_long="cut",
    mask_token_id=None,
)
MASK_TOKEN = 248070


@pytest.fixture(scope="module")
def qwen():
    folder = qwen_tokenizer_folder()
    if folder is None:
        pytest.skip("qwen-tokenizer, which holds the 248k vocabulary, is not installed")
    return ChatTokenizer.load(str(folder))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.build(folder)
    return ChatTokenizer.load(str(folder))


def encode_row(row, tokenizer, settings):
    texts = row_texts(row, tokenizer, settings)
    (result,) = encode_rows([row], [texts], tokenizer, tokenizer.reference, settings)
    if isinstance(result, RowRejected):
        raise result
    return result


def encode_file(name, tokenizer, *, prompts=None, **changes):
    """(encoded rows, rejects with their line numbers) of a file, as the script would give them."""
    settings = EncodeSettings(**{**vars(SETTINGS), "min_loss_tokens": 16, **changes})
    kept, rejected = [], []
    lines = (CASES / name).read_bytes().split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + [lines[-1]]
    for number, line in enumerate(lines, start=1):
        for row in parse_line(line, fallback_id=f"{name}@{number}", prompts=prompts):
            if isinstance(row, Reject):
                rejected.append((number, row.reason))
                continue
            try:
                kept.append((row.id, encode_row(row, tokenizer, settings)))
            except RowRejected as error:
                rejected.append((number, error.reason))
    return kept, rejected


def golden_cases():
    return json.loads((DATA / "golden_cases.json").read_bytes())["cases"]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_case(qwen, case):
    message = {"role": "assistant", "content": case["content"]}
    if case["reasoning"] is not None:
        message["reasoning_content"] = case["reasoning"]
    line = {
        "messages": [*case["prompt_messages"], message],
        "finish_reason": case["finish_reason"],
        "chat_template_kwargs": case["template_kwargs"],
    }
    (row,) = parse_line(json.dumps(line).encode(), fallback_id="x")
    encoded = encode_row(row, qwen, SETTINGS)
    assert encoded.input_ids.tolist() == case["prompt_ids"] + case["completion_ids"]
    want = [False] * case["loss_mask_zeros"] + [True] * case["loss_mask_ones"]
    assert encoded.loss_mask.tolist() == want
    assert encoded.input_ids.dtype == np.int32 and encoded.loss_mask.dtype == bool


@pytest.mark.parametrize(
    "expected", json.loads((CASES / "expected.json").read_bytes()), ids=lambda case: case["file"]
)
def test_a_case_that_broke_others(qwen, expected):
    flags = {"max_length": 160} if expected["file"].startswith("h06") else {}
    kept, rejected = encode_file(expected["file"], qwen, mask_token_id=MASK_TOKEN, **flags)
    if "rows_any" in expected:
        assert len(kept) in expected["rows_any"]
    else:
        assert (len(kept), len(rejected)) == (expected["rows_ok"], expected["rejected"])
    if expected.get("identical"):
        assert len({row.input_ids.tobytes() + row.loss_mask.tobytes() for _, row in kept}) == 1
    for want, (_, row) in zip(expected.get("texts", []), kept, strict=False):
        prompt, completion = row.input_ids[~row.loss_mask], row.input_ids[row.loss_mask]
        assert qwen.decode(prompt.tolist()) == want["prompt"]
        assert qwen.decode(completion.tolist()) == want["completion"]
        assert (len(prompt), len(completion)) == (want["n_prompt"], want["n_loss"])
        assert not row.loss_mask[: len(prompt)].any() and row.loss_mask[len(prompt) :].all()


def test_h06_is_cut_to_the_first_ids_and_no_end_is_added(qwen):
    kept, rejected = encode_file("h06-max-length-160.jsonl", qwen, max_length=160)
    (_, whole), (_, cut) = kept
    assert len(whole.input_ids) == len(cut.input_ids) == 160
    assert (whole.cut, whole.input_ids[-1]) == (False, 248046)
    assert cut.cut and cut.input_ids[-1] != 248046
    assert rejected == [(3, "too_long")]


def test_h08_rows_without_reasoning_follow_the_policy(qwen):
    kept, _ = encode_file("h08-no-reasoning.jsonl", qwen)
    prompts = [qwen.decode(row.input_ids[~row.loss_mask].tolist()) for _, row in kept]
    empty_block = "<think>\n\n</think>\n\n"
    assert [prompt.endswith(empty_block) for prompt in prompts] == [True, True, False]
    lines = (CASES / "h08-no-reasoning.jsonl").read_bytes().splitlines()
    rows = [parse_line(line, fallback_id="x")[0] for line in lines]
    counted = [row_texts(row, qwen, SETTINGS).no_reasoning for row in rows]
    assert counted == [True, False, False]
    third = qwen.decode(kept[2][1].input_ids[kept[2][1].loss_mask].tolist())
    assert third.startswith("\n</think>\n\nSo the whole")
    kept, _ = encode_file("h08-no-reasoning.jsonl", qwen, no_reasoning="empty")
    assert kept[0][1].input_ids.tolist() == kept[2][1].input_ids.tolist()
    _, rejected = encode_file("h08-no-reasoning.jsonl", qwen, no_reasoning="reject")
    assert rejected == [(1, "no_reasoning")]


def test_batch_output_is_joined_with_its_requests(qwen):
    requests = {}
    for line in (CASES / "batch-prompts.jsonl").read_bytes().splitlines():
        request = json.loads(line)
        requests[request["custom_id"]] = request["body"]
    kept, rejected = encode_file("batch-output.jsonl", qwen, prompts=requests.get)
    assert [row_id for row_id, _ in kept] == ["r2#0", "r2#1", "r0"]
    assert [reason for _, reason in rejected] == ["request_failed", "no_prompt"]
    assert "Question 2" in qwen.decode(kept[0][1].input_ids.tolist())
    kept, rejected = encode_file("batch-output.jsonl", qwen)
    assert not kept and {reason for _, reason in rejected} == {"no_prompt", "request_failed"}


@pytest.mark.parametrize(
    ("name", "rows", "reasons"),
    [
        ("reasoning-names.jsonl", 5, []),
        ("tool-calls.jsonl", 4, []),
        ("truncated.jsonl", 3, []),
        ("sharegpt.jsonl", 2, ["request_failed"]),
        ("token-ids.jsonl", 2, ["length_mismatch", "token_out_of_range"]),
        (
            "template-refusals.jsonl",
            1,
            ["template_error"] * 3
            + ["no_messages", "no_assistant", "empty_completion", "unsupported_content"],
        ),
        ("bytes.jsonl", 4, ["invalid_utf8", "lone_surrogate", "not_json", "cut_line"]),
        ("control-tokens-in-user-text.jsonl", 1, []),
        ("mask-token.jsonl", 0, ["mask_token", "mask_token"]),
    ],
)
def test_a_handed_case(qwen, name, rows, reasons):
    kept, rejected = encode_file(name, qwen, mask_token_id=MASK_TOKEN)
    assert len(kept) == rows
    assert [reason for _, reason in rejected] == reasons
    distinct = {row.input_ids.tobytes() + row.loss_mask.tobytes() for _, row in kept}
    if name in ("reasoning-names.jsonl", "tool-calls.jsonl"):
        assert len(distinct) == 1
    if name == "truncated.jsonl":
        texts = [qwen.decode(row.input_ids[row.loss_mask].tolist()) for _, row in kept]
        assert texts[0] == texts[1] and "</think>" not in texts[0]
        assert texts[2].endswith("</think>\n\nThe sum is")
    if name == "token-ids.jsonl":
        assert kept[0][1].input_ids.tolist() == [248045, 846, 198, *range(1000, 1040), 248046]
        assert kept[1][1].loss_mask.tolist() == [False] * 10 + [True] * 30
    if name == "control-tokens-in-user-text.jsonl":
        completion = qwen.decode(kept[0][1].input_ids[kept[0][1].loss_mask].tolist())
        assert completion.startswith("step 1") and completion.count("<|im_end|>") == 1


def test_a_stop_string_ends_without_the_end_token(demo):
    def last(extra):
        line = {
            "messages": [{"role": "user", "content": "hi"}],
            "choices": [{"message": {"content": "ok", "reasoning": "so"}, **extra}],
        }
        (row,) = parse_line(json.dumps(line).encode(), fallback_id="x")
        ids = encode_row(row, demo, SETTINGS).input_ids
        return demo.decode(ids[-1:].tolist())

    assert last({"finish_reason": "stop", "stop_reason": None}) == "<|im_end|>"
    assert last({"finish_reason": "stop", "stop_reason": 248046}) == "<|im_end|>"
    assert last({"finish_reason": "stop", "stop_reason": "k"}) == "k"
    assert last({"finish_reason": {"type": "stop", "matched": "k"}}) == "k"


def test_the_demos_own_template_and_tokenizer(demo):
    """Runs everywhere: the expected texts are written out by hand."""
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first", "reasoning_content": "hidden"},
        {"role": "user", "content": "two"},
    ]
    cases = [
        (
            {"content": "second", "reasoning": "thought"},
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
            "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n",
            "thought\n</think>\n\nsecond<|im_end|>",
        ),
        (
            {"content": "second"},
            {"chat_template_kwargs": {"enable_thinking": False}},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
            "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            "second<|im_end|>",
        ),
    ]
    for message, extra, prompt, completion in cases:
        line = {"messages": [*history, {"role": "assistant", **message}], **extra}
        (row,) = parse_line(json.dumps(line).encode(), fallback_id="x")
        encoded = encode_row(row, demo, SETTINGS)
        ids = demo.encode(prompt), demo.encode(completion)
        assert demo.decode(ids[0]) == prompt and demo.decode(ids[1]) == completion
        assert encoded.input_ids.tolist() == ids[0] + ids[1]
        assert encoded.loss_mask.tolist() == [False] * len(ids[0]) + [True] * len(ids[1])


def test_a_folder_without_its_files_is_one_line(tmp_path):
    for prepare, message in [
        (lambda: None, "tokenizer.json"),
        (lambda: demo_tokenizer.build(tmp_path), None),
        (lambda: (tmp_path / "chat_template.jinja").write_text("{% if"), "chat template is broken"),
        (lambda: (tmp_path / "chat_template.jinja").unlink(), "no chat template"),
        (lambda: demo_tokenizer.build(tmp_path), None),
        (lambda: (tmp_path / "tokenizer.json").write_text("{}"), "tokenizer.json is unusable"),
    ]:
        prepare()
        if message is None:
            ChatTokenizer.load(str(tmp_path))
            continue
        with pytest.raises(UserError, match=message) as caught:
            ChatTokenizer.load(str(tmp_path))
        assert len(str(caught.value).splitlines()) == 1


def test_the_template_copy_is_the_official_one():
    digest = hashlib.sha256((DATA / "chat_template.jinja").read_bytes()).hexdigest()
    assert digest == "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"
