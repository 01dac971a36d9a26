"""The messages of a chat in one spelling, whatever a file calls their fields.

What cannot be used is a RowRejected, whose reasons are the closed list REASONS.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REASONS = {  # and what the line is or does
    "not_json": "is no JSON object",
    "invalid_utf8": "is no UTF-8",
    "lone_surrogate": "holds half a character",
    "cut_line": "is the last one, without its end",
    "request_failed": "is a failed request",
    "finish_reason": "ended neither well nor at a length limit",
    "no_prompt": "lacks its request; --prompts joins a batch with the file of them",
    "no_messages": "is in no known layout, or holds no messages",
    "no_assistant": "has no assistant turn at its end",
    "empty_completion": "says nothing",
    "unsupported_content": "holds what is no text: images, parts of other types",
    "template_error": "is refused by the chat template, say for a late system turn",
    "bad_tool_arguments": "has tools or tool calls that can't be read",
    "stray_think_end": "has a second </think>",
    "length_mismatch": "has ready-made ids and mask of different lengths",
    "token_out_of_range": "has ready-made ids beyond the vocabulary",
    "mask_token": "holds the drafter's --mask-token",
    "no_loss_tokens": "has nothing that the target generated",
    "too_few_loss_tokens": "has fewer than --min-loss-tokens",
    "too_long": "has a prompt beyond --max-length; with --too-long reject any longer row",
    "no_reasoning": "has no reasoning, with --no-reasoning reject",
    "worker_killed": "killed two workers, most likely for want of memory",
}
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
MAX_ERROR = 500  # characters of an error kept


class RowRejected(Exception):
    """A row that cannot be used; `reason` is one of REASONS."""

    def __init__(self, reason: str, error: str) -> None:
        assert reason in REASONS, reason
        super().__init__(error[:MAX_ERROR])
        self.reason = reason


@dataclass(frozen=True)
class Completion:
    """An assistant turn in parts; reasoning None means that no field spoke of it."""

    reasoning: str | None
    content: str
    tool_calls: list[dict[str, Any]]


def completion_of(message: dict[str, Any]) -> Completion:
    """The parts of an assistant's message. Raises RowRejected for a refusal."""
    turn = message_of(message)
    if message.get("refusal") and not turn["content"]:
        raise RowRejected("unsupported_content", "the message is a refusal")
    return Completion(turn.get("reasoning_content"), turn["content"], turn.get("tool_calls", []))


def message_of(message: Any) -> dict[str, Any]:
    """A message with one spelling of every field, as chat templates read it."""
    if not isinstance(message, dict):
        raise RowRejected("unsupported_content", f"a message is a {type(message).__name__}")
    content = message["value"] if "value" in message else message.get("content")
    turn: dict[str, Any] = {"role": role_of(message), "content": _text(content)}
    reasoning = next(
        (message[name] for name in REASONING_NAMES if message.get(name) is not None), None
    )
    if reasoning is not None:
        turn["reasoning_content"] = _text(reasoning)
    if message.get("tool_calls"):
        turn["tool_calls"] = [_tool_call(call) for call in _list(message["tool_calls"])]
    return turn


def role_of(message: Mapping[str, Any]) -> str:
    """A message's role by its present name, or an empty text."""
    role = message.get("role", message.get("from"))
    return ROLES.get(role, role) if isinstance(role, str) else ""


def _text(content: Any) -> str:
    """Text of a content: a string, nothing, or text parts, which join without a separator."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("unsupported_content", f"content is a {type(content).__name__}")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
            parts.append(_text(part["text"]))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowRejected("unsupported_content", f"a content part of type {kind}")
    return "".join(parts)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRejected("bad_tool_arguments", "a tool call without a function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise RowRejected("bad_tool_arguments", f"{function['name']}: {error}") from error
    if arguments is not None and not isinstance(arguments, dict):
        raise RowRejected("bad_tool_arguments", f"{function['name']}: arguments are no object")
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or {}},
    }


def tools_of(tools: Any) -> list[Any] | None:
    """The tools of a request, a list or its JSON; None without any. Raises RowRejected."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowRejected("bad_tool_arguments", f"tools: {error}") from error
    return _list(tools) or None


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowRejected("unsupported_content", f"a list was expected, not {type(value).__name__}")
    return value
