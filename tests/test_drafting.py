"""Micro-batches have one shape whatever their rows; compiled layers are the layers."""

import argparse
import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
import torch
import torch._dynamo
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from common import dist
from common.attention import num_compiled_graphs
from common.blocks import dense_mask, flex_mask
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.drafting import TargetEnds, accumulate_gradients, micro_batches, padded_taps
from common.feed import ReadyStep
from common.losses import LOSSES
from common.setup import build_drafter
from common.target import Taps
from tests.gradients import make_pack
from tests.test_losses import naive_loss
from tests.tiny_models import tiny_drafter_config

WORDS, HIDDEN, SIZE, ANCHORS = 128, 64, 8, 12
# full packs and nearly empty ones, many short documents, none at all, none long enough to draft
ROWS = [(128,), (100, 20, 8), (5,) * 20, (), (1, 1, 1), (60, 60), (2,), (128,)]


def make_config() -> DrafterConfig:
    return tiny_drafter_config(
        hidden_size=HIDDEN,
        intermediate_size=96,
        max_position_embeddings=256,
        vocab_size=WORDS,
        block_size=SIZE,
        mask_token_id=WORDS - 1,
        target_layer_ids=(0, 1),
        layer_types=("sliding_attention",) * 2 + ("full_attention",),
        sliding_window=16,
    )


def make_batches(rows, *, size=1, step=1):
    generator = np.random.default_rng(step)
    packs = tuple(make_pack(lengths, generator) for lengths in rows)
    taps = []
    for pack in packs:
        future = Future()
        states = generator.standard_normal((pack.num_tokens, 3 * HIDDEN), dtype=np.float32)
        taps_and_final = torch.from_numpy(states).split([2 * HIDDEN, HIDDEN], dim=1)
        future.set_result(Taps(*taps_and_final))
        taps.append(future)
    return micro_batches(
        ReadyStep(None, 0, packs, tuple(taps)), make_config(), step=step, seed=0, size=size,
        num_anchors=ANCHORS, gamma=4.0, device=torch.device("cpu"),
    )  # fmt: skip


def make_ends() -> TargetEnds:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, WORDS, HIDDEN, generator=generator)
    return TargetEnds(table[0], table[1])


def shapes(batch):
    """Shape, dtype and strides of all that a forward and its masks are made of."""
    config, ends = make_config(), make_ends()
    taps = padded_taps(batch.packs, [taps.hidden for taps in batch.taps], ends.embedding)
    found = {"taps": taps, "weights": batch.weights}
    for part in (batch.pack, batch.blocks):
        found |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for window in (None, config.sliding_window):
        found[f"dense {window}"] = dense_mask(batch.pack, batch.blocks, sliding_window=window)
        mask = flex_mask(batch.pack, batch.blocks, sliding_window=window)
        tensors = [part for part in mask.as_tuple() if isinstance(part, torch.Tensor)]
        found |= {f"flex {window} {index}": tensor for index, tensor in enumerate(tensors)}
    return {name: (x.shape, x.dtype, x.stride()) for name, x in found.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_micro_batch_has_the_same_shapes_whatever_its_rows(size):
    found = [shapes(batch) for batch in make_batches(ROWS, size=size)]
    assert len(found) == len(ROWS) // size and len(found[0]) > 12
    assert all(each == found[0] for each in found)


def draft(drafter, batch, attention):
    """The drafter's output over the dense masks or the flex ones."""
    config, ends = drafter.config, make_ends()
    make = dense_mask if attention == "sdpa" else flex_mask
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    return drafter(
        padded_taps(batch.packs, [taps.hidden for taps in batch.taps], ends.embedding),
        ends.embedding[batch.blocks.input_ids][None],
        context_positions=batch.pack.positions[None],
        block_positions=batch.blocks.positions[None],
        masks={
            kind: make(batch.pack, batch.blocks, sliding_window=window)
            for kind, window in windows.items()
        },
    )


def test_layers_of_unlike_rows_are_compiled_once():
    """What a GPU runs compiled, with a backend that makes no code."""
    torch._dynamo.reset()
    drafter = Drafter(make_config())
    drafter.compile_layers(backend="aot_eager")
    first, *others = make_batches(ROWS)
    before = num_compiled_graphs()
    draft(drafter, first, "sdpa").square().mean().backward()
    warm = num_compiled_graphs()
    assert warm > before
    for batch in others:
        draft(drafter, batch, "sdpa").square().mean().backward()
    assert num_compiled_graphs() == warm
    wider = make_batches([(128,), (40,)], size=2)[0]
    draft(drafter, wider, "sdpa").square().mean().backward()
    assert num_compiled_graphs() > warm, "the counter sees a new shape"


@torch.no_grad()  # flex has no backward on a CPU
def test_flex_masks_and_layers_of_unlike_rows_are_compiled_once(monkeypatch):
    torch._dynamo.reset()
    plain, drafter = Drafter(make_config()), Drafter(make_config())
    for each in (plain, drafter):
        each.reset_parameters(seed=0)
    drafter.compile_layers(backend="aot_eager")
    compiled = torch.compile(create_block_mask, backend="eager", dynamic=False)
    monkeypatch.setattr("common.blocks.create_block_mask", compiled)
    counts = []
    for batch in make_batches(ROWS):
        flex, dense = draft(drafter, batch, "flex"), draft(plain, batch, "sdpa")
        torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)
        counts.append(num_compiled_graphs())
    assert 0 < counts[0] == counts[-1]


