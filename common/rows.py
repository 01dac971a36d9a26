"""One line of JSONL -> training rows: the layouts in which people have their completions.

Told apart line by line, so one file may mix them:
- batch output of OpenAI and vLLM (response.body.choices; prompt beside it or by custom_id)
- a chat completion saved as it came (choices), with its messages or request beside it
- token ids of a server (prompt_token_ids with token_ids or output_ids), taken as they are
- input_ids + loss_mask, taken as they are
- SGLang's /generate (text, meta_info) with its prompt or messages beside it
- messages or conversations (role/content or from/value) that end in an assistant turn
- prompt + completion, strings or lists of messages
One row a completion; of a conversation the last assistant turn, or each. Reasoning may stand in
reasoning_content, reasoning, thinking or thought, or inline before </think>.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from common.messages import (
    Completion,
    RowRejected,
    completion_of,
    message_of,
    role_of,
    tools_of,
)

ROW_VERSION = 1  # goes up when the same line would give another row

FINISHED = ("stop", "tool_calls", "eos", "function_call")
CUT = ("length", "max_tokens", None)
ABSENT = object()

PromptLookup = Callable[[str], dict[str, Any] | None]


@dataclass(frozen=True)
class Reject:
    """A row that was not used, and why."""

    id: str
    reason: str
    error: str


@dataclass(frozen=True)
class Row:
    """One completion and its prompt.

    prompt: messages, a rendered text, or token ids. completion: parts of a turn, the raw generated
    text, or token ids. finished: the target ended its turn. thinking, preserve_thinking: what
    the request said, None when it said nothing. loss_mask: only with ready-made ids, which then are
    the completion, and the prompt is empty.
    """

    id: str
    source: str | None
    prompt: list[dict[str, Any]] | str | list[int]
    completion: Completion | str | list[int]
    finished: bool
    tools: list[Any] | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    loss_mask: list[bool] | None = None


def parse_line(
    line: bytes, *, fallback_id: str, prompts: PromptLookup | None = None, all_turns: bool = False
) -> list[Row | Reject]:
    """The rows of one line (with its newline, where it had one), in the order of its choices.

    Never raises for what a line may hold: what cannot be used comes back as a Reject. A blank line
    gives nothing. `prompts` finds the request of a custom_id. With `all_turns` every assistant turn
    of a conversation is a row of its own, its history the messages before it.
    """
    if not line.strip():
        return []
    try:
        record, doubtful = _decode(line)
    except RowRejected as error:
        return [Reject(fallback_id, error.reason, str(error))]
    row_id = _row_id(record, fallback_id)
    results: list[Row | Reject] = []
    try:
        found = list(_completions(record, prompts, all_turns))
    except RowRejected as error:
        return [Reject(row_id, error.reason, str(error))]
    for suffix, build in found:
        own_id = row_id + suffix
        try:
            row = build(own_id)
            if doubtful:
                _refuse_surrogates(row)
            results.append(row)
        except RowRejected as error:
            results.append(Reject(own_id, error.reason, str(error)))
    return results


# ---- bytes -> a JSON object


def _decode(line: bytes) -> tuple[dict[str, Any], bool]:
    """The object of a line, and whether it may hold lone surrogates."""
    data = line.removeprefix(b"\xef\xbb\xbf")
    doubtful = False
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError:
        # orjson refuses NaN, 1e400 and lone surrogates even in fields that nobody reads
        record, doubtful = _decode_leniently(data), True
    if not isinstance(record, dict):
        raise RowRejected("not_json", f"a JSON {type(record).__name__}, not an object")
    return record, doubtful


def _decode_leniently(data: bytes) -> Any:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RowRejected("invalid_utf8", "UTF-16; convert the file to UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowRejected("invalid_utf8", str(error)) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "not_json" if data.endswith(b"\n") else "cut_line"
        raise RowRejected(reason, str(error)) from error


def _refuse_surrogates(row: Row) -> None:
    used = (row.id, row.source, row.prompt, row.tools, row.completion)
    for text in _strings(used):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowRejected("lone_surrogate", str(error)) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Completion):
        yield from _strings((value.reasoning, value.content, value.tool_calls))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _row_id(record: Mapping[str, Any], fallback_id: str) -> str:
    for name in ("custom_id", "id"):
        value = record.get(name)
        if isinstance(value, (str, int)) and value != "":
            return str(value).encode(errors="replace").decode()
    return fallback_id


# ---- an object -> its completions


def _completions(
    record: dict[str, Any], prompts: PromptLookup | None, all_turns: bool
) -> Iterator[tuple[str, Callable[[str], Row]]]:
    """For each completion its id's suffix and a builder (row id -> Row). Raises RowRejected."""
    _refuse_failed(record)
    if "loss_mask" in record:
        yield "", functools.partial(_ready_ids, record)
        return
    answer = _answer(record)
    request = _request(record, prompts)
    choices = answer.get("choices")
    if choices is not None:
        if not isinstance(choices, list) or not choices:
            raise RowRejected("request_failed", "the answer has no choices")
        for number, choice in enumerate(choices):
            if not isinstance(choice, dict):
                raise RowRejected("request_failed", "a choice is not an object")
            suffix = f"#{number}" if len(choices) > 1 else ""
            yield suffix, functools.partial(_from_choice, choice, record, request)
    elif "output_ids" in record or "meta_info" in record:
        yield "", functools.partial(_from_choice, record, record, request)
    elif "messages" in record or "conversations" in record:
        messages: Any = record.get("messages", record.get("conversations"))
        ends = _assistant_turns(messages) if all_turns else []
        for turn, end in enumerate(ends):
            part = {**record, "messages": messages[: end + 1]}
            if end + 1 < len(messages):  # what the conversation went on after was finished
                part.pop("finish_reason", None)
            yield f"/{turn}", functools.partial(_from_conversation, part, request)
        if not ends:
            yield "", functools.partial(_from_conversation, record, request)
    elif "prompt" in record and "completion" in record:
        yield "", functools.partial(_from_prompt, record, request)
    else:
        raise RowRejected("no_messages", f"no known layout in the keys {sorted(record)[:12]}")


