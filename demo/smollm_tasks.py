"""Procedural requests for a small chat model: short texts of a fixed form about drawn things.

Ten forms; only names, words and numbers differ between two requests of a form. So the answers
are far easier to draft than open chat: they show that the chain works, not what a drafter reaches.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from demo.tasks import DAYS, WORDS

# fmt: off
NAMES = (
    "Anna", "Omar", "Maria", "Peter", "Lena", "Hugo", "Nina", "Victor", "Clara", "Simon",
    "Julia", "Martin", "Emma", "Oscar", "Laura", "Felix", "Sarah", "David", "Alice", "Robert",
)
CLASSES = (
    "Dog", "Book", "Car", "House", "Player", "Student", "City", "Phone", "Movie", "Plant",
    "Order", "Ticket", "Camera", "Song", "Boat", "Recipe", "Worker", "Planet", "Lamp", "Game",
)
FIELDS = (
    "name", "age", "color", "title", "year", "price", "weight", "size", "speed", "height",
    "country", "score", "rating", "email", "phone", "city", "length", "status", "level", "author",
)
EVENTS = ("meeting", "dinner", "party", "concert", "picnic", "workshop", "lunch", "wedding")
GIFTS = ("book", "flowers", "cake", "lamp", "painting", "scarf", "camera", "music box", "bicycle")
# fmt: on


@dataclass(frozen=True)
class Request:
    """What a user asks for, and the name of its form."""

    kind: str
    question: str


def make_requests(count: int, *, seed: int) -> list[Request]:
    """`count` requests without a repetition, the forms in turn."""
    generator, forms = random.Random(seed), list(FORMS.items())
    requests: list[Request] = []
    asked: set[str] = set()
    while len(requests) < count:
        kind, form = forms[len(requests) % len(forms)]
        question = form(generator)
        if question not in asked:
            asked.add(question)
            requests.append(Request(kind, question))
    return requests


def joined(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def numbered_list(draw: random.Random) -> str:
    return f"Write a numbered list of these items: {', '.join(draw.sample(WORDS, 8))}."


def html_list(draw: random.Random) -> str:
    return f"Write an HTML list with the items {joined(draw.sample(WORDS, 5))}."


def xml_book(draw: random.Random) -> str:
    title = f"The {draw.choice(WORDS).title()} and the {draw.choice(WORDS).title()}"
    author = f"{draw.choice(NAMES)} {draw.choice(NAMES)}"
    return (
        f"Write an XML element for a book with the title {title}, the author {author} and the "
        f"year {draw.randint(1900, 2020)}."
    )


def json_person(draw: random.Random) -> str:
    return (
        f"Write a JSON object with the keys name, age and pet for {draw.choice(NAMES)}, who is "
        f"{draw.randint(18, 90)} and has a pet named {draw.choice(NAMES)}."
    )


def python_class(draw: random.Random) -> str:
    fields = joined(draw.sample(FIELDS, 3))
    return f"Write a Python class {draw.choice(CLASSES)} with the attributes {fields}."


def java_class(draw: random.Random) -> str:
    fields = joined(draw.sample(FIELDS, 2))
    return f"Write a Java class {draw.choice(CLASSES)} with the private fields {fields}."


def c_struct(draw: random.Random) -> str:
    fields = joined(draw.sample(FIELDS, 4))
    return f"Write a C struct {draw.choice(CLASSES)} with the integer fields {fields}."


def sql_table(draw: random.Random) -> str:
    fields = joined(draw.sample(FIELDS, 3))
    table = draw.choice(CLASSES).lower()
    return f"Write a SQL statement that creates the table {table} with the columns id, {fields}."


def invitation(draw: random.Random) -> str:
    return (
        f"Write a short email to {draw.choice(NAMES)} with an invitation to a "
        f"{draw.choice(EVENTS)} on {draw.choice(DAYS)}."
    )


def thanks(draw: random.Random) -> str:
    return f"Write a polite thank-you note to {draw.choice(NAMES)} for the {draw.choice(GIFTS)}."


FORMS: dict[str, Callable[[random.Random], str]] = {
    "numbered-list": numbered_list,
    "html-list": html_list,
    "xml-book": xml_book,
    "json-person": json_person,
    "python-class": python_class,
    "java-class": java_class,
    "c-struct": c_struct,
    "sql-table": sql_table,
    "invitation": invitation,
    "thanks": thanks,
}
