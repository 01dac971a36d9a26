"""A byte-level BPE tokenizer of a few hundred tokens with Qwen3.6's template and control tokens.

Small enough to load in no time, and of a kind that fastokens takes, unlike the demo's.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from tests.qwen_vocabulary import DATA, PATTERN


def build_tiny_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's folder; trained on the template itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = (DATA / "chat_template.jinja").read_text(encoding="utf-8")
    trainer = BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([template], trainer)
    added = json.loads((DATA / "added_tokens.json").read_bytes())
    for token, facts in sorted(added.items(), key=lambda item: item[1]["id"]):
        add = tokenizer.add_special_tokens if facts["special"] else tokenizer.add_tokens
        add([AddedToken(token, special=facts["special"], normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
