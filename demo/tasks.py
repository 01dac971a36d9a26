"""Procedural questions, each with the thought and the answer that the tiny target is trained on."""

import random
from dataclasses import dataclass

# fmt: off
WORDS = (
    "apple", "bread", "chair", "dance", "eagle", "field", "grape", "house", "ivory", "jolly",
    "knife", "lemon", "mango", "night", "ocean", "piano", "queen", "river", "stone", "table",
    "under", "violet", "water", "yellow", "zebra", "bridge", "candle", "dragon",
)
# fmt: on
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Task:
    """A question, and how it is answered."""

    kind: str
    question: str
    thought: str
    answer: str


def make_task(generator: random.Random) -> Task:
    """Draw one of five kinds of task."""
    kind = generator.choice(["count", "spell", "times", "days", "repeat"])
    word = generator.choice(WORDS)
    if kind == "count":
        first, step = generator.randint(1, 20), generator.randint(1, 5)
        numbers = " ".join(str(first + step * index) for index in range(9))
        return Task(
            kind, f"Count from {first} by {step}.", f"Begin at {first}, add {step}.", numbers
        )
    if kind == "spell":
        letters = "-".join(word)
        return Task(kind, f"Spell {word}.", f"The letters of {word}, one by one.", letters)
    if kind == "times":
        factor = generator.randint(2, 9)
        lines = ", ".join(f"{index}x{factor}={index * factor}" for index in range(1, 8))
        return Task(kind, f"Table of {factor}.", f"Multiply {factor} by 1 to 7.", lines)
    if kind == "days":
        start = generator.randrange(7)
        names = " ".join(DAYS[(start + index) % 7] for index in range(1, 6))
        return Task(
            kind, f"Five days after {DAYS[start]}?", f"The week after {DAYS[start]}.", names
        )
    times = generator.randint(4, 8)
    return Task(
        kind,
        f"Say {word} {times} times.",
        f"Repeat {word}, count to {times}.",
        " ".join([word] * times),
    )
