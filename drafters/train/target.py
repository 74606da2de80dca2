"""The frozen target of a draft head: any causal language model that transformers loads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from drafters.packaged import resolve
from drafters.train.runtime import slow_bfloat16

_PROBE_TOKENS = 8
_PROBE_ERROR = 0.02  # of the logits' norm; bf16 rounding gives 0.004, a lost scale over 0.1


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The entries of a target's config that a head takes over."""

    vocab_size: int  # rows of the output matrix
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @classmethod
    def of(cls, config: Any, vocab_size: int) -> Self:
        """Read a text config of any model family: their names differ, and some lack entries."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        rope = _first(config, ["rope_parameters"], {})
        rope = rope.get("full_attention", rope)  # models that mix two kinds of attention
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_first(
                config, ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"], 4 * hidden
            ),
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=_first(config, ["num_key_value_heads", "num_kv_heads"], heads),
            head_dim=_first(config, ["head_dim"], hidden // heads),
            rms_norm_eps=_first(
                config,
                ["rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"],
                1e-5,
            ),
            rope_theta=float(rope.get("rope_theta") or _first(config, ["rope_theta"], 10000.0)),
            max_position_embeddings=_first(config, ["max_position_embeddings"], 2048),
        )


@dataclass(frozen=True, slots=True)
class States:
    """The target's hidden states at each position, in its own dtype."""

    taps: torch.Tensor  # [batch, n, taps * hidden], in the order of the `taps` argument
    final: torch.Tensor  # [batch, n, hidden], after the final norm: final @ lm_head.T = logits


class FrozenTarget:
    """A causal language model in evaluation mode, without gradients.

    Tap i is the residual stream after i layers (the input of layer i): i = 0 is what enters the
    first layer, i = number of layers the stream before the final norm.

    Families that multiply their logits by a constant have it folded into `States.final`. Those
    that cap them (`softcap`) keep final @ lm_head.T uncapped: its order is right, and `logits`
    gives the capped values.

    `stored` is the checkpoint's dtype, which may differ from the one that it computes in.
    """

    def __init__(
        self, model: Any, tokenizer: Any, folder: Path, stored: torch.dtype | None = None
    ) -> None:
        self.model, self.tokenizer, self._folder = (
            model.eval().requires_grad_(False),
            tokenizer,
            folder,
        )
        config = model.config.get_text_config()
        output = model.get_output_embeddings()
        if output is None or getattr(output, "bias", None) is not None:
            raise ValueError(f"{folder}: the target needs one output matrix without a bias")
        self.lm_head: torch.Tensor = output.weight  # [vocab, hidden]
        self.stored = stored or self.lm_head.dtype
        # As stored, without the scale that some families multiply embeddings by.
        self.embeddings: torch.Tensor = model.get_input_embeddings().weight  # [vocab, hidden]
        self.shape = TargetShape.of(config, len(self.lm_head))
        self.softcap: float | None = _first(config, ["final_logit_softcapping"], None)
        self._scale = float(
            _first(config, ["logit_scale", "lm_head_multiplier"], 1.0)
            / _first(config, ["logits_scaling"], 1.0)
        )
        self.end_tokens = end_tokens(model.generation_config, tokenizer)
        # Drop the checkpoint's defaults for sampling: top_k, penalties and so on.
        model.generation_config = GenerationConfig()
        self._decoder: nn.Module = model.get_decoder()
        self._layers = _layers(self._decoder, self.shape.num_hidden_layers)
        self._check()

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a folder, a hub id or a packaged model, in `dtype` or else in its own."""
        name = resolve(str(name_or_path))
        stored = AutoConfig.from_pretrained(name).dtype
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
        return cls(model.to(device), tokenizer, checkpoint_folder(name), stored)

    @classmethod
    def load_for_training(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> Self:
        """Load in `dtype`, else in the type that a head is best trained in: the checkpoint's, but
        float32 on a CPU that multiplies that faster, and bfloat16 instead of float16.

        The mean loss of thousands of drafts has gradients that vanish in float16. Some checkpoints
        are loaded in float16 all the same: transformers does so for AWQ on CUDA, and for a config
        that names no type.
        """
        name = resolve(str(name_or_path))
        dtype = dtype or slow_bfloat16(device)
        if dtype is None and AutoConfig.from_pretrained(name).dtype == torch.float16:
            dtype = torch.bfloat16
        return cls.load(name, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """Device of the target's weights."""
        return self.lm_head.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the target's weights."""
        return self.lm_head.dtype

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over config.json and the weights; takes a minute per hundred gigabytes."""
        return checkpoint_fingerprint(self._folder)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, taps: Sequence[int]) -> States:
        """Taps and final states of `tokens` [batch, n], whose rows are padded on the right.

        No mask is needed: padding lies behind every real token. States at padding mean nothing.
        Raises ValueError for taps that the target does not have.
        """
        layers, size = self.shape.num_hidden_layers, self.shape.hidden_size
        if wrong := [tap for tap in taps if not 0 <= tap <= layers]:
            raise ValueError(f"taps {wrong} are outside 0..{layers}")
        taken = torch.empty((*tokens.shape, len(taps) * size), dtype=self.dtype, device=self.device)

        def take(tap: int, stream: torch.Tensor) -> None:
            if stream.shape != (*tokens.shape, size):
                raise ValueError(f"layer {tap} has no plain residual stream: {stream.shape}")
            for place in (place for place, wanted in enumerate(taps) if wanted == tap):
                # Copied now, as a layer may change its input in place.
                taken[..., place * size : (place + 1) * size] = stream

        hooks = [_hook(self._layers, tap, take) for tap in sorted(set(taps))]
        try:
            output = self._decoder(input_ids=tokens.to(self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        final = output.last_hidden_state
        return States(taken, final if self._scale == 1.0 else final * self._scale)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """The target's own logits [..., vocab] from `States.final`."""
        return capped(functional.linear(final, self.lm_head), self.softcap)

    @torch.no_grad()
    def _check(self) -> None:
        """Raise ValueError for a family whose logits `logits` does not reproduce."""
        tokens = torch.arange(min(_PROBE_TOKENS, self.shape.vocab_size), device=self.device)[None]
        states = self.states(tokens, [0, self.shape.num_hidden_layers])
        own = self.model(input_ids=tokens, use_cache=False).logits.float()
        ours = self.logits(states.final).float()
        if own.shape != ours.shape or not (own - ours).norm() <= _PROBE_ERROR * own.norm():
            kind = self.model.config.model_type
            raise ValueError(
                f"{self._folder}: logits of {kind} models are not final states times the output "
                "matrix; heads cannot be trained for this family"
            )


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits bent to within -softcap and softcap, as some families' are; None leaves them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def checkpoint_folder(name: str) -> Path:
    """The folder of a checkpoint's files; those of a hub id must have been downloaded."""
    folder = Path(resolve(name))
    if folder.is_dir():
        return folder
    return Path(cached_file(name, "config.json", local_files_only=True)).parent


