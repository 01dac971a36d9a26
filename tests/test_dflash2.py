"""DFlash 2: its parts against plain loops; a fresh one is a DFlash; trained, served, exported."""

import dataclasses
import json
import math
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import train_dflash_online
from common import dist
from common.acceptance import acceptance_lengths, judge_drafts, walked_acceptance
from common.attention import attend
from common.blocks import (
    Pack,
    decay_weights,
    dense_mask,
    dpace_weights,
    flex_mask,
    grouped_mask,
    legal_anchors,
    make_blocks,
    sample_anchors,
)
from common.decode import draw_walk
from common.dflash2 import CandidateSelector, ConvolvedSublayer
from common.drafter import Drafter
from common.drafter_config import DFLASH2_SHAPE, DrafterConfig
from common.drafting import accumulate_gradients, draft_blocks, tensor_pack
from common.loss import weighted_loss
from common.losses import block_loss
from common.run import UserError
from common.selection import highest, selector_loss, top_words, walk
from common.verify import verify
from tests import forked, test_decode, test_drafting, test_parity
from tests.test_drafter import qwen_config
from tests.test_export import findings, write
from tests.tiny_models import tiny_drafter_config, tiny_target
from tests.tiny_run import (
    ENVIRONMENT,
    assert_alike,
    assert_same_run,
    comparable,
    train,
)

HIDDEN, WORDS, SIZE, GROUP, RANK, TOP = 32, 50, 6, 8, 5, 4
ADDED = dict(conv_kernel_size=2, conv_group_size=GROUP, selector_rank=RANK, selector_top_k=TOP)


def make_config(**changes) -> DrafterConfig:
    shape = dict(
        hidden_size=HIDDEN, intermediate_size=48, max_position_embeddings=256, vocab_size=WORDS,
        block_size=SIZE, mask_token_id=WORDS - 1, target_layer_ids=(0, 1, 2),
        layer_types=("sliding_attention",) * 3, sliding_window=8, **ADDED,
    )  # fmt: skip
    return tiny_drafter_config(**{**shape, **changes})


def plain(config: DrafterConfig) -> DrafterConfig:
    """The DFlash of the same shape."""
    return dataclasses.replace(config, **dict.fromkeys(ADDED))


