"""The speculators layout of a drafter's config.json, and what it says in z-lab's words.

Key names are those of vllm-project/speculators (models/dflash/config.py, config.py,
proposals/greedy.py) and of vLLM's reader (transformers_utils/configs/speculators). Its layer ids
count from the embedding's output: one more than target_layer_ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from common.drafter_config import ARCHITECTURES, PLAIN, DrafterConfig
from common.run import UserError

# Tensors beside the drafter's own: the target's, and the maps of a reduced vocabulary.
ENDS = ("embed_tokens.weight", "lm_head.weight")
EXTRA_TENSORS = frozenset([*ENDS, "verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t"])
NOT_OF_THE_LAYERS = ("architectures", "block_size", "dflash_config")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the layout of vLLM's speculators."""
    return "speculators_model_type" in config


def speculators_json(
    config: DrafterConfig, *, target: str, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """The config.json of an export in this layout; `target` is where engines find the target."""
    zlab = config.to_json()
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
            ],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target},
        },
        "speculators_model_type": "dflash",
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            key: value for key, value in zlab.items() if key not in NOT_OF_THE_LAYERS
        },
    }


def zlab_json(config: Mapping[str, Any], *, num_target_layers: int | None = None) -> dict[str, Any]:
    """The same drafter's config in z-lab's layout; one in that layout is returned as it is.

    `num_target_layers` is the target's depth for those that do not say it. Raises UserError for
    what is no DFlash drafter, and for missing keys.
    """
    if not is_speculators(config):
        return dict(config)
    if config["speculators_model_type"] != "dflash":
        raise UserError(
            f"drafter config: speculators_model_type {config['speculators_model_type']}, not dflash"
        )
    for key, plain in PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise UserError(
                f"drafter config: {key} is {config[key]}: served as plain DFlash it would draft "
                "other tokens than it was trained to"
            )
    try:
        layers = config["transformer_layer_config"]
        ids = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
        dflash = {
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": ids,
        }
        if config.get("sliding_window_non_causal"):
            dflash["causal"] = False
        return {
            "dtype": config.get("dtype"),
            "torch_dtype": config.get("torch_dtype"),
            "num_target_layers": num_target_layers,
            **layers,
            "architectures": [ARCHITECTURES["dflash"]],
            "block_size": config["block_size"],
            "dflash_config": dflash,
        }
    except KeyError as error:
        raise UserError(f"drafter config: {error.args[0]} is missing") from error
    except TypeError as error:
        raise UserError(f"drafter config: not in the speculators layout ({error})") from error
