"""Fixtures: a target and a head with random weights, small enough for brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.train.target import FrozenTarget
from tests.drafters.train.stub_server import Answer, StubServer
from tests.drafters.train.tiny import VOCABULARY, write_target

NewHead = Callable[..., DraftHead]
Serve = Callable[[Answer], StubServer]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
def target(target_folder: Path) -> FrozenTarget:
    return FrozenTarget.load(target_folder)


@pytest.fixture
def new_head(target: FrozenTarget) -> NewHead:
    """Makes heads for `target`; keywords change the config, of a P-EAGLE head."""

    def make(**changes: Any) -> DraftHead:
        torch.manual_seed(6)
        values: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 16, "target_hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "eagle_aux_hidden_state_layer_ids": (0, 1, 2),
            "max_position_embeddings": 128, "ptd_token_id": VOCABULARY - 1,
        }  # fmt: skip
        config = HeadConfig(**{**values, **changes})
        head = DraftHead(config, own_embeddings=config.method == "p-eagle")
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
        head.share(embeddings=target.embeddings, lm_head=target.lm_head)
        return head

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts servers that answer as they are told, and stops them."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[StubServer] = []

    def start(answer: Answer) -> StubServer:
        servers.append(StubServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