def stir(module: torch.nn.Module, scale: float = 0.5) -> None:
    """Random weights all over, so that every part counts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator))


# ---- the convolution


@pytest.mark.parametrize("taps", [2, 3])
def test_the_convolution_is_a_plain_loop_that_ends_at_its_block(taps):
    layer = ConvolvedSublayer(HIDDEN, taps=taps, group_size=GROUP, block_size=SIZE)
    layer.reset_parameters()
    stir(layer)
    torch.manual_seed(0)
    x, matrix = torch.randn(1, 3 * SIZE, HIDDEN), torch.randn(HIDDEN, HIDDEN) / 5
    got = layer(x, lambda inner: (inner @ matrix).tanh())[0]
    added = x[0] @ layer.kernel_projection.weight.T  # rows: side, tap, group

    def convolve(rows, side):
        out = torch.zeros_like(rows)
        for i in range(len(rows)):
            for tap in range(min(i % SIZE + 1, taps)):
                for c in range(HIDDEN):
                    row = (side * taps + tap) * (HIDDEN // GROUP) + c // GROUP
                    kernel = layer.base_kernel[side, tap, c] + added[i, row]
                    out[i, c] += kernel * rows[i - tap, c]
        return out

    with torch.no_grad():
        want = convolve((convolve(x[0], 0) @ matrix).tanh(), 1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    moved = x.clone()
    moved[0, SIZE - 1] += 1  # the last slot of the first block
    other = layer(moved, lambda inner: inner)[0] != layer(x, lambda inner: inner)[0]
    assert other[SIZE - 1].all() and not other[SIZE:].any() and not other[: SIZE - 1].any()


# ---- fresh: a DFlash


def test_a_fresh_dflash2_is_a_dflash_bit_for_bit():
    batches, ends = test_drafting.make_batches(test_drafting.ROWS[:3]), test_drafting.make_ends()
    config = dataclasses.replace(
        test_drafting.make_config(), layer_types=("full_attention",) * 3, sliding_window=None,
        conv_kernel_size=2, conv_group_size=16, selector_rank=RANK, selector_top_k=TOP,
    )  # fmt: skip
    batch, found = batches[0], []
    with dist.start("cpu") as world:
        for shape in (plain(config), config):
            drafter = Drafter(shape)
            drafter.reset_parameters(seed=4)
            taps = torch.randn(
                1, 128, 2 * test_drafting.HIDDEN, generator=torch.Generator().manual_seed(0)
            )
            output = draft_blocks(
                drafter, shape, ends, pack=batch.pack, blocks=batch.blocks, taps=taps,
                attention="sdpa",
            )  # fmt: skip
            judged = judge_drafts(
                output.detach() + 0.3 * ends.head[batch.blocks.labels], ends.head, batch.blocks,
                chunk_slots=7,
                selector=drafter.candidate_selector,
            )  # fmt: skip
            for module in drafter.shards:
                fully_shard(module, mesh=world.mesh)
            step = accumulate_gradients(
                drafter, shape, ends, batches, loss_kind="ce", attention="sdpa", world=world
            )
            found.append((drafter, output, judged, step))
    (old, output, judged, step), (new, other, other_judged, other_step) = found
    assert torch.equal(other, output) and torch.equal(other_judged.right, judged.right)
    assert 0 < other_judged.right.sum() < other_judged.supervised.sum()
    assert other_step.loss == step.loss and other_step.correct == step.correct
    assert other_step.selector_loss > 0 == step.selector_loss
    shared = dict(new.named_parameters())
    assert set(old.state_dict()) < set(shared)
    for name, weight in old.named_parameters():
        assert torch.equal(shared[name].full_tensor(), weight.full_tensor()), name
    for name, weight in shared.items():  # what was added learns from the first step on
        waits = name.endswith(("hidden_projection.weight", "predecessor_codebook"))
        assert weight.grad.full_tensor().any() != waits, name


def test_compiled_and_checkpointed_layers_give_the_same_step():
    torch._dynamo.reset()
    batches, ends = test_drafting.make_batches(test_drafting.ROWS[1:2]), test_drafting.make_ends()
    config = dataclasses.replace(
        test_drafting.make_config(), num_hidden_layers=1, layer_types=("sliding_attention",),
        conv_kernel_size=2, conv_group_size=16, selector_rank=RANK, selector_top_k=TOP,
    )  # fmt: skip
    steps = []
    with dist.start("cpu") as world:
        for changed in (False, True):
            drafter = Drafter(config, checkpoint_layers=changed)
            drafter.reset_parameters(seed=0)
            stir(drafter, scale=0.1)
            if changed:
                drafter.compile_layers(backend="aot_eager")
            for module in drafter.shards:
                fully_shard(module, mesh=world.mesh)
            step = accumulate_gradients(
                drafter, config, ends, batches, loss_kind="ce", attention="sdpa", world=world
            )
            steps.append((step, dict(drafter.named_parameters())))
    (one, weights), (other, others) = steps
    assert other.selector_loss == pytest.approx(one.selector_loss, rel=1e-5)
    for name, weight in weights.items():
        gradient = weight.grad.full_tensor()
        assert gradient.any(), name
        torch.testing.assert_close(others[name].grad.full_tensor(), gradient, atol=1e-5, rtol=1e-4)


# ---- masks and serving


@pytest.mark.parametrize("window", [0, 8, 64])
def test_training_forward_equals_serving_forward(monkeypatch, window):
    kind = "sliding_attention" if window else "full_attention"
    config = make_config(layer_types=(kind,) * 3, sliding_window=window or None)
    pack, taps, table = test_parity.make_parts()
    drafter = Drafter(config)
    drafter.reset_parameters(seed=1)
    stir(drafter, scale=0.25)
    served = test_parity.served_output(drafter, pack, taps, table)
    trained = test_parity.training_output(drafter, pack, taps, table)
    torch.testing.assert_close(trained, served, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(DrafterConfig, "causal", True)
    causal = test_parity.training_output(drafter, pack, taps, table)
    assert ((causal - served).abs().max() > 0.1) == (window > 0)


def test_every_form_of_a_mask_that_is_not_causal_is_the_same(pack):
    blocks = make_blocks(
        pack, torch.tensor([2, 9, 20, 23]), torch.tensor([True, True, True, False]),
        block_size=SIZE, mask_token_id=1,
    )  # fmt: skip
    options = dict(sliding_window=8, causal=False)
    dense = dense_mask(pack, blocks, **options)
    queries, length = len(blocks.input_ids), len(pack.input_ids)
    same = torch.arange(queries)[:, None] // SIZE == torch.arange(queries) // SIZE
    assert torch.equal(dense[0, 0, :, length:], same)
    context = dense_mask(pack, blocks, sliding_window=8)[..., :length]
    assert torch.equal(dense[..., :length], context) and context.any()
    heads = [torch.randn(1, 2, size, 16) for size in (queries, length + queries, length + queries)]
    want = attend(*heads, dense)
    for mask in (grouped_mask(pack, blocks, **options), flex_mask(pack, blocks, **options)):
        torch.testing.assert_close(attend(*heads, mask), want, atol=1e-5, rtol=1e-5)


# ---- the selector


@pytest.fixture
def pack():
    documents = torch.tensor([0] * 14 + [1] * 12 + [-1] * 6, dtype=torch.int32)
    loss_mask = documents >= 0
    loss_mask[[0, 1, 6, 14]] = False  # a hole at 6
    generator = torch.Generator().manual_seed(0)
    return Pack(
        input_ids=torch.randint(0, WORDS, (32,), generator=generator),
        loss_mask=loss_mask,
        documents=documents,
        positions=torch.cat([torch.arange(14), torch.arange(12), torch.zeros(6)]).long(),
    )


@pytest.fixture
def scene(pack):
    """Blocks over a hole and past a document's end, states that lean to their labels."""
    blocks = make_blocks(
        pack, torch.tensor([2, 3, 5, 10, 15, 17, 22, 0]), torch.tensor([True] * 7 + [False]),
        block_size=SIZE, mask_token_id=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    hidden = torch.randn(8 * SIZE, HIDDEN, generator=generator) + 0.35 * head[blocks.labels]
    selector = CandidateSelector(HIDDEN, WORDS, rank=RANK, top_k=TOP)
    selector.reset_parameters(std=1.0, generator=generator)
    stir(selector, scale=0.7)
    final = torch.randn(32, HIDDEN, generator=generator)
    return blocks, hidden, head, selector, final


def plain_candidates(state, head):
    """(word, logit) of the highest, in plain Python."""
    logits = [sum(a * b for a, b in zip(state, word, strict=True)) for word in head]
    return sorted(enumerate(logits), key=lambda pair: -pair[1])[:TOP]


def plain_scores(state, head, selector, before):
    """{word: score} of a slot's candidates after the word `before`."""
    scores = {}
    wide = {name: weight.double().tolist() for name, weight in selector.state_dict().items()}
    projected = [
        sum(w * h for w, h in zip(row, state, strict=True))
        for row in wide["hidden_projection.weight"]
    ]
    for word, logit in plain_candidates(state, head):
        given, follows = wide["predecessor_codebook"][before], wide["successor_codebook"][word]
        scores[word] = logit + sum(
            a * p * b for a, p, b in zip(given, projected, follows, strict=True)
        )
    return scores


def chances(scores, temperature=1.0):
    top = max(scores.values())
    parts = {word: math.exp((score - top) / temperature) for word, score in scores.items()}
    return {word: part / sum(parts.values()) for word, part in parts.items()}


@torch.no_grad()
@pytest.mark.parametrize("chunk_slots", [3, 1000])
def test_drafts_are_those_of_a_plain_walk(scene, chunk_slots):
    blocks, hidden, head, selector, final = scene
    judged = judge_drafts(
        hidden, head, blocks, chunk_slots=chunk_slots, final=final, temperature=0.7,
        selector=selector,
    )  # fmt: skip
    states, words = hidden.double().tolist(), head.double().tolist()
    differs = False
    for block, anchor in enumerate(blocks.anchors.tolist()):
        before = int(blocks.labels[block * SIZE])
        for slot in range(1, SIZE):
            place = block * SIZE + slot
            label, found = int(blocks.labels[place]), (block, slot - 1)
            if not blocks.supervised[place]:
                assert not judged.right[found] and judged.overlap[found] == 0
                before = label
                continue
            scores = plain_scores(states[place], words, selector, before)
            before = max(scores, key=scores.get)
            differs |= before != plain_candidates(states[place], words)[0][0]
            assert judged.right[found] == (before == label), found
            true = plain_scores(states[place], words, selector, int(blocks.labels[place - 1]))
            q = chances(true, 0.7)
            p = ((final[anchor + slot - 1].double() @ head.double().T) / 0.7).softmax(-1)
            overlap = sum(min(q[word], float(p[word])) for word in q)
            assert float(judged.overlap[found]) == pytest.approx(overlap, rel=1e-4, abs=1e-6)
    assert differs and 5 < judged.right.sum() < judged.supervised.sum()
    without = judge_drafts(hidden, head, blocks, chunk_slots=chunk_slots)
    assert torch.equal(without.cross_entropy, judged.cross_entropy)
    assert not torch.equal(without.right, judged.right)
    # one block by itself, as decoding walks it
    draft = draw_walk(
        selector, hidden[1:SIZE], head, blocks.labels[:1], temperature=0.0,
        generator=torch.Generator(),
    )  # fmt: skip
    before = int(blocks.labels[0])
    for slot, token in enumerate(draft.tokens.tolist(), start=1):
        scores = plain_scores(states[slot], words, selector, before)
        before = max(scores, key=scores.get)
        assert token == before


@torch.no_grad()
def test_sampled_drafts_come_from_the_q_that_verification_is_told(scene):
    blocks, hidden, head, selector, _ = scene
    states, words = hidden[1:3].double().tolist(), head.double().tolist()
    anchor, generator = blocks.labels[:1], torch.Generator().manual_seed(0)
    counts, samples = torch.zeros(WORDS), 800
    for _ in range(samples):
        draft = draw_walk(
            selector, hidden[1:3], head, anchor, temperature=2.0, generator=generator
        )  # fmt: skip
        counts[draft.tokens[0]] += 1
        before = int(anchor)
        for slot, token in enumerate(draft.tokens.tolist()):
            q = chances(plain_scores(states[slot], words, selector, before), 2.0)
            got = draft.probabilities[slot]
            assert int((got > 0).sum()) == TOP and token in q
            assert float(got[token]) == pytest.approx(q[token], rel=1e-4)
            before = token
            if counts.sum() > 50:
                break  # enough of the slow part
    q = chances(plain_scores(states[0], words, selector, int(anchor)), 2.0)
    for word, share in q.items():
        assert float(counts[word]) / samples == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("tile_bytes", [1, 8 * 40 * 4 * 64, None])
def test_the_top_words_of_tiles_are_those_of_all_words(tile_bytes):
    torch.manual_seed(0)
    states, head = torch.randn(40, HIDDEN), torch.randn(300, HIDDEN)
    logits, words = top_words(states, head, top_k=TOP, tile_bytes=tile_bytes)
    want = (states @ head.T).topk(TOP, dim=1)
    torch.testing.assert_close(logits, want.values)
    assert torch.equal(words, want.indices)


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_the_selectors_loss_and_gradients_are_those_of_all_logits_in_float64(scene, kind):
    blocks, hidden, head, selector, _ = scene
    weights = decay_weights(blocks, gamma=3.0)
    ours = hidden.clone().requires_grad_()
    base = block_loss(kind, ours, head, blocks, weights, final=None)
    sums = selector_loss(
        selector, ours, head, blocks, base.slot_weights, top_k=TOP, tile_bytes=64 * 4
    )
    sums.loss.backward()
    got = [ours.grad, *[weight.grad for weight in selector.parameters()]]

    wide = CandidateSelector(HIDDEN, WORDS, rank=RANK, top_k=TOP).double()
    wide.load_state_dict(selector.state_dict())
    theirs = hidden.double().requires_grad_()
    logits = theirs @ head.double().T
    if kind == "dpace":
        entropy = -logits.log_softmax(-1).gather(1, blocks.labels[:, None])[:, 0].detach()
        weights = weights * dpace_weights(blocks, torch.where(blocks.supervised, entropy, 0.0))
    loss, right, missing = 0.0, 0, 0
    for place in torch.nonzero(blocks.supervised)[:, 0].tolist():
        words, label = logits[place].topk(TOP).indices.tolist(), int(blocks.labels[place])
        missing += label not in words
        if label not in words:
            words[-1] = label
        given = wide.predecessor_codebook[blocks.labels[place - 1]]
        pull = given * (wide.hidden_projection.weight @ theirs[place])
        scores = logits[place][words] + wide.successor_codebook[words] @ pull
        loss = loss - weights[place] * scores.log_softmax(0)[words.index(label)]
        best = logits[place].topk(TOP).indices[0] if label not in words else words[scores.argmax()]
        right += best == label and label in logits[place].topk(TOP).indices
    loss.backward()
    assert 0 < missing < blocks.supervised.sum() and 0 < right == sums.correct
    assert sums.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(
        got, [theirs.grad, *[weight.grad for weight in wide.parameters()]], strict=True
    ):
        assert other.any()
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


def test_a_batch_without_supervision_has_no_selector_gradient(scene):
    blocks, hidden, head, selector, _ = scene
    nothing = dataclasses.replace(blocks, supervised=torch.zeros_like(blocks.supervised))
    sums = selector_loss(
        selector, hidden.requires_grad_(), head, nothing, torch.zeros(0), top_k=TOP
    )
    sums.loss.backward()
    assert sums.loss == 0 and not any(weight.grad.any() for weight in selector.parameters())


def test_the_walk_follows_what_it_chose():
    scores = torch.zeros(1, 3, 2, 2)
    scores[0, 0, :, 1], scores[0, 1, 1, 0], scores[0, 2, 0, 1] = 1.0, 1.0, 1.0
    words = torch.tensor([[[10, 11], [20, 21], [30, 31]]])
    assert walk(scores, words, highest).tolist() == [[11, 20, 31]]
    scores[0, 0, :, 0] = 2.0
    assert walk(scores, words, highest).tolist() == [[10, 20, 31]]


# ---- decoding


@pytest.fixture(scope="module")
def decoding(tmp_path_factory):
    """A target, its own greedy texts, and a DFlash 2 that has learnt parts of them."""
    target = test_decode.load(tmp_path_factory.mktemp("target"), kind="qwen3_5")
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 127, 5 + row).astype(np.int32) for row in range(4)]
    texts = [test_decode.greedy(target, None, prompt).tokens for prompt in prompts]
    config = dataclasses.replace(
        test_decode.make_drafter().config, layer_types=("sliding_attention",) * 2,
        conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4,
    )  # fmt: skip
    drafter = Drafter(config)
    drafter.reset_parameters(seed=0)
    rows = test_decode.make_pack(prompts, texts)
    legal = legal_anchors(tensor_pack([rows], device=torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for _ in range(40):
        anchors, _ = sample_anchors(legal, 48, generator=generator)
        output, blocks = test_decode.blocks_at(drafter, target, rows, anchors)
        base = weighted_loss(output, target.head, blocks, decay_weights(blocks, gamma=4.0))
        more = selector_loss(
            drafter.candidate_selector, output, target.head, blocks, base.slot_weights, top_k=4
        )
        ((base.loss + more.loss) / base.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # a selector that often overrules the slots
        drafter.candidate_selector.successor_codebook.mul_(30)
    return target, prompts, texts, drafter


@torch.no_grad()
def test_greedy_text_is_that_of_plain_decoding_and_the_walked_simulation_its_steps(decoding):
    target, prompts, texts, drafter = decoding
    results = [test_decode.greedy(target, drafter, prompt) for prompt in prompts]
    assert [result.tokens for result in results] == texts
    rows = test_decode.make_pack(prompts, texts)
    anchors = torch.nonzero(legal_anchors(tensor_pack([rows], device=torch.device("cpu"))))[:, 0]
    output, blocks = test_decode.blocks_at(drafter, target, rows, anchors)
    walks = {}
    for selector in (None, drafter.candidate_selector):
        judged = judge_drafts(output, target.head, blocks, chunk_slots=64, selector=selector)
        lengths, documents = acceptance_lengths(judged.right), torch.from_numpy(rows.documents)
        walks[selector] = [
            walked_acceptance(lengths[documents[anchors] == n], anchors[documents[anchors] == n])
            for n in range(len(prompts))
        ]
    real = test_decode.real(results)
    assert walks[drafter.candidate_selector] == real != walks[None]
    assert 1.3 < sum(t for t, _ in real) / sum(s for _, s in real) < 7.5


def test_sampled_text_has_the_targets_distribution():
    generator = torch.Generator().manual_seed(5)
    words = test_decode.CHOICES
    selector = CandidateSelector(16, words, rank=RANK, top_k=5)
    selector.reset_parameters(std=1.0, generator=generator)
    stir(selector, scale=0.3)
    head, states = (torch.randn(rows, 16, generator=generator) / 3 for rows in (words, 2))

    @torch.no_grad()
    def draw(_, **options):
        return draw_walk(selector, states, head, torch.zeros(1, dtype=torch.int64), **options)

    counts, chances, accepted = test_decode.counted_pairs(3000, draw)
    assert test_decode.chi_square_p(counts, chances) > 0.01 and 0.2 < accepted < 1.5

    def careless(_, **options):  # as if a slot's q did not depend on the draft before it
        draft = draw(_, **options)
        other = draw_walk(selector, states, head, torch.ones(1, dtype=torch.int64), **options)
        return dataclasses.replace(draft, probabilities=other.probabilities)

    counts, chances, _ = test_decode.counted_pairs(3000, torch.no_grad()(careless))
    assert test_decode.chi_square_p(counts, chances) < 1e-6


# ---- config and export


def test_the_released_config_is_read_and_ours_says_both_forms():
    released = qwen_config().to_json()
    released |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    released |= {"layer_types": ["sliding_attention"] * 5}
    released["dflash_config"] = {
        **DFLASH2_SHAPE, "block_size": 8, "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
    }  # fmt: skip
    del released["block_size"], released["rope_theta"]
    config = DrafterConfig.from_json(released)
    assert (config.draft, config.causal, config.block_size) == ("dflash2", False, 8)
    written = config.to_json()
    assert written["architectures"] == ["DFlash2DraftModel"] and written["is_causal"] is False
    assert written["dflash_config"] == released["dflash_config"]
    assert written["block_size"] == 8 and written["rope_theta"] == 1e7
    assert DrafterConfig.from_json(written) == config
    with torch.device("meta"):
        tensors = {name: tuple(w.shape) for name, w in Drafter(config).state_dict().items()}
    assert len(tensors) == 81
    wanted = {
        "layers.4.attention_conv.base_kernel": (2, 2, 5120),
        "layers.4.attention_conv.kernel_projection.weight": (1280, 5120),
        "layers.0.mlp_conv.base_kernel": (2, 2, 5120),
        "layers.0.mlp_conv.kernel_projection.weight": (1280, 5120),
        "candidate_selector.hidden_projection.weight": (256, 5120),
        "candidate_selector.predecessor_codebook": (248320, 256),
        "candidate_selector.successor_codebook": (248320, 256),
    }
    assert wanted.items() <= tensors.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_top_k": None}, "selector_top_k: a DFlash 2 needs"),
        ({"selector_top_k": WORDS + 1}, "over vocab_size"),
        ({"conv_kernel_size": SIZE + 1}, "over block_size"),
        ({"conv_group_size": 5}, "no multiple of conv_group_size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("is_causal"), "is_causal"),
        (lambda c: c.update(is_causal=True), "is_causal"),
        (lambda c: c["dflash_config"].pop("selector_rank"), "selector_rank is missing"),
        (lambda c: c.update(architectures=["DFlashDraftModel"]), "conv_kernel_size"),
    ],
)
def test_configs_of_another_drafter_are_refused(change, message):
    document = make_config().to_json()
    change(document)
    with pytest.raises(UserError, match=message):
        DrafterConfig.from_json(document)


def test_an_export_is_checked_against_the_formulas(tmp_path, monkeypatch):
    target = str(tiny_target(tmp_path / "target", num_layers=6))
    drafter = Drafter(
        make_config(
            hidden_size=64, vocab_size=128, mask_token_id=127, target_layer_ids=(0, 2, 4),
            sliding_window=24, eos_token_id=0,
        )
    )  # fmt: skip
    drafter.reset_parameters(seed=0)
    stir(drafter, scale=0.2)
    folder = write(tmp_path / "export", target, drafter=drafter)
    assert findings(verify(folder)) == []
    assert len(load_file(folder / "model.safetensors")) == 3 + 3 * 15 + 3
    with pytest.raises(UserError, match="has no DFlash 2"):
        write(tmp_path / "other", target, layout="speculators", drafter=drafter)
    honest = ConvolvedSublayer._convolve

    def swapped(self, x, base, added):
        return honest(self, x, base.flip(0), added)

    with monkeypatch.context() as patch:
        patch.setattr(ConvolvedSublayer, "_convolve", swapped)
        assert [name for name, fatal, _ in findings(verify(folder)) if fatal] == ["forward"]
    with monkeypatch.context() as patch:
        patch.setattr(DrafterConfig, "causal", True)
        assert [name for name, fatal, _ in findings(verify(folder)) if fatal] == ["forward"]
    honest_scores = CandidateSelector.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            CandidateSelector, "forward", lambda *parts: honest_scores(*parts).transpose(-1, -2)
        )
        assert [name for name, fatal, _ in findings(verify(folder)) if fatal] == ["forward"]


# ---- the script


@pytest.fixture(scope="module")
def parts(tiny):
    return tiny.data, tiny.target


@pytest.fixture(scope="module")
def calm_run(parts, tmp_path_factory):
    output = tmp_path_factory.mktemp("calm") / "run"
    flags = ("--draft", "dflash2", "--max-steps", "6", "--save-every", "3")
    result = train(*parts, output, *flags)
    assert result.returncode == 0, result.stderr
    return output


def test_a_short_run_trains_exports_and_resumes_to_the_bit(parts, calm_run, tmp_path):
    steps = [entry for entry in comparable(calm_run) if "loss" in entry]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["selector_loss"] < steps[0]["selector_loss"] < steps[0]["loss"]
    assert 0 < steps[-1]["selector_accuracy"] < 1
    config = json.loads((calm_run / "export/config.json").read_bytes())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert train_dflash_online.main(["--verify-export", str(calm_run / "export")]) == 0
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(calm_run), str(run)], check=True)
    subprocess.run(["rm", "-r", str(run / "checkpoints/step-00000006")], check=True)
    flags = ("--max-steps", "6", "--save-every", "3")
    resumed = train(*parts, run, "--draft", "dflash2", *flags)
    assert resumed.returncode == 0 and "starting step=3" in resumed.stderr, resumed.stderr
    assert_same_run(run, calm_run, tmp_path)
    other = train(*parts, run, *flags)
    assert other.returncode == 1 and "draft_config" in other.stderr


