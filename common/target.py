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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from common.run import UserError
from common.target_files import check_layers, first_bytes, target_facts
from common.target_model import find_decoder, kernels_in_use, load_model

# of config.json: what changes the states of the same weights
STATE_FACTS = (
    "model_type",
    "hidden_act",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
MAX_BATCH_TOKENS = 8192  # of a forward, padding included
MIN_ROW_TOKENS = 64  # that a row costs at least: linear attention works in chunks of 64
CHECKED_SHAPE = (2, 33)  # of the ids that taps are checked on
GROUP_SPREAD = 0.5  # documents share a forward when the shortest has this share of the longest


@dataclass(frozen=True)
class Taps:
    """hidden: (T, L*H), the tapped layers side by side in the order of the ids, the documents' real
    tokens in request order. final: (T, H), the normed output of the last layer, when asked for."""

    hidden: torch.Tensor
    final: torch.Tensor | None


def padding_groups(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Which documents of a request share a forward: indices, longest first.

    A pure function of the lengths, so that equal requests are computed alike everywhere. A group
    pads to its longest document, or MIN_ROW_TOKENS, and holds at most `max_tokens` with padding, or
    one document.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups:
            longest = lengths[groups[-1][0]]
            row_tokens = max(longest, MIN_ROW_TOKENS)
            fits = row_tokens * (len(groups[-1]) + 1) <= max_tokens
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
        self.max_tokens = max_tokens
        self._max_tokens, self._out_of_memory = max_tokens, False
        self._model = model.eval().requires_grad_(False)
        self._decoder, self._layers_name = find_decoder(model)
        self._sink: _Sink | None = None
        for place, layer in enumerate(self.layers):
            self._decoder_layers[layer].register_forward_hook(self._capture(place))

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
        model = load_model(path, layers=layers, final=final, dtype=dtype, device=device)
        if not head and not getattr(model.config.get_text_config(), "tie_word_embeddings", True):
            model.set_output_embeddings(None)
        name = Path(path).resolve().name if Path(path).is_dir() else path
        target = cls(model, name=name, layers=layers, final=final, max_tokens=max_tokens)
        try:
            target.check()
        except UserError as error:
            raise UserError(f"--target {path}: {target.class_name}: {error}") from error
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
    def _decoder_layers(self) -> nn.ModuleList:
        return getattr(self._decoder, self._layers_name)

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

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion, of generation_config.json or else of config.json."""
        ids = self._model.generation_config.eos_token_id
        return frozenset(() if ids is None else ids if isinstance(ids, list) else [ids])

    def fast_kernels(self) -> dict[str, bool]:
        """Whether linear attention runs in these packages' kernels; empty where there is none."""
        return kernels_in_use(self._decoder)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of what the states depend on: facts of the config and all tensors in use.

        Of a tensor (name, dtype, shape, first 4 KiB) count; layers above the highest tap do only
        with final.
        """
        num_used = len(self._decoder_layers) if self.final else max(self.layers) + 1
        facts = {name: getattr(self._decoder.config, name, None) for name in STATE_FACTS}
        if facts["layer_types"]:
            facts["layer_types"] = facts["layer_types"][:num_used]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self._decoder.named_parameters()):
            parts = name.split(".")
            if parts[0] == self._layers_name and int(parts[1]) >= num_used:
                continue
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(first_bytes(tensor))
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

    def new_cache(self) -> DynamicCache:
        """What `extend` adds to, empty."""
        return DynamicCache(config=self._decoder.config)

    @torch.no_grad()
    def extend(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache,
        *,
        num_logits: int,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run (T,) ids that follow those in `cache`, which takes them in; for decoding.

        Returns the model's own logits (num_logits, V) of the last ids. `hidden` (T, L*H), if any,
        is filled with the taps. Raises ValueError for a target that was loaded without `final`.
        """
        if not self.final:
            raise ValueError("this target was loaded without its last layers: it cannot decode")
        options = {"cache": cache, "use_cache": True, "logits_to_keep": num_logits}
        if hidden is None:
            output = self._model(input_ids=input_ids[None], **options)
        else:
            sink = _Sink(hidden, [(0, len(input_ids))], self.hidden_size)
            output = self._tapped(self._model, sink, input_ids=input_ids[None], **options)
        return output.logits[0]

    def _run(self, input_ids: torch.Tensor, sink: "_Sink", **options: Any) -> Any:
        """One forward of (b, T) ids, its taps into the sink; the decoder's output object."""
        return self._tapped(self._decoder, sink, input_ids=input_ids, use_cache=False, **options)

    def _tapped(self, module: Any, sink: "_Sink", **inputs: Any) -> Any:
        """The output of the model or its decoder, the taps into the sink."""
        self._sink = sink
        try:
            output = module(**inputs)
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
            own, candidates = states[layer + 1], [tap]
            if layer + 2 == len(states):  # transformers hands out the last one after the norm
                candidates += [norm(tap) for norm in self._norms()]
            if not any(torch.equal(candidate, own) for candidate in candidates):
                raise UserError(
                    f"layer {layer}: the tap is not the model's hidden_states[{layer + 1}]"
                )

    def _norms(self) -> list[nn.Module]:
        children = self._decoder.children()
        return [child for child in children if "norm" in type(child).__name__.lower()]


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
