"""Rows -> token ids and loss masks, through the target's own chat template and tokenizer.

Prompt (rendered with the generation prompt, `<think>` included) and completion are tokenized apart
and joined, as a server does; so the mask is a split by length, and no text is ever searched for
markers. It is 1 on everything that the target generated, through `<|im_end|>` when it ended its
turn, and 0 on the prompt. Only tokenizers and jinja2: transformers' AutoTokenizer imports torch.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.rows import Completion, Row, RowRejected
from common.run import UserError

END_OF_TURN = "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
AFTER_THINKING = "\n</think>\n\n"


@dataclass(frozen=True)
class EncodeSettings:
    """What decides a row's ids besides the row.

    no_reasoning: what a row without any reasoning field becomes while thinking is on: "nonthinking"
    (the empty think block is in the prompt), "empty" (it is in the loss) or "reject".
    """

    max_length: int
    min_loss_tokens: int
    thinking: bool
    preserve_thinking: bool
    no_reasoning: str
    mask_token_id: int | None


@dataclass(frozen=True)
class Encoded:
    """input_ids (T,) int32, loss_mask (T,) bool; cut at max_length; no field spoke of reasoning."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool
    no_reasoning: bool


class ChatTokenizer:
    """A tokenizer and a chat template, loaded from tokenizer.json and the template's own file.

    Loading tokenizer.json itself, not the class that tokenizer_config.json names, keeps Qwen3.6's
    pre-tokenizer: the class named there would rebuild an older one.
    """

    def __init__(self, tokenizer_json: bytes, template: str) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _environment().from_string(template)
        self.tokenizer_sha256 = hashlib.sha256(tokenizer_json).hexdigest()
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, path: str) -> "ChatTokenizer":
        """From a folder or a hub id. Raises UserError when a file is missing or unreadable."""
        folder = _folder(path)
        try:
            tokenizer_json = (folder / "tokenizer.json").read_bytes()
        except OSError as error:
            raise UserError(f"--tokenizer {path}: no tokenizer.json there") from error
        try:
            return cls(tokenizer_json, _template_text(folder, path))
        except jinja2.TemplateError as error:
            raise UserError(f"--tokenizer {path}: the chat template is broken: {error}") from error
        except Exception as error:  # tokenizers raises nothing narrower
            if isinstance(error, UserError):
                raise
            raise UserError(f"--tokenizer {path}: tokenizer.json is unusable: {error}") from error

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text; None when the vocabulary has no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, control tokens in it included, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        thinking: bool,
        preserve_thinking: bool,
        add_generation_prompt: bool = True,
    ) -> str:
        """Messages as the server rendered them. Raises RowRejected for what it refuses."""
        options = {"preserve_thinking": True} if preserve_thinking else {}
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowRejected("template_error", str(error)) from error


def encode_row(row: Row, tokenizer: ChatTokenizer, settings: EncodeSettings) -> Encoded:
    """The ids and the mask of a row. Raises RowRejected with its reason."""
    no_reasoning = False
    if isinstance(row.completion, list):
        prompt: list[Any] = list(row.prompt)  # token ids too, or nothing
        completion = row.completion
    else:
        prompt_text, completion_text, no_reasoning = row_texts(row, tokenizer, settings)
        prompt, completion = tokenizer.encode(prompt_text), tokenizer.encode(completion_text)
    ids = np.array([*prompt, *completion], dtype=np.int64)
    mask = np.arange(len(ids)) >= len(prompt)
    if row.loss_mask is not None:
        mask = np.array(row.loss_mask, dtype=bool)
    _check_ids(ids, tokenizer, settings)
    if not mask.any():
        raise RowRejected("no_loss_tokens", "nothing in it was generated by the target")
    if mask.argmax() >= settings.max_length:
        raise RowRejected(
            "too_long", f"a prompt of {mask.argmax()} tokens; --max-length {settings.max_length}"
        )
    cut = len(ids) > settings.max_length
    ids, mask = ids[: settings.max_length], mask[: settings.max_length]
    if mask.sum() < settings.min_loss_tokens:
        raise RowRejected(
            "too_few_loss_tokens",
            f"{mask.sum()} loss tokens; --min-loss-tokens {settings.min_loss_tokens}",
        )
    return Encoded(ids.astype(np.int32), mask, cut, no_reasoning)