def _assistant_turns(messages: Any) -> list[int]:
    """Where a conversation's assistant turns are."""
    if not isinstance(messages, list):
        return []
    return [
        index
        for index, message in enumerate(messages)
        if isinstance(message, dict) and role_of(message) == "assistant"
    ]


def _refuse_failed(record: Mapping[str, Any]) -> None:
    if record.get("error"):
        raise RowRejected("request_failed", f"error: {record['error']}")
    if record.get("status") in ("error", "skipped", "failed"):
        raise RowRejected("request_failed", f"status {record['status']}")
    if "response" in record:
        response = record["response"]
        if not isinstance(response, dict):
            raise RowRejected("request_failed", "no response")
        if response.get("status_code", 200) != 200:
            raise RowRejected("request_failed", f"status code {response['status_code']}")


def _answer(record: dict[str, Any]) -> dict[str, Any]:
    """Where the choices stand: response.body, response, or the line itself."""
    response = record.get("response")
    if isinstance(response, dict):
        body = response.get("body", response)
        if not isinstance(body, dict):
            raise RowRejected("request_failed", "the response has no body")
        if body.get("error"):
            raise RowRejected("request_failed", f"error: {body['error']}")
        return {"choices": [], **body}
    return record


def _request(record: dict[str, Any], prompts: PromptLookup | None) -> dict[str, Any]:
    """What was asked: the fields beside the answer, in `request`, or found by custom_id."""
    request: dict[str, Any] = {}
    if prompts is not None and isinstance(record.get("custom_id"), str):
        request |= prompts(record["custom_id"]) or {}
    for holder in (record.get("request"), record.get("body"), record):
        if isinstance(holder, dict):
            body = holder.get("body")
            request |= body if isinstance(body, dict) else {}
            request |= {key: value for key, value in holder.items() if value is not None}
    return request


def _ready_ids(record: dict[str, Any], row_id: str) -> Row:
    ids, mask = _ids(record.get("input_ids"), "input_ids"), record["loss_mask"]
    if not isinstance(mask, list) or not all(flag in (0, 1) for flag in mask):
        raise RowRejected("unsupported_content", "loss_mask must be a list of 0 and 1")
    if len(ids) != len(mask):
        raise RowRejected("length_mismatch", f"{len(ids)} input_ids, {len(mask)} in loss_mask")
    flags = [bool(flag) for flag in mask]
    return Row(row_id, _source(record), [], ids, finished=True, loss_mask=flags)


