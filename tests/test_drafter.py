"""The drafter of Qwen3.6-27B name by name, its config.json key by key, and its details."""

import json

import pytest
import torch

from common.drafter import Drafter, rotary_table, rotate
from common.drafter_config import DrafterConfig
from common.run import UserError
from common.target_files import default_target_layers


def qwen_config(**changes) -> DrafterConfig:
    facts = dict(
        hidden_size=5120,
        intermediate_size=17408,
        vocab_size=248320,
        num_target_layers=64,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262144,
        eos_token_id=248044,
        target_layer_ids=default_target_layers(64),
        num_layers=5,
        block_size=16,
        mask_token_id=248070,
        sliding_window=2048,
    )
    return DrafterConfig.for_target(**{**facts, **changes})


# z-lab/Qwen3.6-27B-DFlash, written out
EXPECTED_SHAPES = {
    "fc.weight": (5120, 25600),
    "hidden_norm.weight": (5120,),
    "norm.weight": (5120,),
} | {
    f"layers.{layer}.{name}": shape
    for layer in range(5)
    for name, shape in {
        "input_layernorm.weight": (5120,),
        "post_attention_layernorm.weight": (5120,),
        "self_attn.q_proj.weight": (4096, 5120),
        "self_attn.k_proj.weight": (1024, 5120),
        "self_attn.v_proj.weight": (1024, 5120),
        "self_attn.o_proj.weight": (5120, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (17408, 5120),
        "mlp.up_proj.weight": (17408, 5120),
        "mlp.down_proj.weight": (5120, 17408),
    }.items()
}

EXPECTED_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": None,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 248070,
        "target_layer_ids": [1, 16, 31, 46, 61],
    },
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 1e7,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}


def test_the_27b_drafter_has_the_58_names_and_shapes():
    with torch.device("meta"):
        drafter = Drafter(qwen_config())
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert len(EXPECTED_SHAPES) == 58 and shapes == EXPECTED_SHAPES
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 1_730_213_120


def test_the_config_has_every_key_that_engines_read():
    config = qwen_config()
    assert json.loads(json.dumps(config.to_json())) == EXPECTED_CONFIG
    assert "is_causal" not in config.to_json()
    assert DrafterConfig.from_json(config.to_json()) == config
    full = qwen_config(sliding_window=0).to_json()
    assert full["layer_types"] == ["full_attention"] * 5
    assert (full["sliding_window"], full["use_sliding_window"]) == (None, False)


def test_transformers_reads_the_rotary_base_from_our_config(tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(qwen_config().to_json()))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e7


def test_released_configs_are_read():
    released = {**EXPECTED_CONFIG, "dflash_config": {**EXPECTED_CONFIG["dflash_config"]}}
    del released["rope_parameters"], released["dflash_config"]["block_size"]
    assert DrafterConfig.from_json(released) == qwen_config()
    newer = {**EXPECTED_CONFIG}
    del newer["rope_theta"], newer["block_size"]
    assert DrafterConfig.from_json(newer) == qwen_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 5}, "linear_attention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"vocab_size": 1000}, "mask token 248070"),
        ({"num_target_layers": 60}, "target_layer_ids"),
        ({"num_key_value_heads": 5}, "key-value"),
    ],
)
def test_unusable_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        DrafterConfig.from_json({**EXPECTED_CONFIG, **changes})
    without = {key: value for key, value in EXPECTED_CONFIG.items() if key != "hidden_size"}
    with pytest.raises(UserError, match="hidden_size is missing"):
        DrafterConfig.from_json(without)


def small(**changes) -> Drafter:
    config = qwen_config(
        hidden_size=256,
        intermediate_size=64,
        vocab_size=100,
        mask_token_id=9,
        num_target_layers=8,
        target_layer_ids=(1, 3),
        num_layers=2,
        **changes,
    )
    drafter = Drafter(config)
    drafter.reset_parameters(seed=0)
    return drafter


def inputs(drafter):
    torch.manual_seed(1)
    config = drafter.config
    return {
        "taps": torch.randn(1, 128, 2 * config.hidden_size),
        "block_embeddings": torch.randn(1, 32, config.hidden_size),
        "context_positions": torch.arange(128)[None],
        "block_positions": torch.arange(100, 132)[None],
        "masks": {kind: torch.rand(1, 1, 32, 160) < 0.5 for kind in config.layer_types},
    }


def test_the_seed_decides_the_fresh_weights():
    one, same, other = small(), small(), small()
    other.reset_parameters(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(one.norm.weight, torch.ones(256))


def test_rotary_is_the_half_split_form_over_the_full_head():
    positions = torch.tensor([[0, 1, 77]])
    x = torch.randn(1, 2, 3, 8)
    turned = rotate(x, rotary_table(positions, head_dim=8, theta=100.0))
    for place, position in enumerate(positions[0].tolist()):
        for pair in range(4):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 8))
            a, b = x[..., place, pair], x[..., place, pair + 4]
            want_a, want_b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
            torch.testing.assert_close(turned[..., place, pair], want_a, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(turned[..., place, pair + 4], want_b, atol=1e-5, rtol=1e-5)


def test_checkpointed_layers_give_the_same_gradients():
    plain, checkpointed = small(), small()
    checkpointed.checkpoint_layers = True
    for drafter in (plain, checkpointed):
        drafter(**inputs(drafter)).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
        assert a.grad.abs().sum() > 0, name


def test_it_runs_in_bf16_close_to_float32():
    drafter = small()
    given = inputs(drafter)
    exact = drafter(**given)
    half = drafter.bfloat16()(
        **{**given, "taps": given["taps"].bfloat16(),
           "block_embeddings": given["block_embeddings"].bfloat16()}
    )  # fmt: skip
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.1, rtol=0.1)
