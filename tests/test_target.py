"""Taps are the model's own hidden states, whatever the batch; unusable layers are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from common.run import UserError
from common.target import Target, padding_groups
from common.target_files import (
    default_target_layers,
    embedding_fingerprint,
    read_embedding_and_head,
    target_facts,
)
from tests.tiny_models import tiny_target

KINDS = ("qwen3", "qwen3_5")
CPU = torch.device("cpu")
LAYERS = (0, 2, 4)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {kind: str(tiny_target(folder / kind, kind=kind, num_layers=8)) for kind in KINDS}


def load(path, **options):
    return Target.load(path, layers=LAYERS, dtype=torch.float32, device=CPU, **options)


def documents(*lengths):
    generator = np.random.default_rng(0)
    return [generator.integers(0, 128, size=length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
def test_hook_on_layer_i_is_hidden_states_i_plus_1(targets, kind):
    (document,) = documents(70)
    model = AutoModelForCausalLM.from_pretrained(targets[kind], dtype=torch.float32)
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(document.astype(np.int64))[None], output_hidden_states=True
        )
    want = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
    taps = load(targets[kind], final=True).forward([document], final=True)
    assert torch.equal(taps.hidden, want)
    assert torch.equal(taps.final, output.hidden_states[-1][0])
    # and the convention is not blind to its neighbours
    assert not torch.allclose(taps.hidden[:, :64], output.hidden_states[0][0], atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_stopping_after_the_highest_tap_changes_nothing(targets, kind):
    request = documents(40, 33)
    cut, whole = load(targets[kind]), load(targets[kind], final=True)
    assert len(cut._decoder.layers) == max(LAYERS) + 1 < len(whole._decoder.layers) == 8
    assert torch.equal(cut.forward(request).hidden, whole.forward(request).hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_right_padded_batch_equals_one_by_one(targets, kind):
    target = load(targets[kind])
    request = documents(5, 90, 61, 64, 1, 33)
    together = target.forward(request).hidden
    alone = torch.cat([target.forward([document]).hidden for document in request])
    assert any(len(group) > 1 for group in padding_groups([5, 90, 61, 64, 1, 33], max_tokens=8192))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_padding_groups_hold_every_document_once_and_keep_the_bound():
    lengths = np.random.default_rng(1).integers(1, 2000, size=300).tolist()
    groups = padding_groups(lengths, max_tokens=4096)
    assert sorted(index for group in groups for index in group) == list(range(300))
    for group in groups:
        padded = max(lengths[index] for index in group) * len(group)
        assert padded <= 4096 or len(group) == 1
    assert groups == padding_groups(lengths, max_tokens=4096)
    # linear attention pads each row to 64 tokens, however short it is
    assert {len(group) for group in padding_groups([1] * 640, max_tokens=4096)} == {64}


@pytest.mark.parametrize("kind", KINDS)
def test_self_check_passes_and_names_a_layer_that_returns_zeros(targets, kind):
    target = load(targets[kind])
    target.check()
    target._decoder.layers[2].forward = lambda states, *rest, **named: torch.zeros_like(states)
    with pytest.raises(UserError, match="layer 2"):
        target.check()


@pytest.mark.parametrize(
    ("layers", "message"),
    [((0, 7), "last layer"), ((0, 8), "0 to 7"), ((-1,), "0 to 7"), ((1, 1), "distinct")],
)
def test_unusable_layers_are_refused(targets, layers, message):
    with pytest.raises(UserError, match=message):
        Target.load(targets["qwen3"], layers=layers, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([np.array([3, 128], dtype=np.int32)], "id 128"),
        ([np.array([-1], dtype=np.int32)], "id -1"),
        ([np.array([], dtype=np.int32)], "at least one token"),
        ([], "needs documents"),
    ],
)
def test_bad_requests_are_refused(targets, request_, message):
    with pytest.raises(ValueError, match=message):
        load(targets["qwen3"]).forward(request_)


def test_default_layers_are_those_of_the_released_drafters():
    assert default_target_layers(64) == (1, 16, 31, 46, 61)
    assert default_target_layers(36) == (1, 9, 17, 25, 33)
    assert default_target_layers(32) == (1, 8, 15, 22, 29)
    with pytest.raises(UserError, match="--layers"):
        default_target_layers(7)


def test_weights_decide_the_fingerprint(targets, tmp_path):
    other = str(tiny_target(tmp_path / "other", kind="qwen3", num_layers=8, seed=1))
    assert load(targets["qwen3"]).fingerprint == load(targets["qwen3"]).fingerprint
    assert load(targets["qwen3"]).fingerprint != load(other).fingerprint


def changed(path, folder, *, facts=None, tensors=()):
    """A copy of a target with other facts in its config, and zeros in some tensors."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | (facts or {})))
    weights = load_file(folder / "model.safetensors")
    zeros = {name: torch.zeros_like(weights[name]) for name in tensors}
    save_file(weights | zeros, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_whatever_changes_the_states_changes_the_fingerprint(targets, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 77.0}
    turned = changed(targets["qwen3"], tmp_path / "rope", facts={"rope_parameters": rope})
    finer = changed(targets["qwen3"], tmp_path / "eps", facts={"rms_norm_eps": 1e-3})
    prints = {load(path).fingerprint for path in (targets["qwen3"], turned, finer)}
    assert len(prints) == 3
    # the layers above the taps change the final states alone
    upper = ("model.layers.7.mlp.up_proj.weight",)
    above = changed(targets["qwen3"], tmp_path / "above", tensors=upper)
    assert load(above).fingerprint == load(targets["qwen3"]).fingerprint
    finals = [load(path, final=True).fingerprint for path in (targets["qwen3"], above)]
    assert finals[0] != finals[1]


def test_the_embedding_has_a_fingerprint_of_its_own_in_any_type(targets, tmp_path):
    whole = load(targets["qwen3"]).embedding
    half = Target.load(targets["qwen3"], layers=LAYERS, dtype=torch.bfloat16, device=CPU).embedding
    assert embedding_fingerprint(whole) == embedding_fingerprint(half)
    other = str(tiny_target(tmp_path / "other", kind="qwen3", num_layers=8, seed=1))
    assert embedding_fingerprint(whole) != embedding_fingerprint(load(other).embedding)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_come_from_the_files(tmp_path, tied):
    path = str(tiny_target(tmp_path / "t", tied=tied))
    embedding, head = read_embedding_and_head(path, dtype=torch.float32, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (embedding is head) == tied


def composite(path, folder):
    """The same weights under the names and the config of a model that can also see."""
    folder.mkdir()
    text = json.loads((path / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["mtp.embed_tokens.weight"] = torch.zeros(128, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_a_composite_checkpoint_is_its_text_model(tmp_path, tied):
    path = tiny_target(tmp_path / "text", num_layers=8, tied=tied)
    whole = composite(path, tmp_path / "whole")
    facts = target_facts(whole)
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (8, 64, 128)
    one, other = load(str(path)), load(whole)
    assert torch.equal(one.forward(documents(40)).hidden, other.forward(documents(40)).hidden)
    assert one.fingerprint == other.fingerprint
    want = read_embedding_and_head(str(path), dtype=torch.float32, device=CPU)
    got = read_embedding_and_head(whole, dtype=torch.float32, device=CPU)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (got[0] is got[1]) == tied


def test_a_head_of_its_own_wins_over_a_config_that_says_tied(tmp_path):
    path = tiny_target(tmp_path / "t", tied=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(128, 64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _, head = read_embedding_and_head(str(path), dtype=torch.float32, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(head, model.get_output_embeddings().weight)


def test_embedding_and_head_are_found_in_sharded_files(tmp_path):
    path = tiny_target(tmp_path / "t")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    got = read_embedding_and_head(str(tmp_path / "sharded"), dtype=torch.float32, device=CPU)
    assert torch.equal(got[0], model.get_input_embeddings().weight)
    assert torch.equal(got[1], model.get_output_embeddings().weight)


def test_a_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--target") as caught:
        load(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


SMALL = dict(vocab_size=128, hidden_size=32, num_hidden_layers=6, num_attention_heads=4)
LLAMA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0}
GPT2 = dict(vocab_size=128, n_embd=32, n_layer=6, n_head=4, n_positions=64)
# their layers lie at layers, h, model.layers; some configs hold a list with an entry a layer
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gpt_neo": dict(
        vocab_size=128, hidden_size=32, num_layers=6, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 3]],
    ),
    "gpt_neox": LLAMA,
    "phi": LLAMA,
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": dict(vocab_size=128, hidden_size=32, n_layer=6, n_head=4),
    "falcon": SMALL,
    "cohere": LLAMA,
    "gemma3_text": LLAMA,
    "llama4_text": {**LLAMA, "num_local_experts": 2, "intermediate_size_mlp": 64},
}  # fmt: skip


def family(folder, name, **shape):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**FAMILIES.get(name, SMALL), **shape})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_are_tapped_too(tmp_path, name):
    path = family(tmp_path / name, name)
    (document,) = documents(50)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(document.astype(np.int64))[None]
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    target = load(path, head=False)
    assert target.class_name == type(model).__name__
    assert len(target._decoder_layers) == max(LAYERS) + 1 < target_facts(path).num_layers
    want = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(target.forward([document]).hidden, want, atol=1e-5, rtol=1e-5)


def test_a_family_whose_states_are_not_its_layers_outputs_is_refused_by_name(tmp_path):
    path = family(tmp_path / "mamba", "mamba", state_size=4)
    with pytest.raises(UserError, match="MambaForCausalLM.*not the model's hidden_states"):
        load(path)


def test_a_model_whose_layers_cannot_be_found_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2))
    model.transformer.h = nn.Sequential(*model.transformer.h)
    with pytest.raises(UserError, match="no list of 6 decoder layers in GPT2LMHeadModel"):
        Target(model, name="gpt2", layers=LAYERS, final=True, max_tokens=100)


