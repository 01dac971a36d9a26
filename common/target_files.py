"""The target's files: what its config.json says, its embedding and head, and damage to them."""

import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from common.chat import THINK_END, THINK_START
from common.run import UsageError, UserError, one_line

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEAD_NAMES = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
FINGERPRINT_BYTES = 4096  # of each tensor
OTHER_PARTS = re.compile(r"(^|\.)(visual|vision\w*|mtp)\.")  # of checkpoints that can also see
HUB_ID = r"\w[\w.-]*(/[\w.-]+)?"  # ./folder is none
GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class TargetFacts:
    """What config.json says of the text model.

    The properties are what a drafter is shaped after. They raise UserError for a family that has no
    such field, whose hidden states can be had all the same.
    """

    path: str
    config: Any

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        eos = getattr(self.config, "eos_token_id", None)
        return eos[0] if isinstance(eos, list) else eos

    @property
    def intermediate_size(self) -> int:
        return self._field("intermediate_size")

    @property
    def max_position_embeddings(self) -> int:
        return self._field("max_position_embeddings")

    @property
    def rms_norm_eps(self) -> float:
        return self._field("rms_norm_eps")

    @property
    def rope_theta(self) -> float:
        rope = self._field("rope_parameters")
        rope = rope.get("full_attention", rope)  # some families have one a kind of layer
        return float(self._given("rope_theta", rope.get("rope_theta")))

    def _field(self, name: str) -> Any:
        return self._given(name, getattr(self.config, name, None))

    def _given(self, name: str, value: Any) -> Any:
        if value is None:
            raise UserError(
                f"--target {self.path}: {type(self.config).__name__} has no {name}, after which "
                "the drafter would be shaped: give --draft-config"
            )
        return value


@functools.lru_cache(maxsize=4)
def target_facts(path: str) -> TargetFacts:
    """Read a target's config.json. Raises UserError when there is none that transformers knows."""
    facts = TargetFacts(path, read_config(path).get_text_config())
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        size = getattr(facts.config, name, None)
        if not isinstance(size, int) or size < 1:
            raise UserError(
                f"--target {path}: {type(facts.config).__name__} has {name} {size}; a language "
                "model needs a number"
            )
    return facts


def read_config(path: str) -> Any:
    """The config of a folder or hub id. Raises UserError for what cannot be loaded."""
    if Path(path).is_file():
        raise UserError(f"--target {path}: is a file; give the folder of the model")
    is_folder = Path(path).is_dir()
    if not is_folder and not re.fullmatch(HUB_ID, path):
        raise UserError(f"--target {path}: no such folder, and not a hub id")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever an odd config.json trips over
        what = "no usable config.json" if is_folder else "no such folder, and no hub id that loads"
        raise UserError(f"--target {path}: {what} ({one_line(error)})") from error
    method = _quantization(config) or _quantization(config.get_text_config())
    if method and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UserError(f"--target {path}: transformers knows no quantization {method!r}")
    return config


def _quantization(config: Any) -> str | None:
    facts = getattr(config, "quantization_config", None)
    return facts.get("quant_method") if isinstance(facts, dict) else None


def default_target_layers(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Evenly spread ids from 1 to num_layers - 3, as z-lab's build_target_layer_ids gives them.

    Raises UserError for a target too shallow for distinct taps.
    """
    if num_layers < num_taps + 3:
        raise UserError(
            f"a target of {num_layers} layers is too shallow for {num_taps} evenly spread taps: "
            "give --layers"
        )
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Raises UsageError for layers that are out of range, out of order, or the last one."""
    for layer in layers:
        if not 0 <= layer < depth:
            raise UsageError(f"--layers {layer}: the target has layers 0 to {depth - 1}")
        if layer == depth - 1:
            raise UsageError(
                f"--layers {layer}: the last layer cannot be tapped, engines see it only after "
                "the final norm"
            )
    if list(layers) != sorted(set(layers)) or not layers:
        raise UsageError(
            f"--layers {','.join(map(str, layers))}: must be distinct and ascend, as engines "
            "hand them over"
        )


def embedding_fingerprint(embedding: torch.Tensor) -> str:
    """sha256 of the first 4 KiB of an embedding table in bfloat16, whatever type it is held in."""
    return hashlib.sha256(first_bytes(embedding, torch.bfloat16)).hexdigest()


def first_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bytes:
    """The first FINGERPRINT_BYTES of a tensor in `dtype`, or its own."""
    dtype = dtype or tensor.dtype
    head = tensor.flatten()[: FINGERPRINT_BYTES // dtype.itemsize].detach().to(dtype)
    return head.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def read_embedding_and_head(
    path: str, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and head, (V, H) each, straight from its safetensors files.

    Tied ones are one tensor, returned twice; like transformers, a head of its own in the files wins
    over a config that says tied. Raises UserError when they cannot be found.
    """
    folder = _local_folder(path)
    names = _tensor_files(folder)
    embedding_name = next((name for name in EMBEDDING_NAMES if name in names), None)
    head_name = next((name for name in HEAD_NAMES if name in names), None)
    # the text model's own word: a composite config need not repeat it
    tied = read_config(path).get_text_config().tie_word_embeddings
    if embedding_name is None or (head_name is None and not tied):
        raise UserError(f"--target {path}: no embed_tokens.weight or lm_head.weight in its files")

    def read(name: str) -> torch.Tensor:
        with _open_weights(names[name]) as file:
            return file.get_tensor(name).to(device=device, dtype=dtype)

    embedding = read(embedding_name)
    if head_name is None:
        return embedding, embedding
    head = read(head_name)
    return embedding, embedding if tied and torch.equal(head, embedding) else head


def think_tokens(path: str) -> tuple[int, int] | None:
    """The ids of <think> and </think> in a target's tokenizer.json; None without such tokens."""
    file = _local_folder(path) / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    opening, closing = (tokenizer.token_to_id(token) for token in (THINK_START, THINK_END))
    return None if opening is None or closing is None else (opening, closing)


def count_parameters(path: str) -> int | None:
    """Weights of the text model without embedding and head; None without safetensors files."""
    folder = _local_folder(path)
    if not any(folder.glob("*.safetensors*")):
        return None
    total, files = 0, _tensor_files(folder)
    for file in sorted(set(files.values())):
        with _open_weights(file) as weights:
            for name in weights.keys():  # noqa: SIM118, a file is no dict
                if name not in (*EMBEDDING_NAMES, *HEAD_NAMES) and not OTHER_PARTS.search(name):
                    total += math.prod(weights.get_slice(name).get_shape())
    return total


def _local_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # only for hub ids

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(f"--target {path}: {one_line(error)}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--target {folder}: {index.name} is damaged") from error
    if not single.exists():
        raise UserError(f"--target {folder}: no model.safetensors in it")
    with _open_weights(single) as file:
        return dict.fromkeys(file.keys(), single)


def check_files(folder: Path) -> None:
    """Refuse safetensors files that are missing, cut short or none, before anything is loaded."""
    if any(folder.glob("*.safetensors*")):  # some targets have other files
        for path in sorted(set(_tensor_files(folder).values())):
            with _open_weights(path):
                pass


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"--target {path.parent}: {path.name} is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"is damaged ({one_line(error)}): download it again"
        with contextlib.suppress(OSError), path.open("rb") as raw:
            if raw.read(len(GIT_LFS)) == GIT_LFS:
                reason = "is a pointer of git-lfs: run git lfs pull there"
        raise UserError(f"--target {path.parent}: {path.name} {reason}") from error
