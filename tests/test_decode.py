"""Speculative decoding is lossless, and its acceptance is what the walked simulation says."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch._dynamo
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import decode as decoding
from common import dist
from common.acceptance import acceptance_lengths, judge_drafts, walked_acceptance
from common.attention import num_compiled_graphs
from common.batches import PackedRows
from common.blocks import decay_weights, legal_anchors, make_blocks, sample_anchors
from common.decode import (
    Decoded,
    decode,
    decode_figures,
    decode_rows,
    pack_rows_apart,
    prompt_and_length,
)
from common.drafter import Drafter
from common.drafting import TargetEnds, draft_blocks, padded_taps, tensor_pack
from common.loss import weighted_loss
from common.target import Target
from tests.tiny_models import tiny_drafter_config, tiny_target

CPU = torch.device("cpu")
LAYERS, WORDS, MASK, SIZE, LENGTH = (0, 1, 2), 128, 127, 8, 40
KINDS = ("llama", "qwen3", "qwen3_5")


def load(folder, **shape):
    path = tiny_target(folder, **shape)
    return Target.load(str(path), layers=LAYERS, dtype=torch.float32, device=CPU, final=True)


def make_drafter(*, hidden_size=64, words=WORDS, mask=MASK, size=SIZE, seed=0):
    drafter = Drafter(
        tiny_drafter_config(
            num_hidden_layers=2,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            vocab_size=words,
            max_position_embeddings=4096,
            block_size=size,
            mask_token_id=mask,
            target_layer_ids=LAYERS,
            num_target_layers=4,
            layer_types=("sliding_attention", "full_attention"),
            sliding_window=16,
        )
    )
    drafter.reset_parameters(seed=seed)
    return drafter


def greedy(target, drafter, prompt, *, eos=(), length=LENGTH):
    return decode(
        target, drafter, prompt, max_new_tokens=length, eos_token_ids=eos, temperature=0.0,
        generator=torch.Generator(),
    )  # fmt: skip


def make_pack(prompts, texts) -> PackedRows:
    """Prompts and their completions side by side, the completions supervised."""
    rows = [
        np.concatenate([prompt, np.array(text, np.int32)])
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    lengths = [len(row) for row in rows]
    positions = np.concatenate([np.arange(length) for length in lengths])
    starts = np.repeat([len(prompt) for prompt in prompts], lengths)
    return PackedRows(
        input_ids=np.concatenate(rows).astype(np.int64),
        loss_mask=positions >= starts,
        documents=np.repeat(np.arange(len(rows)), lengths).astype(np.int32),
        positions=positions,
        token_lists=tuple(rows),
    )


def blocks_at(drafter, target, rows, anchors):
    """The drafter's output for blocks at anchors of a pack, and the blocks."""
    pack = tensor_pack([rows], device=CPU)
    blocks = make_blocks(
        pack, anchors, torch.ones(len(anchors), dtype=torch.bool), block_size=SIZE,
        mask_token_id=MASK,
    )  # fmt: skip
    ends = TargetEnds(target.embedding, target.head)
    hidden = target.forward(rows.token_lists, dtype=torch.bfloat16).hidden
    output = draft_blocks(
        drafter, drafter.config, ends, pack=pack, blocks=blocks,
        taps=padded_taps([rows], [hidden], ends.embedding), attention="sdpa",
    )  # fmt: skip
    return output, blocks


def train(drafter, target, rows, *, steps):
    """Learn some of the rows by heart."""
    legal = legal_anchors(tensor_pack([rows], device=CPU))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for _ in range(steps):
        anchors, _ = sample_anchors(legal, 48, generator=generator)
        output, blocks = blocks_at(drafter, target, rows, anchors)
        loss = weighted_loss(output, target.head, blocks, decay_weights(blocks, gamma=4.0))
        (loss.loss / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclasses.dataclass
class Case:
    """A target, prompts, its own greedy texts, and a drafter that is right about parts of them."""

    target: Target
    prompts: list
    texts: list
    drafter: Drafter


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    target = load(tmp_path_factory.mktemp("target"), kind=request.param)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, MASK, 5 + row).astype(np.int32) for row in range(6)]
    texts = [greedy(target, None, prompt).tokens for prompt in prompts]
    drafter = make_drafter()
    train(drafter, target, make_pack(prompts, texts), steps=45)
    return Case(target, prompts, texts, drafter)


def test_plain_decoding_gives_the_argmax_of_a_forward_without_a_cache(case):
    for prompt, text in zip(case.prompts, case.texts, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, text]).astype(np.int64))
        with torch.no_grad():
            said = case.target._model(input_ids=ids[None]).logits[0].argmax(-1)
        assert said[len(prompt) - 1 : -1].tolist() == list(text) and len(text) == LENGTH


