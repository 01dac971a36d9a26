"""The DFlash drafter and its config.json; nothing about training.

Letters: S context tokens, L tapped layers, H hidden size, Q block slots. Parameter names are those
of z-lab's drafters, without a prefix; embedding and head are the target's and not in here. The
maths is that of z-lab/dflash model.py: one fused context c = hidden_norm(fc(taps)) feeds the keys
and values of every layer as it is, and block slots attend to [context ; block].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.attention import AttentionMask, attend
from common.dflash2 import CandidateSelector, ConvolvedSublayer, PlainSublayer
from common.run import UserError

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
DFLASH2_SHAPE = {  # of z-lab's released DFlash 2; the names are those of dflash_config
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # of a published drafter
LAYER_TYPES = ("full_attention", "sliding_attention")
HEAD_DIM = 128


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter; `to_json` is the config.json that serving engines read.

    The conv_ and selector_ sizes are those of a DFlash 2, and None in a DFlash.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    eos_token_id: int | None = None
    initializer_range: float = 0.02
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None

    @property
    def draft(self) -> str:
        """The kind of drafter: a key of ARCHITECTURES."""
        return "dflash" if self.conv_kernel_size is None else "dflash2"

    @property
    def causal(self) -> bool:
        """Whether a slot of a sliding layer sees no later slot of its block."""
        return self.draft == "dflash"

    def __post_init__(self) -> None:
        for part in fields(self):
            value, least = getattr(self, part.name), int(part.name != "mask_token_id")
            if part.type is int and (type(value) is not int or value < least):
                raise UserError(f"drafter config: {part.name} is {value!r}, not a number above 0")
        if self.head_dim % 2 or self.num_attention_heads % self.num_key_value_heads:
            raise UserError("drafter config: heads must share key-value heads, head_dim be even")
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError("drafter config: layer_types must name every layer")
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown:
            raise UserError(f"drafter config: unknown layer types {sorted(unknown)}")
        if "sliding_attention" in self.layer_types and (
            (self.sliding_window or 0) < self.block_size
        ):
            raise UserError(
                f"drafter config: sliding_attention layers need a sliding_window of at least a "
                f"block ({self.block_size}), not {self.sliding_window}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter config: mask token {self.mask_token_id} is outside the vocabulary "
                f"({self.vocab_size})"
            )
        self._check_target_layers()
        self._check_dflash2()

    def _check_dflash2(self) -> None:
        sizes = {name: getattr(self, name) for name in DFLASH2_SHAPE}
        if set(sizes.values()) == {None}:
            return
        if wrong := [name for name, size in sizes.items() if type(size) is not int or size < 1]:
            raise UserError(
                f"drafter config: {', '.join(wrong)}: a DFlash 2 needs a number above 0"
            )
        if self.hidden_size % sizes["conv_group_size"]:
            raise UserError(
                f"drafter config: hidden_size {self.hidden_size} is no multiple of conv_group_size "
                f"{self.conv_group_size}"
            )
        for name, limit in (("conv_kernel_size", "block_size"), ("selector_top_k", "vocab_size")):
            if sizes[name] > getattr(self, limit):
                raise UserError(
                    f"drafter config: {name} {sizes[name]} is over {limit} {getattr(self, limit)}"
                )

    def _check_target_layers(self) -> None:
        ids, depth = self.target_layer_ids, self.num_target_layers
        if not ids or not all(0 <= layer < depth for layer in ids):
            raise UserError(
                f"drafter config: target_layer_ids {ids} out of range (0 to {depth - 1})"
            )
        if list(ids) != sorted(set(ids)):
            raise UserError(
                f"drafter config: target_layer_ids {ids} must ascend: vLLM hands them in that order"
            )
        if ids[-1] == depth - 1:
            raise UserError(
                f"drafter config: target_layer_ids {ids} hold the last layer, which engines see "
                "only after the final norm"
            )

    @classmethod
    def for_target(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        vocab_size: int,
        num_target_layers: int,
        rms_norm_eps: float,
        rope_theta: float,
        max_position_embeddings: int,
        eos_token_id: int | None,
        target_layer_ids: Sequence[int],
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        sliding_window: int,
        draft: str = "dflash",
    ) -> "DrafterConfig":
        """The released drafters' shape for a target: heads of 128, four query heads a key head.

        All layers but the last slide over `sliding_window` tokens, and of a "dflash2" that one too;
        0 makes all of them full.
        """
        heads = max(1, min(32, hidden_size // HEAD_DIM))
        sliding = "sliding_attention" if sliding_window else "full_attention"
        return cls(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            head_dim=HEAD_DIM,
            rms_norm_eps=rms_norm_eps,
            rope_theta=rope_theta,
            max_position_embeddings=max_position_embeddings,
            vocab_size=vocab_size,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=num_target_layers,
            layer_types=(sliding,) * (num_layers - 1)
            + ("full_attention" if draft == "dflash" else sliding,),
            sliding_window=sliding_window or None,
            eos_token_id=eos_token_id,
            **(DFLASH2_SHAPE if draft == "dflash2" else {}),
        )

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Read a config.json of DFlash or DFlash 2, ours or z-lab's.

        Raises UserError for what is missing or else. block_size may stand at the top or in
        dflash_config; rope_theta at the top or in rope_parameters.
        """
        draft = draft_kind(config)
        for key in ("dflash_config", "rope_parameters", "rope_scaling"):
            if not isinstance(config.get(key) or {}, Mapping):
                raise UserError(f"drafter config: {key} is {config[key]!r}, not an object")
        dflash, rope = config.get("dflash_config") or {}, config.get("rope_parameters") or {}
        flat = {**config, **rope, **dflash}
        try:
            _refuse_other_maths(flat, config.get("rope_scaling"), draft=draft)
            layers = flat["num_hidden_layers"]
            return cls(
                hidden_size=flat["hidden_size"],
                intermediate_size=flat["intermediate_size"],
                num_hidden_layers=layers,
                num_attention_heads=flat["num_attention_heads"],
                num_key_value_heads=flat["num_key_value_heads"],
                head_dim=flat["head_dim"],
                rms_norm_eps=flat["rms_norm_eps"],
                rope_theta=float(flat["rope_theta"]),
                max_position_embeddings=flat["max_position_embeddings"],
                vocab_size=flat["vocab_size"],
                block_size=flat["block_size"],
                mask_token_id=flat["mask_token_id"],
                target_layer_ids=tuple(flat["target_layer_ids"]),
                num_target_layers=flat["num_target_layers"],
                layer_types=tuple(flat.get("layer_types") or ("full_attention",) * layers),
                sliding_window=flat.get("sliding_window"),
                eos_token_id=flat.get("eos_token_id"),
                initializer_range=flat.get("initializer_range", 0.02),
                **({name: flat[name] for name in DFLASH2_SHAPE} if draft == "dflash2" else {}),
            )
        except KeyError as error:
            raise UserError(f"drafter config: {error.args[0]} is missing") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"drafter config: a value of the wrong type ({error})") from error

    def to_json(self) -> dict[str, Any]:
        """The config.json of an export, written by hand: transformers' own save drops rope_theta.

        Both rope forms and both places of block_size, since engines differ in which they read;
        is_causal is absent so that they take causality from each layer's type, but in a DFlash 2,
        none of whose layers is causal.
        """
        sliding = "sliding_attention" in self.layer_types
        dflash2 = self.draft == "dflash2"
        added = {name: getattr(self, name) for name in DFLASH2_SHAPE} if dflash2 else {}
        return {
            "architectures": [ARCHITECTURES[self.draft]],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": None,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **added,
            },
            "dtype": "bfloat16",
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            **({"is_causal": False} if dflash2 else {}),
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "pad_token_id": self.eos_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window if sliding else None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": sliding,
            "vocab_size": self.vocab_size,
        }


