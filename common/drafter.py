"""The DFlash drafter; nothing about training.

Letters: S context tokens, L tapped layers, H hidden size, Q block slots. Parameter names are those
of z-lab's drafters, without a prefix; embedding and head are the target's and not in here. The
maths is that of z-lab/dflash model.py: one fused context c = hidden_norm(fc(taps)) feeds the keys
and values of every layer as it is, and block slots attend to [context ; block].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.attention import AttentionMask, attend
from common.dflash2 import CandidateSelector, ConvolvedSublayer, PlainSublayer
from common.drafter_config import DrafterConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight in float32, weight starting at 1: Qwen3's form, not Qwen3.5's (1 + w)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_table(
    positions: torch.Tensor, *, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (1, 1, T, head_dim) in float32 for positions (1, T); half-split (NeoX) layout."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-exponents / head_dim)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions to x (1, heads, T, head_dim)."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Block queries over [context ; block] keys; grouped heads, no biases, q and k normed."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(
        self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values (1, kv heads, T, head_dim) of x (1, T, H)."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), table)
        return keys, self._heads(self.v_proj(x))

    def forward(
        self,
        x: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor],
        mask: AttentionMask,
    ) -> torch.Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), table)
        keys, values = self.keys_values(x, table)
        keys = torch.cat([context[0], keys], dim=2)
        values = torch.cat([context[1], values], dim=2)
        output = attend(queries, keys, values, mask)
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One layer: the context enters attention as it is, without this layer's input norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.attention_conv, self.mlp_conv = make_sublayer(config), make_sublayer(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        tables: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        mask: AttentionMask,
        cache: "LayerCache | None" = None,
    ) -> torch.Tensor:
        """x (1, Q, H), context (1, S, H), tables of the context's and the block's positions.

        With a cache, the keys and values of `context` are appended to it and all of it is seen.
        """
        context_table, block_table = tables
        seen = self.self_attn.keys_values(context, context_table)
        if cache is not None:
            seen = cache.extend(*seen)

        def attend_to(inner: torch.Tensor) -> torch.Tensor:
            return self.self_attn(inner, block_table, seen, mask)

        x = x + self.attention_conv(self.input_layernorm(x), attend_to)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


def make_sublayer(config: DrafterConfig) -> nn.Module:
    """What stands around a sublayer: nothing, or a DFlash 2's convolutions."""
    if config.conv_kernel_size is None or config.conv_group_size is None:
        return PlainSublayer()
    return ConvolvedSublayer(
        config.hidden_size,
        taps=config.conv_kernel_size,
        group_size=config.conv_group_size,
        block_size=config.block_size,
    )


class LayerCache:
    """Keys and values of a layer's context, (1, kv heads, S, head_dim) each, None at first.

    No list or tuple: fully_shard hands a layer copies of those, which it would then fill in vain.
    """

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append those of further context; returns all of them."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


@dataclass
class ContextCache:
    """Keys and values of the context for each layer, and its length; blocks are never kept."""

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0


