"""RULER's requests are those that ART's code makes of the same trajectories; ruler_of_art.json has them, with their source."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.rewards.judges import ruler

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "ruler_of_art.json").read_text())["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_messages_are_those_of_art(vector: dict[str, Any]) -> None:
    assert ruler.messages_of(vector["message_lists"], vector["rubric"]) == vector["messages"]


def test_the_schema_is_that_of_arts_response() -> None:
    """As pydantic makes it of ART's classes TrajectoryScore and Response, and as OpenAI's strict form adds to it."""
    score = ruler.SCHEMA["schema"]["properties"]["scores"]["items"]
    assert ruler.SCHEMA["name"] == "Response"
    assert {name: each["type"] for name, each in score["properties"].items()} == {
        "trajectory_id": "string",
        "explanation": "string",
        "score": "number",
    }
    assert score["required"] == ["trajectory_id", "explanation", "score"]
