"""One request after another, through a real agent to a real engine."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.agents import Agent, chain_of, running_agent
from harness.engines import EngineProcess
from harness.services import until
from harness.tiny_model import words
from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import generation_pb2, prompt_pb2
from kvplane_common.errors import UnsupportedError, from_rpc

StartEngine = Callable[..., Awaitable[EngineProcess]]
Sampling = prompt_pb2.Sampling


async def refusal(agent: Agent, request: agent_pb2.GenerateRequest) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.run(request)
    return from_rpc(caught.value)


async def test_a_text_is_answered_with_what_it_cost(nano_agent: Agent) -> None:
    answer = await nano_agent.generate(words(100, seed=11), 6)
    assert answer.text
    assert answer.completion.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert answer.usage.prompt_tokens >= 100
    assert answer.usage.completion_tokens == 6
    assert answer.usage.evidence == generation_pb2.EVIDENCE_MEASURED
    timings = answer.completion.timings
    assert all(
        timings.HasField(name) for name in ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms")
    )
    assert not timings.HasField("load_ms")


async def test_a_conversation_is_answered(nano_agent: Agent) -> None:
    request = nano_agent.request("")
    messages = [prompt_pb2.Message(role="user", content=words(20, seed=12))]
    request.prompt.chat.CopyFrom(prompt_pb2.Chat(messages=messages))
    answer = await nano_agent.run(request)
    assert answer.text
    assert answer.usage.prompt_tokens > 20


async def test_a_repeated_prompt_is_predicted_measured_and_confirmed(nano_agent: Agent) -> None:
    text = words(300, seed=13)
    first, second = await nano_agent.generate(text), await nano_agent.generate(text)
    assert first.admission.predicted_cached_tokens == 0
    assert second.admission.predicted_cached_tokens == first.usage.prompt_tokens
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    (residency,) = (await nano_agent.listing()).residencies
    assert residency.evidence == generation_pb2.EVIDENCE_MEASURED
    assert (residency.node_id, residency.model) == ("n1", nano_agent.model)
    assert residency.tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert residency.hits == 1


async def test_the_next_turn_supersedes_the_turn_it_continues(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model, slots=2, context_tokens=4096, cache_ram_mb=0)
    # A whole number of the chain's steps, so that the longer prompt has the shorter one's digest.
    text = words(200, seed=14)[:768]
    async with running_agent(engine.url, engine.name) as agent:
        first = await agent.generate(text)
        second = await agent.generate(text + " " + words(40, seed=15))
        assert second.admission.predicted_cached_tokens == first.usage.prompt_tokens
        assert second.usage.cached_tokens >= first.usage.prompt_tokens - 2
        (residency,) = (await agent.listing()).residencies
        assert residency.tokens > first.usage.prompt_tokens + 40


async def test_a_prompt_that_the_engine_lost_is_not_believed_again(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model, slots=1, cache_ram_mb=0)
    first, other = words(200, seed=16), words(200, seed=17)
    async with running_agent(engine.url, engine.name, kv_budget_mb=64) as agent:
        await agent.generate(first)
        await agent.generate(other)
        again = await agent.generate(first)
        assert again.admission.predicted_cached_tokens > 0
        assert again.usage.cached_tokens == 0
        believed = {one.chain.digests[-8:]: one for one in (await agent.listing()).residencies}
        renewed = believed[chain_of(first).last]
        assert renewed.evidence == generation_pb2.EVIDENCE_PREDICTED
        assert renewed.hits == 0


async def test_a_prompt_without_a_chain_is_not_remembered(nano_agent: Agent) -> None:
    await nano_agent.generate(words(30, seed=18), chained=False)
    assert not (await nano_agent.listing()).residencies


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        (lambda ask: ask.ClearField("model"), "INVALID_REQUEST", "model"),
        (lambda ask: ask.ClearField("prompt"), "INVALID_PROMPT", "prompt"),
        (lambda ask: setattr(ask.prompt, "text", ""), "INVALID_PROMPT", "prompt.text"),
        (lambda ask: ask.prompt.chat.SetInParent(), "INVALID_PROMPT", "prompt.chat.messages"),
        (
            lambda ask: ask.prompt.chat.messages.add(role="wizard"),
            "INVALID_PROMPT",
            "prompt.chat.messages[0].role",
        ),
        (lambda ask: setattr(ask.chain, "digests", b"short"), "INVALID_PROMPT", "chain"),
        (
            lambda ask: ask.sampling.CopyFrom(Sampling(max_tokens=0)),
            "INVALID_SAMPLING",
            "sampling.max_tokens",
        ),
        (
            lambda ask: ask.sampling.CopyFrom(Sampling(temperature=-1)),
            "INVALID_SAMPLING",
            "sampling.temperature",
        ),
    ],
    ids=[
        "no model", "no prompt", "an empty text", "no messages", "an unknown role",
        "a malformed chain", "no tokens asked for", "a negative temperature",
    ],
)  # fmt: skip
async def test_a_request_that_is_wrong_in_itself_is_refused(
    nano_agent: Agent, change: Callable[[agent_pb2.GenerateRequest], None], reason: str, field: str
) -> None:
    request = nano_agent.request("the")
    change(request)
    error = await refusal(nano_agent, request)
    assert (error.reason, error.facts["field"]) == (reason, field)


async def test_an_unknown_model_is_refused_with_those_that_there_are(nano_agent: Agent) -> None:
    error = await refusal(nano_agent, nano_agent.request("the", model="other"))
    assert error.reason == "MODEL_NOT_FOUND"
    assert nano_agent.model in str(error)


async def test_the_engine_refuses_a_prompt_that_is_a_little_too_long(nano_agent: Agent) -> None:
    error = await refusal(nano_agent, nano_agent.request(words(4500, seed=19), chained=False))
    assert error.reason == "CONTEXT_EXCEEDED"
    assert {"prompt_tokens", "context_tokens"} <= set(error.facts)


async def test_a_prompt_beyond_any_doubt_is_refused_before_the_engine_sees_it(
    nano_agent: Agent,
) -> None:
    request = nano_agent.request(words(13000, seed=21) * 3)
    error = await refusal(nano_agent, request)
    assert error.reason == "CONTEXT_EXCEEDED"
    assert int(error.facts["prompt_tokens"]) > int(error.facts["context_tokens"])
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(aiter(nano_agent.stub.Generate(request)))


async def test_a_cancel_in_the_midst_of_the_answer_stops_the_engine_and_frees_all(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model)
    async with running_agent(engine.url, engine.name) as agent:
        call = agent.stub.Generate(agent.request("the", 3000))
        async for step in call:
            if step.WhichOneof("event") == "delta":
                break
        assert await engine.busy_slots() == 1
        call.cancel()
        await agent.until_idle()
        await engine.idle()
        assert (await agent.generate("the")).text


async def test_a_cancel_before_the_first_piece_frees_all(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model)
    async with running_agent(engine.url, engine.name) as agent:
        call = agent.stub.Generate(agent.request(words(3000, seed=22), 5))
        assert (await anext(aiter(call))).HasField("admission")
        call.cancel()
        await agent.until_idle()
        await engine.idle()


async def test_the_load_tells_of_a_running_prefill(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model)
    async with running_agent(engine.url, engine.name) as agent:
        call = agent.stub.Generate(agent.request(words(2000, seed=23), 50))
        steps = aiter(call)
        assert (await anext(steps)).HasField("admission")
        (work,) = (await agent.load()).models
        assert (work.active, work.queued) == (1, 0)
        assert work.pending_prefill_tokens > 500
        assert (await anext(steps)).HasField("delta")

        async def evaluated() -> bool:
            return all(not model.pending_prefill_tokens for model in (await agent.load()).models)

        await until(evaluated)
        call.cancel()
        await agent.until_idle()


async def test_what_this_version_does_not_do_says_so(nano_agent: Agent) -> None:
    calls = (
        nano_agent.stub.Forward(agent_pb2.ForwardRequest(dialect="openai")),
        nano_agent.stub.FetchKv(agent_pb2.FetchKvRequest(model=nano_agent.model)),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert isinstance(from_rpc(caught.value), UnsupportedError)
