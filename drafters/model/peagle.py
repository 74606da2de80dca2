"""The P-EAGLE head (arXiv 2602.01469, section 3): K draft tokens from one pass.

An entry of the head pairs the token at p + 1 with the target's hidden states at p, at
position p. Real entries have both; a parallel slot has the placeholder token and the learnt
`mask_hidden` instead, and continues the positions. All of this follows vLLM 0.32's proposer,
and a checkpoint of this module loads there unchanged.
"""

from __future__ import annotations

import torch
from torch import nn

from drafters.model.cache import KeyValueCache
from drafters.model.config import HeadConfig
from drafters.model.layers import MLP, Attention, RMSNorm


class DecoderLayer(nn.Module):
    """A Llama layer; the first one reads the embedding beside the hidden state."""

    def __init__(self, config: HeadConfig, *, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        if first:
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(
            2 * size if first else size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rope_theta,
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.first = first

    def forward(
        self,
        x: torch.Tensor,  # [batch, n, hidden]: the residual stream
        embeddings: torch.Tensor,  # [batch, n, hidden]
        positions: torch.Tensor,
        allowed: torch.Tensor,
        cache: KeyValueCache | None,
        layer: int,
    ) -> torch.Tensor:
        if self.first:
            inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(x)], dim=-1)
        else:
            inputs = self.input_layernorm(x)
        x = x + self.self_attn(inputs, positions, allowed, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class PEagleHead(nn.Module):
    """Draft head over a target's taps. The output matrix is the target's own.

    Sharing `lm_head` keeps the checkpoint small; vLLM fills in the target's when the weights
    lack one. The embeddings are the head's own and trainable (paper, table 6).
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in config.eagle_aux_hidden_state_layer_ids
            )
        self.fc = nn.Linear(config.taps_size, config.hidden_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(1, config.taps_size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, first=index == 0) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Concatenated taps [..., taps * target hidden] to hidden states [..., hidden]."""
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(taps)

    def forward(
        self,
        tokens: torch.Tensor,  # [batch, n]
        hidden: torch.Tensor,  # [batch, n, hidden]: from `fuse`
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor,  # bool [batch or 1, n, past + n]: which entries each may see
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Final hidden states [batch, n, hidden], ready for the output matrix."""
        embeddings = self.embed_tokens(tokens)
        x = hidden
        for index, layer in enumerate(self.layers):
            x = layer(x, embeddings, positions, allowed, cache, index)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        config = self.config
        return KeyValueCache(
            config.num_hidden_layers,
            batch,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            self.fc.weight.dtype,
        )
