"""The frozen target: token ids in, the outputs of chosen decoder layers out.

`target_layer_ids` count from 0 and name a layer's *output*: id i is transformers'
`hidden_states[i + 1]`. Documents are padded on the right only, which is exact for causal and
recurrent layers alike; they are never packed into one row, since recurrent layers would carry state
from one document to the next. A hidden state depends on (target, layers, the request's documents).
"""

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common.run import UserError

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEAD_NAMES = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
FINGERPRINT_BYTES = 4096  # of each tensor
MAX_BATCH_TOKENS = 8192  # of a forward, padding included
CHECKED_SHAPE = (2, 33)  # of the ids that taps are checked on
# of transformers' modeling files, which call a kernel where its package can be used
LINEAR_ATTENTION_FUNCTIONS = {
    "flash-linear-attention": "torch_chunk_gated_delta_rule",
    "causal-conv1d": "causal_conv1d_fn",
}
GROUP_SPREAD = 0.5  # documents share a forward when the shortest has this share of the longest

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # it would list the layers that are left out


@dataclass(frozen=True)
class TargetFacts:
    """What config.json says of the text model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: int | None


@dataclass(frozen=True)
class Taps:
    """hidden: (T, L*H), the tapped layers side by side in the order of the ids, the documents' real
    tokens in request order. final: (T, H), the normed output of the last layer, when asked for."""

    hidden: torch.Tensor
    final: torch.Tensor | None


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


@functools.lru_cache(maxsize=4)
def target_facts(path: str) -> TargetFacts:
    """Read a target's config.json. Raises UserError when there is none that transformers knows."""
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--target {path}: no usable config.json ({_first_line(error)})") from error
    eos = config.eos_token_id
    return TargetFacts(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
    )


