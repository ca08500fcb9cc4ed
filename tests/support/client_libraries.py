"""Use a server through pydantic-ai and LangChain: `python client_libraries.py PORT`. Prints what each got, as JSON."""

import json
import sys

from pydantic import BaseModel


class Place(BaseModel):
    x: bool
    y: int | None


def with_pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny-llama", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, output_type=Place, model_settings={"max_tokens": 200, "seed": 1})
    return agent.run_sync("abc").output.model_dump()


def with_langchain(url):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(x: bool) -> str:
        """Look around."""
        return str(x)

    chat = ChatOpenAI(model="tiny-llama", base_url=url, api_key="none", max_tokens=200, seed=1)
    message = chat.bind_tools([look], tool_choice="any").invoke("abc")
    return {
        "calls": [[call["name"], call["args"]] for call in message.tool_calls],
        "place": chat.with_structured_output(Place, method="json_schema").invoke("abc").model_dump(),
    }


if __name__ == "__main__":
    url = f"http://127.0.0.1:{sys.argv[1]}/v1"
    print(json.dumps({"pydantic_ai": with_pydantic_ai(url), "langchain": with_langchain(url)}))
