"""Run requests through vLLM's scheduler and our drafter, without a model.

The target's hidden state at a position encodes the tokens up to it, so that every key that the
drafter attends to shows what it was computed from. Scheduler, prefix cache, preemption and drafter
are the real ones; the runner has only what a drafter reads of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench.simulate.fixed import Fixed
from drafters.config import LONGEST_MATCH, LOOKUP, SHORTEST_MATCH
from drafters.control.policy import Load, Step
from drafters.train.embedded import EMBEDDED
from drafters.vllm.scheduling.limits import MAX_K
from drafters.vllm.scheduling.scheduler import DraftingScheduler
from drafters.vllm.v1.drafter import Drafter, Ints
from drafters.vllm.v1.layout import Layout, Rows
from drafters.vllm.v1.parallel import ParallelDrafter
from drafters.vllm.v1.sequential import SequentialDrafter

if not current_platform.is_cpu():
    pytest.skip("builds a configuration of vLLM's CPU build", allow_module_level=True)

MASK, SHARED = 99, -1.0  # token and hidden state of a masked position
CARRIED = 0.25  # by which a state that a pass hands on differs from the one that it read
LONGEST, K_MAX, SEQUENCES = 64, 5, 4
GREEDY = SimpleNamespace(all_greedy=True)  # what a drafter reads of SamplingMetadata first


class Model:
    """In the place of the head: stores keys, and checks what the pass attends to."""

    def __init__(self, drafter: Watched) -> None:
        self.drafter = drafter
        self.keys: dict[int, tuple[int, int, float]] = {}  # slot -> position, token, state

    def combine_hidden_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def __call__(
        self, *, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, rows, harness = self.drafter.metadata, self.drafter.rows, self.drafter.harness
        ids, states = input_ids.tolist(), hidden_states[:, 0].tolist()
        places, slots = positions.tolist(), metadata.slot_mapping.tolist()
        count = metadata.num_actual_tokens
        assert len(set(slots[:count])) == count, "two tokens of a pass share a slot"
        self.keys.update(
            (slot, key)
            for slot, key in zip(slots, zip(places, ids, states, strict=True), strict=True)
        )
        size = harness.block_size
        bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        tables = metadata.block_table_tensor.tolist()
        for row, index in enumerate(rows.index.tolist()):
            name = harness.batch.req_ids[index]
            tokens, owned = harness.known[name], harness.blocks[name]
            first, end, k = int(rows.context_start[row]), int(rows.end[row]), int(rows.k[row])
            last = first + lengths[row] - 1
            drafted, text_end = self.drafter.drafted[index], self.drafter.text_ends[index]
            limit = self.drafter.context_tokens
            assert not limit or text_end - first <= limit  # drafts are read besides
            read = places[bounds[row] : bounds[row + 1]]
            assert read == list(range(int(rows.start[row]), last + 1))
            assert last == end - 1 + self.drafter.masked_per_token * max(k - 1, 0)
            for offset, place in enumerate(range(first, last + 1)):
                block = tables[row][offset // size]
                assert block == owned[place // size], f"{name} at {place}: not its block"
                if place >= end:
                    expected = (place, MASK, SHARED)
                elif place >= text_end:  # a draft, from the state behind the text
                    far = place - text_end
                    state = harness.state(tokens[:text_end]) - CARRIED * (far + 1)
                    expected = (place, drafted[far], state)
                    harness.seen["followed"] += 1
                else:
                    expected = (place, tokens[place + 1], harness.state(tokens[: place + 1]))
                found = self.keys[block * size + place % size]
                if found != expected and harness.forked(name, place, found, expected):
                    harness.seen["forked"] += 1
                    continue
                assert found == expected, f"{name} attends to {found}, not {expected}"
        harness.seen["passes"] += 1
        harness.seen["anew"] += int((rows.context_start > 0).sum())
        harness.seen["held"] += int((rows.num_computed_tokens > rows.start).sum())
        return hidden_states, hidden_states - CARRIED


class Watched(Drafter):
    """Mixed into a drafter: around Model, without vLLM's attention backends and weights."""

    def __init__(
        self, config: VllmConfig, harness: SchedulerHarness, window: int, context: int
    ) -> None:
        self.vllm_config, self.harness, self.runner = config, harness, harness
        self.device = torch.device("cpu")
        self.k_max, self.window, self.passes = K_MAX, window, 0
        self.context_tokens, self._longest_text = context, LONGEST
        self.block_size, self.kv_cache_gid = harness.block_size, 0
        self.max_num_tokens = config.scheduler_config.max_num_batched_tokens + SEQUENCES * K_MAX
        self.max_batch_size = SEQUENCES
        self.parallel_drafting_token_id = MASK
        self.parallel_drafting_hidden_state_tensor = torch.tensor([SHARED], dtype=torch.float64)
        self.input_ids = torch.full((self.max_num_tokens,), -7, dtype=torch.int32)
        self.positions = torch.full((self.max_num_tokens,), -7)
        self.hidden_states = torch.full((self.max_num_tokens, 1), -7.0, dtype=torch.float64)
        self.supports_mm_inputs = self.uses_mrope = self.uses_xdrope_dim = False
        self.draft_uses_xdrope_dim = 0
        self.pass_hidden_states_to_model = True
        self._contexts = None
        # What no one stored must not look right.
        self._store = torch.full((SEQUENCES * window, 1), -3.0, dtype=torch.float64)
        self._gathered = torch.empty((self.max_num_tokens, 1), dtype=torch.float64)
        self._deferred, self._defers = [], min(3, window)
        self.model = Model(self)
        # By row of the batch: where its text ends, and what was drafted behind it.
        self.text_ends: dict[int, int] = {}
        self.drafted: dict[int, list[int]] = {}

    def _propose(self, rows: Rows, *args: Any) -> list[list[int]]:
        self.entered, index = rows, rows.index.tolist()
        self.text_ends = dict(zip(index, rows.end.tolist(), strict=True))
        self.drafted = {row: [] for row in index}
        return super()._propose(rows, *args)

    def build_per_group_and_layer_attn_metadata(self, *_: Any, **__: Any) -> Any:
        return [], {}

    def _determine_batch_execution_and_padding(self, count: int, *_: Any) -> Any:
        return CUDAGraphMode.NONE, count, None

    def _get_slot_mapping(self, *_: Any) -> Any:
        return {}

    def _metadata(self, layout: Layout, rows: Rows, common: Any) -> CommonAttentionMetadata:
        self.rows, self.metadata = rows, super()._metadata(layout, rows, common)
        return self.metadata

    def _tokens(self, hidden: torch.Tensor, rows: Ints, offsets: Ints) -> torch.Tensor:
        ids = torch.tensor([self.harness.token() for _ in hidden], dtype=torch.int64)
        for row, offset, token in zip(rows.tolist(), offsets.tolist(), ids.tolist(), strict=True):
            assert offset == len(self.drafted[row])
            self.drafted[row].append(token)
        return ids


