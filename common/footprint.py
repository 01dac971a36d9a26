"""How much memory a GPU needs, item by item: one that trains, and one that runs the target.

Bytes at the peak of a step: what lies there always, and the forward's saved activations beside
the larger of the loss and a layer's backward. As common/setup.py shards the drafter: float32
weights, gradients and moments over all ranks, a layer gathered while it runs.
"""

from dataclasses import dataclass

from common.drafter_config import DrafterConfig
from common.flops import TargetWork, drafter_parameters
from common.target import MAX_BATCH_TOKENS

TEACHER_ARRAYS = 5  # float32 arrays of a tile's size that its loss holds, see common/losses.py


@dataclass(frozen=True)
class StepShape:
    """What one rank does in a step: forwards of `tokens` context tokens and `anchors` blocks."""

    ranks: int
    forwards: int
    tokens: int
    anchors: int
    width: int  # bytes of a number of the compute dtype
    tile_bytes: int
    teacher: bool
    checkpoint_layers: bool


def drafter_memory(config: DrafterConfig, step: StepShape) -> dict[str, float]:
    """What training needs but for the target, its embedding and head, and waiting hidden states.

    All as it is when the backward begins. With several forwards a step the gradients of those
    before are summed up whole, in float32; with one they come as activations go.
    """
    layer, rest = drafter_parameters(config)
    parameters = config.num_hidden_layers * layer + rest
    shard = 4 * parameters / step.ranks
    # several ranks: the layer at work, the one fetched ahead, and what came over the wire
    gathered = rest + layer * (1 if step.ranks == 1 else 3)
    slots = step.anchors * config.block_size
    saved = _saved_bytes(config, step, slots)
    if step.forwards > 1:
        gradients = 4.0 * parameters
    elif step.checkpoint_layers:  # the first layer's activations come back when the rest is done
        gradients = 4 * layer * (config.num_hidden_layers - 1) / step.ranks
    else:
        gradients = max(0.0, shard - saved)
    working = max(_loss_bytes(config, step), _backward_bytes(config, step, slots))
    return {
        "master weights": shard,
        "optimiser": 2 * shard,
        "gradients": gradients,
        "gathered weights": step.width * gathered,
        "activations": saved,
        "logits tile, backward": working,
    }


def _norm_bytes(size: int, width: int) -> int:
    """An RMSNorm keeps its input in float32, and what it made before and after its weight."""
    return (4 + 2 * width) * size


def _layer_bytes(config: DrafterConfig, step: StepShape, slots: int) -> float:
    """What one layer's forward keeps: per slot, and of keys and values per context token."""
    width, heads = step.width, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    key_bytes = (4 + 3 * width) * keys  # normed from float32; then beside the others, and values
    slot = (
        2 * _norm_bytes(config.hidden_size, width)
        + (4 + 4 * width) * queries  # normed, rotated; the output as it is, and as rows
        + 4 * heads
        + key_bytes
        + 4 * width * config.intermediate_size
    )
    if config.conv_kernel_size is not None:  # of four convolutions kernels and inputs by tap
        slot += (8 * config.conv_kernel_size + 2) * width * config.hidden_size
    return slots * slot + step.tokens * key_bytes


def _saved_bytes(config: DrafterConfig, step: StepShape, slots: int) -> float:
    width, hidden = step.width, config.hidden_size
    layers = config.num_hidden_layers * _layer_bytes(config, step, slots)
    if step.checkpoint_layers:
        inputs = config.num_hidden_layers * width * hidden * slots
        layers = inputs + _layer_bytes(config, step, slots)
    tables = 8 * config.head_dim * (step.tokens + slots)
    norms = _norm_bytes(hidden, width) * (step.tokens + slots)
    return layers + tables + norms


def _loss_bytes(config: DrafterConfig, step: StepShape) -> float:
    supervised = step.anchors * (config.block_size - 1)
    tile = step.tile_bytes * (TEACHER_ARRAYS if step.teacher else 1 if step.width == 4 else 1.5)
    selected = 0
    if config.selector_rank is not None and config.selector_top_k is not None:
        selected = config.selector_rank * config.selector_top_k * (4 + step.width)
    return tile + supervised * (config.hidden_size * (4 + 2 * step.width) + selected)


def _backward_bytes(config: DrafterConfig, step: StepShape, slots: int) -> float:
    return slots * (3 * step.width * config.intermediate_size + 8 * config.hidden_size)


def taps_bytes(config: DrafterConfig, *, tokens: int, width: int, teacher: bool) -> int:
    """Hidden states of so many tokens; with a `teacher` the last ones too."""
    taps = len(config.target_layer_ids) + int(teacher)
    return tokens * taps * config.hidden_size * width


def ends_bytes(target: TargetWork, width: int) -> int:
    """Bytes of embedding and head at `width` bytes a weight."""
    return width * (target.embedding + target.head)


def target_forward_bytes(target: TargetWork, width: int) -> int:
    """What a forward of MAX_BATCH_TOKENS holds at once: an estimate for the fast kernels."""
    per_token = 3 * target.intermediate_size + 6 * target.hidden_size
    return MAX_BATCH_TOKENS * width * per_token


def trainer_memory(
    target: TargetWork,
    config: DrafterConfig,
    step: StepShape,
    *,
    colocated: bool,
) -> dict[str, float]:
    """All of a GPU that trains, by item; colocated with the target, or asking servers."""
    width = step.width
    items = drafter_memory(config, step)
    packed = taps_bytes(config, tokens=step.tokens, width=width, teacher=step.teacher)
    waiting = packed  # of servers: the next forward's come in during this one's backward
    if colocated:
        waiting = taps_bytes(
            config, tokens=step.tokens * step.forwards, width=2, teacher=step.teacher
        )
        # the target runs while the drafter does not
        spare = items["activations"] + items["logits tile, backward"]
        items["logits tile, backward"] += max(0, target_forward_bytes(target, width) - spare)
    return {
        "target layers": width * target.layers if colocated else 0,
        "embedding and head": ends_bytes(target, width),
        **items,
        "hidden states": packed + waiting,
    }


def server_memory(
    target: TargetWork, config: DrafterConfig, *, tokens: int, width: int, teacher: bool
) -> dict[str, float]:
    """All of a GPU that serves hidden states of requests of `tokens`; it loads no head."""
    answer = taps_bytes(config, tokens=tokens, width=2, teacher=teacher)
    return {
        "target layers": width * target.layers,
        "embedding and head": width * target.embedding,
        "activations": target_forward_bytes(target, width),
        "hidden states": 2 * answer,  # one in the making, one on its way to the host
    }
