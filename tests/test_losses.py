"""The losses by name against plain Python and dense autograd."""

import math

import pytest
import torch

from common.blocks import Pack, decay_weights, dpace_weights, make_blocks
from common.losses import LOSSES, block_loss, needs_teacher
from tests.test_loss import HIDDEN, SIZE, WORDS, parts, random_case  # noqa: F401

TEACHERS = [kind for kind in LOSSES if needs_teacher(kind)]


def plain_softmax(states, head):
    """softmax(head @ state) of lists of floats."""
    logits = [math.fsum(a * b for a, b in zip(states, row, strict=True)) for row in head]
    top = max(logits)
    shares = [math.exp(logit - top) for logit in logits]
    return [share / math.fsum(shares) for share in shares]


def plain_slot(kind, q, p, label):
    """The loss of one slot, by its formula."""
    cross_entropy = -math.log(q[label])
    distance = math.fsum(abs(a - b) for a, b in zip(q, p, strict=True))
    return {
        "ce": cross_entropy,
        "dpace": cross_entropy,
        "kd": -math.fsum(a * math.log(b) for a, b in zip(p, q, strict=True)),
        "tv": distance,
        "ce+tv": 0.1 * cross_entropy + 0.9 * distance,
    }[kind]


def plain_dpace(chances):
    """Weights of a block's supervised slots from the chance of each label."""
    reached, product = [], 1.0
    for chance in chances:
        product *= 0.5 * chance + 0.5
        reached.append(product)
    return [sum(reached[number:]) for number in range(len(reached))]


def plain_loss(kind, pack, blocks, hidden, head, final, gamma):
    """(sum of weight * loss, sum of weights) in Python floats."""
    hidden, head, final = (x.double().tolist() for x in (hidden, head, final))
    total = weight_sum = 0.0
    for block, anchor in enumerate(blocks.anchors.tolist()):
        slots = []
        for slot in range(1, SIZE):
            place = anchor + slot
            if not blocks.keep[block] or place >= 32 or not pack.loss_mask[place]:
                continue
            if pack.documents[place] == pack.documents[anchor]:
                q = plain_softmax(hidden[block * SIZE + slot], head)
                p = plain_softmax(final[place - 1], head)  # that token is said by the one before
                slots.append((slot, q, p, int(pack.input_ids[place])))
        weights = [math.exp(-(slot - 1) / gamma) if gamma else 1.0 for slot, *_ in slots]
        if kind == "dpace":
            dpace = plain_dpace([q[label] for _, q, _, label in slots])
            weights = [a * b for a, b in zip(weights, dpace, strict=True)]
        for weight, (_, q, p, label) in zip(weights, slots, strict=True):
            total += weight * plain_slot(kind, q, p, label)
            weight_sum += weight
    return total, weight_sum


