"""Taps are the model's own hidden states, whatever the batch; unusable layers are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from common.run import UserError
from common.target import (
    Target,
    default_target_layers,
    padding_groups,
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
    assert cut.fingerprint == whole.fingerprint


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


def llama(folder, **shape):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_another_familys_layers_are_tapped_too(tmp_path):
    path = llama(tmp_path / "llama")
    (document,) = documents(50)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(document.astype(np.int64))[None]
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    want = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
    target = load(path)
    assert target.class_name == "LlamaForCausalLM"
    assert torch.equal(target.forward([document]).hidden, want)


def test_a_model_whose_layers_cannot_be_found_is_refused_by_name(tmp_path):
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=8, n_head=4, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        Target(
            AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2"),
            name="gpt2", layers=LAYERS, final=True, max_tokens=100,
        )  # fmt: skip


def test_weights_that_are_missing_are_not_made_up(targets, tmp_path):
    folder = tmp_path / "holey"
    shutil.copytree(targets["qwen3"], folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing.*layers\.3\.mlp\.up_proj"):
        load(str(folder))
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="of another shape"):
        load(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed_is_loaded(targets, kind):
    whole = load(targets[kind], final=True)
    lean = load(targets[kind], head=False)
    assert lean.weight_bytes < 0.75 * whole.weight_bytes
    (document,) = documents(30)
    assert torch.equal(lean.forward([document]).hidden, whole.forward([document]).hidden)
    assert lean.fingerprint == whole.fingerprint


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
