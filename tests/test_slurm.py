"""The README's job array for Slurm, handed to bash for each task as sbatch would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_tokenize_faults import make_line
from tests.test_tokenize_script import SCRIPT, contents, run_script
from tests.tiny_tokenizer import build_tiny_tokenizer

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_job_array_of_the_readme_makes_the_whole_dataset(tmp_path):
    (source := tmp_path / "in").mkdir()
    lines = (make_line(row, "word " * 40) for row in range(400))
    (source / "a.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = build_tiny_tokenizer(tmp_path / "tokenizer")
    written = re.search(r"^ +(sbatch .*?--wrap '.*?')$", README.read_text(), re.DOTALL | re.M)
    _, array, *_, job = shlex.split(written[1])
    assert array == "--array=0-3"
    for name, stands_for in {
        "python tokenize_completions.py": shlex.join([sys.executable, *SCRIPT[1:]]),
        "s3://bucket/completions/": source,
        "s3://bucket/tokens/": tmp_path / "out",
        "./Qwen3.6-27B": tokenizer,
    }.items():
        assert name in job
        job = job.replace(name, str(stands_for))
    job += " --tokenize-workers 1"
    tasks = [
        subprocess.Popen(
            ["bash", "-c", job],
            env={**os.environ, "SLURM_ARRAY_TASK_ID": str(number)},
            stderr=subprocess.PIPE,
        )
        for number in range(4)
    ]
    for task in tasks:
        said = task.communicate(timeout=200)[1]
        assert task.returncode == 0, said
    assert (tmp_path / "out/dataset_info.json").exists()
    alone = run_script(
        "--input", source, "--output", tmp_path / "alone", "--tokenizer", tokenizer,
        "--num-shards", "45",
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
