"""The target as transformers builds it: loaded, or shapes alone; where its decoder layers are.

A model is cut after its highest tapped layer, so that no others are built or read from files. What
is done with it is common/target.py's.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common.run import UserError, one_line
from common.target_files import check_files, read_config

# of transformers' modeling files, which call a kernel where its package can be used
LINEAR_ATTENTION_FUNCTIONS = {
    "flash-linear-attention": "torch_chunk_gated_delta_rule",
    "causal-conv1d": "causal_conv1d_fn",
}

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # it would list the layers that are left out


def load_model(
    path: str, *, layers: Sequence[int], final: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """The causal language model of a folder or hub id, straight on its device.

    Only the layers up to the highest of `layers` unless `final`. Raises UserError when that fails,
    and for weights that are missing, which transformers would fill with random ones.
    """
    config = read_config(path)
    if Path(path).is_dir():
        check_files(Path(path))
    if not final:
        config = _cut_config(config, max(layers) + 1)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            trust_remote_code=False,
        )
    except Exception as error:  # as for the config
        raise UserError(f"--target {path}: cannot load it ({one_line(error)})") from error
    model, report = loaded
    mismatched = [entry[0] for entry in report["mismatched_keys"]]
    lacking = sorted([*report["missing_keys"], *mismatched])
    if lacking:
        raise UserError(
            f"--target {path}: {len(lacking)} weights are missing or of another shape, "
            f"{lacking[0]} first"
        )
    return model


def build_without_weights(path: str, *, layers: Sequence[int], final: bool) -> Any:
    """The model that Target.load would load, on the meta device: shapes alone.

    Raises UserError for a config that transformers cannot build a model from.
    """
    config = read_config(path)
    if not final:
        config = _cut_config(config, max(layers) + 1)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever an odd config.json trips over
        raise UserError(f"--target {path}: cannot build it ({one_line(error)})") from error


def _cut_config(config: Any, num_layers: int) -> Any:
    """The config of the first layers alone, so that no others are built and read from files.

    The whole one for a family that cannot be built so.
    """
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    depth = text.num_hidden_layers
    text.num_hidden_layers = num_layers
    try:
        for name, value in vars(text).items():
            if isinstance(value, list) and len(value) == depth:  # an entry a layer
                setattr(text, name, value[:num_layers])
        with torch.device("meta"):
            find_decoder(AutoModelForCausalLM.from_config(cut, trust_remote_code=False))
    except Exception:  # whatever it is, loading the whole model will say it
        return config
    return cut


def find_decoder(model: Any) -> tuple[Any, str]:
    """The module that holds the list of all decoder layers, and the list's name in it.

    Raises UserError for a class that has no such list, or several.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    depth = decoder.config.get_text_config().num_hidden_layers
    lists = [
        name
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    tops = [name for name in lists if name.count(".") == min(n.count(".") for n in lists)]
    if len(tops) != 1:
        found = "no list" if not tops else f"{len(tops)} lists"
        raise UserError(f"--target: {found} of {depth} decoder layers in {type(model).__name__}")
    parent, _, name = tops[0].rpartition(".")
    return decoder.get_submodule(parent), name


def kernels_in_use(decoder: Any) -> dict[str, bool]:
    """Whether linear attention runs in these packages' kernels; empty for a model without any.

    Asked of the functions that the model calls: being importable is not yet being used.
    """
    functions = vars(sys.modules[type(decoder).__module__])
    return {
        package: _is_kernel(functions[name])
        for package, name in LINEAR_ATTENTION_FUNCTIONS.items()
        if name in functions
    }


def _is_kernel(function: Callable[..., Any]) -> bool:
    # transformers refuses packed sequences in its own versions, which know no borders, before
    # anything else; a kernel misses its arguments instead
    try:
        function(cu_seqlens=True, seq_idx=True)
    except ValueError:
        return False
    except TypeError:
        return True
    raise AssertionError(f"{function} runs without arguments")
