"""A corpus of distinct, long-tailed chats with reasoning, for benchmarks and large runs.

Text is cut from what is installed beside us (Python sources and documents), made up (maths) or
walked at random over the target's vocabulary (CJK, emoji, words). Same packages and settings: same
bytes. Bytes cut from the sources are counted, so that their reuse can be told.

  python -m tests.bench.corpus FOLDER --chats 100000 --files 40
"""

import argparse
import bisect
import itertools
import json
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run
from common.chat import ChatTokenizer
from tests.qwen_vocabulary import qwen_tokenizer_folder

POOL_CHARS = {"code": 120_000_000, "prose": 30_000_000}
ENDINGS = {"code": (".py", ".pyi"), "prose": (".md", ".rst", ".txt", "METADATA")}
FILE_CHARS = 400_000  # of a file at most: generated tables should not fill the pool
KINDS = {"code": 0.45, "prose": 0.15, "maths": 0.20, "cjk": 0.12, "words": 0.08}
CHARS_A_TOKEN = {"code": 3.5, "prose": 4.0, "maths": 2.1, "cjk": 1.9, "words": 4.3}
MEAN_TOKENS, SIGMA = 2_350, 0.75  # before rows are cut at 4,096: about 2,000 after
PROMPT_SHARE, THOUGHT_SHARE = 0.12, 0.6
SEGMENT_CHARS = 1_200
EMOJI = ("\U0001f600", "\U0001f680", "\U0001f469\u200d\U0001f4bb", "\u2764\ufe0f", "1\ufe0f\u20e3")
ASCII_SHARE = 0.5  # of the files: JSON with every other character escaped, as most servers write it


@dataclass(frozen=True)
class Facts:
    """Of a corpus: chats, bytes, and how often a character of the sources was used on average."""

    chats: int
    files: int
    bytes: int
    pool_chars: int
    reuse: float