def padding_groups(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Which documents of a request share a forward: indices, longest first.

    A pure function of the lengths, so that equal requests are computed alike everywhere. A group
    pads to its longest document and holds at most `max_tokens` with padding, or one document.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups:
            longest = lengths[groups[-1][0]]
            fits = longest * (len(groups[-1]) + 1) <= max_tokens
            if fits and lengths[index] >= GROUP_SPREAD * longest:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


class Target:
    """A causal language model of transformers, frozen, cut after its highest tapped layer."""

    def __init__(
        self, model: Any, *, name: str, layers: Sequence[int], final: bool, max_tokens: int
    ) -> None:
        """Wrap a loaded model, whose layers end with the highest tap unless `final`.

        Raises UserError for a class whose decoder layers cannot be found.
        """
        self.name, self.layers, self.final = name, tuple(layers), final
        self._max_tokens, self._out_of_memory = max_tokens, False
        self._model = model.eval().requires_grad_(False)
        self._decoder = model.get_decoder()
        found = getattr(self._decoder, "layers", None)
        depth = self._decoder.config.num_hidden_layers
        if not isinstance(found, nn.ModuleList) or len(found) != depth:
            raise UserError(
                f"--target: no list of {depth} decoder layers in {type(model).__name__}"
            )
        self._sink: _Sink | None = None
        for place, layer in enumerate(self.layers):
            found[layer].register_forward_hook(self._capture(place))

    @classmethod
    def load(
        cls,
        path: str,
        *,
        layers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        final: bool = False,
        head: bool = True,
        max_tokens: int = MAX_BATCH_TOKENS,
    ) -> "Target":
        """Load the text model of a folder or hub id, straight to its device, and check its taps.

        Only the layers up to the highest tap are loaded unless `final`, and no output head without
        `head`. Raises UserError when that fails, for layers that cannot be tapped, and for weights
        that are missing, which transformers would fill with random ones.
        """
        check_layers(layers, target_facts(path).num_layers)
        config = AutoConfig.from_pretrained(path)
        if not final:
            _cut_config(config.get_text_config(), max(layers) + 1)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                device_map={"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise UserError(f"--target {path}: cannot load it ({_first_line(error)})") from error
        model, report = loaded
        lacking = sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])])
        if lacking:
            raise UserError(
                f"--target {path}: {len(lacking)} weights are missing or of another shape, "
                f"{lacking[0]} first"
            )
        if not head and not config.get_text_config().tie_word_embeddings:
            model.set_output_embeddings(None)
        target = cls(model, name=Path(path).name, layers=layers, final=final, max_tokens=max_tokens)
        target.check()
        return target

    def _capture(self, place: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._sink is not None:
                self._sink.take(place, output[0] if isinstance(output, tuple) else output)

        return hook

    @property
    def class_name(self) -> str:
        return type(self._model).__name__

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are loaded."""
        return sum(w.numel() * w.element_size() for w in self._model.parameters())

    @property
    def hidden_size(self) -> int:
        return self._decoder.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table (V, H), the model's own tensor."""
        return self._model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        """The output head (V, H), the model's own tensor."""
        return self._model.get_output_embeddings().weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def fast_kernels(self) -> dict[str, bool]:
        """Whether linear attention runs in these packages' kernels; empty for a model without any.

        Asked of the functions that the model calls: being importable is not yet being used.
        """
        functions = vars(sys.modules[type(self._decoder).__module__])
        return {
            package: _is_kernel(functions[name])
            for package, name in LINEAR_ATTENTION_FUNCTIONS.items()
            if name in functions
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over (name, dtype, shape, first 4 KiB) of the tensors that the taps depend on."""
        digest = hashlib.sha256()
        top = max(self.layers)
        for name, tensor in sorted(self._decoder.named_parameters()):
            parts = name.split(".")
            if parts[0] == "norm" or (parts[0] == "layers" and int(parts[1]) > top):
                continue
            head = tensor.flatten()[: FINGERPRINT_BYTES // tensor.element_size()]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(head.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def forward(
        self,
        documents: Sequence[np.ndarray],
        *,
        final: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Taps:
        """Run one request: documents of int32 token ids, none empty. Taps in `dtype`, or their own.

        A batch that does not fit the GPU's memory is halved, and every one from then on is at most
        as large as what did fit. Raises ValueError for an empty request or document, or an id
        outside the vocabulary; torch.OutOfMemoryError when one document alone does not fit.
        """
        self._check_documents(documents, final)
        lengths = [len(document) for document in documents]
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        options: dict[str, Any] = {"dtype": dtype or self.dtype, "device": self.device}
        hidden = torch.empty(starts[-1], len(self.layers) * self.hidden_size, **options)
        last = torch.empty(starts[-1], self.hidden_size, **options) if final else None
        groups = padding_groups(lengths, max_tokens=self._max_tokens)
        while groups:
            group = groups.pop(0)
            rows = [(starts[index], documents[index]) for index in group]
            try:
                self._run_group(rows, hidden, last)
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
                groups[:0] = [group[: len(group) // 2], group[len(group) // 2 :]]
                self._note_out_of_memory(len(group) * lengths[group[0]])
        return Taps(hidden, last)

    def _run_group(
        self,
        rows: Sequence[tuple[int, np.ndarray]],
        hidden: torch.Tensor,
        last: torch.Tensor | None,
    ) -> None:
        """One forward of documents, longest first, each with the place where its states belong."""
        ids = torch.zeros(len(rows), len(rows[0][1]), dtype=torch.int64)
        for row, (_, document) in enumerate(rows):
            ids[row, : len(document)] = torch.from_numpy(document.astype(np.int64))
        places = [(start, len(document)) for start, document in rows]
        sink = _Sink(hidden, places, self.hidden_size)
        output = self._run(ids.to(self.device), sink)
        if last is not None:
            for row, (start, length) in enumerate(places):
                last[start : start + length] = output.last_hidden_state[row, :length]

    def _run(self, input_ids: torch.Tensor, sink: "_Sink", **options: Any) -> Any:
        """One forward of (b, T) ids, its taps into the sink; the decoder's output object."""
        self._sink = sink
        try:
            output = self._decoder(input_ids=input_ids, use_cache=False, **options)
        finally:
            self._sink = None
        # A hook that a compiled graph swallowed would leave no states behind, silently.
        missing = [layer for place, layer in enumerate(self.layers) if place not in sink.taken]
        assert not missing, f"no output captured from layers {missing}"
        return output

    def _note_out_of_memory(self, tokens: int) -> None:
        torch.cuda.empty_cache()
        self._max_tokens = min(self._max_tokens, max(1, tokens // 2))
        if not self._out_of_memory:
            logging.getLogger(__name__).warning(
                f"out of GPU memory on a batch of {tokens} tokens: batches are halved from here on "
                "(--max-tokens-per-batch)"
            )
        self._out_of_memory = True

    def _check_documents(self, documents: Sequence[np.ndarray], final: bool) -> None:
        if final and not self.final:
            raise ValueError("this target was loaded without its last layers: no final states")
        if not documents or min(len(document) for document in documents) == 0:
            raise ValueError("a request needs documents, each of at least one token")
        for number, document in enumerate(documents):
            low, high = int(document.min()), int(document.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"document {number} has token id {low if low < 0 else high}; the target's "
                    f"vocabulary is 0 to {self.vocab_size - 1}"
                )

    @torch.no_grad()
    def check(self) -> None:
        """Compare the taps with the model's own hidden_states on a short text of random ids.

        Raises UserError that names the layer: taps that differ, are not finite, or do not vary.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, CHECKED_SHAPE, generator=generator)
        count, length = CHECKED_SHAPE
        width = len(self.layers) * self.hidden_size
        taps = torch.empty(count * length, width, dtype=self.dtype, device=self.device)
        sink = _Sink(taps, [(row * length, length) for row in range(count)], self.hidden_size)
        output = self._run(ids.to(self.device), sink, output_hidden_states=True)
        states = output.hidden_states
        for layer, tap in zip(self.layers, taps.split(self.hidden_size, dim=1), strict=True):
            tap = tap.reshape(count, length, self.hidden_size)
            values = tap.float().cpu()
            if not values.isfinite().all():
                raise UserError(f"layer {layer}: its output is not finite")
            if float(values.std()) == 0 or torch.equal(values[0], values[1]):
                raise UserError(f"layer {layer}: its output does not depend on the text")
            own = states[layer + 1]
            if layer + 2 == len(states):  # transformers hands out the last one after the norm
                tap = self._decoder.norm(tap)
            if not torch.equal(tap, own):
                raise UserError(
                    f"layer {layer}: the tap is not the model's hidden_states[{layer + 1}]"
                )


class _Sink:
    """Where the hooks of one forward put their layers' states: straight into the answer."""

    def __init__(
        self, hidden: torch.Tensor, places: Sequence[tuple[int, int]], hidden_size: int
    ) -> None:
        self._hidden, self._places, self._hidden_size = hidden, places, hidden_size
        self.taken: set[int] = set()

    def take(self, tap: int, states: torch.Tensor) -> None:
        """Copy the real tokens of states (b, T, H) to the columns of a tap."""
        columns = slice(tap * self._hidden_size, (tap + 1) * self._hidden_size)
        for row, (start, length) in enumerate(self._places):
            self._hidden[start : start + length, columns] = states[row, :length]
        self.taken.add(tap)


def _is_kernel(function: Callable[..., Any]) -> bool:
    # transformers refuses packed sequences in its own versions, which know no borders, before
    # anything else; a kernel misses its arguments instead
    try:
        function(cu_seqlens=True, seq_idx=True)
    except ValueError:
        return False
    except TypeError:
        return True
    raise AssertionError(f"{function} runs without arguments")


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Raises UserError for layers that are out of range, repeated, or the last one."""
    for layer in layers:
        if not 0 <= layer < depth:
            raise UserError(f"--layers {layer}: the target has layers 0 to {depth - 1}")
        if layer == depth - 1:
            raise UserError(
                f"--layers {layer}: the last layer cannot be tapped, engines see it only after "
                "the final norm"
            )
    if len(set(layers)) != len(layers) or not layers:
        raise UserError(f"--layers {','.join(map(str, layers))}: must name distinct layers")


def _cut_config(config: Any, num_layers: int) -> None:
    """Have the layers above left out when the model is built and its files are read."""
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


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
    tied = AutoConfig.from_pretrained(path).get_text_config().tie_word_embeddings
    if embedding_name is None or (head_name is None and not tied):
        raise UserError(f"--target {path}: no embed_tokens.weight or lm_head.weight in its files")

    def read(name: str) -> torch.Tensor:
        with safe_open(names[name], framework="pt") as file:
            return file.get_tensor(name).to(device=device, dtype=dtype)

    embedding = read(embedding_name)
    if head_name is None:
        return embedding, embedding
    head = read(head_name)
    return embedding, embedding if tied and torch.equal(head, embedding) else head


def _local_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # only for hub ids

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(f"--target {path}: {_first_line(error)}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise UserError(f"--target {folder}: no model.safetensors in it")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
