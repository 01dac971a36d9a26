"""Convert a GGUF file into a model folder that every stage takes as --tokenizer and --target.

python -m demo.gguf SmolLM2-135M-Instruct.Q4_1.gguf ./SmolLM2-135M-Instruct
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common import run


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="where the model goes")
    args = parser.parse_args(argv)
    log = run.setup_logging("gguf", debug=args.debug)
    transformers_logging.disable_progress_bar()
    convert(args.file, args.folder)
    log.info(f"{args.file.name} -> {args.folder}")
    return 0


def convert(file: Path, folder: Path) -> None:
    """Write config.json, float32 weights, tokenizer.json and chat template, the folder at once.

    Raises UserError when there is no such file.
    """
    if not file.is_file():
        raise run.UserError(f"{file}: no such file")
    name: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**name, dtype=torch.float32)
    # transformers saves no model that came from a GGUF file: its weights move to a fresh one
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**name))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    aside = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    AutoTokenizer.from_pretrained(**name).save_pretrained(aside)
    aside.replace(folder)


if __name__ == "__main__":
    run.exit_with(main)