@pytest.mark.parametrize("gamma", [0.0, 4.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_equals_plain_python(parts, kind, gamma):  # noqa: F811
    pack, blocks, hidden, head = parts
    final = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(1))
    want, want_weight = plain_loss(kind, pack, blocks, hidden, head, final, gamma)
    weights = decay_weights(blocks, gamma=gamma)
    sums = block_loss(kind, hidden, head, blocks, weights, final=final, tile_bytes=5 * 4 * WORDS)
    assert float(sums.loss) == pytest.approx(want, rel=1e-5)
    assert float(sums.weight) == pytest.approx(want_weight, rel=1e-6)
    predicted = (hidden @ head.T).argmax(-1)
    right = (predicted == blocks.labels) & blocks.supervised
    assert torch.equal(sums.correct, right.view(-1, SIZE).sum(0).float())
    assert torch.equal(sums.supervised, blocks.supervised.view(-1, SIZE).sum(0).float())


def naive_loss(kind, hidden, head, blocks, weights, final):
    """(sum of weight * loss, sum of weights) from all logits at once, for autograd.

    In the dtype of the weights, but for the products with the head.
    """
    log_q = (hidden @ head.T).to(weights.dtype).log_softmax(-1)
    q = log_q.exp()
    slots = torch.arange(blocks.block_size, device=hidden.device).repeat(len(blocks.anchors))
    places = blocks.anchors.repeat_interleave(blocks.block_size) + slots - 1
    p = (final[places.clamp(0, len(final) - 1)] @ head.T).to(weights.dtype).softmax(-1)
    cross_entropy = -log_q.gather(1, blocks.labels[:, None])[:, 0]
    distance = (p - q).abs().sum(-1)
    each = {
        "ce": cross_entropy,
        "dpace": cross_entropy,
        "kd": -(p * log_q).sum(-1),
        "tv": distance,
        "ce+tv": 0.1 * cross_entropy + 0.9 * distance,
    }[kind]
    if kind == "dpace":
        weights = weights * dpace_weights(blocks, cross_entropy.detach())
    return (each * weights).sum(), weights.sum()


def teacher_case(kind, words, *, sharp, near):
    """Blocks, states, head, and a teacher; `near` draws the states to what the teacher says."""
    if "tv" in kind:
        near = min(near, 0.5)  # where p and q are equal to rounding, the sign of p - q is noise
    blocks, hidden, head = random_case(words, sharp=sharp)
    final = torch.randn(200, hidden.shape[1], generator=torch.Generator().manual_seed(3))
    if sharp:
        final = final + sharp * head[torch.randint(words, (200,))]
    places = blocks.anchors.repeat_interleave(16) + torch.arange(16).repeat(40) - 1
    taught = final[places.clamp(0, 199)]
    return blocks, torch.lerp(hidden, taught, near), head, final


def gradient_of(loss, hidden, divisor):
    (loss / divisor).backward()
    return hidden.grad


CASES = [(0.0, 0.0), (4.0, 0.5), (30.0, 0.5), (4.0, 0.999)]  # sharp, near


@pytest.mark.parametrize("slots", [37, 10_000])
@pytest.mark.parametrize(("sharp", "near"), CASES)
@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_equal_the_naive_ones(kind, sharp, near, slots):
    blocks, hidden, head, final = teacher_case(kind, 257, sharp=sharp, near=near)
    weights = decay_weights(blocks, gamma=7.0)
    plain = hidden.clone().requires_grad_()
    want, want_weight = naive_loss(kind, plain, head, blocks, weights, final)
    ours = hidden.clone().requires_grad_()
    sums = block_loss(
        kind, ours, head, blocks, weights, final=final, tile_bytes=4 * len(head) * slots
    )
    torch.testing.assert_close(sums.loss / sums.weight, want / want_weight, atol=1e-6, rtol=1e-6)
    gradient = gradient_of(sums.loss, ours, sums.weight)
    torch.testing.assert_close(
        gradient, gradient_of(want, plain, want_weight), atol=1e-6, rtol=1e-6
    )
    assert gradient[~blocks.supervised].abs().max() == 0 and gradient.abs().max() > 0


@pytest.mark.parametrize("kind", LOSSES)
def test_a_batch_without_supervision_gives_zero_and_finite_gradients(parts, kind):  # noqa: F811
    pack, blocks, hidden, head = parts
    nothing = make_blocks(
        pack, blocks.anchors, torch.zeros_like(blocks.keep), block_size=SIZE, mask_token_id=1
    )
    hidden = hidden.requires_grad_()
    sums = block_loss(
        kind, hidden, head, nothing, decay_weights(nothing, gamma=0.0),
        final=torch.randn(32, HIDDEN),
    )  # fmt: skip
    sums.loss.backward()
    assert sums.loss.item() == 0 and sums.weight.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize(("sharp", "near"), CASES)
@pytest.mark.parametrize("kind", LOSSES)
def test_bf16_is_as_near_to_float64_as_the_naive_way(kind, sharp, near):
    blocks, *tensors = teacher_case(kind, 1000, sharp=sharp, near=near)
    hidden, head, final = (x.bfloat16() for x in tensors)
    weights = decay_weights(blocks, gamma=7.0)
    double = [x.double() for x in (hidden, head, final)]
    exact_in, plain_in, ours_in = (
        x.clone().requires_grad_() for x in (double[0], hidden, hidden)
    )  # fmt: skip
    want, weight = naive_loss(kind, exact_in, double[1], blocks, weights.double(), double[2])
    exact = gradient_of(want, exact_in, weight)
    plain_loss, _ = naive_loss(kind, plain_in, head, blocks, weights, final)
    plain = gradient_of(plain_loss, plain_in, weight)
    sums = block_loss(kind, ours_in, head, blocks, weights, final=final)
    gradient = gradient_of(sums.loss, ours_in, sums.weight)
    assert sums.loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert (sums.loss / sums.weight).item() == pytest.approx((want / weight).item(), rel=0.02)

    def error(gradient):
        return float((gradient.double() - exact).norm() / exact.norm())

    assert error(gradient) <= max(1.1 * error(plain), 0.004)  # bf16's own rounding


@pytest.mark.parametrize("word", [0, 9])
def test_small_differences_of_two_sure_distributions_keep_their_digits(word):
    """Both nearly one at a word: the slope there is what the others leave, not a difference."""
    head = torch.eye(10)
    hidden, final = torch.zeros(2, 10), torch.zeros(2, 10)
    hidden[1, word], final[0, word] = 16.0, 17.0
    pack = Pack(
        input_ids=torch.tensor([3, word]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        documents=torch.zeros(2, dtype=torch.int32),
        positions=torch.arange(2),
    )
    keep = torch.ones(1, dtype=torch.bool)
    blocks = make_blocks(pack, torch.zeros(1).long(), keep, block_size=2, mask_token_id=1)
    weights = decay_weights(blocks, gamma=0.0)
    for kind in LOSSES:
        exact, ours = hidden.double().requires_grad_(), hidden.clone().requires_grad_()
        want, _ = naive_loss(kind, exact, head.double(), blocks, weights.double(), final.double())
        want.backward()
        block_loss(kind, ours, head, blocks, weights, final=final).loss.backward()
        # the two softmaxes themselves round at 1e-7 of their values, whatever is small in them
        torch.testing.assert_close(ours.grad, exact.grad.float(), rtol=2e-5, atol=0, msg=kind)


def test_dpace_weighs_what_a_slot_adds_and_passes_over_holes(parts):  # noqa: F811
    _, blocks, _, _ = parts
    # the block at anchor 4: slots 1, 3, 4 (a hole at place 6), all of them sure, or hopeless
    for cross_entropy, want in ((0.0, [3, 0, 2, 1]), (100.0, [7 / 8, 0, 3 / 8, 1 / 8])):
        weights = dpace_weights(blocks, torch.full((len(blocks.labels),), cross_entropy))
        assert weights.view(-1, SIZE)[1].tolist() == pytest.approx([0, *want])
        assert torch.equal(weights > 0, blocks.supervised)
