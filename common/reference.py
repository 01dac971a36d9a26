"""A drafter's output on a seeded input: as training computes it, and by the formulas alone.

The second form shares no code with common/drafter.py and common/blocks.py. It is DFlash, and
DFlash 2, written from its definition (arXiv 2602.06036, z-lab/dflash model.py), an anchor at a time
as in serving: what training and this agree on, an engine that follows the definition gives too.

Letters: S context tokens, N anchors, B slots of a block, L tapped layers, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from common.blocks import Pack, dense_mask, make_blocks
from common.drafter import Drafter
from common.drafter_config import DrafterConfig

Sublayer = Callable[[torch.Tensor], torch.Tensor]
STRETCH = 16  # context tokens of the first stretch, half of the second's
ANCHORS = (3, STRETCH + 8, STRETCH + 20)  # places in the context


@dataclass(frozen=True)
class Sample:
    """positions (S,) int64, taps (S, L*H) and the N blocks' embeddings (N, B, H), float32."""

    positions: torch.Tensor
    taps: torch.Tensor
    blocks: torch.Tensor


def seeded_sample(config: DrafterConfig) -> Sample:
    """A random context that reaches over a sliding window's edge, and blocks at ANCHORS.

    Positions 0 to 15, and 32 from the window on: of the first ones the second anchor's slots see
    fewer and fewer through the window, the third's none.
    """
    second = max(config.sliding_window or 0, STRETCH)
    positions = torch.cat(
        [torch.arange(STRETCH), torch.arange(second, second + 2 * STRETCH)]
    )  # no token in between: at 27B each costs 0.4 GFLOP
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.hidden_size
    shape = (len(ANCHORS), config.block_size, config.hidden_size)
    return Sample(
        positions,
        torch.randn(len(positions), width, generator=generator),
        torch.randn(*shape, generator=generator),
    )


