"""The planner: FLOPs as torch counts them, memory as measured, the 27B case as worked by hand."""

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from common import planner
from common.blocks import Pack, decay_weights, make_blocks
from common.drafter import Drafter
from common.flops import delta_rule, drafter_parameters, drafter_work, target_work
from common.footprint import StepShape, drafter_memory, ends_bytes, taps_bytes
from common.gpus import GPUS, Gpu, copy_rate, matmul_rate
from common.loss import TILE_BYTES, weighted_loss
from common.plan import InputRange, Plan
from common.run import UsageError, UserError
from common.selection import selector_loss
from common.target import Target
from common.target_files import target_facts
from common.target_model import build_without_weights
from tests import step_memory
from tests.forked import FORKS
from tests.tiny_models import tiny_drafter_config, tiny_target
from train_dflash_online import main, parse_args

QWEN = str(Path(__file__).parent / "data/qwen3.6-27b")
CARD = GPUS["rtx-pro-6000-blackwell"]
EPOCH = 1.87e9  # tokens of the README's recipe
TERA = 1e12


def counted(run) -> Counter:
    """FLOPs by operator; attention as matrix products, each pair computed."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return Counter({str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()})


# ---- what there is to compute


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_a_targets_flops_are_those_that_torch_counts(tmp_path, kind):
    path = str(tiny_target(tmp_path / kind, kind=kind, num_layers=5))
    layers = (1, 3)
    work = target_work(build_without_weights(path, layers=layers, final=False))
    target = Target.load(path, layers=layers, dtype=torch.float32, device=torch.device("cpu"))
    ids = np.arange(192, dtype=np.int32) % 128
    flops = counted(lambda: target.forward([ids]))
    # torch's own counter knows no triangular systems, and attention's mask only from its kernels
    linear = target_facts(path).config.layer_types if kind == "qwen3_5" else []
    config = target_facts(path).config
    solves = delta_rule(config, solves=True) - delta_rule(config, solves=False)
    unseen = linear[:4].count("linear_attention") * solves
    pairs = sum(4 * width * len(ids) / 2 for width, _ in work.attention)
    expected = work.forward(len(ids)) - unseen + pairs
    assert len(work.attention) == (1 if kind == "qwen3_5" else 4)
    assert sum(flops.values()) / len(ids) == pytest.approx(expected, rel=2e-3)


def test_of_experts_those_count_that_a_token_meets():
    config = Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        vocab_size=128,
    )  # fmt: skip
    with torch.device("meta"):
        work = target_work(Qwen3MoeForCausalLM(config))
    attention, router, expert = 64 * (64 + 32 + 32 + 64), 64 * 8, 3 * 64 * 48
    assert work.matrices == 2 * 2 * (attention + router + 2 * expert)
    assert work.layers > 2 * 8 * expert


@pytest.mark.parametrize("dflash2", [False, True])
def test_a_drafters_flops_are_those_that_torch_counts(dflash2):
    added = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
    config = tiny_drafter_config(
        **(added if dflash2 else {}),
        hidden_size=64, intermediate_size=96, vocab_size=640, block_size=8, mask_token_id=9,
        target_layer_ids=(1, 3), layer_types=("sliding_attention",) * 2 + ("full_attention",),
        sliding_window=16, max_position_embeddings=64,
    )  # fmt: skip
    tokens, anchors = 40, 6
    pack = Pack(
        input_ids=torch.arange(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        documents=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.arange(tokens),
    )
    blocks = make_blocks(
        pack, torch.arange(anchors), torch.ones(anchors, dtype=torch.bool),
        block_size=8, mask_token_id=9,
    )  # fmt: skip
    drafter, head = Drafter(config), torch.randn(640, 64)
    drafter.reset_parameters(seed=0)
    taps, slots = torch.randn(1, tokens, 128), torch.randn(1, anchors * 8, 64)
    losses = []

    def forward():
        output = drafter(
            taps, slots, context_positions=pack.positions[None],
            block_positions=blocks.positions[None], masks=dict.fromkeys(config.layer_types),
        )  # fmt: skip
        losses.append(weighted_loss(output[0], head, blocks, decay_weights(blocks, gamma=7.0)))

    forwards, backwards = counted(forward), counted(lambda: losses[0].loss.backward())
    work = drafter_work(
        config, tokens=tokens, anchors=anchors, supervised=int(blocks.supervised.sum()),
        visible=dict.fromkeys(config.layer_types, tokens + anchors * 8), teacher=False,
    )  # fmt: skip
    once, back = dict(work.forward), dict(work.backward)
    selecting, scoring = once.pop("selector"), back.pop("selector")
    assert forwards["aten.bmm"] == once.pop("attention")
    assert forwards["aten.mm"] == sum(once.values())
    assert backwards["aten.mm"] == sum(back.values()) - back["attention"]
    assert backwards["aten.bmm"] == 2 * work.forward["attention"]  # without the scores made again
    if dflash2:
        states = torch.randn(anchors * 8, 64, requires_grad=True)
        sums = []
        of_slots = torch.ones(int(blocks.supervised.sum()))
        select = functools.partial(
            selector_loss, drafter.candidate_selector, states, head, blocks, of_slots, top_k=4
        )
        assert sum(counted(lambda: sums.append(select())).values()) == selecting
        assert sum(counted(lambda: sums[0].loss.backward()).values()) == scoring
    layer, rest = drafter_parameters(config)
    assert 3 * layer + rest == sum(weight.numel() for weight in drafter.parameters())


# ---- the 27B case


def qwen(*flags, document_tokens=None):
    args = parse_args(["--plan", "--target", QWEN, *flags])
    return args, planner.count_work(args, document_tokens=document_tokens, mask_token_id=248_070)


def speeds(*flags, document_tokens=None):
    args, work = qwen(*flags, document_tokens=document_tokens)
    splits = planner.plan_splits(args, work, CARD, 4)
    return {split.name: split.tokens_per_s for split in splits}


def test_the_27b_work_as_worked_by_hand():
    args, work = qwen()
    assert args.layers == (1, 16, 31, 46, 61)
    assert work.target.matrices == pytest.approx(47.2e9, rel=1e-3)
    assert work.drafter_parameters == 1_730_213_120
    assert work.target_per_token * 4096 == pytest.approx(198 * TERA, rel=0.01)
    assert work.drafter(512).total == pytest.approx(126 * TERA, rel=0.015)
    assert work.drafter(512).forward["head"] == pytest.approx(39 * TERA, rel=0.01)
    assert work.drafter(256).total == pytest.approx(65 * TERA, rel=0.03)
    assert work.wire_per_token == 51_200


def test_the_27b_splits_as_worked_by_hand():
    at_512 = speeds()
    colocated = at_512["colocated 4"]
    assert colocated == pytest.approx(12_200, rel=0.01)
    for name, share in (("served 2+2", 0.85), ("served 3+1", 0.60), ("served 1+3", 0.43)):
        assert at_512[name] / colocated == pytest.approx(share, abs=0.01)
    at_256 = speeds("--anchor-ratio", "0.0625")
    assert at_256["served 3+1"] / at_256["colocated 4"] == pytest.approx(0.94, abs=0.015)
    # an epoch: 42 h, and with 512 anchors for 2,073 tokens 58
    assert EPOCH / colocated / 3600 == pytest.approx(42.5, abs=0.5)
    shorter = speeds("--pack-length", "2048", "--anchor-ratio", "0.25")["colocated 4"]
    assert EPOCH / shorter / 3600 == pytest.approx(58.5, abs=1)


def test_the_27b_memory_as_worked_by_hand():
    _, work = qwen("--loss", "kd")  # all layers
    target = 2 * work.target.layers + ends_bytes(work.target, 2)
    assert target == pytest.approx(53.8e9, rel=0.002)
    unsharded = (2 + 2 + 4 + 8) * work.drafter_parameters
    assert target + unsharded == pytest.approx(81.5e9, rel=0.002)


def test_a_balanced_anchor_ratio_lets_neither_side_wait():
    args, work = qwen()
    split = planner.plan_split(args, work, CARD, servers=3, trainers=1)
    ratio = str(split.balanced_ratio)
    args, work = qwen("--anchor-ratio", ratio)
    seconds = planner.plan_split(args, work, CARD, servers=3, trainers=1).seconds
    assert split.balanced_ratio < 0.0625 < 0.125
    assert seconds["target"] == pytest.approx(seconds["drafter"], rel=0.005)


def test_a_slow_link_is_the_limit():
    args, work = qwen()
    slow = Gpu("slow", 1 << 20, CARD.tflops, 1.0)
    split = planner.plan_split(args, work, slow, servers=0, trainers=4)
    parameters, share = work.drafter_parameters, 2 * 4096
    # two forwards a step: bf16 weights twice each, float32 gradients once, 3 of 4 shards
    expected = 1e9 / (0.75 * parameters * (2 * 2 * 2 + 4)) * share * 4
    assert split.bottleneck == "exchange"
    assert split.tokens_per_s == pytest.approx(expected)


# ---- memory


def test_predicted_memory_is_what_a_step_takes():
    cases = [("dflash", 1, False), ("dflash", 2, False), ("dflash", 1, True), ("dflash2", 1, False)]
    with FORKS.Pool(1, maxtasksperchild=1) as pool:
        measured = pool.starmap(step_memory.growth, cases, chunksize=1)
    tokens, predicted = step_memory.TOKENS, []
    for draft, forwards, checkpoint_layers in cases:
        config = step_memory.shape(draft)
        step = StepShape(
            ranks=1, forwards=forwards, tokens=tokens, anchors=step_memory.ANCHORS, width=4,
            tile_bytes=TILE_BYTES["cpu"], teacher=False, checkpoint_layers=checkpoint_layers,
        )  # fmt: skip
        items = drafter_memory(config, step)
        ends = 4 * 2 * config.vocab_size * config.hidden_size
        taps = taps_bytes(config, tokens=tokens, width=4, teacher=False)
        waiting = taps_bytes(config, tokens=tokens * forwards, width=2, teacher=False)
        predicted.append(sum(items.values()) + ends + taps + waiting)
    ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
    print([f"{size / 1e6:.0f} MB" for size in measured], ratios)
    assert min(ratios) > 0.95 and max(ratios) < 1.15  # rather too much than too little


def test_sharding_divides_what_all_ranks_hold():
    args, work = qwen()
    one, four = (
        drafter_memory(work.config, planner.step_shape(args, work, ranks=ranks)) for ranks in (1, 4)
    )
    for item in ("master weights", "optimiser"):
        assert four[item] == one[item] / 4
    assert one["optimiser"] == 8 * work.drafter_parameters


@pytest.mark.parametrize(
    ("memory_gib", "flags", "found"),
    [
        (96, (), None),
        (77, (), "activations: --checkpoint-layers"),
        (96, ("--global-batch", "512"), "hidden states: less --global-batch"),
        (40, (), "target layers: GPUs with more memory"),
    ],
)
def test_what_does_not_fit_is_named(memory_gib, flags, found):
    args, work = qwen(*flags)
    gpu = Gpu("card", memory_gib << 10, CARD.tflops, 63.0)
    said = planner.split_misfit(planner.plan_split(args, work, gpu, servers=0, trainers=4), gpu)
    assert said is None if found is None else f"over; {found}" in said


# ---- as a person runs it


def test_the_plan_of_the_27b(capsys):
    assert main(["--plan", "--target", QWEN]) == 0
    said = capsys.readouterr().out
    assert "needs a --global-batch that 3 divides" in said
    for part in ("198 TFLOP", "125 TFLOP", "served 2+2", "h/1B tokens", "20.8GB each"):
        assert part in said
    assert said.splitlines()[-1].startswith("take colocated 4: 12,")


def make_dataset(folder: Path, *, committed: int) -> Path:
    """A plan of three shards of 100, 200 and 300 bytes, and the records of the first ones."""
    plan = Plan(
        settings={"mask_token_id": 248_070},
        tokenizer_sha256="", template_sha256="", row_version=1, prompts=(),
        shards=tuple((InputRange("a", 600, "", 0, 100 * n),) for n in (1, 2, 3)),
    )  # fmt: skip
    folder.mkdir()
    (folder / "plan.json").write_bytes(plan.to_bytes())
    for index in range(committed):
        size = index + 1
        record = {"plan_sha256": plan.sha256, "rows": 10 * size, "tokens": 20_730 * size}
        path = folder / f"shard-{index:05}.json"
        path.write_text(json.dumps({**record, "bytes": 100_000 * size}))
    return folder


@pytest.mark.parametrize(("committed", "word"), [(3, "counted"), (1, "guessed")])
def test_data_gives_the_hours_of_an_epoch(tmp_path, capsys, committed, word):
    data = make_dataset(tmp_path / "data", committed=committed)
    args = parse_args(["--plan", "--target", QWEN, "--data", str(data)])
    facts, mask_token_id = planner.read_data(args)
    assert (facts.tokens, facts.tokens_per_row) == (pytest.approx(6 * 20_730), 2073)
    assert (facts.shard_bytes, mask_token_id) == (pytest.approx(600_000), 248_070)
    assert main(["--plan", "--target", QWEN, "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert f"124,380 tokens, {word}" in said and "h/6 epochs" in said and "up to 600.0kB" in said
    assert list(tmp_path.iterdir()) == [data]  # nothing is written


def test_data_without_a_committed_shard_is_refused(tmp_path):
    data = make_dataset(tmp_path / "data", committed=0)
    with pytest.raises(UserError, match="no shard with tokens is committed yet; leave --data out"):
        main(["--plan", "--target", QWEN, "--data", str(data)])


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--dtype", "float32"), "leave --dtype float32 out"),
        (("--gpu", "auto"), "torch sees no CUDA device here; give rtx-pro-6000-blackwell"),
    ],
)
def test_what_a_plan_cannot_say_is_refused(flags, cause):
    if torch.cuda.is_available() and "auto" in flags:
        pytest.skip("there is a GPU to measure")
    with pytest.raises(UsageError, match=cause):
        main(["--plan", "--target", QWEN, *flags])


def test_measured_rates_are_those_of_the_work_done(monkeypatch):
    """On a clock by which a product takes 2 s, and a copy too."""
    now = [0.0]
    monkeypatch.setattr("common.gpus.time.monotonic", lambda: now[0])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: now.__setitem__(0, now[0] + 2))
    cpu = torch.device("cpu")
    assert copy_rate(cpu, cpu, size=1000, seconds=1.0) == 500
    monkeypatch.setattr(torch, "mm", lambda *a, **k: now.__setitem__(0, now[0] + 2))
    assert matmul_rate(cpu, size=100, seconds=1.0) == 1_000_000


def test_a_gpu_that_cannot_be_measured_is_said_in_a_line(monkeypatch):
    def no_code(device):
        raise RuntimeError("CUDA error: no kernel image is available\nfor more, look there")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_code)
    with pytest.raises(
        UserError, match="--gpu auto: cannot measure cuda:0 .*no kernel image.*h100"
    ):
        main(["--plan", "--target", QWEN, "--gpu", "auto"])


def test_a_plan_that_fits_nowhere_ends_with_1(capsys):
    assert main(["--plan", "--target", QWEN, "--gpu", "l40s"]) == 1
    assert (
        "served 2+2 does not fit: serve GPU 6.4GB over; target layers: GPUs"
        in capsys.readouterr().out
    )
