"""Exports: what engines read is there, every fault is found, what fails is never published."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import common.blocks
import common.drafter
import common.export
import train_dflash_online
from common import dist
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.export import export, exported_layout, publish
from common.reference import reference_states, seeded_sample, training_states
from common.run import UserError
from common.setup import load_weights, read_draft_config
from common.speculators import speculators_json, zlab_json
from common.verify import Check, config_checks, read_drafter, verify
from tests import forked
from tests.test_drafter import EXPECTED_CONFIG, qwen_config
from tests.tiny_models import tiny_drafter_config, tiny_target
from tests.tiny_run import ENVIRONMENT, train

HIDDEN, WORDS = 64, 128


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_target(tmp_path_factory.mktemp("target"), num_layers=6))


def make_config(**changes) -> DrafterConfig:
    shape = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        max_position_embeddings=128,
        vocab_size=WORDS,
        block_size=6,
        mask_token_id=WORDS - 1,
        target_layer_ids=(0, 2, 4),
        layer_types=("sliding_attention",) * 2 + ("full_attention",),
        sliding_window=24,
        eos_token_id=0,
    )
    return tiny_drafter_config(**{**shape, **changes})


def make_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    drafter = Drafter(config)
    drafter.reset_parameters(seed=seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:  # attention that is far from uniform
                parameter.mul_(100 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.4 * torch.randn(parameter.shape))
    return drafter


def ends(*, tied: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    embedding = torch.randn(WORDS, HIDDEN).bfloat16()  # as on a GPU
    return embedding, embedding if tied else torch.randn(WORDS, HIDDEN)


def write(folder, target, *, layout="zlab", drafter=None, tied=False):
    torch.manual_seed(1)
    drafter = drafter or make_drafter(make_config())
    tensors = {name: weight.bfloat16() for name, weight in drafter.state_dict().items()}
    publish(
        folder, tensors, drafter.config, layout=layout, target=target, ends=ends(tied=tied)
    )  # fmt: skip
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "who may read one, may all"
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, target):
    """An export in each layout, to be copied before it is broken."""
    folder = tmp_path_factory.mktemp("made")
    return {
        layout: write(folder / layout, target, layout=layout) for layout in ("zlab", "speculators")
    }


def findings(checks: list[Check]) -> list[tuple[str, bool, str]]:
    return [(check.name, found.fatal, found.text) for check in checks for found in check.findings]


# ---- what is written


def test_an_export_is_what_engines_load(made):
    checks = verify(made["zlab"])
    assert findings(checks) == []
    assert [check.name for check in checks][-2:] == ["finite weights", "forward"]
    config = json.loads((made["zlab"] / "config.json").read_bytes())
    assert config == make_config().to_json()
    assert sorted(path.name for path in made["zlab"].iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert exported_layout(made["zlab"]) == "zlab"
    assert exported_layout(made["zlab"] / "void") is None


def test_the_speculators_layout(made, target):
    folder = made["speculators"]
    assert findings(verify(folder)) == [] and exported_layout(folder) == "speculators"
    config = json.loads((folder / "config.json").read_bytes())
    layers = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "block_size": 6,
        "draft_vocab_size": WORDS,
        "dtype": "bfloat16",
        "mask_token_id": WORDS - 1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["Qwen3_5ForCausalLM"], "name_or_path": target},
        },
        "speculators_model_type": "dflash",
        "tie_word_embeddings": False,
    }
    assert (layers["model_type"], layers["rope_theta"], layers["sliding_window"]) == (
        "qwen3",
        1e4,
        24,
    )
    tensors = load_file(folder / "model.safetensors")
    body = load_file(made["zlab"] / "model.safetensors")
    assert tensors.keys() == body.keys() | {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(tensors[name], body[name]) for name in body)
    for name, end in zip(("embed_tokens.weight", "lm_head.weight"), ends(), strict=True):
        assert torch.equal(tensors[name], end.bfloat16())


def test_a_tied_head_is_written_twice(target, tmp_path):
    tensors = load_file(
        write(tmp_path / "e", target, layout="speculators", tied=True) / "model.safetensors"
    )
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


def test_transformers_reads_the_layers_of_both_layouts(made):
    from transformers import Qwen3Config

    for layout, inner in (
        ("zlab", lambda c: c),
        ("speculators", lambda c: c["transformer_layer_config"]),
    ):
        config = inner(json.loads((made[layout] / "config.json").read_bytes()))
        read = Qwen3Config(**config)
        assert config["rope_theta"] == read.rope_parameters["rope_theta"] == 1e4
        assert read.layer_types == list(make_config().layer_types) and read.sliding_window == 24


# ---- the reference


@pytest.mark.parametrize("window", [0, 6, 24, 64])
def test_the_training_forward_equals_the_formulas(window):
    kind = "sliding_attention" if window else "full_attention"
    config = make_config(
        layer_types=(kind, kind, "full_attention"), sliding_window=window or None, rope_theta=1e7
    )
    drafter, sample = make_drafter(config), seeded_sample(config)
    want = reference_states(drafter.state_dict().__getitem__, config, sample)
    got = training_states(drafter, sample)
    assert want.abs().max() > 1 and (got - want).abs().max() / want.abs().max() < 1e-4


def wrong_rope(monkeypatch):
    right = common.drafter.rotary_table
    monkeypatch.setattr(
        common.drafter, "rotary_table", lambda p, **named: right(p, **{**named, "theta": 1e6})
    )


def wrong_norm(monkeypatch):
    right = common.drafter.RMSNorm.forward
    monkeypatch.setattr(
        common.drafter.RMSNorm, "forward", lambda self, x: right(self, x) * (1 + self.weight)
    )


def wrongly(right, pack, changed):
    blocks, window = changed
    return right(pack, blocks, sliding_window=window)


def wrong_mask(change):
    def patch(monkeypatch):
        right = common.blocks.mask_predicate

        def wrong(pack, blocks, *, sliding_window, causal):
            return wrongly(right, pack, change(blocks, sliding_window))

        monkeypatch.setattr(common.blocks, "mask_predicate", wrong)

    return patch


MISTAKES = {
    "rope": wrong_rope,
    "norm": wrong_norm,
    "anchor seen": wrong_mask(
        lambda blocks, window: (dataclasses.replace(blocks, anchors=blocks.anchors + 1), window)
    ),
    "window": wrong_mask(lambda blocks, window: (blocks, window and window + 1)),
    "not causal": wrong_mask(lambda blocks, window: (blocks, None)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_forward_is_a_fault(made, monkeypatch, mistake):
    MISTAKES[mistake](monkeypatch)
    found = findings(verify(made["zlab"]))
    assert [name for name, fatal, _ in found if fatal] == ["forward"], found


# ---- every fault is found


def without(config, *path):
    *way, last = path
    for key in way:
        config = config[key]
    del config[last]


def put(value, *path):
    def change(config):
        *way, last = path
        inner = config
        for key in way:
            inner = inner[key]
        inner[last] = value

    return change


ZLAB_FAULTS = [
    (lambda c: c.pop("hidden_size"), "drafter", "hidden_size is missing"),
    (lambda c: c.pop("num_target_layers"), "drafter", "num_target_layers is missing"),
    (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "drafter", "rope_theta is missing"),
    (put([0, 2, 5], "dflash_config", "target_layer_ids"), "drafter", "the last layer"),
    (put([0, 2, 6], "dflash_config", "target_layer_ids"), "drafter", "out of range"),
    (put([2, 0, 4], "dflash_config", "target_layer_ids"), "drafter", "must ascend"),
    (put(WORDS, "dflash_config", "mask_token_id"), "drafter", f"mask token {WORDS}"),
    (put("x", "dflash_config"), "drafter", "not an object"),
    (put("six", "block_size"), "z-lab keys", "another in dflash_config"),
    (put(["full_attention"] * 2, "layer_types"), "drafter", "layer_types"),
    (put(None, "sliding_window"), "drafter", "sliding_window"),
    (put(False, "use_sliding_window"), "layer types", "use_sliding_window is false"),
    (put(False, "is_causal"), "drafter", "is_causal"),
    (put(True, "dflash_config", "causal"), "drafter", "causal"),
    (put(0.25, "rope_parameters", "partial_rotary_factor"), "drafter", "partial_rotary_factor"),
    (put([11, 11, 10], "rope_parameters", "mrope_section"), "drafter", "mrope_section"),
    (put({"rope_type": "yarn", "factor": 4.0}, "rope_scaling"), "drafter", "rope_scaling"),
    (put(True, "attention_bias"), "drafter", "attention_bias"),
    (put(1e6, "rope_parameters", "rope_theta"), "rope", "must be the same"),
    (put(["DFlash3DraftModel"], "architectures"), "drafter", "DFlash3DraftModel"),
    (put("qwen3_5", "model_type"), "z-lab keys", "model_type"),
    (lambda c: c.pop("dflash_config") and c.update(mask_token_id=1, target_layer_ids=[0, 2, 4]),
     "z-lab keys", "dflash_config lacks mask_token_id, target_layer_ids"),
    (lambda c: (c.pop("dtype"), c.pop("torch_dtype")), "dtype keys", "neither dtype"),
    (put("float16", "dtype"), "dtype keys", "must be the same"),
]  # fmt: skip
SPECULATORS_FAULTS = [
    (lambda c: c.pop("aux_hidden_state_layer_ids"), "drafter", "aux_hidden_state_layer_ids"),
    (put([1, 3, 6], "aux_hidden_state_layer_ids"), "drafter", "the last layer"),
    (put("eagle3", "speculators_model_type"), "drafter", "eagle3"),
    (put(True, "sample_from_anchor"), "drafter", "sample_from_anchor"),
    (put(True, "sliding_window_non_causal"), "drafter", "causal"),
    (put("domino", "projector_type"), "drafter", "projector_type"),
    (put(["x"], "transformer_layer_config"), "drafter", "layout"),
    (lambda c: c.pop("speculators_config"), "speculators keys", "speculators_config lacks"),
    (put(6, "speculators_config", "proposal_methods", 0, "speculative_tokens"),
     "speculators keys", "block_size - 1"),
    (put(None, "speculators_config", "verifier", "name_or_path"), "speculators keys", "verifier"),
    (put("eagle3", "speculators_config", "algorithm"), "speculators keys", "eagle3"),
    (put(WORDS + 1, "draft_vocab_size"), "speculators keys", "draft_vocab_size"),
    (put(WORDS - 1, "draft_vocab_size"), "shapes", "lm_head.weight is"),
    (put("llama", "transformer_layer_config", "model_type"), "speculators keys", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "change", "check", "text"),
    [("zlab", *row) for row in ZLAB_FAULTS] + [("speculators", *row) for row in SPECULATORS_FAULTS],
    ids=[f"{row[1]}: {row[2]}" for row in (*ZLAB_FAULTS, *SPECULATORS_FAULTS)],
)
def test_every_fault_of_a_config_is_found(made, tmp_path, layout, change, check, text):
    folder = shutil.copytree(made[layout], tmp_path / "e")
    config = json.loads((folder / "config.json").read_bytes())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    found = findings(verify(folder))
    assert any(name == check and fatal and text in said for name, fatal, said in found), found


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_no_value_of_a_config_is_a_traceback(made, layout):
    whole = json.loads((made[layout] / "config.json").read_bytes())

    def places(value, path=()):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            if isinstance(value[key], dict | list):
                yield from places(value[key], (*path, key))

    for path in places(whole):
        for odd in (None, "x", -1, [], {}, [None], True):
            config = json.loads(json.dumps(whole))
            put(odd, *path)(config)
            assert config_checks(config), (path, odd)


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def prefixed(prefix):
    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return change


def set_value(value):
    def change(tensors):
        tensors["layers.1.mlp.up_proj.weight"][3, 5] = value

    return change


TENSOR_FAULTS = [
    (rename("fc.weight", "fc.wait"), "tensor names", ["missing: fc.weight", "unknown: fc.wait"]),
    (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), "tensor names", ["missing: layers.1"]),
    (lambda t: t.update(rotary=torch.zeros(1).bfloat16()), "tensor names", ["unknown: rotary"]),
    (prefixed("model."), "tensor names", ['36 names begin with "model."']),
    (prefixed("module."), "tensor names", ['begin with "module."']),
    (prefixed("draft_model."), "tensor names", ['begin with "draft_model."']),
    (lambda t: t.update({"norm.weight": torch.ones(HIDDEN + 1).bfloat16()}),
     "shapes", [f"norm.weight is ({HIDDEN + 1},), not ({HIDDEN},)"]),
    (lambda t: t.update({"norm.weight": torch.ones(HIDDEN)}), "dtypes", ["norm.weight is F32"]),
    (set_value(float("nan")), "finite weights", ["layers.1.mlp.up_proj.weight: 1 values"]),
    (set_value(float("-inf")), "finite weights", ["layers.1.mlp.up_proj.weight: 1 values"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "check", "texts"), TENSOR_FAULTS)
def test_every_fault_of_the_tensors_is_found(made, tmp_path, change, check, texts):
    folder = shutil.copytree(made["zlab"], tmp_path / "e")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = findings(verify(folder))
    assert all(name == check and fatal for name, fatal, _ in found)
    for text in texts:
        assert any(text in said for *_, said in found), found


def test_faults_of_the_files_are_found(made, tmp_path):
    folder = shutil.copytree(made["zlab"], tmp_path / "e")
    weights = folder / "model.safetensors"
    save_file(load_file(weights), weights)
    (finding,) = findings(verify(folder))
    assert finding[:2] == ("metadata", True) and '{"format": "pt"}' in finding[2]
    weights.write_bytes(weights.read_bytes()[:-1])
    (finding,) = findings(verify(folder))
    assert finding[:2] == ("files", True) and "damaged or cut short" in finding[2]
    weights.unlink()
    (finding,) = findings(verify(folder))
    assert finding[:2] == ("files", True) and "is missing" in finding[2]
    (folder / "config.json").write_text("{")
    (finding,) = findings(verify(folder))
    assert "config.json is damaged" in finding[2]
    (finding,) = findings(verify(tmp_path / "void"))
    assert "cannot read" in finding[2]


# ---- what others have published


def published(folder, target, change, *, layout="zlab"):
    write(folder, target, layout=layout)
    config = json.loads((folder / "config.json").read_bytes())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return findings(verify(folder))


def test_what_others_published_passes_with_warnings(target, tmp_path):
    def older(config):  # z-lab's, of Qwen3-8B and Qwen3.6-27B
        for path in (("rope_parameters",), ("torch_dtype",), ("dflash_config", "block_size")):
            without(config, *path)
        config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}

    found = published(tmp_path / "older", target, older)
    assert {name for name, *_ in found} == {"z-lab keys", "dtype keys", "rope"}
    assert not any(fatal for _, fatal, _ in found) and len(found) == 4

    def newer(config):
        for path in (("rope_theta",), ("block_size",)):
            without(config, *path)
        config.update(pad_token_id=WORDS - 1)

    found = published(tmp_path / "newer", target, newer)
    assert {name for name, *_ in found} == {"z-lab keys", "rope", "mask token"}
    assert not any(fatal for _, fatal, _ in found)

    def theirs(config):  # full vocabulary: newer versions save neither end
        for path in (("sample_from_anchor",), ("transformer_layer_config", "num_target_layers")):
            without(config, *path)

    folder = tmp_path / "speculators"
    write(folder, target, layout="speculators")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "embed" not in name}
    tensors["verifier_norm.weight"] = torch.ones(HIDDEN).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    theirs(config)
    (folder / "config.json").write_text(json.dumps(config))
    found = findings(verify(folder))
    assert {name for name, *_ in found} == {"speculators keys", "tensor names"}
    assert not any(fatal for _, fatal, _ in found)


def test_the_27b_config_has_nothing_to_warn_of():
    assert findings(config_checks(EXPECTED_CONFIG)) == []
    config = speculators_json(qwen_config(), target="Qwen/Qwen3.6-27B", target_architectures=["X"])
    assert findings(config_checks(config)) == []
    assert config["aux_hidden_state_layer_ids"] == [2, 17, 32, 47, 62]
    assert DrafterConfig.from_json(zlab_json(config)) == qwen_config()


# ---- training goes on from it


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_untouched_weights_come_back_bit_for_bit(made, target, tmp_path, layout):
    config = read_draft_config(made[layout] / "config.json", "--init-from", num_target_layers=6)
    assert config == make_config()
    drafter = Drafter(config)
    load_weights(drafter, made[layout])
    again = write(tmp_path / "again", target, layout=layout, drafter=drafter)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (made[layout] / name).read_bytes()


def test_a_config_of_z_labs_comes_back_as_it_was(tmp_path):
    """Qwen3.6-27B's but for what names remote code and its writer's version."""
    extra = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "5.5.3"}
    released = {**EXPECTED_CONFIG, **extra}
    del released["rope_parameters"], released["torch_dtype"]
    released["dflash_config"] = {
        key: value for key, value in released["dflash_config"].items() if key != "block_size"
    }
    again = DrafterConfig.from_json(released).to_json()
    assert {key for key in released if again.get(key, key) != released[key]} == {
        *extra, "dflash_config",
    }  # fmt: skip
    assert again["dflash_config"] == {**released["dflash_config"], "block_size": 16}


# ---- publication


def test_what_fails_its_check_is_not_published(target, tmp_path):
    folder = write(tmp_path / "export", target)
    before = (folder / "model.safetensors").read_bytes()
    drafter = make_drafter(make_config(), seed=1)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"fails its check.*finite weights: fc\.weight"):
        write(folder, target, drafter=drafter)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    with pytest.raises(UserError, match="is not there"):
        write(tmp_path / "other", target, drafter=drafter)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_files_that_are_not_what_was_trained_are_not_published(target, tmp_path, monkeypatch):
    def lossy(tensors, path, metadata):
        tensors = {**tensors, "norm.weight": tensors["norm.weight"] + 1}
        save_file(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(common.export, "save_file", lossy)
        with pytest.raises(UserError, match="norm.weight is not as it was trained"):
            write(tmp_path / "export", target)
    to_json = DrafterConfig.to_json

    def forgetful(self):
        config = to_json(self)
        return {
            **config,
            "rope_theta": 1e6,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        }

    monkeypatch.setattr(DrafterConfig, "to_json", forgetful)
    with pytest.raises(UserError, match="otherwise than what was trained: config.json"):
        write(tmp_path / "export", target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_an_export_runs_the_training_forward_once(target, tmp_path, monkeypatch, layout):
    runs, forward = [], Drafter.forward
    monkeypatch.setattr(Drafter, "forward", lambda *a, **k: runs.append(1) or forward(*a, **k))
    no_sliding = make_config(layer_types=("full_attention",) * 3)  # though a window is named
    for number, config in enumerate((make_config(), no_sliding), start=1):
        write(tmp_path / str(number), target, layout=layout, drafter=make_drafter(config))
        assert len(runs) == number


def test_a_full_disk_leaves_the_export_before(target, tmp_path):
    folder = write(tmp_path / "export", target)
    before = (folder / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(
            UserError, match=r"cannot write the export \(.*File too large"
        ) as raised:
            write(folder, target, drafter=make_drafter(make_config(), seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "rerun the same command" in str(raised.value)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_kill_at_any_moment_leaves_a_whole_export(target, tmp_path):
    """Killed at each system call that renames, makes or removes something in the run folder."""
    folder = write(tmp_path / "export", target)
    old = (folder / "model.safetensors").read_bytes()
    drafter = make_drafter(make_config(), seed=1)
    killed, new = 0, None
    while new is None:
        killed += 1
        pid = os.fork()
        if pid == 0:
            try:
                kill_at_event(killed)
                write(folder, target, drafter=drafter)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        whole = folder if folder.exists() else tmp_path / "export.replaced"
        assert findings(verify(whole)) == [], killed
        if status == 0:
            new = (folder / "model.safetensors").read_bytes()
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL
    assert killed > 5 and new != old
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_between_two_names_is_kept_when_the_next_one_fails(target, tmp_path):
    folder = write(tmp_path / "export", target)
    before = (folder / "model.safetensors").read_bytes()
    folder.rename(tmp_path / "export.replaced")  # where a kill leaves it
    drafter = make_drafter(make_config())
    with torch.no_grad():
        drafter.norm.weight.fill_(float("inf"))
    with pytest.raises(UserError, match="is the one before"):
        write(folder, target, drafter=drafter)
    assert (folder / "model.safetensors").read_bytes() == before


def kill_at_event(count):
    left = count

    def watch(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def test_a_model_on_a_world_of_one_is_exported(target, tmp_path):
    drafter = make_drafter(make_config())
    with dist.start("cpu") as world:
        export(
            tmp_path / "export", model=drafter, config=drafter.config, world=world,
            layout="zlab", target=target, ends=ends(),
        )  # fmt: skip
    weights = drafter.state_dict()
    for name, tensor in read_drafter(tmp_path / "export").state_dict().items():
        assert torch.equal(tensor, weights[name].bfloat16().float()), name


# ---- the script


def run_script(*argv):
    return forked.run_to_end("train_dflash_online", argv, env=ENVIRONMENT, timeout=120)


def test_the_script_verifies_a_folder(made, tmp_path, capsys):
    assert train_dflash_online.main(["--verify-export", str(made["zlab"])]) == 0
    said = capsys.readouterr().out
    assert "engines load it" in said and "forward" in said
    broken = shutil.copytree(made["zlab"], tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    result = run_script("--verify-export", broken)
    assert result.returncode == 1 and result.stderr == ""
    assert "FAULT: files: " in result.stdout and "1 fault" in result.stdout


@pytest.mark.parametrize("name", ["export", "tensorboard", "checkpoints"])
def test_a_file_in_a_folders_place_is_one_line_at_the_start(target, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("")
    result = run_script("--data", tmp_path, "--target", target, "--output", tmp_path / "run")
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "error:" in line]
    assert f"{name} is not a folder" in line


@pytest.fixture(scope="module")
def run_parts(tiny):
    return tiny.data, tiny.target


def block_export(run):
    run.mkdir()
    (run / ".export.partial").write_text("in the way")


def test_a_run_exports_when_it_can_and_goes_on_from_there(run_parts, tmp_path):
    """A run that cannot export, the same in another layout, and training on from it."""
    run = tmp_path / "run"
    flags = ("--max-steps", "1", "--eval-rows", "0")
    block_export(run)
    failed = train(*run_parts, run, *flags)
    assert failed.returncode == 1 and "cannot write the export" in failed.stderr.splitlines()[-1]
    assert not (run / "export").exists() and (run / "checkpoints/latest").exists()
    (run / ".export.partial").unlink()
    done = train(*run_parts, run, *flags, "--export-format", "speculators")
    assert done.returncode == 0, done.stderr
    assert findings(verify(run / "export")) == []
    assert exported_layout(run / "export") == "speculators"
    flags = (*flags, "--init-from", str(run / "export"), "--learning-rate", "1e-30")
    further = train(*run_parts, tmp_path / "on", *flags)
    assert further.returncode == 0, further.stderr
    tensors = load_file(run / "export/model.safetensors")
    untouched = load_file(tmp_path / "on/export/model.safetensors")
    assert tensors.keys() == untouched.keys() | {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in untouched.items())


@pytest.mark.slow
def test_a_failed_export_ends_both_ranks(run_parts, tmp_path):
    block_export(tmp_path / "run")
    failed = train(*run_parts, tmp_path / "run", "--max-steps", "1", "--eval-rows", "0", ranks=2)
    assert failed.returncode == 1 and failed.stderr.count("cannot write the export") == 1
    assert "the main rank could not export" in failed.stderr