@torch.no_grad()
def training_states(drafter: Drafter, sample: Sample) -> torch.Tensor:
    """All blocks in one masked forward, as in training: (N, B, H) float32."""
    config, length = drafter.config, len(sample.positions)
    pack = Pack(
        input_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.ones(length, dtype=torch.bool),
        documents=torch.zeros(length, dtype=torch.int32),
        positions=sample.positions,
    )
    anchors = torch.tensor(ANCHORS)
    blocks = make_blocks(
        pack,
        anchors,
        torch.ones(len(ANCHORS), dtype=torch.bool),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    masks = {
        kind: dense_mask(
            pack,
            blocks,
            sliding_window=config.sliding_window if kind == "sliding_attention" else None,
            causal=config.causal,
        )
        for kind in set(config.layer_types)
    }
    states = drafter(
        sample.taps[None],
        sample.blocks.flatten(0, 1)[None],
        context_positions=pack.positions[None],
        block_positions=blocks.positions[None],
        masks=masks,
    )
    return states.view(sample.blocks.shape)


@torch.no_grad()
def reference_states(
    weight: Callable[[str], torch.Tensor], config: DrafterConfig, sample: Sample
) -> torch.Tensor:
    """Block by block, each with the context before its anchor alone: (N, B, H) float32.

    `weight` gives a tensor by its name in the file.
    """
    outputs = []
    for place, block in zip(ANCHORS, sample.blocks, strict=True):
        anchor = int(sample.positions[place])
        outputs.append(
            _block_states(
                lambda name: weight(name).float(),
                config,
                taps=sample.taps[:place],
                seen=sample.positions[:place],
                block=block,
                slots=torch.arange(anchor, anchor + config.block_size),
            )
        )
    return torch.stack(outputs)


def seeded_words(config: DrafterConfig) -> torch.Tensor:
    """Some token ids, (8,) int64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (8,), generator=generator)


def reference_scores(
    weight: Callable[[str], torch.Tensor], state: torch.Tensor, words: torch.Tensor
) -> torch.Tensor:
    """What a DFlash 2's selector gives, at a slot's state (H,), for each word after each: (8, 8).

    Row: the word before.
    """
    name = "candidate_selector"
    projected = weight(f"{name}.hidden_projection.weight").float() @ state
    given = weight(f"{name}.predecessor_codebook")[words].float()
    follows = weight(f"{name}.successor_codebook")[words].float()
    return torch.einsum("ar,r,br->ab", given, projected, follows)


def _block_states(
    weight: Callable[[str], torch.Tensor],
    config: DrafterConfig,
    *,
    taps: torch.Tensor,
    seen: torch.Tensor,
    block: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One block over taps (s, L*H) at positions `seen` (s,); its slots (B, H) at `slots` (B,)."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight(name), config.rms_norm_eps)

    def within(name: str, inner: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
        """A sublayer, in a DFlash 2 between the convolutions `name` of its block."""
        if config.conv_kernel_size is None:
            return sublayer(inner)
        base, projection = weight(f"{name}.base_kernel"), weight(f"{name}.kernel_projection.weight")
        added = (inner @ projection.T).unflatten(-1, (*base.shape[:2], -1))  # (B, 2, taps, G)
        kernels = base + added.repeat_interleave(config.hidden_size // added.shape[-1], -1)
        return _convolved(sublayer(_convolved(inner, kernels[:, 0])), kernels[:, 1])

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:  # (heads, tokens, D)
        return (x @ weight(name).T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)

    context, x = norm(taps @ weight("fc.weight").T, "hidden_norm.weight"), block
    positions = torch.cat([seen, slots])
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, kind in enumerate(config.layer_types):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"

        def attend(
            inner: torch.Tensor, kind: str = kind, attention: str = attention
        ) -> torch.Tensor:
            both = torch.cat([context, inner])  # the context has no norm of this layer
            queries = norm(heads(inner, f"{attention}.q_proj.weight"), f"{attention}.q_norm.weight")
            keys = norm(heads(both, f"{attention}.k_proj.weight"), f"{attention}.k_norm.weight")
            values = heads(both, f"{attention}.v_proj.weight").repeat_interleave(groups, 0)
            queries = _turned(queries, slots, theta=config.rope_theta)
            keys = _turned(keys, positions, theta=config.rope_theta).repeat_interleave(groups, 0)
            scores = queries @ keys.transpose(1, 2) * config.head_dim**-0.5
            if kind == "sliding_attention":
                distance = slots[:, None] - positions
                hidden = distance >= (config.sliding_window or 0)
                if config.conv_kernel_size is None:  # a DFlash 2 is causal nowhere
                    hidden |= distance < 0
                scores = scores.masked_fill(hidden, float("-inf"))
            mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
            return mixed @ weight(f"{attention}.o_proj.weight").T

        def feed(inner: torch.Tensor, layer: str = layer) -> torch.Tensor:
            gate = functional.silu(inner @ weight(f"{layer}.mlp.gate_proj.weight").T)
            up = inner @ weight(f"{layer}.mlp.up_proj.weight").T
            return (gate * up) @ weight(f"{layer}.mlp.down_proj.weight").T

        inner = norm(x, f"{layer}.input_layernorm.weight")
        x = x + within(f"{layer}.attention_conv", inner, attend)
        inner = norm(x, f"{layer}.post_attention_layernorm.weight")
        x = x + within(f"{layer}.mlp_conv", inner, feed)
    return norm(x, "norm.weight")


def _convolved(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """x (B, H) under each slot's own kernels (B, taps, H); tap t weighs the slot t before."""
    return torch.stack(
        [
            sum((kernels[i, t] * x[i - t] for t in range(min(i + 1, kernels.shape[1]))), zero)
            for i, zero in enumerate(torch.zeros_like(x))
        ]
    )


def _turned(x: torch.Tensor, positions: torch.Tensor, *, theta: float) -> torch.Tensor:
    """x (heads, tokens, D) as complex pairs (i, i + D/2), turned by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    return torch.cat([turned.real, turned.imag], dim=-1)
