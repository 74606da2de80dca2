"""Draft heads: P-EAGLE (arXiv 2602.01469, section 3) and EAGLE-3 (arXiv 2503.01840).

Both are a few decoder layers over the target's hidden states. An entry of a head pairs the
token at p + 1 with the target's hidden states at p, at position p. Behind the newest real
entry EAGLE-3 continues with its own draft tokens and hidden states, in one pass for each; P-EAGLE
has the mask token and one learned `mask_hidden` instead, and drafts all K tokens in one pass.
A checkpoint of this module loads in vLLM 0.32 unchanged (model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.layers import MLP, Attention, RMSNorm, Store
from drafters.model.selector import PathSelector, SelectorTables


class DecoderLayer(nn.Module):
    """A Llama or Qwen3 layer; the first one reads the embedding beside the hidden state."""

    def __init__(self, config: HeadConfig, *, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.self_attn = Attention(2 * size if first else size, config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        x: torch.Tensor,  # [batch, n, hidden]: the residual stream
        embeddings: torch.Tensor,  # [batch, n, hidden]
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor | None,
        store: Store | None,
        layer: int,
    ) -> torch.Tensor:
        """Apply attention and MLP to the residual stream."""
        if self.hidden_norm is not None:
            normed = self.hidden_norm(x)
            inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            x = normed if self.norm_before_residual else x
        else:
            inputs = self.input_layernorm(x)
        x = x + self.self_attn(inputs, positions, allowed, store, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """A draft head of either method; `config.method` says which.

    Embeddings and output matrix that it lacks are the target's (`share`), as in vLLM for tensors
    that a checkpoint lacks. P-EAGLE trains its own embeddings (paper, table 6); a draft vocabulary
    needs an output matrix of its own. A path selector reads the target's embeddings in any case.
    """

    def __init__(
        self, config: HeadConfig, *, own_embeddings: bool = True, own_lm_head: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None
        )
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in config.eagle_aux_hidden_state_layer_ids
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.taps_size, config.rms_norm_eps)
        self.fc = nn.Linear(config.taps_size, config.hidden_size, bias=False)
        if config.method == "p-eagle":
            self.mask_hidden = nn.Parameter(torch.zeros(1, config.taps_size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, first=index == 0) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.draft_vocab_size or config.vocab_size
        self.lm_head: nn.Linear | None = None
        if own_lm_head or config.draft_vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        if config.draft_vocab_size:
            # Target id of draft id i is i + d2t[i]; t2d marks the target ids that can be drafted.
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < size)
        self.selector: PathSelector | None = None
        if config.path_selector is not None:
            self.selector = PathSelector(config.path_selector, config)
        self._shared: dict[str, torch.Tensor] = {}

    def share(self, *, embeddings: torch.Tensor, lm_head: torch.Tensor) -> None:
        """Lend the target's matrices, both [vocabulary, hidden]: not copied, saved or trained.

        The output matrix may have more rows than the vocabulary (padding). Raises ValueError if a
        matrix that is needed has another hidden size.
        """
        size = self.config.hidden_size
        if self.embed_tokens is None and embeddings.shape[1] != size:
            raise ValueError(f"embeddings of {embeddings.shape[1]} do not fit a head of {size}")
        if self.lm_head is None and lm_head.shape[1] != size:
            raise ValueError(f"an output matrix of {lm_head.shape[1]} does not fit {size}")
        if self.selector is not None and embeddings.shape[1] != self.config.target_hidden_size:
            raise ValueError(
                f"embeddings of {embeddings.shape[1]} do not fit a path selector of "
                f"{self.config.target_hidden_size}"
            )
        self._shared = {"embeddings": embeddings, "lm_head": lm_head}

    def add_selector(self, selector: SelectorConfig) -> PathSelector:
        """Give the head a new path selector, which changes no draft before it is trained, in the
        head's dtype and on its device. Raises ValueError for an EAGLE-3 head."""
        self.config = replace(self.config, path_selector=selector)
        self.selector = PathSelector(selector, self.config).to(self.norm.weight)
        return self.selector

    def selector_tables(self, drafts: torch.Tensor | None = None) -> SelectorTables:
        """What the path selector needs of each token of the draft vocabulary, or of the draft ids
        `drafts`, from the embeddings of `share`. Raises ValueError without a selector."""
        if self.selector is None:
            raise ValueError("the head has no path selector")
        embeddings = self._borrow("embeddings")
        if drafts is None:
            drafts = torch.arange(len(self.output_matrix), device=embeddings.device)
        return self.selector.tables(embeddings[self.to_target(drafts)])

    @property
    def own_embeddings(self) -> bool:
        """Whether the head has token embeddings of its own."""
        return self.embed_tokens is not None

    @property
    def output_matrix(self) -> torch.Tensor:
        """[draft vocabulary, hidden]: the head's own, or the target's."""
        if self.lm_head is None:
            return self._borrow("lm_head")[: self.config.vocab_size]
        return self.lm_head.weight

    def set_draft_vocabulary(self, ids: torch.Tensor) -> None:
        """Draft only these target ids, ascending and distinct: [draft vocabulary]; ValueError for
        others."""
        size = self.config.draft_vocab_size
        if ids.shape != (size,) or bool((ids.diff() <= 0).any()):
            raise ValueError(f"a draft vocabulary is {size} ascending ids, got {tuple(ids.shape)}")
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape."""
        return ids + self.d2t[ids] if self.config.draft_vocab_size else ids

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Final hidden states [..., hidden] to logits [..., draft vocabulary]."""
        return functional.linear(output, self.output_matrix)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Concatenated taps [..., taps * target hidden] to hidden states [..., hidden]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(taps)

    def forward(
        self,
        tokens: torch.Tensor,  # [batch, n]
        hidden: torch.Tensor,  # [batch, n, hidden]: from `fuse`, or the last pass's second result
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor | None,  # bool [batch or 1, n, past + n]; None: causal, no past
        store: Store | None = None,
        past: torch.Tensor | None = None,  # [past]: positions of the entries in `store`
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(states for `logits`, states for EAGLE-3's next pass), both [batch, n, hidden].

        Only heads with sliding-window layers use `past`.
        """
        table = (
            self._borrow("embeddings") if self.embed_tokens is None else self.embed_tokens.weight
        )
        embeddings = functional.embedding(tokens, table)
        x = hidden
        near = self._near(positions, allowed, past)
        for index, layer in enumerate(self.layers):
            mask = allowed if self.config.window(index) is None else near
            x = layer(x, embeddings, positions, mask, store, index)
        output = self.norm(x)
        return output, output if self.config.norm_output else x

    def _near(
        self,
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor | None,
        past: torch.Tensor | None,  # [past]
    ) -> torch.Tensor | None:
        """The mask of sliding-window layers: `allowed`, within the window; None without any."""
        window = self.config.sliding_window
        if window is None:
            return None
        keys = positions
        if past is not None:
            keys = torch.cat([past.expand(len(positions), -1), positions], dim=1)
        distance = positions[:, :, None] - keys[:, None, :]
        assert allowed is None or allowed.shape[-1] == keys.shape[1]
        return (distance < window) & (distance >= 0 if allowed is None else allowed)

    def _borrow(self, name: str) -> torch.Tensor:
        if name not in self._shared:
            raise RuntimeError(f"the head has no {name} of its own: call share() first")
        return self._shared[name]
