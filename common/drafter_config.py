"""The shape of a drafter and its config.json, read from ours and from z-lab's releases.

A DFlash and a DFlash 2 share the file's form; whatever an engine would compute otherwise than
common/drafter.py does is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from common.run import UserError

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
DFLASH2_SHAPE = {  # of z-lab's released DFlash 2; the names are those of dflash_config
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # of a published drafter
NUMBERS: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float)}  # JSON's 1 and 1.0
# What makes another model of the same weights; its value in a plain DFlash drafter.
PLAIN = {"projector_type": "dflash", "sample_from_anchor": False, "shift_label": False}
LAYER_TYPES = ("full_attention", "sliding_attention")
HEAD_DIM = 128


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter; `to_json` is the config.json that serving engines read.

    The conv_ and selector_ sizes are those of a DFlash 2, and None in a DFlash.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    eos_token_id: int | None = None
    initializer_range: float = 0.02
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None

    @property
    def draft(self) -> str:
        """The kind of drafter: a key of ARCHITECTURES."""
        return "dflash" if self.conv_kernel_size is None else "dflash2"

    @property
    def causal(self) -> bool:
        """Whether a slot of a sliding layer sees no later slot of its block."""
        return self.draft == "dflash"

    def __post_init__(self) -> None:
        for part in fields(self):
            value, floor = getattr(self, part.name), -1 if part.name == "mask_token_id" else 0
            kinds = NUMBERS.get(part.type, ())
            if kinds and not (type(value) in kinds and value > floor):
                raise UserError(f"drafter config: {part.name} is {value!r}, not a number above 0")
        if self.head_dim % 2 or self.num_attention_heads % self.num_key_value_heads:
            raise UserError("drafter config: heads must share key-value heads, head_dim be even")
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError("drafter config: layer_types must name every layer")
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown:
            raise UserError(f"drafter config: unknown layer types {sorted(unknown)}")
        if "sliding_attention" in self.layer_types and (
            type(self.sliding_window) is not int or self.sliding_window < self.block_size
        ):
            raise UserError(
                f"drafter config: sliding_attention layers need a sliding_window of at least a "
                f"block ({self.block_size}), not {self.sliding_window}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter config: mask token {self.mask_token_id} is outside the vocabulary "
                f"({self.vocab_size})"
            )
        self._check_target_layers()
        self._check_dflash2()

    def _check_dflash2(self) -> None:
        sizes = {name: getattr(self, name) for name in DFLASH2_SHAPE}
        if set(sizes.values()) == {None}:
            return
        if wrong := [name for name, size in sizes.items() if type(size) is not int or size < 1]:
            raise UserError(
                f"drafter config: {', '.join(wrong)}: a DFlash 2 needs a number above 0"
            )
        if self.hidden_size % sizes["conv_group_size"]:
            raise UserError(
                f"drafter config: hidden_size {self.hidden_size} is no multiple of conv_group_size "
                f"{self.conv_group_size}"
            )
        for name, limit in (("conv_kernel_size", "block_size"), ("selector_top_k", "vocab_size")):
            if sizes[name] > getattr(self, limit):
                raise UserError(
                    f"drafter config: {name} {sizes[name]} is over {limit} {getattr(self, limit)}"
                )

    def _check_target_layers(self) -> None:
        ids, depth = self.target_layer_ids, self.num_target_layers
        if not ids or not all(type(layer) is int and 0 <= layer < depth for layer in ids):
            raise UserError(
                f"drafter config: target_layer_ids {ids} out of range (0 to {depth - 1})"
            )
        if list(ids) != sorted(set(ids)):
            raise UserError(
                f"drafter config: target_layer_ids {ids} must ascend: vLLM hands them in that order"
            )
        if ids[-1] == depth - 1:
            raise UserError(
                f"drafter config: target_layer_ids {ids} hold the last layer, which engines see "
                "only after the final norm"
            )

    @classmethod
    def for_target(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        vocab_size: int,
        num_target_layers: int,
        rms_norm_eps: float,
        rope_theta: float,
        max_position_embeddings: int,
        eos_token_id: int | None,
        target_layer_ids: Sequence[int],
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        sliding_window: int,
        draft: str = "dflash",
    ) -> "DrafterConfig":
        """The released drafters' shape for a target: heads of 128, four query heads a key head.

        All layers but the last slide over `sliding_window` tokens, and of a "dflash2" that one too;
        0 makes all of them full.
        """
        heads = max(1, min(32, hidden_size // HEAD_DIM))
        sliding = "sliding_attention" if sliding_window else "full_attention"
        return cls(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            head_dim=HEAD_DIM,
            rms_norm_eps=rms_norm_eps,
            rope_theta=rope_theta,
            max_position_embeddings=max_position_embeddings,
            vocab_size=vocab_size,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=num_target_layers,
            layer_types=(sliding,) * (num_layers - 1)
            + ("full_attention" if draft == "dflash" else sliding,),
            sliding_window=sliding_window or None,
            eos_token_id=eos_token_id,
            **(DFLASH2_SHAPE if draft == "dflash2" else {}),
        )

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Read a config.json of DFlash or DFlash 2, ours or z-lab's.

        Raises UserError for what is missing or else. block_size may stand at the top or in
        dflash_config; rope_theta at the top or in rope_parameters.
        """
        draft = draft_kind(config)
        for key in ("dflash_config", "rope_parameters", "rope_scaling"):
            if not isinstance(config.get(key) or {}, Mapping):
                raise UserError(f"drafter config: {key} is {config[key]!r}, not an object")
        dflash, rope = config.get("dflash_config") or {}, config.get("rope_parameters") or {}
        flat = {**config, **rope, **dflash}
        try:
            _refuse_other_maths(flat, config.get("rope_scaling"), draft=draft)
            layers = flat["num_hidden_layers"]
            return cls(
                hidden_size=flat["hidden_size"],
                intermediate_size=flat["intermediate_size"],
                num_hidden_layers=layers,
                num_attention_heads=flat["num_attention_heads"],
                num_key_value_heads=flat["num_key_value_heads"],
                head_dim=flat["head_dim"],
                rms_norm_eps=flat["rms_norm_eps"],
                rope_theta=float(flat["rope_theta"]),
                max_position_embeddings=flat["max_position_embeddings"],
                vocab_size=flat["vocab_size"],
                block_size=flat["block_size"],
                mask_token_id=flat["mask_token_id"],
                target_layer_ids=tuple(flat["target_layer_ids"]),
                num_target_layers=flat["num_target_layers"],
                layer_types=tuple(flat.get("layer_types") or ("full_attention",) * layers),
                sliding_window=flat.get("sliding_window"),
                eos_token_id=flat.get("eos_token_id"),
                initializer_range=flat.get("initializer_range", 0.02),
                **({name: flat[name] for name in DFLASH2_SHAPE} if draft == "dflash2" else {}),
            )
        except KeyError as error:
            raise UserError(f"drafter config: {error.args[0]} is missing") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"drafter config: a value of the wrong type ({error})") from error

    def to_json(self) -> dict[str, Any]:
        """The config.json of an export, written by hand: transformers' own save drops rope_theta.

        Both rope forms and both places of block_size, since engines differ in which they read;
        is_causal is absent so that they take causality from each layer's type, but in a DFlash 2,
        none of whose layers is causal.
        """
        sliding = "sliding_attention" in self.layer_types
        dflash2 = self.draft == "dflash2"
        added = {name: getattr(self, name) for name in DFLASH2_SHAPE} if dflash2 else {}
        return {
            "architectures": [ARCHITECTURES[self.draft]],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": None,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **added,
            },
            "dtype": "bfloat16",
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            **({"is_causal": False} if dflash2 else {}),
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "pad_token_id": self.eos_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window if sliding else None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": sliding,
            "vocab_size": self.vocab_size,
        }