def checkpoint_fingerprint(folder: Path) -> str:
    """sha256 over config.json and the weights of a checkpoint."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights")
    return _digest([folder / "config.json", *files])


def description_fingerprint(folder: Path) -> str:
    """sha256 over config.json and tokenizer.json, where the weights need not be there."""
    files = [folder / name for name in ("config.json", "tokenizer.json")]
    return _digest([file for file in files if file.is_file()])


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {_sha256(file)}\n".encode())
    return digest.hexdigest()


def _first(config: Any, names: Sequence[str], default: Any) -> Any:
    """The first of these fields that the config has and that is not None, else `default`."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def end_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text in service, the tokenizer's first: vLLM ends at that one and at
    those of the generation config (vllm/sampling_params.py, update_from_generation_config)."""
    end = generation.eos_token_id if generation is not None else None
    if end is None:
        end = []
    all_ends = [tokenizer.eos_token_id, *([end] if isinstance(end, int) else end)]
    return list(dict.fromkeys(token for token in all_ends if token is not None))


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's stack of layers, under whatever name the family has for it."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(decoder).__name__} has no list of {count} layers")


def _hook(layers: nn.ModuleList, tap: int, take: Any) -> Any:
    """Call `take(tap, stream)` with the residual stream before layer `tap`, or after the last."""
    if tap < len(layers):

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            take(tap, args[0] if args else kwargs["hidden_states"])

        return layers[tap].register_forward_pre_hook(before, with_kwargs=True)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        take(tap, output[0] if isinstance(output, tuple) else output)

    return layers[-1].register_forward_hook(after)


def _sha256(file: Path) -> str:
    blob = file.resolve()
    # The hub's cache names large files by their sha256.
    if blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
