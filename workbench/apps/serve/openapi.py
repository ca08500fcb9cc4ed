"""The description of the API at /openapi.json, made from the types of requests and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from workbench import __version__
from workbench.apps.serve import shapes
from workbench.apps.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    other_fields,
)
from workbench.apps.serve.unread_fields import as_properties

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"

REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """One address with one method.

    Attributes:
        path: The address; a part in braces is a parameter.
        summary: Description of the operation.
        answer: Type of the JSON answer; None for no JSON answer.
        body: Type of the request's body; with a body the method is POST.
        event: Type of the data of each event, for an answer that is a stream of events.
        text: Whether the answer is plain text.
        statuses: Statuses besides 200 whose answer has the same shape.
        rejects: Whether it rejects every request.
    """

    path: str
    summary: str
    answer: Any = None
    body: Any = None
    event: Any = None
    text: bool = False
    statuses: tuple[int, ...] = ()
    rejects: bool = False

    @property
    def method(self) -> str:
        """HTTP method, in lower case."""
        return "post" if self.body is not None or self.rejects else "get"


OPERATIONS = (
    Operation("/v1/models", "The model and its adapters", shapes.ModelList),
    Operation("/v1/models/{model}", "One of them by its name", shapes.Model),
    Operation("/v1/completions", "Continue prompts", shapes.Completion, CompletionRequest, shapes.Completion),
    Operation(
        "/v1/chat/completions",
        "Continue a conversation",
        shapes.ChatCompletion,
        ChatRequest,
        shapes.ChatCompletionChunk,
    ),
    Operation("/v1/embeddings", "Not served: the engine generates text", rejects=True),
    Operation("/tokenize", "Token ids of a prompt, or of messages under the template", shapes.Tokens, TokenizeRequest),
    Operation("/detokenize", "Text of token ids", shapes.DetokenizedText, DetokenizeRequest),
    Operation("/version", "The version of this server", shapes.Version),
    Operation("/health", "Whether the server accepts requests", shapes.Health, statuses=(503,)),
    Operation("/metrics", "Metrics for Prometheus", text=True),
    Operation(
        "/trace/stream", "The trace from the next step on: a line of a trace file per event", event=dict[str, Any]
    ),
    Operation("/openapi.json", "This description", dict[str, Any]),
)


def describe(*, needs_key: bool) -> dict[str, Any]:
    """The API as an OpenAPI 3.1 document.

    Args:
        needs_key: Whether requests need an API key.
    """
    types = [shapes.Error]
    for operation in OPERATIONS:
        types += [kind for kind in (operation.answer, operation.body, operation.event) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for operation in OPERATIONS:
        if operation.body is not None:
            properties = components[operation.body.__name__]["properties"]
            properties |= as_properties(other_fields(operation.body))
    schema_of = dict(zip(map(repr, types), schemas))
    error = _json("The problem and its solution", schema_of[repr(shapes.Error)])
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        responses: dict[str, Any] = {"4XX": error}
        if not operation.rejects:
            responses["200"] = _success(operation, schema_of)
            responses |= {str(status): responses["200"] for status in operation.statuses}
        if operation.body is not None:
            responses["503"] = error
        described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
        if operation.body is not None:
            described["requestBody"] = {
                "required": True, "content": {JSON: {"schema": schema_of[repr(operation.body)]}},
            }  # fmt: skip
        if "{model}" in operation.path:
            described["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            ]
        paths[operation.path] = {operation.method: described}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "workbench serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        paths["/health"]["get"]["security"] = []
    return document


def _success(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[JSON] = {"schema": schema_of[repr(operation.answer)]}
    if operation.event is not None:
        data = [{"const": "[DONE]"}, *(_encoded(schema_of[repr(kind)]) for kind in (operation.event, shapes.Error))]
        event = {"type": "object", "properties": {"data": {"anyOf": data}}, "required": ["data"]}
        content[EVENTS] = {"itemSchema": event}  # OpenAPI 3.2's word; readers of 3.1 skip it
    if operation.text:
        content[TEXT] = {"schema": {"type": "string"}}
    return {"description": operation.summary, "content": content}


def _encoded(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": JSON, "contentSchema": schema}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}