class Drafter(nn.Module):
    """Fused taps and block embeddings in, drafter states out; the head is applied elsewhere.

    A DFlash 2 has a `candidate_selector`, for the states that come out; a DFlash has None.
    checkpoint_layers: keep only each layer's input and run it again in the backward: a third more
    time in the layers, a layer's activations in memory instead of all layers'.
    """

    def __init__(self, config: DrafterConfig, *, checkpoint_layers: bool = False) -> None:
        super().__init__()
        self.config, self.checkpoint_layers = config, checkpoint_layers
        taps = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(taps, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if config.selector_rank is not None and config.selector_top_k is not None:
            self.candidate_selector = CandidateSelector(
                config.hidden_size,
                config.vocab_size,
                rank=config.selector_rank,
                top_k=config.selector_top_k,
            )

    @property
    def shards(self) -> list[nn.Module]:
        """What to fully_shard, in order: each module whose forward is called, from outside too."""
        selector = [] if self.candidate_selector is None else [self.candidate_selector]
        return [*self.layers, *selector, self]

    def compile_layers(self, *, backend: str = "inductor") -> None:
        """Compile each layer, one graph for all layers of a kind; to be called before fully_shard.

        Only `forward` is replaced, so parameter names stay, and the hooks of fully_shard and the
        recomputation of checkpoint_layers run outside of the graph. Static: shapes never change.
        """
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)

    def reset_parameters(self, *, seed: int) -> None:
        """Fresh weights, a function of `seed`: normal(0, initializer_range), norms at 1.

        What a DFlash 2 adds comes last, and changes nothing yet.
        """
        generator = torch.Generator().manual_seed(seed)
        added = [module for module in self.modules() if isinstance(module, ConvolvedSublayer)]
        apart = {id(weight) for module in added for weight in module.parameters()}
        if self.candidate_selector is not None:
            apart |= {id(weight) for weight in self.candidate_selector.parameters()}
        for parameter in self.parameters():
            if id(parameter) in apart:
                continue
            with torch.no_grad():
                if parameter.dim() == 2:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn * self.config.initializer_range)
                else:
                    parameter.fill_(1.0)
        for module in added:
            module.reset_parameters()
        if self.candidate_selector is not None:
            self.candidate_selector.reset_parameters(
                std=self.config.initializer_range, generator=generator
            )

    def forward(
        self,
        taps: torch.Tensor,
        block_embeddings: torch.Tensor,
        *,
        context_positions: torch.Tensor,
        block_positions: torch.Tensor,
        masks: Mapping[str, AttentionMask],
        cache: ContextCache | None = None,
    ) -> torch.Tensor:
        """Draft all blocks at once.

        taps (1, S, L*H), block_embeddings (1, Q, H), positions (1, S) and (1, Q) int64; masks by
        layer type, over S + Q keys (None: everything). Returns the normed states (1, Q, H).
        """
        context = self.hidden_norm(self.fc(taps))
        tables = (self._table(context_positions), self._table(block_positions))
        x = block_embeddings
        for index, layer in enumerate(self.layers):
            mask = masks[self.config.layer_types[index]]
            if cache is not None:
                x = layer(x, context, tables, mask, cache.layers[index])
            elif self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, context, tables, mask, use_reentrant=False)
            else:
                x = layer(x, context, tables, mask)
        return self.norm(x)

    @torch.no_grad()
    def draft(
        self, new_taps: torch.Tensor, block_embeddings: torch.Tensor, *, cache: ContextCache
    ) -> torch.Tensor:
        """One draft as in serving: the taps verified since the last one, then one block.

        new_taps (1, T, L*H) follow the cached context; block_embeddings (1, B, H) start at the next
        position. Their keys and values are appended to `cache`; the block's are thrown away.
        Returns the states (1, B, H).
        """
        if not cache.layers:
            cache.layers = [LayerCache() for _ in self.layers]
        device, size = new_taps.device, block_embeddings.shape[1]
        length = cache.length + new_taps.shape[1]
        block_positions = torch.arange(length, length + size, device=device)[None]
        output = self(
            new_taps,
            block_embeddings,
            context_positions=torch.arange(cache.length, length, device=device)[None],
            block_positions=block_positions,
            masks=self._draft_masks(length, size, device),
            cache=cache,
        )
        cache.length = length
        return output

    def _draft_masks(
        self, length: int, size: int, device: torch.device
    ) -> dict[str, AttentionMask]:
        query = torch.arange(length, length + size, device=device)[:, None]
        key = torch.arange(length + size, device=device)
        window = self.config.sliding_window or 0
        sliding = key >= query - (window - 1)
        if self.config.causal:
            sliding = sliding & (key <= query)
        return {"full_attention": None, "sliding_attention": sliding[None, None]}

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_table(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta)
