"""vLLM's AsyncLLM, with the corrections that every API needs."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any

from vllm import envs
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from app.learning.learning import Learning
from app.llm.answer_logprobs import Alternatives, keep_answer_logprobs, watch_texts
from app.llm.cache_salt import tenant_cache_salt
from app.llm.captured_sequences import captured_from, follow, take_steps
from app.llm.first_token import settle_first_token
from app.llm.json_whitespace import bounded
from app.llm.stop_strings import hold_back_beginnings_only
from app.llm.token_origins import attach, record, watch
from app.llm.vllm_errors import ConstraintError, NonFiniteError, engine_lost
from app.observability import metrics
from app.observability.exposition import EXPOSITION
from app.request_usage import RequestUsage, current_usage, searches_with_beams, trace_headers
from app.validation.constraints import relax
from drafters.config import MAX_K, REPORT_TOKENS
from drafters.control.report import of_all_copies
from drafters.vllm.own_drafter import accept_undrafted
from drafters.vllm.worker_bounds import beyond_worker

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[RequestOutput, None]
# Most log probabilities of a prompt's tokens, of one sequence: tokens x (alternatives + 1). vLLM
# makes all of their objects in one call on the event loop, and decodes each by itself
# (vllm/v1/engine/logprobs.py, _update_prompt_logprobs), whatever the context: some 2 us each.
MAX_PROMPT_ALTERNATIVES = 65_536
NON_FINITE = "aerie-non-finite"  # the stop reason of sequences whose logits are not finite
WARM_UP = "aerie-warm-up-"  # begins the ids of requests that a start makes


class GatewayLLM(AsyncLLM):
    """vLLM's engine client (vllm/v1/engine/async_llm.py).

    What is added to it:

    - Outputs settle the request's FirstToken. A request that the engine gives up before its first
      token raises.
    - The alternatives of each token come in order of probability. vLLM puts the sampled token
      first, for which the serving classes would cut off one of the k most likely ones.
    - Log probabilities are those of the answer's text: not of the token that ends it, for one.
    - A request's sequences are entered in its RequestUsage, and its tenant's cache salt goes with
      it to the engine. The origin of its tokens is attached to them if it asked for that.
    - Sequences whose logits are not finite end with a NonFiniteError.
    - Sequences are captured, and the load is reported, where a head learns (`learning`).
    - Requests with `logit_bias` or `min_p` are accepted beside a draft head of this project.
    - Requests for which vLLM's worker would raise, and end the engine, are refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.learning: Learning | None = None
        accept_undrafted(self.input_processor)
        register = self.output_processor.add_request

        def enter(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
            refuse_beyond_worker(request.sampling_params)
            usage = current_usage()
            if usage is not None and usage.cache_tenant is not None:
                request.cache_salt = tenant_cache_salt(usage.cache_tenant, request.cache_salt)
            register(request, *args, **kwargs)
            sequence = self.output_processor.request_states[request.request_id]
            hold_back_beginnings_only(sequence.detokenizer)
            if usage is not None:
                usage.enter(sequence, self.output_processor.request_states)
                self._watch(sequence, request.sampling_params)
                captures = usage.captured_as is not None and not searches_with_beams()
                if captures and follow(request, sequence):
                    usage.followed.append(sequence)
            self._report_load()

        # The one place that every sequence of every kind of request passes, in its own task.
        self.output_processor.add_request = enter
        process = self.output_processor.process_outputs

        def process_finite(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
            aborted = end_non_finite(outputs)
            record(outputs, self.output_processor.request_states)
            if self.learning is not None:
                take_steps(outputs, self.output_processor.request_states)
            processed = process(outputs, *args, **kwargs)
            processed.reqs_to_abort.extend(aborted)
            self._report_load()
            return processed

        self.output_processor.process_outputs = process_finite
        abort = self.output_processor.abort_requests

        def abort_requests(*args: Any, **kwargs: Any) -> list[str]:
            aborted: list[str] = abort(*args, **kwargs)
            self._report_load()
            return aborted

        self.output_processor.abort_requests = abort_requests

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Outputs:
        """Generate as AsyncLLM.generate does. `max_tokens` may be 0: the prompt is scored only."""
        silent = sampling_params.max_tokens == 0
        if silent:
            sampling_params.max_tokens = 1  # a request without a step cannot be scheduled
        constraint = sampling_params.structured_outputs
        if constraint:
            relax(constraint)
        if constraint and constraint.structural_tag and self._white_space_is_bounded:
            constraint.structural_tag = bounded(constraint.structural_tag)
        if (usage := current_usage()) is not None:
            if not searches_with_beams():
                refuse_too_many_alternatives(usage, prompt, sampling_params)
                refuse_too_many_repeats(usage, prompt, sampling_params.n)
            self._apply_tenant_limits(usage, sampling_params, kwargs)
        if (headers := trace_headers()) is not None:
            kwargs["trace_headers"] = headers
        outputs = super().generate(prompt, sampling_params, request_id, *args, **kwargs)
        watched = usage if is_watched(sampling_params) else None
        ended = partial(self._end, usage, request_id) if usage is not None else None
        return settle_first_token(
            _corrected(outputs, constraint is not None, silent, watched, ended)
        )

    def _end(self, usage: RequestUsage, request_id: str) -> None:
        """Settle and capture the sequences of vLLM's request of this id, which has ended."""
        usage.end(request_id)
        if self.learning is None or usage.captured_as is None:
            return
        capture = self.learning.capture
        for sequence in usage.end_followed(request_id):
            captured = captured_from(sequence, usage.captured_as, capture.generation())
            if captured is not None:
                capture.offer(captured)

    def _report_load(self) -> None:
        if self.learning is not None:
            self.learning.load.count(len(self.output_processor.request_states))

    def _watch(self, sequence: Any, sampling_params: SamplingParams | None) -> None:
        if reports_tokens(sampling_params):
            watch(sequence)
        if reports_logprobs(sampling_params):
            watch_texts(sequence, self._special_tokens)

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        return frozenset(() if self.tokenizer is None else self.tokenizer.all_special_ids)

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a command of DraftingScheduler.speculation (drafters/vllm/scheduling/scheduler.py) in
        every engine core; returns the answer of the first, with the sums of all.

        Raises ApiError 503 if the engine dies meanwhile.
        """
        return of_all_copies(
            await self._ask("call_utility_all_async", "aerie_speculation", command, arguments)
        )

    async def head(self, command: str, folder: str) -> list[dict[str, Any]]:
        """Run a command about the draft head in every engine core (drafters/vllm/patches.py, head);
        returns the answer of each. Raises ApiError 503 if the engine dies meanwhile.
        """
        answers: list[dict[str, Any]] = await self._ask(
            "call_utility_all_async", "aerie_head", command, folder
        )
        return answers

    async def _ask(self, call: str, *arguments: Any) -> Any:
        """Call a utility method of the engine core. Raises ApiError 503 if the engine dies
        meanwhile: vLLM leaves the calls of a dead engine unanswered."""
        self._run_output_handler()
        asking = asyncio.ensure_future(getattr(self.engine_core, call)(*arguments))
        try:
            await asyncio.wait({asking, self.output_handler}, return_when=FIRST_COMPLETED)
            if not asking.done():
                raise engine_lost()
            return asking.result()
        except EngineDeadError:
            raise engine_lost() from None
        finally:
            asking.cancel()

    async def run_dummy_batch(self, requests: int, tokens: int) -> None:
        """Run `requests` requests at once, each with `tokens` output tokens, on the first copy of
        the engine (data-parallel): the others would take their share, and no step have them all."""
        await self._run(_dummies(requests), tokens, copy=0)

    async def answer(self, texts: Sequence[str], tokens: int) -> None:
        """Continue all texts at once, each by `tokens` tokens."""
        if self.tokenizer is None:  # the settings leave it out: requests are token ids
            await self._run(_dummies(len(texts)), tokens)
        else:
            await self._run([self.tokenizer.encode(text) for text in texts], tokens)

    async def repeat(self, text: str, tokens: int) -> None:
        """Continue a text by `tokens` tokens, all of them its last one."""
        prompt = [1, 2, 3, 4] * 4 if self.tokenizer is None else self.tokenizer.encode(text)
        await self._run([prompt], tokens, allowed=prompt[-1:])

    async def _run(
        self,
        prompts: Sequence[list[int]],
        tokens: int,
        allowed: list[int] | None = None,
        copy: int | None = None,
    ) -> None:
        longest = max(1, self.model_config.max_model_len - tokens)

        async def one(prompt: list[int]) -> None:
            params = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, allowed_token_ids=allowed
            )
            name = f"{WARM_UP}{next(self._dummy_numbers)}"
            asked = tokens_input(prompt[:longest])
            async for _ in self.generate(asked, params, name, data_parallel_rank=copy):
                pass

        await asyncio.gather(*map(one, prompts))

    _dummy_numbers = count()

    @property
    def unfinished(self) -> dict[int, int]:
        """Number of sequences that each copy of the engine has not finished, by its data-parallel
        rank."""
        core, sequences = self.engine_core, self.output_processor.request_states
        copy_of = getattr(core, "reqs_in_flight", None)
        if copy_of is None:  # the client of one copy
            return dict.fromkeys(core.engine_ranks_managed, len(sequences))
        by_copy = Counter(copy_of.get(sequence) for sequence in sequences)
        ranked = zip(core.engine_ranks_managed, core.core_engines, strict=True)
        return {rank: by_copy[copy] for rank, copy in ranked}

    @property
    def processes(self) -> list[int]:
        """Ids of the engine core processes that run on this machine."""
        manager = self.engine_core.resources.engine_manager
        return [process.pid for process in getattr(manager, "processes", ()) if process.pid]

    def mark_failed(self) -> None:
        """Mark the engine as dead, whatever its processes do.

        Every request ends with an error now, and none is accepted. The engine's counters stay on
        /metrics.
        """
        self.engine_core.resources.engine_dead = True
        self.output_processor.propagate_error(EngineDeadError())
        if self.output_handler is not None:
            self.output_handler.cancel()
        EXPOSITION.retire(unregister_vllm_metrics)

    def _apply_tenant_limits(
        self, usage: RequestUsage, sampling_params: SamplingParams, kwargs: dict[str, Any]
    ) -> None:
        """Apply the tenant's priority, where the scheduler knows priorities, and its largest K."""
        if self.vllm_config.scheduler_config.policy == "priority":
            kwargs["priority"] = usage.priority
        if usage.max_k is not None:
            extra = dict(sampling_params.extra_args or {})
            limit = min(usage.max_k, extra.get(MAX_K, usage.max_k))
            sampling_params.extra_args = {**extra, MAX_K: limit}

    def __del__(self) -> None:
        """Run vLLM's finaliser, unless the interpreter ends and its modules are gone."""
        if not sys.is_finalizing():
            super().__del__()

    @property
    def _white_space_is_bounded(self) -> bool:
        return bool(self.vllm_config.structured_outputs_config.disable_any_whitespace)


def _dummies(count: int) -> list[list[int]]:
    """Short prompts of token ids that every vocabulary has. They differ, as equal texts would need
    few experts of a mixture, and steps of many requests would look too cheap."""
    return [[1 + number % 100, 2, 3, 4] for number in range(count)]


def refuse_beyond_worker(sampling_params: SamplingParams | None) -> None:
    """Raise VLLMValidationError for parameters that do not fit into a worker's rows."""
    if sampling_params is None:
        return
    refused = beyond_worker(sampling_params, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS)
    if refused is not None:
        field, message = refused
        raise VLLMValidationError(message, parameter=field)


def refuse_too_many_alternatives(
    usage: RequestUsage, prompt: Any, sampling_params: SamplingParams
) -> None:
    """Count the log probabilities that one prompt of a request asks for. Raises VLLMValidationError
    if the request asks for too many: each becomes an object on the event loop.

    One choice of one prompt may have as many as the context allows for its output.
    """
    choices = sampling_params.n
    scored = 0 if sampling_params.prompt_logprobs is None else _length(prompt)
    width = (sampling_params.prompt_logprobs or 0) + 1
    if scored * width > MAX_PROMPT_ALTERNATIVES:
        raise VLLMValidationError(
            f"The {scored} tokens of the prompt have {width} log probabilities each, and all of "
            f"them together may have {MAX_PROMPT_ALTERNATIVES}: send a shorter prompt, or ask for "
            "fewer alternatives of its tokens.",
            parameter="prompt",
        )
    alone = choices == 1 and usage.alternatives == 0
    if sampling_params.logprobs is not None:
        usage.count_alternatives(
            output_tokens=choices * (sampling_params.max_tokens or 0),
            output_width=sampling_params.logprobs + 1,
        )
    if scored:
        usage.count_alternatives(prompt_tokens=scored, prompt_width=choices * width)
    if usage.asks_for_too_many and not alone:
        raise VLLMValidationError(
            "The choices and prompts of this request ask for more than "
            f"{usage.max_alternatives} log probabilities: send a smaller 'n', fewer prompts, a "
            "smaller limit of the output, or ask for fewer alternatives of each token.",
            parameter="n" if choices > 1 else "prompt",
        )


def refuse_too_many_repeats(usage: RequestUsage, prompt: Any, choices: int) -> None:
    """Count the tokens of one prompt that each choice of the answer holds again. Raises
    VLLMValidationError if the answer of a request would hold too many.

    The only choice of the only prompt may repeat it, however long it is.
    """
    if not usage.repeats_prompts:
        return
    alone = choices == 1 and usage.repeated_tokens == 0
    usage.repeated_tokens += choices * _length(prompt)
    if usage.repeats_too_much and not alone:
        raise VLLMValidationError(
            f"The choices of this request would repeat more than {usage.max_alternatives} tokens "
            "of its prompts: send a smaller 'n' or fewer prompts, or leave out 'return_token_ids' "
            "and 'echo'.",
            parameter="n" if choices > 1 else "prompt",
        )


def _length(prompt: Any) -> int:
    """How many tokens a prompt has, as far as it is known here."""
    return len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0


def end_non_finite(outputs: list[EngineCoreOutput]) -> list[str]:
    """End sequences whose tokens were chosen from logits that are not finite.

    They lose these tokens and finish with an error. Returns the ids of those that are still running
    in the engine core and have to be aborted there.

    The engine core counts such logits (drafters/vllm/verification/finite.py). It passes the count
    on and otherwise goes on as if nothing had happened.
    """
    running = []
    for output in outputs:
        if output.num_nans_in_logits:
            if not output.finished:
                running.append(output.request_id)
            output.new_token_ids, output.new_logprobs = [], None
            output.finish_reason, output.stop_reason = FinishReason.ERROR, NON_FINITE
            if not output.request_id.startswith(WARM_UP):  # a start says itself why it failed
                metrics.NON_FINITE.inc()
            logger.error("logits of %s are not finite: the sequence was ended", output.request_id)
    return running


def reports_tokens(sampling_params: SamplingParams | None) -> bool:
    """Whether a request asked where its tokens come from (app/validation/speculation_field.py)."""
    extra = None if sampling_params is None else sampling_params.extra_args
    return bool(extra and extra.get(REPORT_TOKENS))


def reports_logprobs(sampling_params: SamplingParams | None) -> bool:
    """Whether a request asked for log probabilities of its answer. A beam search asks for those of
    each step, to choose the next tokens by them."""
    if sampling_params is None or searches_with_beams():
        return False
    return sampling_params.logprobs is not None


def is_watched(sampling_params: SamplingParams | None) -> bool:
    """Whether each token's text is logged, for what the answer tells of its tokens."""
    return reports_tokens(sampling_params) or reports_logprobs(sampling_params)


async def _corrected(
    outputs: Outputs,
    constrained: bool,
    silent: bool,
    watched: RequestUsage | None = None,
    ended: Callable[[], None] | None = None,
) -> Outputs:
    """The outputs as the serving classes expect them.

    `watched` is the usage of a request that asked about its tokens (`is_watched`). `ended` is
    called after the last output, whatever it was.
    """
    begun = False
    try:
        async for output in outputs:
            failed = any(choice.finish_reason == "error" for choice in output.outputs)
            if failed and any(choice.stop_reason == NON_FINITE for choice in output.outputs):
                raise NonFiniteError
            if failed and (constrained or not begun):
                raise _given_up(constrained)
            begun = True
            for choice in output.outputs:
                if silent:
                    choice.text, choice.token_ids, choice.logprobs = "", [], None
                if choice.logprobs:
                    choice.logprobs = [
                        Alternatives(token, step)
                        for token, step in zip(choice.token_ids, choice.logprobs, strict=True)
                    ]
            if watched is not None:
                attach(output, watched.sequences)
                keep_answer_logprobs(output, watched.sequences)
            yield output
    finally:
        if ended is not None:
            ended()
        await outputs.aclose()


def _given_up(constrained: bool) -> Exception:
    """The error of a request that the engine gave up.

    That a grammar allows no next token is noticed only when one is to be chosen.
    """
    if constrained:
        return ConstraintError("The output cannot be constrained like this: nothing matches it.")
    return GenerationError()
