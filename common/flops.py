"""How much there is to compute: FLOPs of the target's forward and of the drafter's training.

Two FLOPs for each multiply-add of a matrix product; what is done element by element does not
count. Attention counts the pairs that its mask lets through, as flex_attention and causal kernels
compute them. tests/test_planner.py compares with torch's FlopCounterMode.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.target_model import find_decoder

DELTA_CHUNK = 64  # tokens that a linear-attention layer takes at once, in fla as in transformers
BACKWARD_ATTENTION = 2.5  # of the forward: flash kernels make the scores again


@dataclass(frozen=True)
class TargetWork:
    """A frozen target up to its highest tap.

    layers, embedding, head: parameters, head 0 where it is tied · matrices, delta: FLOPs a token ·
    attention: of each attention layer its heads' width together, and its window if it has one.
    """

    layers: int
    embedding: int
    head: int
    matrices: int
    delta: int
    attention: tuple[tuple[int, int | None], ...]
    hidden_size: int
    intermediate_size: int

    def forward(self, document_tokens: float) -> float:
        """FLOPs a token, in documents of so many tokens each."""
        keys = sum(width * mean_window(document_tokens, window) for width, window in self.attention)
        return self.matrices + self.delta + 4 * keys


def mean_window(tokens: float, window: int | None) -> float:
    """How many earlier tokens one sees on average in `tokens`: all, or at most `window`."""
    if window is None or window >= tokens:
        return tokens / 2
    return window - window * window / (2 * tokens)


def target_work(model: Any) -> TargetWork:
    """Count a target that has been built without weights, on the meta device.

    Of experts those that a token meets count; the parameters are those of all.
    """
    decoder, name = find_decoder(model)
    layers, config = getattr(decoder, name), decoder.config
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = bool(config.tie_word_embeddings)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    active = config.num_experts_per_tok / experts if experts else 1.0
    matrices = 0.0
    for weight_name, weight in layers.named_parameters():
        if weight.dim() > 1:
            matrices += 2 * weight.numel() * (active if ".experts." in weight_name else 1.0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    kinds = kinds[: len(layers)]
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    width = config.num_attention_heads * head_dim
    windows = {"sliding_attention": getattr(config, "sliding_window", None)}
    return TargetWork(
        layers=sum(weight.numel() for weight in layers.parameters()),
        embedding=embedding.numel(),
        head=0 if tied else head.numel(),
        matrices=round(matrices),
        delta=kinds.count("linear_attention") * delta_rule(config, solves=True),
        attention=tuple((width, windows.get(kind)) for kind in kinds if kind != "linear_attention"),
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
    )


def delta_rule(config: Any, *, solves: bool) -> int:
    """FLOPs a token of one layer's gated delta rule in chunks (arXiv 2412.06464), 0 without.

    A chunk of C has the products k k', q k', (q k') v, and three with the state; `solves` adds the
    triangular systems for k and v, half a product each.
    """
    heads = getattr(config, "linear_num_value_heads", None)
    if heads is None:
        return 0
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    multiplies = DELTA_CHUNK * (2 * keys + values) + 3 * keys * values
    if solves:
        multiplies += DELTA_CHUNK * (keys + values) // 2
    return 2 * heads * multiplies


@dataclass(frozen=True)
class DrafterWork:
    """FLOPs of one forward, and of its backward, by part; parts of one pack or of several."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def visible_keys(config: DrafterConfig, document_tokens: float) -> dict[str, float]:
    """Keys that a block slot sees on average, by layer type: context and its own block."""
    size = config.block_size
    return {
        "full_attention": mean_window(document_tokens, None) + size,
        "sliding_attention": mean_window(document_tokens, config.sliding_window)
        + ((size + 1) / 2 if config.causal else size),
    }


def drafter_work(
    config: DrafterConfig,
    *,
    tokens: int,
    anchors: int,
    supervised: int,
    visible: Mapping[str, float],
    teacher: bool,
) -> DrafterWork:
    """FLOPs of a training step over `tokens` of context and `anchors` blocks.

    `supervised` slots meet the head: their logits, and the gradient from them, which is made in the
    forward; with a `teacher` its logits too, and once more for the candidates of a DFlash 2. No
    gradient goes to the head, or to hidden states.
    """
    hidden, slots = config.hidden_size, anchors * config.block_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    if config.conv_kernel_size is not None and config.conv_group_size is not None:
        # two sublayers, each with the kernels of two convolutions
        layer += 2 * hidden * (2 * config.conv_kernel_size * hidden // config.conv_group_size)
    pairs = slots * sum(visible[kind] for kind in config.layer_types)
    scores, candidates = 0, 0
    if config.selector_rank is not None and config.selector_top_k is not None:
        candidates = 2 * supervised * hidden * config.vocab_size
        scores = 2 * supervised * config.selector_rank * (hidden + config.selector_top_k)
    forward = {
        "fc": 2 * tokens * len(config.target_layer_ids) * hidden**2,
        "context": 2 * tokens * config.num_hidden_layers * 2 * hidden * keys,
        "blocks": 2 * slots * config.num_hidden_layers * layer,
        "attention": 4 * pairs * queries,
        "head": (6 if teacher else 4) * supervised * hidden * config.vocab_size,
        "selector": candidates + scores,
    }
    backward = {
        "fc": forward["fc"],
        "context": 2 * forward["context"],
        "blocks": 2 * forward["blocks"],
        "attention": BACKWARD_ATTENTION * forward["attention"],
        "head": 0,
        "selector": 2 * scores,
    }
    return DrafterWork(forward, backward)


@functools.cache
def drafter_parameters(config: DrafterConfig) -> tuple[int, int]:
    """Parameters of one layer, and of all that is not in layers."""
    with torch.device("meta"):
        drafter = Drafter(config)
    layers = sum(weight.numel() for weight in drafter.layers.parameters())
    whole = sum(weight.numel() for weight in drafter.parameters())
    return layers // config.num_hidden_layers, whole - layers
