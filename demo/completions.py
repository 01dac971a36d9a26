"""The demo's completions: what its own target says, greedily, written as people's files look.

A dozen JSONL files, one of them gzipped, in three layouts: batch output of vLLM with the request
beside it, `messages`, and `prompt` + `completion`.
"""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.chat import ChatTokenizer
from common.run import Progress
from demo.target import prompt_text
from demo.tasks import Task, make_task

NUM_COMPLETIONS = 400
NUM_FILES = 12
BATCH = 40
MAX_NEW_TOKENS = 120
THINK_END = "</think>"


def write_completions(target: Path, folder: Path, log: Any) -> int:
    """Answer NUM_COMPLETIONS tasks with the target and write the files; how many were written."""
    generator = random.Random(1)
    answered = list(
        answer_tasks(target, [make_task(generator) for _ in range(NUM_COMPLETIONS)], log)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_FILES):
        layout = LAYOUTS[number % len(LAYOUTS)]
        first = number * len(answered) // NUM_FILES
        last = (number + 1) * len(answered) // NUM_FILES
        lines = (
            json.dumps(layout(f"{answered[index][0].kind}-{index:04d}", *answered[index]))
            for index in range(first, last)
        )
        data = ("\n".join(lines) + "\n").encode()
        if number == NUM_FILES - 1:
            (folder / f"part-{number:02d}.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))
        else:
            (folder / f"part-{number:02d}.jsonl").write_bytes(data)
    return len(answered)


def answer_tasks(
    target: Path, chosen: list[Task], log: Any
) -> Iterator[tuple[Task, str, str, str]]:
    """(task, thought, answer, finish reason) in order; prompts of one length share a batch."""
    chat = ChatTokenizer.load(str(target))
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    by_length: dict[int, list[int]] = defaultdict(list)
    prompts = [chat.encode(prompt_text(chat, task)) for task in chosen]
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: dict[int, str] = {}
    bar = Progress(log, total=len(chosen), unit="completion")
    for length, indexes in sorted(by_length.items()):
        for start in range(0, len(indexes), BATCH):
            group = indexes[start : start + BATCH]
            ids = torch.tensor([prompts[index] for index in group])
            said = model.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[:, length:]
            for index, row in zip(group, said.tolist(), strict=True):
                answers[index] = chat.decode(row)
            bar.update(len(group))
    bar.close()
    for index, task in enumerate(chosen):
        text, ended, _ = answers[index].partition("<|im_end|>")
        thought, closed, answer = text.partition(THINK_END)
        if not closed:
            thought, answer = text, ""
        yield task, thought.strip(), answer.strip(), "stop" if ended else "length"


def batch_row(
    row_id: str, task: Task, thought: str, answer: str, finish_reason: str
) -> dict[str, Any]:
    """A line of vLLM's run_batch, with the request kept beside the response."""
    message = {"role": "assistant", "content": answer or None, "reasoning": thought}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {
        "custom_id": row_id,
        "request": {"body": {"messages": [{"role": "user", "content": task.question}]}},
        "response": {"status_code": 200, "body": {"choices": [choice]}},
        "error": None,
    }


def messages_row(
    row_id: str, task: Task, thought: str, answer: str, finish_reason: str
) -> dict[str, Any]:
    """A conversation, reasoning in a field of its own."""
    turn = {"role": "assistant", "content": answer, "reasoning_content": thought}
    messages = [{"role": "user", "content": task.question}, turn]
    return {"id": row_id, "messages": messages, "finish_reason": finish_reason}


def prompt_row(
    row_id: str, task: Task, thought: str, answer: str, finish_reason: str
) -> dict[str, Any]:
    """Prompt and completion as strings, the thought inline as servers without a parser do."""
    completion = f"{thought}\n{THINK_END}\n\n{answer}" if answer else thought
    return {
        "id": row_id,
        "category": task.kind,
        "prompt": task.question,
        "completion": completion,
        "finish_reason": finish_reason,
    }


LAYOUTS = (batch_row, messages_row, prompt_row)
