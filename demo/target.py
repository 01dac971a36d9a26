"""The demo's target: a tiny hybrid model of Qwen3.6's family, trained on procedural text.

Three Gated DeltaNet layers and one of full attention, 0.2 M parameters, characters as tokens. One
CPU thread trains it in about a minute; it is kept in a folder named after this recipe.
"""

import fcntl
import hashlib
import logging
import math
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging as transformers_logging

from common.chat import ChatTokenizer
from common.run import Progress
from demo import tasks, tokenizer
from demo.tasks import Task, make_task

STEPS, BATCH, LENGTH = 320, 16, 160
LEARNING_RATE = 3e-3
HIDDEN = 64

transformers_logging.disable_progress_bar()


def target_folder(root: Path, log: logging.Logger) -> Path:
    """The trained target and its tokenizer, made when `root` has none of this recipe."""
    files = (__file__, tokenizer.__file__, tasks.__file__)
    recipe = b"".join(Path(file).read_bytes() for file in files)
    folder = root / f"target-{hashlib.sha256(recipe).hexdigest()[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits and finds it done
        if not (folder / "model.safetensors").exists():
            tokenizer.build(folder)
            train_target(ChatTokenizer.load(str(folder)), log).save_pretrained(folder)
    return folder


def make_model(eos_token_id: int, pad_token_id: int) -> Qwen3_5ForCausalLM:
    """A fresh target of the demo's shape."""
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=tokenizer.VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
    )


def train_target(chat: ChatTokenizer, log: logging.Logger) -> Qwen3_5ForCausalLM:
    """Next-token training on whole conversations, on what an assistant says in them."""
    eos, pad = chat.token_id(tokenizer.TURN_END), chat.token_id(tokenizer.END_OF_TEXT)
    assert eos is not None and pad is not None
    model, generator = make_model(eos, pad), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    bar = Progress(log, total=STEPS, unit="step")
    loss = torch.zeros(())
    for step in range(STEPS):
        ids, mask = training_batch(chat, generator)
        for group in optimizer.param_groups:
            warm, cosine = min(1.0, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / STEPS))
            group["lr"] = LEARNING_RATE * warm * cosine
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.update(1, target_loss=f"{loss.item():.3f}")
    bar.close()
    log.info(f"target trained steps={STEPS} loss={loss.item():.3f}")
    return model.eval()


def training_batch(
    chat: ChatTokenizer, generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (BATCH, LENGTH) int64: conversations one after another; mask: what the assistant says."""
    rows, masks = [], []
    for _ in range(BATCH):
        ids: list[int] = []
        mask: list[bool] = []
        while len(ids) < LENGTH:
            task = make_task(generator)
            prompt = chat.encode(prompt_text(chat, task))
            said = chat.encode(f"{task.thought}\n</think>\n\n{task.answer}{tokenizer.TURN_END}")
            ids += prompt + said
            mask += [False] * len(prompt) + [True] * len(said)
        rows.append(ids[:LENGTH])
        masks.append(mask[:LENGTH])
    return torch.tensor(rows), torch.tensor(masks)


def prompt_text(chat: ChatTokenizer, task: Task) -> str:
    """The task's question as the server renders it, think block opened."""
    messages = [{"role": "user", "content": task.question}]
    return chat.render(messages, tools=None, thinking=True, preserve_thinking=False)
