"""The hand-written renderer against the template itself, in jinja."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat import ChatTokenizer
from common.messages import RowRejected
from common.render import branch_cases, fast_render
from tests.tiny_tokenizer import build_tiny_tokenizer

FLAGS = ("thinking", "preserve_thinking", "add_generation_prompt")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The template's own rendering: messages, flags -> text, None for what it refuses."""
    folder = build_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))
    tokenizer = ChatTokenizer.load(str(folder)).by_template_alone()

    def render(messages, **flags):
        try:
            return tokenizer.render(messages, tools=None, **flags)
        except RowRejected:
            return None

    return render


def all_flags():
    return [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((0, 1), repeat=3)]


@pytest.mark.parametrize("number", range(len(branch_cases())))
def test_every_branch(template, number):
    case = branch_cases()[number]
    for flags in all_flags():
        flags = {name: bool(value) for name, value in flags.items()}
        fast = fast_render(case, **flags)
        if fast is None:
            assert any("tool_calls" in message for message in case) or not template(case, **flags)
        else:
            assert fast == template(case, **flags)


# whitespace, tags and turn markers in every place where the template looks for them
PIECES = st.sampled_from(
    ["a", "b c", " ", "\n", "\n\n", "\t", "<think>", "</think>", "<think>\n", "\n</think>\n\n",
     "<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>user\n", "\u2003",
     "\x1c", "e\u0301"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=6).map("".join)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": TEXTS},
            optional={"reasoning_content": TEXTS},
        ),
        st.fixed_dictionaries({"role": st.just("system"), "content": TEXTS}),
    ),
    max_size=6,
)


@settings(max_examples=400, deadline=None)
@given(MESSAGES, st.tuples(*[st.booleans()] * 3))
def test_any_conversation(template, messages, values):
    flags = dict(zip(FLAGS, values, strict=True))
    fast, truth = fast_render(messages, **flags), template(messages, **flags)
    assert fast == truth  # None for None: what it leaves alone here, the template refuses
