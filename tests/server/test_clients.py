"""Whole round trips of the agents that people have: a call, its result, an answer. What the model writes is given."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.test_tools import OSLO, WEATHER, call, scripted, write

__all__ = ["scripted"]  # a fixture

ASKED = "How warm is it in Oslo?"
SAID = "21 degrees."
LOOK = f"I look.\n{call('weather', OSLO)}"
pytestmark = pytest.mark.slow  # they are large


@pytest.fixture
def weather(scripted: Running) -> Callable[..., str]:
    """The function that is called. After it the model answers with a text."""
    write(scripted, LOOK)

    def weather(city: str, days: int = 1) -> str:
        """How warm it is."""
        assert (city, days) == ("Oslo", 2)
        write(scripted, SAID)
        return "21"

    return weather


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("interface", ["responses", "chat"])
def test_agents_sdk(scripted: Running, weather: Callable[..., str], interface: str, stream: bool) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
            kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
            settings = agents.ModelSettings(reasoning={"effort": "none"})
            agent = agents.Agent(
                name="A",
                instructions="Be brief.",
                model=kinds[interface]("tiny", client),
                tools=[agents.function_tool(weather, strict_mode=False)],
                model_settings=settings,
            )
            config = agents.RunConfig(tracing_disabled=True)
            if not stream:
                return await agents.Runner.run(agent, ASKED, run_config=config)
            result = agents.Runner.run_streamed(agent, ASKED, run_config=config)
            texts = [
                event.data.delta
                async for event in result.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            assert "".join(texts) == f"I look.{SAID}"
            return result

    result = asyncio.run(run())
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds == ["MessageOutputItem", "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert result.final_output == SAID


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("interface", ["responses", "chat"])
def test_langchain_agent(scripted: Running, weather: Callable[..., str], interface: str, stream: bool) -> None:
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny",
        base_url=f"{scripted.url}/v1",
        api_key="none",
        use_responses_api=interface == "responses",
        streaming=stream,
        reasoning_effort="none",
        max_retries=0,
    )
    turns = create_agent(model, [weather]).invoke({"messages": [("user", ASKED)]})["messages"]
    assert [turn.type for turn in turns] == ["human", "ai", "tool", "ai"]
    assert [made["args"] for made in turns[1].tool_calls] == [json.loads(OSLO)]
    assert (turns[1].text, turns[2].content, turns[3].text) == ("I look.", "21", SAID)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_litellm(scripted: Running, weather: Callable[..., str], stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    more = {"api_base": f"{scripted.url}/v1", "api_key": "none", "tools": [WEATHER], "stream": stream}
    messages = [{"role": "user", "content": ASKED}]

    def ask() -> Any:
        quick = {"chat_template_kwargs": {"enable_thinking": False}}
        made = litellm.completion("openai/tiny", messages, **more, extra_body=quick)
        return (litellm.stream_chunk_builder(list(made)) if stream else made).choices[0]

    first = ask()
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I look.")
    (made,) = first.message.tool_calls
    result = weather(**json.loads(made.function.arguments))
    messages += [first.message.model_dump(), {"role": "tool", "tool_call_id": made.id, "content": result}]
    last = ask()
    assert (last.finish_reason, last.message.content) == ("stop", SAID)
