"""A hand-written renderer for one chat template: ten times as fast as jinja, and equal to it.

The template stays the truth. This renderer stands in only for a template whose sha256 it knows and
only for rows it covers; the encoder compares both on the run's first rows, on a fixed set that
takes every branch, and on one row in a thousand after that.
"""

from collections.abc import Sequence
from typing import Any

KNOWN_TEMPLATES = frozenset(
    {
        # Qwen3.6, shared by its 27B and 35B-A3B
        "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    }
)
COVERED_ROLES = frozenset({"system", "user", "assistant"})


def fast_render(
    messages: Sequence[dict[str, Any]],
    *,
    thinking: bool,
    preserve_thinking: bool,
    add_generation_prompt: bool,
) -> str | None:
    """What a template of KNOWN_TEMPLATES gives for these messages; None when jinja must tell.

    Covers text messages of system, user and assistant; no tools, and nothing the template refuses.
    """
    last_query = _last_query(messages)
    if last_query is None:
        return None
    parts: list[str] = []
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"].strip()
        if role == "user":
            parts += ("<|im_start|>user\n", content, "<|im_end|>\n")
        elif role == "assistant":
            reasoning, content = _reasoning(message, content)
            parts.append("<|im_start|>assistant\n")
            if preserve_thinking or index > last_query:
                parts += ("<think>\n", reasoning, "\n</think>\n\n")
            parts += (content, "<|im_end|>\n")
        elif index == 0:
            parts += ("<|im_start|>system\n", content, "<|im_end|>\n")
        else:
            return None
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n<think>\n")
        if not thinking:
            parts.append("\n</think>\n\n")
    return "".join(parts)


def _last_query(messages: Sequence[dict[str, Any]]) -> int | None:
    """The last user turn that is no tool response; None without one, or for uncovered messages."""
    found = None
    for index, message in enumerate(messages):
        if message["role"] not in COVERED_ROLES or "tool_calls" in message:
            return None
        if message["role"] == "user":
            content = message["content"].strip()
            if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
                found = index
    return found


def _reasoning(message: dict[str, Any], content: str) -> tuple[str, str]:
    """An assistant turn's thought and the rest, told apart as the template does."""
    if "reasoning_content" in message:
        return message["reasoning_content"].strip(), content
    if "</think>" not in content:
        return "", content
    thought = content.partition("</think>")[0].rstrip("\n").rpartition("<think>")[2].lstrip("\n")
    return thought.strip(), content.rpartition("</think>")[2].lstrip("\n")


def branch_cases() -> list[list[dict[str, Any]]]:
    """Conversations that take every branch of the renderer, and some that it must leave alone."""
    user = {"role": "user", "content": " hi\n"}
    wrapped = {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    inline = {"role": "assistant", "content": "\n<think>\nfirst\n</think>\n\nthen</think>\n\nend"}
    bare = {"role": "assistant", "content": "no opening\n</think>\nanswer"}
    fields = {"role": "assistant", "content": " four ", "reasoning_content": "\n 2+2 \n"}
    empty = {"role": "assistant", "content": "<think>x</think>y", "reasoning_content": ""}
    system = {"role": "system", "content": "  be brief "}
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}
    return [
        [user],
        [system, user],
        [{"role": "system", "content": ""}, user],
        *[[user, turn] for turn in (inline, bare, fields, empty)],
        *[[system, user, turn, user] for turn in (inline, bare, fields, empty)],
        [user, fields, wrapped, bare],
        [user, bare, user, inline, wrapped, fields],
        [wrapped],
        [user, system],
        [user, {"role": "developer", "content": "x"}],
        [user, {**fields, "tool_calls": [call]}, {"role": "tool", "content": "4"}],
        [{"role": "user", "content": "\u2003<|im_end|>\x1c e\u0301 \u200b"}],
    ]