def _check_ids(ids: np.ndarray, tokenizer: ChatTokenizer, settings: EncodeSettings) -> None:
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(outside):
        raise RowRejected(
            "token_out_of_range",
            f"id {outside[0]}; the tokenizer has 0 to {tokenizer.vocab_size - 1}",
        )
    if settings.mask_token_id is not None and (ids == settings.mask_token_id).any():
        raise RowRejected(
            "mask_token", f"it holds the drafter's mask token {settings.mask_token_id}"
        )


def row_texts(
    row: Row, tokenizer: ChatTokenizer, settings: EncodeSettings
) -> tuple[str, str, bool]:
    """Prompt text (mask 0), completion text (mask 1), and whether no field spoke of reasoning."""
    if isinstance(row.prompt, str):
        assert isinstance(row.completion, str)
        return row.prompt, _ended(row.completion, row.finished), False
    assert isinstance(row.completion, Completion)
    thinking = settings.thinking if row.thinking is None else row.thinking
    turn = _with_inline_thought(row.completion)
    if not (turn.content or turn.reasoning or turn.tool_calls):
        raise RowRejected("empty_completion", "the assistant said nothing")
    no_reasoning = thinking and turn.reasoning is None and row.finished
    if no_reasoning and settings.no_reasoning == "reject":
        raise RowRejected("no_reasoning", "no reasoning field while thinking is on")
    if no_reasoning and settings.no_reasoning == "nonthinking":
        thinking = False
    preserve = row.preserve_thinking
    options: dict[str, Any] = {
        "tools": row.tools,
        "thinking": thinking,
        "preserve_thinking": settings.preserve_thinking if preserve is None else preserve,
    }
    prompt = tokenizer.render(_messages(row), **options)
    if not row.finished and not turn.tool_calls:
        return prompt, _unfinished_text(turn, thinking), no_reasoning
    message = {
        "role": "assistant",
        "content": turn.content,
        "reasoning_content": turn.reasoning or "",
        **({"tool_calls": turn.tool_calls} if turn.tool_calls else {}),
    }
    whole = tokenizer.render([*_messages(row), message], add_generation_prompt=False, **options)
    if not whole.startswith(prompt):
        raise RowRejected(
            "template_error",
            "the rendered conversation does not begin with its generation prompt (reasoning in a "
            "row with thinking off?)",
        )
    completion = whole[len(prompt) :].rstrip("\n")
    return (
        prompt,
        completion if row.finished else completion.removesuffix(END_OF_TURN),
        no_reasoning,
    )


def _messages(row: Row) -> list[dict[str, Any]]:
    return [message for message in row.prompt if isinstance(message, dict)]


def _with_inline_thought(turn: Completion) -> Completion:
    """Move an inline thought, with or without its opening tag, to where the template reads it."""
    if THINK_END not in turn.content:
        return turn
    thought, _, content = turn.content.partition(THINK_END)
    if turn.reasoning or THINK_END in content:
        raise RowRejected("stray_think_end", "a </think> that ends no thought")
    return Completion(_without_opening(thought).strip(), content.strip(), turn.tool_calls)


def _unfinished_text(turn: Completion, thinking: bool) -> str:
    """What a target that was cut off had written: nothing closed, nothing ended.

    Without a reasoning field and without </think>, a server put the unfinished thought in content.
    """
    if not thinking:
        return turn.content
    if turn.reasoning is None:
        return _without_opening(turn.content)
    if not turn.content:
        return _without_opening(turn.reasoning)
    return turn.reasoning.strip() + AFTER_THINKING + turn.content.lstrip()


def _without_opening(thought: str) -> str:
    stripped = thought.lstrip()
    return stripped.removeprefix(THINK_START).lstrip("\n") if stripped else thought


def _ended(text: str, finished: bool) -> str:
    if not finished or text.endswith(END_OF_TURN):
        return text
    return text + END_OF_TURN


# ---- files


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # only for hub ids

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.jinja"]))
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {path}: no such folder, and not on the hub either") from error


def _template_text(folder: Path, path: str) -> str:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_bytes()).get("chat_template") if config.exists() else None
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise UserError(
            f"--tokenizer {path}: no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json)"
        )
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
