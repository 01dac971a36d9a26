"""Tokenized rows for people: the text of a row with its loss part marked."""

import itertools
import os
import sys

import numpy as np

from common.chat import ChatTokenizer

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
OPENING, CLOSING = "\u27e6", "\u27e7"  # around what the target is trained to draft, without colour


def marked_text(
    tokenizer: ChatTokenizer, ids: np.ndarray, mask: np.ndarray, *, longest: int | None
) -> str:
    """A row's text: prompt dimmed on a terminal, elsewhere the loss part in brackets.

    Of a part with more than `longest` characters the middle is left out.
    """
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = (DIM, NORMAL) if colour else (OPENING, CLOSING)
    parts = []
    for is_loss, run in itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([int(token) for _, token in run])
        if longest is not None and len(text) > longest:
            half = longest // 2
            text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
        marked = not is_loss if colour else is_loss
        parts.append(f"{before}{text}{after}" if marked else text)
    return "".join(parts)


def print_row(
    tokenizer: ChatTokenizer,
    row_id: str,
    ids: np.ndarray,
    mask: np.ndarray,
    *,
    where: str,
    longest: int | None = None,
) -> None:
    """A row on stdout: a line of facts, then its marked text."""
    marks = "dim = prompt" if sys.stdout.isatty() else f"{OPENING}loss part{CLOSING}"
    print(f"{where}  id={row_id}  tokens={len(ids)}  loss={int(mask.sum())}  ({marks})")
    print(marked_text(tokenizer, ids, mask, longest=longest))