@pytest.mark.slow
def test_a_published_one_is_taken_up_again(parts, calm_run, tmp_path):
    flags = ("--init-from", str(calm_run / "export"), "--max-steps", "1")
    result = train(*parts, tmp_path / "run", *flags, "--draft", "dflash")
    assert result.returncode == 1 and "draft is dflash2, not dflash" in result.stderr
    result = train(*parts, tmp_path / "run", *flags, "--learning-rate", "1e-12")
    assert result.returncode == 0, result.stderr
    old, new = (load_file(run / "export/model.safetensors") for run in (calm_run, tmp_path / "run"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        # one step at 1e-12 shows in no weight but those at 0
        torch.testing.assert_close(new[name].float(), tensor.float(), rtol=0, atol=2e-12)


@pytest.mark.slow
def test_two_ranks_train_and_judge_alike(parts, calm_run, tmp_path):
    """The selector is gathered for the loss, and for passes that only one rank counts."""
    flags = ("--draft", "dflash2", "--max-steps", "6")
    result = train(*parts, tmp_path / "run", *flags, ranks=2)
    assert result.returncode == 0, result.stderr
    assert_alike(calm_run, tmp_path / "run", rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_gradients_are_equal_on_any_split(parts, tmp_path):
    """One rank x 4 packs, two x 2: the same gradients to 1e-5, the selector's too."""
    found = {}
    for ranks in (1, 2):
        result = forked.run_ranks(
            "tests.gradients", ["dflash2", parts[1], tmp_path / f"{ranks}", "1"], ranks=ranks,
            env=ENVIRONMENT, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        for kind in ("ce", "dpace", "kd"):
            found[kind, ranks] = load_file(f"{tmp_path}/{ranks}-{kind}-1.safetensors")
    for (kind, ranks), tensors in found.items():
        assert tensors["candidate_selector.successor_codebook"].any()
        for name, tensor in found[kind, 1].items():
            torch.testing.assert_close(
                tensors[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{kind} {ranks} {name}"
            )
