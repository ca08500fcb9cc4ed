"""Use a server through pydantic-ai, LangChain and openai: `python client_libraries.py PORT`.

Prints, as JSON, the results of single questions and the turns of conversations, in which each library sends back its
own form of every answer before: texts with reasoning, and calls of a tool with what the tool gave.
"""

import json
import sys

from pydantic import BaseModel

NUM_TURNS = 5
NO_TEXT = {str(token): -100 for token in range(112, 120)}
"""Bias against the tokens of the model that stand for no text."""
LIMITS = {"max_tokens": 200, "seed": 1}
NO_THINKING = {"chat_template_kwargs": {"think": False}}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,  # of which a random model writes more than fit into an answer
        },
    },
}


class Place(BaseModel):
    x: bool
    y: int | None


def pydantic_model(url):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("tiny-llama", provider=OpenAIProvider(base_url=url, api_key="none"))


def with_pydantic_ai(url):
    from pydantic_ai import Agent

    settings = LIMITS | {"extra_body": NO_THINKING}
    agent = Agent(pydantic_model(url), output_type=Place, model_settings=settings)

    @agent.tool_plain
    def look(x: bool) -> str:
        """Look around."""
        return f"seen {x}"

    history, places = [], []
    for _ in range(NUM_TURNS):
        answer = agent.run_sync("abc", message_history=history)
        history = answer.all_messages()
        places.append(answer.output.model_dump())
    return {"places": places, "turns": pydantic_turns(url)}


def pydantic_turns(url):
    from pydantic_ai.direct import model_request_sync
    from pydantic_ai.messages import ModelRequest, ThinkingPart, ToolCallPart, ToolReturnPart, UserPromptPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    model, messages, turns = pydantic_model(url), [], []
    tool = ToolDefinition(name="look", parameters_json_schema=LOOK["function"]["parameters"])
    for turn in range(NUM_TURNS):
        calls = turn % 2
        messages.append(ModelRequest(parts=[UserPromptPart("abc")]))
        parameters = ModelRequestParameters(function_tools=[tool] if calls else [], allow_text_output=not calls)
        settings = {
            **LIMITS,
            "max_tokens": 200 if calls else 8,
            "logit_bias": NO_TEXT,
            "extra_body": NO_THINKING if calls else {},
        }
        answer = model_request_sync(model, messages, model_settings=settings, model_request_parameters=parameters)
        messages.append(answer)
        found = [part for part in answer.parts if isinstance(part, ToolCallPart)]
        results = [ToolReturnPart(call.tool_name, "seen", call.tool_call_id) for call in found]
        if results:
            messages.append(ModelRequest(parts=results))
        thoughts = [part.content for part in answer.parts if isinstance(part, ThinkingPart)]
        turns.append({"reasoning": "".join(thoughts), "calls": [call.args_as_dict() for call in found]})
    return turns


def with_langchain(url):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(x: bool) -> str:
        """Look around."""
        return f"seen {x}"

    plain = ChatOpenAI(
        model="tiny-llama", base_url=url, api_key="none", **LIMITS | {"max_tokens": 8, "logit_bias": NO_TEXT}
    )
    chat = ChatOpenAI(model="tiny-llama", base_url=url, api_key="none", **LIMITS, extra_body=NO_THINKING)
    messages, turns = [], []
    for turn in range(NUM_TURNS):
        messages.append(HumanMessage("abc"))
        asked = chat.bind_tools([look], tool_choice="any") if turn % 2 else plain
        answer = asked.invoke(messages)
        messages.append(answer)
        messages += [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        turns.append({"calls": [call["args"] for call in answer.tool_calls]})
    place = chat.with_structured_output(Place, method="json_schema").invoke("abc").model_dump()
    return {"place": place, "turns": turns}


def with_openai(url):
    from openai import OpenAI

    client, messages, turns = OpenAI(base_url=url, api_key="none"), [], []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": "abc"})
        options = {"max_tokens": 8, "seed": 1, "logit_bias": NO_TEXT}
        if turn % 2:
            options = LIMITS | {"tools": [LOOK], "tool_choice": "required", "extra_body": NO_THINKING}
        answer = client.chat.completions.create(model="tiny-llama", messages=messages, **options).choices[0].message
        messages.append(answer)
        calls = answer.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in calls]
        arguments = [json.loads(call.function.arguments) for call in calls]
        turns.append({"reasoning": getattr(answer, "reasoning", None) or "", "calls": arguments})
    return turns


if __name__ == "__main__":
    url = f"http://127.0.0.1:{sys.argv[1]}/v1"
    print(
        json.dumps({"pydantic_ai": with_pydantic_ai(url), "langchain": with_langchain(url), "openai": with_openai(url)})
    )