def test_greedy_text_is_that_of_plain_decoding(case):
    results = [greedy(case.target, case.drafter, prompt) for prompt in case.prompts]
    assert [result.tokens for result in results] == case.texts
    figures = decode_figures(results)
    assert 2 < figures.tokens_per_step < 7.5, "a drafter that is neither right nor wrong"
    assert sum(count > 0 for count in figures.accepted_counts) >= 4
    for drafter in (make_drafter(seed=1), make_drafter(size=2)):
        results = [greedy(case.target, drafter, prompt) for prompt in case.prompts[:2]]
        assert [result.tokens for result in results] == case.texts[:2]
        assert decode_figures(results).tokens_per_step < 1.5


@torch.no_grad()
def walked(case, rows):
    """(tokens, steps) of each document by the simulation."""
    anchors = torch.nonzero(legal_anchors(tensor_pack([rows], device=CPU)))[:, 0]
    if not len(anchors):
        return [(0, 0)] * len(rows.token_lists)
    output, blocks = blocks_at(case.drafter, case.target, rows, anchors)
    judged = judge_drafts(output, case.target.head, blocks, chunk_slots=64)
    lengths = acceptance_lengths(judged.right)
    documents = torch.from_numpy(rows.documents)[anchors]
    return [
        walked_acceptance(lengths[documents == number], anchors[documents == number])
        for number in range(len(rows.token_lists))
    ]


def real(results):
    return [(sum(result.accepted) + result.steps, result.steps) for result in results]


@pytest.mark.parametrize("length", [LENGTH, 23, 2, 1])
def test_the_walked_simulation_is_the_real_loop(case, length):
    rows = make_pack(case.prompts, [text[:length] for text in case.texts])
    results = list(
        decode_rows(
            case.target, case.drafter, pack_rows_apart([rows]), temperature=0.0, seed=0
        )
    )  # fmt: skip
    assert [result.tokens for result in results] == [text[:length] for text in case.texts]
    assert real(results) == walked(case, rows)
    assert (sum(result.steps for result in results) == 0) == (length == 1)


def test_an_end_token_ends_the_text_wherever_it_stands_in_a_block(case):
    places = set()
    never = min(set(range(WORDS)) - {token for text in case.texts for token in text})
    for prompt, text in zip(case.prompts, case.texts, strict=True):
        whole = greedy(case.target, case.drafter, prompt)
        for end in text[:12]:
            cut = text[: text.index(end) + 1]
            result = greedy(case.target, case.drafter, prompt, eos={end, never})
            assert result.tokens == cut
            assert real([result]) == walked(case, make_pack([prompt], [cut]))
            if result.steps:
                last = result.accepted[-1]
                places.add("draft" if last < whole.accepted[result.steps - 1] else "bonus")
    assert places == {"draft", "bonus"}


# ---- sampling


CHOICES, TEMPERATURE = 8, 0.5