def draft_kind(config: Mapping[str, Any]) -> str:
    """Which of ARCHITECTURES a config.json names. Raises UserError for others."""
    named = config.get("architectures") or [ARCHITECTURES["dflash"]]
    if isinstance(named, list):
        for draft, architecture in ARCHITECTURES.items():
            if architecture in named:
                return draft
    raise UserError(
        f"drafter config: architecture {named}, not {' or '.join(ARCHITECTURES.values())}"
    )


def _refuse_other_maths(flat: Mapping[str, Any], rope_scaling: Any, *, draft: str) -> None:
    """Raises UserError for keys by which an engine computes what this drafter does not."""
    sliding = [
        kind == "sliding_attention" for kind in flat.get("layer_types") or ("full_attention",)
    ]
    causal = flat.get("is_causal")
    causal = flat.get("causal") if causal is None else causal
    kind = (rope_scaling or {}).get("rope_type") or flat.get("rope_type")
    odd = {
        "attention_bias": flat.get("attention_bias"),
        "hidden_act": flat.get("hidden_act", "silu") != "silu",
        "is_causal, or dflash_config.causal": any(
            (kind if causal is None else causal) != (kind and draft == "dflash") for kind in sliding
        ),
        **{name: draft == "dflash" and name in flat for name in DFLASH2_SHAPE},
        "mrope_section": flat.get("mrope_section"),
        "partial_rotary_factor": flat.get("partial_rotary_factor", 1.0) != 1.0,
        "rope_scaling": rope_scaling and kind != "default",
        "rope_type": (kind or "default") != "default",
        "use_swa": flat.get("use_swa"),
    }
    if wrong := [key for key, is_odd in odd.items() if is_odd]:
        raise UserError(
            f"drafter config: {'; '.join(wrong)}: of another kind than the drafters trained here "
            "(plain rotary positions over the whole head, no biases, causal only in sliding layers "
            "and in a DFlash 2 nowhere)"
        )


# ---- the model


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
