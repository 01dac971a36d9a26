"""Tiny random targets, saved as transformers would save them.

Every norm weight is randomised: the (1 + w) norms of qwen3_5 start at w = 0, where a missing norm
changes nothing that a test could see.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from common.drafter_config import DrafterConfig


def tiny_target(
    folder: Path,
    *,
    kind: str = "qwen3_5",
    num_layers: int = 4,
    hidden_size: int = 64,
    vocab_size: int = 128,
    seed: int = 0,
    tied: bool = False,
) -> Path:
    """Save a random target in `folder`: "llama", "qwen3", the hybrid "qwen3_5", or
    "qwen3_sliding", whose layers but the last see 16 tokens."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif kind == "qwen3_sliding":
        types = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
        sliding = dict(use_sliding_window=True, sliding_window=16, layer_types=types)
        model = Qwen3ForCausalLM(Qwen3Config(**shape, **sliding))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **shape,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=hidden_size // 4,
                linear_value_head_dim=hidden_size // 4,
            )
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(5)  # layers that really move their input
    model.save_pretrained(folder)
    return folder


def tiny_drafter_config(**changes) -> DrafterConfig:
    """Three layers of four heads; what a test is about, and its sizes, it names itself."""
    shape = dict(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        num_target_layers=6,
    )
    return DrafterConfig(**{**shape, **changes})