def chi_square_p(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """p-value of counts of outcomes, those expected less than five times taken together."""
    expected = chances.double().flatten() * counts.sum()
    often, counts = expected >= 5, counts.double().flatten()
    assert int(often.sum()) > 12, "outcomes enough to tell"
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counted_pairs(samples: int, draw=None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Counts (8, 8) of the two tokens after an anchor, their chances, and accepted drafts a step.

    The target's logits depend on the last token alone; a step that settles one token is followed
    by a draw of the target's own. `draw` makes the drafts, after token 0, instead of decoding.draw.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(CHOICES, CHOICES, generator=generator)
    drafted = table[0] / 2 + torch.randn(2, CHOICES, generator=generator) / 2
    chances = (table / TEMPERATURE).softmax(-1)
    counts, accepted = torch.zeros(CHOICES, CHOICES), 0
    options = {"temperature": TEMPERATURE, "generator": generator}
    for _ in range(samples):
        draft = (draw or decoding.draw)(drafted, **options)
        seen = torch.cat([draft.tokens.new_zeros(1), draft.tokens])
        count, token = decoding.verify(draft, table[seen], **options)
        tokens = [*draft.tokens[:count].tolist(), token]
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(chances[token], 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
        accepted += count
    return counts, chances[0][:, None] * chances, accepted / samples


def test_the_rule_of_rejection_gives_the_targets_distribution():
    counts, chances, accepted = counted_pairs(6000)
    assert chi_square_p(counts, chances) > 0.01 and 0.5 < accepted < 1.5


@pytest.mark.parametrize("mistake", ["replaced by a draw from p", "always accepted", "q unknown"])
def test_a_broken_rule_of_rejection_shows(monkeypatch, mistake):
    if mistake == "replaced by a draw from p":
        monkeypatch.setattr(decoding, "residual", lambda wanted, drafted: wanted)
    elif mistake == "always accepted":
        monkeypatch.setattr(decoding, "_leading", len)
    else:
        honest, uniform = decoding.draw, torch.full((2, CHOICES), 1 / CHOICES)
        monkeypatch.setattr(
            decoding,
            "draw",
            lambda *args, **options: dataclasses.replace(
                honest(*args, **options), probabilities=uniform
            ),
        )
    counts, chances, _ = counted_pairs(6000)
    assert chi_square_p(counts, chances) < 1e-6


def test_sampled_text_has_the_targets_distribution(tmp_path):
    """The whole loop on a hybrid target of eight words: two tokens after the first."""
    target = load(tmp_path / "small", hidden_size=16, vocab_size=CHOICES)
    drafter = make_drafter(hidden_size=16, words=CHOICES, mask=CHOICES - 1, size=3, seed=3)
    prompt, samples, temperature = [1, 5, 2, 3], 250, 0.4
    pairs = itertools.product(range(CHOICES), repeat=2)
    with torch.no_grad():
        logits = target._model(input_ids=torch.tensor([[*prompt, *pair] for pair in pairs])).logits
    chances = (logits / temperature).softmax(-1).view(CHOICES, CHOICES, len(prompt) + 2, CHOICES)
    first, second, third = chances[0, 0, 3], chances[:, 0, 4], chances[:, :, 5]
    joint = torch.einsum("a,ab,abc->bc", first, second, third)
    counts, accepted = torch.zeros_like(joint), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(samples):
        result = decode(
            target, drafter, np.array(prompt, np.int32), max_new_tokens=3, eos_token_ids=(),
            temperature=temperature, generator=generator,
        )  # fmt: skip
        counts[result.tokens[1:]] += 1
        accepted += sum(result.accepted)
    assert chi_square_p(counts, joint) > 0.01 and 0.4 < accepted / samples < 1.6


def test_samples_depend_on_seed_and_row_alone(case):
    rows = list(pack_rows_apart([make_pack(case.prompts, case.texts)]))[:3]

    def sample(rows, seed, drafter=case.drafter):
        results = decode_rows(
            case.target, drafter, rows, temperature=1.0, seed=seed, max_new_tokens=12
        )
        return [result.tokens for result in results]

    first = sample(rows, 0)
    assert sample(rows, 0) == first and sample(rows[:2], 0) == first[:2]
    assert sample(rows, 1) != first and len(first[0]) <= 12
    assert sample([rows[0], rows[0]], 0)[1] != first[0], "another row, other draws"


# ---- the drafter as a trainer holds it; figures


def test_a_sharded_and_compiled_drafter_drafts_alike_and_compiles_nothing(case):
    torch._dynamo.reset()
    prompt = case.prompts[0]
    want = greedy(case.target, case.drafter, prompt)
    with dist.start("cpu") as world:
        drafter = make_drafter()
        drafter.load_state_dict(case.drafter.state_dict())
        drafter.compile_layers(backend="aot_eager")
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        for module in (*drafter.layers, drafter):
            fully_shard(module, mesh=world.mesh, mp_policy=policy)
        before = num_compiled_graphs()
        found = greedy(case.target, drafter, prompt)
        assert num_compiled_graphs() == before
    assert found.tokens == want.tokens and found.accepted == want.accepted


def test_figures_by_hand():
    results = [
        Decoded((5, 6, 7, 8, 9, 1), (2, 1), 2.0),
        Decoded((5,), (), 0.0),
        Decoded((5, 6, 7), (0, 0), 3.0),
    ]
    figures = decode_figures(results)
    assert (figures.completions, figures.tokens, figures.steps) == (3, 10, 4)
    assert figures.tokens_per_step == 1 + 3 / 4
    assert figures.mean_tokens_per_step == (2.5 + 1.0) / 2
    assert figures.tokens_per_s == 7 / 5
    assert figures.accepted_counts == (2, 1, 1)
    assert decode_figures([]).tokens_per_step == decode_figures([]).mean_tokens_per_step == 1


def test_a_row_is_decoded_from_its_prompt_to_the_end_of_its_first_completion():
    ids = np.arange(8, dtype=np.int32)
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1], bool)
    prompt, length = prompt_and_length(ids, mask)
    assert prompt.tolist() == [0, 1] and length == 3
    assert prompt_and_length(ids[:4], mask[:4])[1] == 2
    for wrong in (np.zeros(8, bool), np.ones(8, bool)):
        with pytest.raises(ValueError, match="needs a prompt"):
            prompt_and_length(ids, wrong)
