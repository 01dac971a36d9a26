"""fastokens gives the reference's ids, and a difference between engines is always found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat import ChatTokenizer
from common.engines import FastEngine, choose_engine, first_difference, nasty_texts
from common.run import UserError
from demo import tokenizer as demo_tokenizer
from tests.qwen_vocabulary import qwen_tokenizer_folder
from tests.tiny_tokenizer import build_tiny_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return ChatTokenizer.load(str(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def pair(tiny):
    """(fast, reference) with the real vocabulary where it is installed."""
    folder = qwen_tokenizer_folder()
    chat = tiny if folder is None else ChatTokenizer.load(str(folder))
    return FastEngine(chat.tokenizer_json), chat.reference


class Twisted:
    """The reference, but wrong about one word, as a fault of an engine would be."""

    name = "twisted"

    def __init__(self, reference):
        self._reference = reference

    def encode(self, texts):
        ids, ends = self._reference.encode(texts)
        for index, text in enumerate(texts):
            if "zebra" in text:
                ids[ends[index]] += 1
        return ids, ends


def test_both_encode_the_nasty_texts_alike(pair, tiny):
    texts = nasty_texts(tiny.added_tokens)
    assert len(texts) > 230
    assert first_difference(*pair, texts) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_both_encode_any_text_alike(pair, texts):
    assert first_difference(*pair, texts) is None


def test_offsets_cut_the_flat_ids_back_into_texts(pair):
    texts = ["one", "", "two words", "\u4f60\u597d", ""]
    for engine in pair:
        ids, ends = engine.encode(texts)
        assert ids.dtype == np.int32 and ends.dtype == np.int64 and len(ends) == 6
        for text, start, end in zip(texts, ends, ends[1:], strict=False):
            np.testing.assert_array_equal(ids[start:end], engine.encode([text])[0])


def test_a_difference_is_found_and_placed(tiny):
    twisted = Twisted(tiny.reference)
    assert first_difference(twisted, tiny.reference, ["a", "horse"]) is None
    assert first_difference(twisted, tiny.reference, ["a", "b", "a zebra", "c"]) == 2


def test_a_lone_surrogate_raises_in_both(pair):
    for engine in pair:
        with pytest.raises((TypeError, UnicodeEncodeError)):
            engine.encode(["fine", "a\ud800"])


def test_auto_does_without_what_cannot_load_the_tokenizer(tmp_path, tiny):
    demo_tokenizer.build(tmp_path)
    chat, said = ChatTokenizer.load(str(tmp_path)), []
    engine = choose_engine("auto", chat.reference, chat.tokenizer_json, said.append)
    assert engine is chat.reference and "cannot load this tokenizer.json" in said[0]
    with pytest.raises(UserError, match="--encoder fastokens: .*use --encoder auto"):
        choose_engine("fastokens", chat.reference, chat.tokenizer_json, said.append)
    engine = choose_engine("auto", tiny.reference, tiny.tokenizer_json, said.append)
    assert engine.name.startswith("fastokens ") and len(said) == 1
    assert choose_engine("tokenizers", tiny.reference, b"", said.append) is tiny.reference
