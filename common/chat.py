"""Rows -> token ids and loss masks, through the target's own chat template and tokenizer.

Prompt (rendered with the generation prompt, `<think>` included) and completion are tokenized apart
and joined, as a server does; so the mask is a split by length, and no text is ever searched for
markers. It is 1 on everything that the target generated, through `<|im_end|>` when it ended its
turn, and 0 on the prompt. Only tokenizers and jinja2: transformers' AutoTokenizer imports torch.
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.engines import Engine, ReferenceEngine
from common.messages import Completion, RowRejected
from common.render import KNOWN_TEMPLATES, fast_render
from common.rows import Row
from common.run import UserError, one_line

END_OF_TURN = "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
AFTER_THINKING = "\n</think>\n\n"


@dataclass(frozen=True)
class EncodeSettings:
    """What decides a row's ids besides the row.

    too_long: "cut" a longer row to its first max_length ids, or "reject" it. no_reasoning: what a
    row without any reasoning field becomes while thinking is on: "nonthinking" (the empty think
    block is in the prompt), "empty" (it is in the loss) or "reject".
    """

    max_length: int
    min_loss_tokens: int
    thinking: bool
    preserve_thinking: bool
    no_reasoning: str
    too_long: str
    mask_token_id: int | None


@dataclass(frozen=True)
class RowTexts:
    """A row as text, mask 0 and mask 1, and what of it deserves to be counted.

    no_reasoning: no field spoke of reasoning while thinking was on. unverified_history: the prompt
    holds earlier thoughts, and only the request says that the server saw them.
    """

    prompt: str
    completion: str
    no_reasoning: bool = False
    unverified_history: bool = False


@dataclass(frozen=True)
class Encoded:
    """input_ids (T,) int32, of which the first prompt_length are no loss tokens.

    A row of ready-made ids has a mask of its own, ready_mask (T,) bool. cut: at max_length.
    """

    input_ids: np.ndarray
    prompt_length: int
    ready_mask: np.ndarray | None
    cut: bool

    @property
    def loss_mask(self) -> np.ndarray:
        """(T,) bool, true on what the target generated."""
        if self.ready_mask is not None:
            return self.ready_mask
        return np.arange(len(self.input_ids)) >= self.prompt_length


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
        self.tokenizer_json, self.template = tokenizer_json, template
        self.tokenizer_sha256 = hashlib.sha256(tokenizer_json).hexdigest()
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.fast_rendering = self.template_sha256 in KNOWN_TEMPLATES
        self.reference = ReferenceEngine(self._tokenizer)
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

    @property
    def added_tokens(self) -> list[str]:
        """The tokens that are matched as they stand: control tokens, tags and the like."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def by_template_alone(self) -> "ChatTokenizer":
        """The same without the hand-written renderer."""
        other = copy.copy(self)
        other.fast_rendering = False
        return other

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text; None when the vocabulary has no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, control tokens in it included, nothing added."""
        return self.reference.encode([text])[0].tolist()

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
        if self.fast_rendering and not tools:
            text = fast_render(
                messages,
                thinking=thinking,
                preserve_thinking=preserve_thinking,
                add_generation_prompt=add_generation_prompt,
            )
            if text is not None:
                return text
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


def encode_rows(
    rows: Sequence[Row],
    texts: Sequence[RowTexts | None],
    tokenizer: ChatTokenizer,
    engine: Engine,
    settings: EncodeSettings,
) -> list[Encoded | RowRejected]:
    """The ids of rows, or why a row has none; `texts` come from row_texts, None for ready ids."""
    flat = [part for text in texts if text for part in (text.prompt, text.completion)]
    try:
        ids, ends = engine.encode(flat)
    except (TypeError, UnicodeEncodeError) as error:
        if len(rows) == 1:
            return [RowRejected("lone_surrogate", str(error))]
        pairs = zip(rows, texts, strict=True)
        return [encode_rows([row], [t], tokenizer, engine, settings)[0] for row, t in pairs]
    results: list[Encoded | RowRejected] = []
    bounds = iter(ends.tolist())
    end = next(bounds)
    for row, text in zip(rows, texts, strict=True):
        try:
            if text is None:
                results.append(_finish(*_ready_ids(row, tokenizer), settings))
            else:
                start, middle, end = end, next(bounds), next(bounds)
                results.append(_finish(ids[start:end], middle - start, None, settings))
        except RowRejected as error:
            results.append(error)
    return results


def _ready_ids(row: Row, tokenizer: ChatTokenizer) -> tuple[np.ndarray, int, np.ndarray | None]:
    """Ids that came with the row, the length of the prompt in them, and their mask if they had one.

    Raises RowRejected for an id that the tokenizer does not have.
    """
    assert isinstance(row.completion, list)
    given = [*row.prompt, *row.completion]
    try:
        ids = np.array(given, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)].tolist()
    except OverflowError:
        outside = [max(given, key=abs)]
    if outside:
        raise RowRejected(
            "token_out_of_range",
            f"id {outside[0]}; the tokenizer has 0 to {tokenizer.vocab_size - 1}",
        )
    mask = None if row.loss_mask is None else np.array(row.loss_mask, dtype=bool)
    return ids.astype(np.int32), len(row.prompt), mask


def _finish(
    ids: np.ndarray, prompt_length: int, mask: np.ndarray | None, settings: EncodeSettings
) -> Encoded:
    """Cut a row to its length. Raises RowRejected when it cannot be used."""
    if settings.mask_token_id is not None and (ids == settings.mask_token_id).any():
        raise RowRejected(
            "mask_token", f"it holds the drafter's mask token {settings.mask_token_id}"
        )
    num_loss = len(ids) - prompt_length if mask is None else int(mask.sum())
    if not num_loss:
        raise RowRejected("no_loss_tokens", "nothing in it was generated by the target")
    before = prompt_length if mask is None else int(mask.argmax())
    if before >= settings.max_length:
        raise RowRejected(
            "too_long", f"a prompt of {before} tokens; --max-length {settings.max_length}"
        )
    cut = len(ids) > settings.max_length
    if cut and settings.too_long == "reject":
        raise RowRejected("too_long", f"{len(ids)} tokens; --max-length {settings.max_length}")
    if cut:
        ids = ids[: settings.max_length]
        mask = None if mask is None else mask[: settings.max_length]
        num_loss = len(ids) - prompt_length if mask is None else int(mask.sum())
    if num_loss < settings.min_loss_tokens:
        raise RowRejected(
            "too_few_loss_tokens",
            f"{num_loss} loss tokens; --min-loss-tokens {settings.min_loss_tokens}",
        )
    return Encoded(ids, prompt_length, mask, cut)


def row_texts(row: Row, tokenizer: ChatTokenizer, settings: EncodeSettings) -> RowTexts | None:
    """A row as the server saw it; None when it holds ids. Raises RowRejected with its reason."""
    if isinstance(row.completion, list):
        return None
    if isinstance(row.prompt, str):
        assert isinstance(row.completion, str)
        return RowTexts(row.prompt, _ended(row.completion, row.finished))
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
    if preserve is None:
        preserve = settings.preserve_thinking
    options: dict[str, Any] = {
        "tools": row.tools,
        "thinking": thinking,
        "preserve_thinking": preserve,
    }
    messages = _messages(row)
    unverified = preserve and any(message.get("reasoning_content") for message in messages)
    prompt = tokenizer.render(messages, **options)
    if not row.finished and not turn.tool_calls:
        return RowTexts(prompt, _unfinished_text(turn, thinking), no_reasoning, unverified)
    message = {
        "role": "assistant",
        "content": turn.content,
        "reasoning_content": turn.reasoning or "",
        **({"tool_calls": turn.tool_calls} if turn.tool_calls else {}),
    }
    whole = tokenizer.render([*messages, message], add_generation_prompt=False, **options)
    if not whole.startswith(prompt):
        raise RowRejected(
            "template_error",
            "the rendered conversation does not begin with its generation prompt (reasoning in a "
            "row with thinking off?)",
        )
    completion = whole[len(prompt) :].rstrip("\n")
    if not row.finished:
        completion = completion.removesuffix(END_OF_TURN)
    return RowTexts(prompt, completion, no_reasoning, unverified)


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
        raise UserError(
            f"--tokenizer {path}: no such folder, and no hub id that loads ({one_line(error)})"
        ) from error


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