def sharded(world, *, dtype):
    """A drafter as the trainer builds it."""
    args = argparse.Namespace(
        seed=0, init_from=None, compile=False, checkpoint_layers=False, learning_rate=1e-4,
        dtype=dtype,
    )  # fmt: skip
    return build_drafter(make_config(), args, world)[0]


@torch.no_grad()
@pytest.mark.parametrize("layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sharded_drafter_compiles_flex_once(monkeypatch, layers):
    """fully_shard takes each layer's mask apart and builds it anew, its predicate too."""
    torch._dynamo.reset()
    batches = make_batches(ROWS[:4])
    masks = torch.compile(create_block_mask, backend="eager", dynamic=False)
    monkeypatch.setattr("common.blocks.create_block_mask", masks)
    with dist.start("cpu") as world:
        drafter, plain = sharded(world, dtype="float32"), Drafter(make_config())
        plain.reset_parameters(seed=0)
        if layers:
            drafter.compile_layers(backend="aot_eager")
        else:
            flex = torch.compile(flex_attention, backend="eager", dynamic=False)
            monkeypatch.setattr("common.attention.flex_attention", flex)
        counts = []
        for batch in batches:
            torch.testing.assert_close(
                draft(drafter, batch, "flex"), draft(plain, batch, "sdpa"), atol=1e-5, rtol=1e-5
            )
            counts.append(num_compiled_graphs())
    assert 0 < counts[0] == counts[-1]


@torch.no_grad()
def test_a_sharded_drafter_turns_by_float32_tables_in_bf16_too():
    """A cosine in bf16 is off by up to 1/512: fully_shard would round what a layer is handed."""
    plain = Drafter(make_config())
    plain.reset_parameters(seed=0)
    plain.bfloat16()
    (batch,) = make_batches([(128,)])
    (states,) = (taps.hidden.bfloat16() for taps in batch.taps)
    inputs = (states[None], make_ends().embedding[batch.blocks.input_ids][None].bfloat16())
    options = dict(
        context_positions=1000 + batch.pack.positions[None],
        block_positions=1000 + batch.blocks.positions[None],
        masks=dict.fromkeys(make_config().layer_types),
    )
    with dist.start("cpu") as world:
        got = sharded(world, dtype="bfloat16")(*inputs, **options)
    assert torch.equal(got, plain(*inputs, **options))


@pytest.mark.parametrize(
    ("compiled", "checkpoint_layers"), [(True, False), (False, True), (True, True)]
)
def test_compiled_and_checkpointed_layers_give_the_same_step(compiled, checkpoint_layers):
    torch._dynamo.reset()
    batches, results = make_batches(ROWS[:3]), []
    with dist.start("cpu") as world:
        for changed in (False, True):
            drafter = Drafter(make_config(), checkpoint_layers=changed and checkpoint_layers)
            drafter.reset_parameters(seed=0)
            if changed and compiled:
                drafter.compile_layers(backend="aot_eager")
            for module in (*drafter.layers, drafter):
                fully_shard(module, mesh=world.mesh)
            before = num_compiled_graphs()
            sums = accumulate_gradients(
                drafter, make_config(), make_ends(), batches, loss_kind="ce", attention="sdpa",
                world=world,
            )  # fmt: skip
            assert (num_compiled_graphs() > before) == (changed and compiled)
            gradients = {name: p.grad.full_tensor() for name, p in drafter.named_parameters()}
            results.append((sums, gradients))
    (plain, gradients), (other, other_gradients) = results
    assert other.loss == pytest.approx(plain.loss, rel=1e-6)
    assert (other.correct, other.supervised) == (plain.correct, plain.supervised)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(other_gradients[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_is_the_gradient_of_the_weighted_mean_over_its_batch(kind):
    """From all logits of all micro-batches at once: mean over slots, not of micro-batches."""
    batches, config, ends = make_batches(ROWS, size=2), make_config(), make_ends()
    plain = Drafter(config)
    plain.reset_parameters(seed=0)
    sums = []
    for batch in batches:
        final = torch.zeros(len(batch.pack.input_ids), HIDDEN)
        for number, (pack, taps) in enumerate(zip(batch.packs, batch.taps, strict=True)):
            final[number * 128 : number * 128 + pack.num_tokens] = taps.final
        hidden = draft(plain, batch, "sdpa")[0]
        sums.append(naive_loss(kind, hidden, ends.head, batch.blocks, batch.weights, final))
    want = sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)
    want.backward()
    with dist.start("cpu") as world:
        drafter = Drafter(config)
        drafter.reset_parameters(seed=0)
        fully_shard(drafter, mesh=world.mesh)
        step = accumulate_gradients(
            drafter, config, ends, batches, loss_kind=kind, attention="sdpa", world=world
        )
        assert step.loss == pytest.approx(want.item(), rel=1e-6)
        for (name, parameter), other in zip(
            drafter.named_parameters(), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(
                parameter.grad.full_tensor(), other.grad, atol=1e-6, rtol=1e-4, msg=name
            )


@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_without_supervision_has_no_gradient(kind):
    batches = make_batches([(), (2,)])
    assert not any(batch.blocks.supervised.any() for batch in batches)
    with dist.start("cpu") as world:
        drafter = Drafter(make_config())
        drafter.reset_parameters(seed=0)
        fully_shard(drafter, mesh=world.mesh)
        step = accumulate_gradients(
            drafter, make_config(), make_ends(), batches, loss_kind=kind, attention="sdpa",
            world=world,
        )  # fmt: skip
        assert (step.loss, step.supervised) == (0.0, 0.0)
        for name, parameter in drafter.named_parameters():
            assert not parameter.grad.full_tensor().any(), name