class WatchedParallel(Watched, ParallelDrafter):
    """P-EAGLE's."""


class WatchedSequential(Watched, SequentialDrafter):
    """EAGLE-3's."""


class Grammar:
    """A request's grammar, which leaves `keep(n)` of n drafts and takes every token."""

    def __init__(self, keep: Callable[[int], int]) -> None:
        self.keep = keep

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self.keep(len(tokens))] if tokens else tokens

    def accept_tokens(self, request: str, tokens: list[int]) -> bool:
        return True


class SchedulerHarness:
    """A scheduler, its requests, and a runner's view of them."""

    def __init__(
        self, config: VllmConfig, *, seed: int, blocks: int, window: int, letters: int = 2,
        context: int = 0,
    ) -> None:  # fmt: skip
        """`config` says which kind of head drafts."""
        self.random = Random(seed)
        self.letters = letters
        self.block_size = config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.kv_cache_config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = DraftingScheduler(
            config, self.kv_cache_config, StructuredOutputManager(config), self.block_size
        )
        self.scheduler.k_policy = self.told = Fixed(0, K_MAX)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(self.block_size, sha256)
        self.requests: dict[str, Request] = {}
        self.known: dict[str, list[int]] = {}  # tokens, with those of this step
        self.blocks: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}  # tokens found in the prefix cache
        table = SimpleNamespace(block_size=self.block_size)
        self.batch = self.input_batch = SimpleNamespace(block_table=[table])
        self.states: dict[tuple[int, ...], float] = {}
        self.arrived = 0
        self.accept = lambda drafts: self.random.randint(0, drafts)  # how many the target accepts
        self.scheduler.structured_output_manager.grammar_bitmask = lambda *_: None
        self.cut: dict[str, int] = {}  # request -> its drafts, of which its grammar cut some
        self.seen: Counter[str] = Counter()
        self.verified_drafts: list[tuple[int, int]] = []  # of a request in a step, and accepted
        self.verified: Counter[tuple[str, str]] = Counter()  # drafts of requests so far
        parallel = config.speculative_config.parallel_drafting
        kind = WatchedParallel if parallel else WatchedSequential
        self.max_model_len = LONGEST
        self.drafter = kind(config, self, window, context)

    def token(self) -> int:
        return self.random.randrange(self.letters)

    def state(self, tokens: list[int]) -> float:
        """Stands for the target's hidden state behind `tokens`."""
        return self.states.setdefault(tuple(tokens), float(len(self.states)))

    def forked(self, name: str, place: int, found: Any, expected: Any) -> bool:
        """Whether a key differs by the next token alone, at the end of a block from the cache:
        vLLM finds a block by the tokens up to its end, and the drafter's last key in it was
        computed with the token behind."""
        return (
            found[0] == expected[0] and found[2] == expected[2]
            and place % self.block_size == self.block_size - 1
            and place < self.cached[name]
        )  # fmt: skip

    def alive(self) -> int:
        return sum(not request.is_finished() for request in self.requests.values())

    def arrive(
        self, *, prompt: int | None = None, most: int | None = None, limit: int | None = None,
        grammar: Grammar | None = None, priority: int = 0, least: int = 0,
        budget: int | None = None,
    ) -> None:  # fmt: skip
        """A request whose prompt may be an earlier one's text, whole or cut. `prompt` is its
        length, `most` how many tokens it makes; without them, and without `limit`, at random.
        `least` is its min_tokens, `budget` its thinking_token_budget."""
        self.arrived += 1
        name = f"r{self.arrived}"
        tokens = [self.token() for _ in range(prompt or self.random.randint(1, 24))]
        if prompt is None and self.known and self.random.random() < 0.6:
            text = self.random.choice(list(self.known.values()))
            tokens = text[: self.random.randint(1, min(len(text), LONGEST - 12))] + tokens[:3]
        if prompt is None:
            limit = self.random.choice([None, None, None, K_MAX, 2, 0])
        parameters = SamplingParams(
            max_tokens=most or self.random.randint(1, 30),
            min_tokens=least,
            thinking_token_budget=budget,
            ignore_eos=True,
            stop=["end"] if self.arrived % 2 else None,
            extra_args=None if limit is None else {MAX_K: limit},
            structured_outputs=StructuredOutputsParams(json_object=True) if grammar else None,
        )
        request = Request(
            name, tokens, parameters, None, block_hasher=self.hasher, priority=priority
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = cast("Any", grammar)
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self) -> None:
        alive = [name for name, request in self.requests.items() if not request.is_finished()]
        if alive:
            self.scheduler.finish_requests(
                self.random.choice(alive), RequestStatus.FINISHED_ABORTED
            )
            self.seen["aborted"] += 1

    def step(self, k: int, *, observed: bool = True) -> None:
        """One engine step with `k` draft tokens to be made for the next one. Unless `observed`, the
        scheduler tells the policy of it when it likes to, and that is not looked at."""
        self.told.k = k
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.cached[new.req_id] = new.num_computed_tokens
            self.seen["hits"] += new.num_computed_tokens > 0
        old = scheduled.scheduled_cached_reqs
        for name, more, computed in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        ):
            if name in old.resumed_req_ids:
                assert more is not None
                self.blocks[name] = list(more[0])
                self.cached[name] = computed
                self.seen["resumed"] += 1
            elif more is not None:
                self.blocks[name] += more[0]
        self.seen["preempted"] += len(scheduled.preempted_req_ids or ())
        self.drafter.sync_requests(scheduled)
        if not scheduled.num_scheduled_tokens:
            self.scheduler.update_from_output(scheduled, ModelRunnerOutput([], {}))
            return
        self.scheduler.get_grammar_bitmask(scheduled)
        sampled, states, common = self._run(scheduled)
        offered = scheduled.scheduled_spec_decode_tokens
        if not any(map(self._limit, scheduled.num_scheduled_tokens)):
            k = 0  # nobody may have drafts
        # Less than was told, and 1 or more, where the pass would not fit behind a full step.
        assert min(k, 1) <= scheduled.num_spec_tokens_to_schedule <= k
        k = scheduled.num_spec_tokens_to_schedule
        drafts = self.drafter.draft(k, offered, sampled, [states], common, GREEDY)
        assert (drafts is None) == (k == 0)
        made = [
            [] if unread else [token for token in row if token >= 0]
            for row, unread in zip(sampled.tolist(), self.discard_request_mask.np, strict=True)
        ]
        names = self.batch.req_ids
        lengths = dict(zip(names, map(len, made), strict=True))
        output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, made)
        outputs = self.scheduler.update_from_output(scheduled, output)
        self._check_counts_sent(outputs, offered, lengths)
        kept = dict(zip(names, map(len, made), strict=True))  # vLLM cuts what is too long
        if observed:
            self.scheduler.recorder.tell(self.scheduler.k_policy)
            ran = self.scheduler.recorder.recent[-1]
            self._check_load(ran.load)
            self._check_verified(ran, offered, lengths, kept)
        # Of a running request that this step left out, the next one counts them.
        self.cut = {
            name: drafts
            for name, drafts in self.cut.items()
            if name not in names and self.requests[name].status == RequestStatus.RUNNING
        }
        self.seen["cut and left out"] += len(self.cut)
        if drafts is not None:
            self._check_counts(drafts, k)
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
            for name, row in zip(names, drafts, strict=True):
                request = self.requests[name]
                if not request.is_finished() and len(request.spec_token_ids) < len(row):
                    self.cut[name] = len(row)

    def _check_counts_sent(
        self, outputs: Any, offered: dict[str, list[int]], made: dict[str, int]
    ) -> None:
        """Requests that the gateway may end at a stop string send what was drafted for them so far
        at every step, the others at their end."""
        for name, drafts in offered.items():
            self.verified[name, "steps"] += 1
            self.verified[name, "drafted"] += len(drafts)
            self.verified[name, "accepted"] += made[name] - 1
        for output in (output for client in outputs.values() for output in client.outputs):
            name, counts = output.request_id, output.spec_decode_metrics
            followed = bool(self.requests[name].sampling_params.stop)
            assert (counts is not None) == (followed or output.finish_reason is not None)
            if counts is not None:
                sent = {
                    "steps": sum(counts.histogram),
                    "drafted": counts.num_draft_tokens,
                    "accepted": sum(j * steps for j, steps in enumerate(counts.histogram)),
                }
                assert sent == {figure: self.verified[name, figure] for figure in sent}
                assert counts is not self.requests[name].spec_decode_metrics or output.finish_reason

    def _check_verified(
        self, step: Step, offered: dict[str, list[int]], made: dict[str, int], kept: dict[str, int]
    ) -> None:
        """What the policy is told of drafts. Those that a grammar cut are rejected ones."""
        self.seen["cut"] += sum(kept[name] < made[name] for name in offered)
        cut = {name: drafts for name, drafts in self.cut.items() if name in made}
        self.seen["cut by a grammar"] += len(cut)
        drafted = {name: len(offered[name]) for name in offered} | cut
        drafts = list(drafted.values())
        right = [made[name] - 1 for name in drafted]
        self.verified_drafts += zip(drafts, right, strict=True)
        assert step.load.draft_tokens == sum(drafts)
        for told, counts in ((step.drafted, drafts), (step.accepted, right)):
            assert told == tuple(sum(n > i for n in counts) for i in range(K_MAX))

    def _limit(self, name: str) -> int:
        parameters = self.requests[name].sampling_params
        assert parameters is not None
        return int((parameters.extra_args or {}).get(MAX_K, K_MAX))

    def _check_load(self, load: Load) -> None:
        """What the policy is told of who may be drafted for, and how far."""
        rows = zip(self.batch.req_ids, self.discard_request_mask.np, strict=True)
        limits = [self._limit(name) for name, unread in rows if not unread]
        assert load.requests == len(limits)
        for k in range(K_MAX + 1):
            assert load.draft_tokens_at(k) == sum(min(limit, k) for limit in limits)
        self.seen["limited"] += bool(load.requests_by_draft_limit)

    def _check_counts(self, drafts: list[list[int]], k: int) -> None:
        for name, row in zip(self.batch.req_ids, drafts, strict=True):
            assert len(row) <= min(self._limit(name), k)

    def _run(self, scheduled: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The target's part of a step. Rows come in any order, and what lies behind a row's
        tokens and blocks is what someone else left there."""
        names = list(scheduled.num_scheduled_tokens)
        self.random.shuffle(names)
        count, batch = len(names), self.batch
        batch.req_ids, batch.num_reqs = names, count
        width = LONGEST // self.block_size
        total = self.kv_cache_config.num_blocks
        tables = np.array(
            [[self.random.randrange(total) for _ in range(width)] for _ in names], np.int32
        )
        batch.token_ids_cpu = np.full((SEQUENCES, LONGEST), 77, np.int32)
        batch.num_computed_tokens_cpu = np.zeros(SEQUENCES, np.int32)
        unread = np.zeros(count, bool)
        sampled = torch.full((count, K_MAX + 1), -1)
        states: list[float] = []
        starts = [0]
        for row, name in enumerate(names):
            request = self.requests[name]
            scheduled_now = scheduled.num_scheduled_tokens[name]
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, [])
            begin = request.num_computed_tokens - scheduled_now  # counted as computed already
            tokens = [*request.all_token_ids, *drafts]
            tables[row, : len(self.blocks[name])] = self.blocks[name]
            batch.token_ids_cpu[row, : len(tokens)] = tokens
            batch.num_computed_tokens_cpu[row] = begin
            end = begin + scheduled_now
            states += [self.state(tokens[: place + 1]) for place in range(begin, end)]
            starts.append(len(states))
            unread[row] = end < len(request.all_token_ids)
            accepted = self.accept(len(drafts))
            self.seen["rejected"] += len(drafts) - accepted
            made = [*drafts[:accepted], self.token()]
            sampled[row, : len(made)] = torch.tensor(made)
            text = list(request.all_token_ids)
            self.known[name] = text if unread[row] else text + made
        batch.block_table[0].get_numpy_array = lambda: tables
        self.discard_request_mask = SimpleNamespace(np=unread)
        common = SimpleNamespace(
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            block_table_tensor=torch.from_numpy(tables),
            max_query_len=max(end - start for start, end in pairwise(starts)),
        )
        return sampled, torch.tensor(states, dtype=torch.float64).unsqueeze(1), common


def configuration(
    block_size: int = 4, batched: int = 24, head: str = "p-eagle", parallel: bool | None = None
) -> VllmConfig:
    """For the embedded models, small in every way that the scheduler knows. `head` may be a folder,
    `parallel` then says whether it is P-EAGLE's; or LOOKUP, for vLLM's own on V2."""
    speculation: dict[str, Any] = {
        "method": "eagle3",
        "model": str(EMBEDDED / head),
        "num_speculative_tokens": K_MAX,
        "parallel_drafting": head == "p-eagle" if parallel is None else parallel,
    }
    if head == LOOKUP:
        speculation = {
            "method": "ngram_gpu",
            "num_speculative_tokens": K_MAX,
            "prompt_lookup_min": SHORTEST_MATCH,
            "prompt_lookup_max": LONGEST_MATCH,
        }
    return EngineArgs(
        model=str(EMBEDDED / "target"),
        max_model_len=LONGEST,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=batched,
        block_size=block_size,
        enable_prefix_caching=True,
        async_scheduling=False,
        per_request_spec_decode_metrics="summary",
        speculative_config=speculation,
    ).create_engine_config()
