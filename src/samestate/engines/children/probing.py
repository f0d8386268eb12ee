"""One request with a reasoning budget, on an engine in this process."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from samestate.engines.children.protocol import Probe, Probed
from samestate.evidence.records import Scalar


def probe(engine: LLMEngine, command: Probe) -> Probed:
    """Run it to its end, alone. Raises what vLLM raises for parameters that it refuses."""
    params = SamplingParams(
        temperature=command.temperature,
        top_p=command.top_p,
        seed=command.seed,
        max_tokens=command.max_tokens,
        stop_token_ids=command.stop_token_ids,
        ignore_eos=command.ignore_eos,
        thinking_token_budget=command.budget,
        skip_special_tokens=False,
    )
    request = engine.add_request(command.request, TokensPrompt(prompt_token_ids=command.token_ids), params)
    echo = _echo(engine, request) or _parameters(params)
    last: RequestOutput | None = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    _finish_what_runs_ahead(engine)
    if last is None:
        raise ValueError(f"request {command.request}: the engine gave no output")
    completion = last.outputs[0]
    return Probed(
        request=request,
        prompt_token_ids=list(last.prompt_token_ids),
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        text=completion.text,
        echo=echo,
    )


def _finish_what_runs_ahead(engine: LLMEngine) -> None:
    """Under asynchronous scheduling a step for the request may be out when it ends; a core of its own sees to it."""
    core = getattr(engine.engine_core, "engine_core", None)
    while core is not None and core.batch_queue:
        core.step_fn()


def _echo(engine: LLMEngine, request: str) -> dict[str, Scalar] | None:
    """As the scheduler has it, where that is in this process."""
    core = getattr(engine.engine_core, "engine_core", None)
    known = core.scheduler.requests.get(request) if core is not None else None
    return _parameters(known.sampling_params) if known is not None else None


def _parameters(params: SamplingParams) -> dict[str, Scalar]:
    """Under the names of `ProbeSent`."""
    return {
        "budget": params.thinking_token_budget,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "ignore_eos": params.ignore_eos,
    }
