"""Texts -> token ids in bulk: HF tokenizers, the reference, and fastokens, the same ids far faster.

fastokens takes a few per cent of the reference's time, so it is used only under watch: compared
with the reference on a fixed set of nasty texts and on the run's first rows before anything is
written, and on one row in a thousand after that. A standing check, because its past faults were ids
that differed only under rare conditions.
"""

import importlib.metadata
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from common.run import UserError

ENGINES = ("auto", "fastokens", "tokenizers")
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked child of rayon's threads would hang
os.environ["RAYON_NUM_THREADS"] = "1"  # the processes are the parallelism


class Engine(Protocol):
    """Encodes texts, control tokens in them included, nothing added."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, (T,) int32, and where each begins and ends in them, (n + 1,) int64.

        Raises TypeError or UnicodeEncodeError for a text with a lone surrogate.
        """


class ReferenceEngine:
    """HF tokenizers."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = f"tokenizers {importlib.metadata.version('tokenizers')}"
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return (
            np.concatenate([np.zeros(0, np.int32), *rows]),
            np.cumsum([0, *map(len, rows)], dtype=np.int64),
        )


class FastEngine:
    """fastokens. Raises ImportError without it, ValueError for a model that it does not know."""

    def __init__(self, tokenizer_json: bytes) -> None:
        import fastokens

        self.name = f"fastokens {importlib.metadata.version('fastokens')}"
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts))
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


def choose_engine(
    name: str, reference: Engine, tokenizer_json: bytes, tell: Callable[[str], None]
) -> Engine:
    """The engine of --encoder; `auto` tells why it is not the fast one.

    Raises UserError when fastokens is asked for by name and cannot be had.
    """
    if name == "tokenizers":
        return reference
    try:
        return FastEngine(tokenizer_json)
    except ImportError as error:
        reason = f"fastokens cannot be imported ({error})"
    except Exception as error:  # it raises nothing narrower for a model that it does not know
        reason = f"fastokens cannot load this tokenizer.json ({error})"
    if name == "fastokens":
        raise UserError(f"--encoder fastokens: {reason}; use --encoder auto")
    tell(f"encoding with tokenizers: {reason}")
    return reference


def first_difference(one: Engine, other: Engine, texts: Sequence[str]) -> int | None:
    """The index of the first text that two engines encode differently."""
    (ids, ends), (other_ids, other_ends) = one.encode(texts), other.encode(texts)
    if np.array_equal(ends, other_ends) and np.array_equal(ids, other_ids):
        return None
    for index in range(len(texts)):
        mine = ids[ends[index] : ends[index + 1]]
        if not np.array_equal(mine, other_ids[other_ends[index] : other_ends[index + 1]]):
            return index
    raise AssertionError("equal text by text, yet not as a whole")


def nasty_texts(added_tokens: Sequence[str]) -> list[str]:
    """Texts on which tokenizers part ways, and 200 random mixtures of them."""
    pieces = [
        "",
        " ",
        "e\u0301 o\u0308\u0304 n\u0303 \u00c5 \u212b \u2126 \u1e69 s\u0323\u0307",  # NFC
        "\u1112\u1161\u11ab\u1100\u116e\u11a8 \u0958 \ufb1d \u2adc",  # Jamo, composition exclusions
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22\u0e01\u0e33 \u0639\u064e\u0631",
        "\u0ba8\u0bbf \u1019\u103c\u1014\u103a \u0f56\u0f7c\u0f51",  # Tamil, Burmese, Tibetan
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
        "\U0001f1e9\U0001f1ea \u2764\ufe0f",
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \ud55c\uad6d\uc5b4",
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac",
        "\U0001d4d0\U0001d552 \u210d \u222b\u2080\u00b9 x\u00b2 \u2264 \u2211 \\frac{1}{2}",
        "I'm you'LL we'Ve don't 'S",
        "3.14159 1,000,000 0x1F 12345678901234567890 \u0661\u0662 \u2164",
        "    four\n\n\n        eight\t\ttabs \n \n  \r\nx\r",
        " " * 300 + "x" + "\n" * 300 + "\t" * 300,
        "a" * 3000,
        "\u00e4" * 1500 + "=" * 1500 + "\u4e00" * 700,
        "\x00\x01\x7f\u0085\u2028\u2029\ufeff\u200b\u200e\u00ad",
        "\ue000 \U000f0000 \U000e0001 \u0378 \U0001fbff \U00020000",  # private, unassigned, rare
        "def f(x):\n    return {**x, 'k': [i for i in range(10)]}  # ok\n",
        "<|im_start <|im_end|> < |im_end|> <think </think>",
        *[f"a{token}b {token} {token}{token}\n{token}" for token in added_tokens],
    ]
    draw = random.Random(0)
    mixed = ["".join(draw.choices(pieces[2:], k=draw.randint(2, 5)))[:2000] for _ in range(150)]
    points = [*range(0x20, 0x3000), *range(0xA000, 0xABFF), *range(0x1F000, 0x1FB00)]
    noise = ["".join(map(chr, draw.choices(points, k=draw.randint(1, 60)))) for _ in range(50)]
    return [*pieces, *mixed, *noise]
