"""One line -> rows or rejects: layouts, failures, ids and bytes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import REASONS, Completion
from common.rows import Reject, Row, parse_line

QUESTION = [{"role": "user", "content": "one"}]
ANSWER = {"role": "assistant", "content": "two", "reasoning": "three"}
PARTS = Completion("three", "two", [])


def parse(record, **options):
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_line(data, fallback_id="file@7", **options)


def only(record, **options):
    (row,) = parse(record, **options)
    return row


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [*QUESTION, ANSWER]},
        {"conversations": [*QUESTION, ANSWER], "status": "success"},
        {
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "two", "thinking": "three"},
            ]
        },
        {"prompt": QUESTION, "completion": [ANSWER]},
        {"prompt": "one", "completion": [ANSWER]},
        {"messages": QUESTION, "choices": [{"message": ANSWER, "finish_reason": "stop"}]},
        {"request": {"messages": QUESTION}, "choices": [{"message": ANSWER}]},
        {
            "request": {"body": {"messages": QUESTION}},
            "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
        },
        {
            "body": {"messages": QUESTION},
            "response": {"body": {"choices": [{"message": ANSWER}]}},
            "error": None,
        },
        {"messages": QUESTION, "response": {"choices": [{"message": ANSWER}]}},
    ],
)
def test_layouts_give_the_same_row(record):
    row = only(record)
    assert isinstance(row, Row), row
    assert row.prompt == QUESTION and row.completion == PARTS and row.finished


def test_a_string_prompt_is_a_user_turn_unless_it_is_rendered():
    row = only({"prompt": "one", "completion": "three</think>two"})
    assert row.prompt == QUESTION and row.completion.content == "three</think>two"
    rendered = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n"
    row = only({"prompt": rendered, "completion": "three\n</think>\n\ntwo"})
    assert row.prompt == rendered and row.completion == "three\n</think>\n\ntwo"


def test_sglangs_generate_output():
    meta = {"finish_reason": {"type": "length", "length": 5}, "prompt_tokens": 1}
    row = only({"prompt": "one", "text": "cut thou", "meta_info": meta})
    assert row.completion.content == "cut thou" and not row.finished
    row = only({"prompt_token_ids": [1, 2], "output_ids": [3, 4], "text": "x", "meta_info": {}})
    assert (row.prompt, row.completion) == ([1, 2], [3, 4])


def test_choices_are_numbered_and_fail_one_by_one():
    record = {
        "custom_id": "r",
        "messages": QUESTION,
        "choices": [{"message": ANSWER}, {"message": None}, {"message": ANSWER}],
    }
    first, second, third = parse(record)
    assert (first.id, second.id, third.id) == ("r#0", "r#1", "r#2")
    assert isinstance(second, Reject) and second.reason == "no_assistant"


def test_every_turn_of_a_conversation_on_request():
    first, second = {**ANSWER, "content": "first"}, {**ANSWER, "content": "second"}
    talk = [*QUESTION, first, {"role": "user", "content": "and then?"}, second]
    for name in ("messages", "conversations"):
        record = {"id": "r", name: talk, "finish_reason": "length"}
        assert only(record).completion.content == "second"
        one, two = parse(record, all_turns=True)
        assert (one.id, two.id) == ("r/0", "r/1")
        assert one.prompt == QUESTION and one.completion.content == "first"
        assert [message["content"] for message in two.prompt] == ["one", "first", "and then?"]
        assert two.prompt[1]["reasoning_content"] == "three"
        assert (one.finished, two.finished) == (True, False)
    unanswered = {"messages": talk[:3]}
    assert [row.id for row in parse(unanswered, all_turns=True)] == ["file@7/0"]
    assert only(unanswered).reason == "no_assistant"
    assert only({"messages": QUESTION}, all_turns=True).reason == "no_assistant"
    choices = {"messages": QUESTION, "choices": [{"message": ANSWER}]}
    assert only(choices, all_turns=True).id == "file@7"


def test_ids_come_from_the_line_or_its_place():
    assert only({"messages": [*QUESTION, ANSWER]}).id == "file@7"
    assert only({"id": 3, "messages": [*QUESTION, ANSWER]}).id == "3"
    assert only({"id": "a", "custom_id": "b", "messages": [*QUESTION, ANSWER]}).id == "b"


def test_requests_say_how_the_server_thought():
    options = {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}
    row = only({"messages": QUESTION, "choices": [{"message": ANSWER}], **options})
    assert (row.thinking, row.preserve_thinking) == (False, True)
    prompts = {"c": {"messages": QUESTION, **options}}
    row = only({"custom_id": "c", "choices": [{"message": ANSWER}]}, prompts=prompts.get)
    assert (row.prompt, row.thinking) == (QUESTION, False)


def test_unread_fields_may_hold_what_json_forbids():
    good = json.dumps({"messages": [*QUESTION, ANSWER]})[:-1]
    for extra in (', "score": NaN}', ', "score": 1e400}', r', "note": "\ud800"}'):
        assert isinstance(only((good + extra).encode()), Row), extra
    bad = only(json.dumps({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}).encode())
    assert bad.reason == "lone_surrogate"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]\n", "not_json"),
        (b"{}\n", "no_messages"),
        (b'{"messages": [\n', "not_json"),
        (b'{"messages": [', "cut_line"),
        (b"\xff\xfe{\x00}\x00\n", "invalid_utf8"),
        (b"[" * 100_000 + b"\n", "not_json"),
        (b"\x00" * 4096 + b"\n", "not_json"),
    ],
)
def test_unreadable_lines_have_their_reason(line, reason):
    assert only(line).reason == reason
    assert parse(b" \r\n") == []


@pytest.mark.parametrize("arguments", ["{not json", "[1]", 5])
def test_bad_tool_arguments_are_rejected(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    row = only({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}]})
    assert row.reason == "bad_tool_arguments"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "role",
                    "from",
                    "content",
                    "value",
                    "reasoning",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "choices",
                    "message",
                    "finish_reason",
                    "response",
                    "body",
                    "prompt",
                    "completion",
                    "input_ids",
                    "loss_mask",
                    "prompt_token_ids",
                    "token_ids",
                    "text",
                    "meta_info",
                    "type",
                    "tools",
                    "custom_id",
                    "id",
                    "error",
                    "status",
                    "request",
                    "chat_template_kwargs",
                    "output_ids",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(json_values)
@settings(max_examples=600, deadline=None)
def test_no_object_raises(value):
    for result in parse(json.dumps(value).encode(), prompts={}.get):
        assert isinstance(result, Row) or result.reason in REASONS


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise(data):
    for result in parse(data.replace(b"\n", b"")):
        assert isinstance(result, Row) or result.reason in REASONS
