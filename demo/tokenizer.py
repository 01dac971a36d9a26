"""The demo's tokenizer: a token a character, ChatML's control tokens, thinking as in Qwen3.6."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
UNKNOWN = "<unk>"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MASK_TOKEN = "<|audio_start|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK_TOKEN)
THINK_TOKENS = ("<think>", "</think>")
VOCAB_SIZE = 128  # rows of the embedding; the ids in use are fewer

# The thought of a turn is kept only after the last question, and the prompt of a turn ends inside
# the opened think block, or after an empty one when thinking is off.
CHAT_TEMPLATE = """\
{%- set found = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set found.question = messages.index(message) %}
{%- endfor %}
{%- if found.question < 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set text = (message.content or '') | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > found.question %}
        {{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def build(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK_TOKENS])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": TURN_END, "pad_token": END_OF_TEXT, "unk_token": UNKNOWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
