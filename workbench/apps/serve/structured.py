"""The form of an answer, as clients ask for it: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Schema = dict[str, Any] | bool


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema and its name. Every schema is kept to, whether ``strict`` or not."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer: text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """The form as ``SamplingParams(structured_outputs=...)`` has it.

        Raises:
            ValueError: The schema is missing, or there is one and the type is another.
        """
        if (self.json_schema is not None) is not (self.type == "json_schema"):
            raise ValueError('response_format needs json_schema with the type "json_schema", and with no other')
        if self.json_schema is not None:
            return {"json": self.json_schema.schema}
        return {"json_object": True} if self.type == "json_object" else {}


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One of vLLM's constraints; ``grammar`` is in Lark or GBNF."""

    json: Schema | str | None = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> dict[str, Any]:
    """The form of an answer; empty for any text.

    Raises:
        ValueError: There are both, or they are not valid.
    """
    wanted = response_format.constraint() if response_format is not None else {}
    if structured_outputs is None:
        return wanted
    if wanted:
        raise ValueError("structured_outputs does not work with response_format: give one of them")
    return {field: value for field, value in msgspec.structs.asdict(structured_outputs).items() if value is not None}