def _from_choice(
    choice: dict[str, Any], record: dict[str, Any], request: dict[str, Any], row_id: str
) -> Row:
    finished = _finished(choice, record)
    prompt_ids = choice.get("prompt_token_ids") or request.get("prompt_token_ids")
    ids = choice.get("token_ids") or choice.get("output_ids")
    if prompt_ids is not None and ids is not None:
        return Row(
            row_id,
            _source(record),
            _ids(prompt_ids, "prompt_token_ids"),
            _ids(ids, "token_ids"),
            finished,
        )
    if isinstance(choice.get("text"), str):
        return _row(record, request, row_id, choice["text"], finished)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise RowRejected("no_assistant", "the choice has no message")
    return _row(record, request, row_id, completion_of(message), finished)


def _from_conversation(record: dict[str, Any], request: dict[str, Any], row_id: str) -> Row:
    messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise RowRejected("no_messages", "the list of messages is empty")
    last = messages[-1]
    if not isinstance(last, dict) or role_of(last) != "assistant":
        raise RowRejected("no_assistant", "the messages do not end in an assistant turn")
    finished = _finished(last if "finish_reason" in last else record, record)
    asked = {**request, "messages": messages[:-1]}
    return _row(record, asked, row_id, completion_of(last), finished)


def _from_prompt(record: dict[str, Any], request: dict[str, Any], row_id: str) -> Row:
    completion, finished = record["completion"], _finished(record, record)
    if isinstance(completion, list):
        prompt = record["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            raise RowRejected("no_prompt", "prompt is neither a string nor a list of messages")
        whole = {**record, "messages": [*prompt, *completion]}
        return _from_conversation(whole, request, row_id)
    if not isinstance(completion, str):
        raise RowRejected("no_assistant", "completion is neither a string nor a list")
    return _row(record, request, row_id, completion, finished)


def _row(
    record: dict[str, Any],
    request: dict[str, Any],
    row_id: str,
    completion: Completion | str,
    finished: bool,
) -> Row:
    """Put a completion and what was asked together.

    A prompt in text form is a rendered one when it holds ChatML's turn marker, and its completion
    is then the raw text; any other is what a user said.
    """
    prompt: list[dict[str, Any]] | str
    if isinstance(request.get("messages"), list):
        prompt = [message_of(message) for message in request["messages"]]
    elif isinstance(request.get("prompt"), list):
        prompt = [message_of(message) for message in request["prompt"]]
    elif isinstance(request.get("prompt"), str):
        prompt = request["prompt"]
        if "<|im_start|>" not in prompt:
            prompt = [{"role": "user", "content": prompt}]
    else:
        raise RowRejected(
            "no_prompt",
            "the line holds no prompt and none is known for its custom_id; --prompts names the "
            "file of requests",
        )
    if isinstance(completion, str) and not isinstance(prompt, str):
        completion = Completion(None, completion, [])
    options = request.get("chat_template_kwargs")
    options = options if isinstance(options, dict) else {}
    return Row(
        id=row_id,
        source=_source(record),
        prompt=prompt,
        completion=completion,
        finished=finished,
        tools=tools_of(request.get("tools")),
        thinking=_flag(options.get("enable_thinking")),
        preserve_thinking=_flag(options.get("preserve_thinking")),
    )


# ---- fields


def _finished(choice: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether the target ended its turn; an absent reason means so. Raises RowRejected."""
    meta = choice.get("meta_info")
    holders = [choice, meta if isinstance(meta, dict) else {}, record]
    holder = next((h for h in holders if "finish_reason" in h), {})
    reason = holder.get("finish_reason", ABSENT)
    stopped_by = holder.get("stop_reason", holder.get("matched_stop"))
    if isinstance(reason, dict):
        stopped_by = reason.get("matched", stopped_by)
        reason = reason.get("type")
    if reason is ABSENT:
        return True
    if reason in FINISHED:
        # a stop string ends the text without the end token
        return not isinstance(stopped_by, str) or stopped_by == "<|im_end|>"
    if reason in CUT:
        return False
    raise RowRejected("finish_reason", f"finish_reason {reason!r}")


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RowRejected("unsupported_content", f"{name} must be a list of whole numbers")
    return value


def _source(record: Mapping[str, Any]) -> str | None:
    for name in ("source", "category"):
        if isinstance(record.get(name), str):
            return record[name]
    return None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