def test_a_family_that_cannot_be_cut_is_loaded_whole(targets, monkeypatch):
    want = load(targets["qwen3"])
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda *_, **__: 1 / 0)
    whole = load(targets["qwen3"])
    assert len(whole._decoder_layers) == 8
    request = documents(30)
    assert torch.equal(whole.forward(request).hidden, want.forward(request).hidden)
    assert whole.fingerprint == want.fingerprint


def test_what_only_the_drafters_shape_needs_is_asked_for_late(tmp_path):
    facts = target_facts(family(tmp_path / "gpt2", "gpt2"))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (6, 32, 128)
    with pytest.raises(UserError, match="GPT2Config has no rms_norm_eps"):
        _ = facts.rms_norm_eps
    with pytest.raises(UserError, match="GPT2Config has no rope_parameters"):
        _ = facts.rope_theta
    assert target_facts(family(tmp_path / "gemma", "gemma3_text")).rope_theta == 1e6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "model.safetensors is damaged"),
        (b"garbage" * 100, "model.safetensors is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (None, "model.safetensors is damaged"),  # cut short
    ],
)
def test_a_damaged_file_is_named(targets, tmp_path, content, message):
    folder = tmp_path / "damaged"
    shutil.copytree(targets["qwen3"], folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    for read in (
        lambda: load(str(folder)),
        lambda: read_embedding_and_head(str(folder), dtype=torch.float32, device=CPU),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read()
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"hidden_size": "big"}, "expected int, got str"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": -3}, "Qwen3Config has vocab_size -3"),
        ({"quantization_config": {"quant_method": "zzz"}}, "no quantization 'zzz'"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, "contains custom code"),
    ],
)
def test_an_odd_config_is_one_line(targets, tmp_path, facts, message):
    with pytest.raises(UserError, match=message) as caught:
        load(changed(targets["qwen3"], tmp_path / "odd", facts=facts))
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_that_is_no_folder_is_said_to_be_none(targets, tmp_path):
    with pytest.raises(UserError, match="no such folder, and not a hub id"):
        load(str(tmp_path / "none"))
    with pytest.raises(UserError, match="no such folder, and not a hub id"):
        load("./none")
    with pytest.raises(UserError, match="is a file; give the folder"):
        load(f"{targets['qwen3']}/config.json")
    folder = tmp_path / "damaged"
    shutil.copytree(targets["qwen3"], folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="index.json is damaged"):
        load(str(folder))
    lost = {"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(lost))
    with pytest.raises(UserError, match="gone.safetensors is missing"):
        load(str(folder))


def test_weights_that_are_missing_are_not_made_up(targets, tmp_path):
    folder = tmp_path / "holey"
    shutil.copytree(targets["qwen3"], folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"another shape, model\.layers\.3\.mlp\.up_proj"):
        load(str(folder))
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"another shape, model\.layers\.3\.mlp\.up_proj"):
        load(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed_is_loaded(targets, kind):
    whole = load(targets[kind], final=True)
    lean = load(targets[kind], head=False)
    assert lean.weight_bytes < 0.75 * whole.weight_bytes
    (document,) = documents(30)
    assert torch.equal(lean.forward([document]).hidden, whole.forward([document]).hidden)


def test_an_fp8_checkpoint_gives_what_its_numbers_say(targets, tmp_path):
    """Blocks of 128 x 128 with a scale each, as Qwen's FP8 releases have them."""
    folder = tmp_path / "fp8"
    wide = tiny_target(tmp_path / "wide", kind="qwen3", num_layers=6, hidden_size=128)
    shutil.copytree(wide, folder)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        rows, columns = weight.shape
        blocks = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
        blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        eighths = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = eighths.float() * scale[:, None, :, None]
        plain[name] = whole.flatten(2).flatten(0, 1)[:rows, :columns].clone()
        tensors[name] = eighths.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    reference = load_file(wide / "model.safetensors") | plain
    save_file(reference, wide / "model.safetensors", metadata={"format": "pt"})
    (document,) = documents(40)
    want, got = load(str(wide)).forward([document]), load(str(folder)).forward([document])
    # without a GPU transformers unpacks the weights to bfloat16
    error = (got.hidden - want.hidden).norm() / want.hidden.norm()
    assert error < 0.05


class SmallMemory:
    """Makes a target's forward fail as a GPU does when a batch has more than so many tokens."""

    def __init__(self, target, tokens):
        self._decoder, self._tokens, self.batches = target._decoder, tokens, []
        target._decoder = self

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def __call__(self, *, input_ids, **options):
        self.batches.append(input_ids.numel())
        if input_ids.numel() > self._tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._decoder(input_ids=input_ids, **options)


def test_a_batch_that_does_not_fit_is_halved_and_said_once(targets, caplog):
    request = documents(*[40] * 9, 30, 20)
    want = load(targets["qwen3_5"]).forward(request).hidden
    target = load(targets["qwen3_5"])
    memory = SmallMemory(target, 100)
    torch.testing.assert_close(target.forward(request).hidden, want, atol=1e-5, rtol=1e-5)
    failed = [tokens for tokens in memory.batches if tokens > 100]
    assert 0 < len(failed) < 8
    memory.batches.clear()
    target.forward(request)
    assert max(memory.batches) <= 100  # it has learned
    assert sum("out of GPU memory" in line for line in caplog.messages) == 1
    with pytest.raises(torch.OutOfMemoryError):
        target.forward(documents(101))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rows_do_not_depend_on_their_batch_beyond_rounding(targets, kind):
    target = Target.load(targets[kind], layers=LAYERS, dtype=torch.bfloat16, device=CPU)
    request = documents(5, 90, 61, 64, 1, 33)
    together = target.forward(request).hidden.float()
    again = target.forward(request).hidden.float()
    assert torch.equal(together, again)
    alone = torch.cat([target.forward([document]).hidden for document in request]).float()
    scale = alone.norm(dim=1).mean()
    assert (together - alone).norm(dim=1).max() < 0.05 * scale  # 8 bits of mantissa, 5 layers


def test_the_functions_that_a_model_calls_say_whether_it_runs_in_kernels(targets, monkeypatch):
    target = load(targets["qwen3_5"])
    assert target.fast_kernels() == {"flash-linear-attention": False, "causal-conv1d": False}
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", lambda x, weight: x)
    assert target.fast_kernels() == {"flash-linear-attention": False, "causal-conv1d": True}
    assert load(targets["qwen3"]).fast_kernels() == {}