class Texts:
    """Text of a kind and a length, from a generator of its own."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._pools = {
            kind: _read_pool(endings, POOL_CHARS[kind]) for kind, endings in ENDINGS.items()
        }
        vocabulary = [tokenizer.decode([token]) for token in range(100_000)]
        cjk = [text for text in vocabulary if _all_between(text, "\u3040", "\u9fff")]
        self._cjk = _Walk(cjk, ("\uff0c", "\u3002", "\u3001"))
        emoji = [text for text in vocabulary if _all_between(text, "\U0001f300", "\U0001faff")]
        self._emoji = [*emoji, *EMOJI]
        words = [text for text in vocabulary if text[:1] == " " and text[1:].isalpha()]
        self._words = _Walk(words, (",", ".", " \u2014", ":"))
        self.pool_chars = sum(map(len, self._pools.values()))
        self.cut_chars = 0

    def make(self, kind: str, length: int, generator: random.Random) -> str:
        parts: list[str] = []
        have = 0
        while have < length:
            wanted = min(SEGMENT_CHARS, length - have)
            part = self._segment(kind, wanted, generator)
            parts.append(part)
            have += len(part) + 2
        if generator.random() < 0.2:
            parts.append(" ".join(generator.choices(self._emoji, k=3)))
        return "\n\n".join(parts)

    def _segment(self, kind: str, length: int, generator: random.Random) -> str:
        if kind == "maths":
            return _maths(length, generator)
        if kind == "cjk":
            return self._cjk.take(length // 2, generator)
        if kind == "words":
            return self._words.take(length // 6, generator)
        pool = self._pools[kind]
        start = pool.find("\n", generator.randrange(len(pool) - 2 * length)) + 1
        self.cut_chars += length
        return pool[start : start + length]


class _Walk:
    """Tokens at random, the low ids far more often, as in a language; a mark now and then."""

    def __init__(self, texts: Sequence[str], marks: Sequence[str]) -> None:
        self._texts, self._marks = texts, marks
        self._sums = list(itertools.accumulate(1 / (rank + 20) for rank in range(len(texts))))

    def take(self, count: int, generator: random.Random) -> str:
        parts = []
        for number in range(count):
            parts.append(
                self._texts[bisect.bisect_left(self._sums, generator.random() * self._sums[-1])]
            )
            if number % 8 == 7:
                parts.append(generator.choice(self._marks))
        return "".join(parts)


def _maths(length: int, generator: random.Random) -> str:
    lines: list[str] = []
    have = 0
    while have < length:
        a, b, c = generator.randrange(2, 999), generator.randrange(2, 99), generator.randrange(9)
        name = generator.choice("xyzuvwnkpq")
        line = generator.choice(
            (
                f"So ${name}_{{{c}}} = \\frac{{{a}}}{{{b}}}{name}^{{{c + 2}}}$, thus {a * b}.",
                f"${a} \\cdot {b} = {a * b}$, and ${a}^2 = {a * a}$.",
                f"\\int_0^{{{b}}} {a}{name}^{c}\\,d{name} = {a * b ** (c + 1) / (c + 1):.4f}",
                f"Wait, is {a} mod {b} equal to {a % b}? {a} = {b} \u00b7 {a // b} + {a % b}. Yes.",
                f"\u2211_{{{name}=1}}^{{{b}}} {name} = {b * (b + 1) // 2} \u2264 {a}\u00b2",
                f"Therefore {name} \u2208 [{-b}, {a}] and |{name}| < {a + b}.",
            )
        )
        lines.append(line)
        have += len(line) + 1
    return "\n".join(lines)


def _all_between(text: str, first: str, last: str) -> bool:
    return bool(text) and all(first <= character <= last for character in text)


def _read_pool(endings: tuple[str, ...], limit: int) -> str:
    """The text of installed files with these endings, up to `limit` characters."""
    roots = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")})
    files = sorted(
        path
        for root in roots
        for path in Path(root).rglob("*")
        if path.name.endswith(endings) and path.is_file()
    )
    random.Random(0).shuffle(files)
    seen: set[int] = set()
    texts: list[str] = []
    have = 0
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")[:FILE_CHARS]
        if hash(text) in seen or have > limit:
            continue
        seen.add(hash(text))
        texts.append(text)
        have += len(text)
    return "\n".join(texts)


# ---- chats


def make_chat(
    number: int, texts: Texts, generator: random.Random, mean_tokens: float
) -> tuple[str, str, str, bool]:
    """Question, thought, answer, and whether the target ended its turn."""
    kind = generator.choices(list(KINDS), list(KINDS.values()))[0]
    mu = -SIGMA * SIGMA / 2  # so that the mean is 1
    tokens = mean_tokens * generator.lognormvariate(mu, SIGMA)
    chars = int(tokens * CHARS_A_TOKEN[kind])
    question = texts.make(kind, int(chars * PROMPT_SHARE), generator)
    thought = texts.make(kind, int(chars * THOUGHT_SHARE), generator)
    answer = texts.make(kind, int(chars * (1 - PROMPT_SHARE - THOUGHT_SHARE)), generator)
    finished = generator.random() > 0.03
    return f"{question}\n\n(Question {number}.)", thought, answer, finished


def batch_row(number: int, chat: tuple[str, str, str, bool]) -> dict[str, Any]:
    question, thought, answer, finished = chat
    message = {"role": "assistant", "content": answer, "reasoning_content": thought}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if finished else "length"}
    return {
        "custom_id": f"row-{number}",
        "request": {"body": {"messages": [{"role": "user", "content": question}]}},
        "response": {"status_code": 200, "body": {"choices": [choice]}},
        "error": None,
    }


def messages_row(number: int, chat: tuple[str, str, str, bool]) -> dict[str, Any]:
    question, thought, answer, finished = chat
    system = {"role": "system", "content": "You are a careful assistant."}
    turn = {"role": "assistant", "content": answer, "reasoning": thought}
    return {
        "id": f"row-{number}",
        "source": "synthetic",
        "messages": [system, {"role": "user", "content": question}, turn],
        "finish_reason": "stop" if finished else "length",
    }


def conversation_row(number: int, chat: tuple[str, str, str, bool]) -> dict[str, Any]:
    question, thought, answer, finished = chat
    turn = {"role": "assistant", "content": answer, "reasoning_content": thought}
    return {
        "id": f"row-{number}",
        "conversations": [{"role": "user", "content": question}, turn],
        "status": "success",
        "finish_reason": "stop" if finished else "length",
    }


def prompt_row(number: int, chat: tuple[str, str, str, bool]) -> dict[str, Any]:
    question, thought, answer, finished = chat
    return {
        "id": f"row-{number}",
        "prompt": [{"role": "user", "content": question}],
        "completion": f"{thought}\n</think>\n\n{answer}",
        "finish_reason": "stop" if finished else "length",
    }


LAYOUTS = (batch_row, batch_row, messages_row, conversation_row, prompt_row)


def make_rows(
    first: int, count: int, texts: Texts, generator: random.Random, mean_tokens: float
) -> Iterator[dict[str, Any]]:
    for number in range(first, first + count):
        chat = make_chat(number, texts, generator, mean_tokens)
        yield generator.choice(LAYOUTS)(number, chat)


def build(folder: Path, *, chats: int, files: int, mean_tokens: float = MEAN_TOKENS) -> Facts:
    """Write a corpus into a folder; its facts.json is written last. Raises UserError."""
    facts_path = folder.with_name(f"{folder.name}.json")
    if facts_path.exists():
        facts = Facts(**json.loads(facts_path.read_bytes()))
        if (facts.chats, facts.files) == (chats, files):
            return facts
        shutil.rmtree(folder)
    vocabulary = qwen_tokenizer_folder()
    if vocabulary is None:
        raise run.UserError("the corpus needs the vocabulary of qwen-tokenizer, which is missing")
    folder.mkdir(parents=True, exist_ok=True)
    texts = Texts(ChatTokenizer.load(str(vocabulary)))
    size = 0
    bounds = [chats * number // files for number in range(files + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        generator = random.Random(number)
        escaped = generator.random() < ASCII_SHARE
        path = folder / f"part-{number:05}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in make_rows(first, end - first, texts, generator, mean_tokens):
                file.write(json.dumps(row, ensure_ascii=escaped) + "\n")
        size += path.stat().st_size
    facts = Facts(chats, files, size, texts.pool_chars, texts.cut_chars / texts.pool_chars)
    facts_path.write_text(json.dumps(vars(facts)) + "\n")
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chats", type=run.positive_int, default=100_000)
    parser.add_argument("--files", type=run.positive_int, default=40)
    parser.add_argument("--mean-tokens", type=float, default=MEAN_TOKENS, help="before the cut")
    args = parser.parse_args()
    facts = build(args.folder, chats=args.chats, files=args.files, mean_tokens=args.mean_tokens)
    print(facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
