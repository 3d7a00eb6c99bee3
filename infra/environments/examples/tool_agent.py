"""An agent that may call a calculator, Python and the tools of `environment.mcp`, by the model's own tool calls:
`infra.environments.examples.tool_agent.run`."""

from typing import Any

from infra.environments.examples.tools import calculate, run_python
from infra.environments.mcp.servers import mcp_tools
from infra.environments.runner import ModelClient
from infra.environments.tools import answers_of
from infra.rewards.built_in.gsm8k import numeric

TOOLS = (calculate, run_python)
MAX_TURNS = 4


async def run(task: dict[str, Any], client: ModelClient) -> float:  # Any: a row's columns
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    tools = (*TOOLS, *mcp_tools())
    for _ in range(MAX_TURNS):
        answer = await client.chat(messages, tools=[each.schema for each in tools])
        messages.append(answer)
        if not answer.get("tool_calls"):
            break
        messages += answers_of(tools, answer)
    return float(numeric(question=task["question"], completion=messages[-1].get("content") or "", answer=task["answer"]))