def draft_kind(config: Mapping[str, Any]) -> str:
    """Which of ARCHITECTURES a config.json names. Raises UserError for others."""
    named = config.get("architectures") or [ARCHITECTURES["dflash"]]
    if isinstance(named, list):
        for draft, architecture in ARCHITECTURES.items():
            if architecture in named:
                return draft
    raise UserError(
        f"drafter config: architecture {named}, not {' or '.join(ARCHITECTURES.values())}"
    )


def _refuse_other_maths(flat: Mapping[str, Any], rope_scaling: Any, *, draft: str) -> None:
    """Raises UserError for keys by which an engine computes what this drafter does not."""
    sliding = [
        kind == "sliding_attention" for kind in flat.get("layer_types") or ("full_attention",)
    ]
    causal = flat.get("is_causal")
    causal = flat.get("causal") if causal is None else causal
    scaling, rope = (  # "type" is the older name, which transformers reads too
        keys.get("rope_type") or keys.get("type") for keys in (rope_scaling or {}, flat)
    )
    odd = {
        "attention_bias": flat.get("attention_bias"),
        "hidden_act": flat.get("hidden_act", "silu") != "silu",
        "is_causal, or dflash_config.causal": any(
            (kind if causal is None else causal) != (kind and draft == "dflash") for kind in sliding
        ),
        **{name: draft == "dflash" and name in flat for name in DFLASH2_SHAPE},
        **{name: (flat.get(name) or plain) != plain for name, plain in PLAIN.items()},
        "mrope_section": flat.get("mrope_section"),
        "partial_rotary_factor": flat.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": flat.get("quantization_config"),
        "rope_scaling": rope_scaling and scaling != "default",
        "rope_type": (rope or "default") != "default",
        "use_swa": flat.get("use_swa"),
    }
    if wrong := [key for key, is_odd in odd.items() if is_odd]:
        raise UserError(
            f"drafter config: {'; '.join(wrong)}: of another kind than the drafters trained here "
            "(plain rotary positions over the whole head, no biases, causal only in sliding layers "
            "and in a DFlash 2 nowhere)"
        )
