"""Writes the gateway's OpenAPI description from a FileDescriptorSet with comments, read from stdin (`make proto`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from pydantic.json_schema import models_json_schema

from executor_server.gateway.connect.plain import LINES_TYPE
from executor_server.gateway.connect.run import PATH, RunRequest, RunResult

SERVICE = "ExecutorService"
JSON = "application/json"
STREAM = "application/connect+json"
SCHEMAS = "#/components/schemas/"

_FILE_MESSAGES, _FILE_ENUMS, _FILE_SERVICES = 4, 5, 6  # numbers of fields of FileDescriptorProto, in paths of comments
_MESSAGE_FIELDS = _ENUM_VALUES = _SERVICE_METHODS = 2
_T = FieldDescriptorProto
_NUMBERS = (_T.TYPE_DOUBLE, _T.TYPE_FLOAT)
_LONG = (_T.TYPE_INT64, _T.TYPE_UINT64, _T.TYPE_SINT64, _T.TYPE_FIXED64, _T.TYPE_SFIXED64)
_TEXTS = {
    _T.TYPE_STRING: {"type": "string"},
    _T.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    _T.TYPE_BOOL: {"type": "boolean"},
}
_TIMESTAMP = {"type": "string", "format": "date-time"}
Schema = dict[str, Any]


class Described:
    """A file of the protocol and its comments."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(each.path): " ".join(each.leading_comments.split()) for each in file.source_code_info.location
        }

    def comment(self, *path: int) -> Schema:
        text = self._comments.get(path, "")
        return {"description": text} if text else {}

    def schemas(self) -> Iterator[tuple[str, Schema]]:
        for index, enum in enumerate(self.file.enum_type):
            values = [each.name for each in enum.value]
            meanings = [
                f"{each.name}: {described}"
                for at, each in enumerate(enum.value)
                if (described := self._comments.get((_FILE_ENUMS, index, _ENUM_VALUES, at)))
            ]
            text = " ".join([self._comments.get((_FILE_ENUMS, index), ""), *meanings]).strip()
            yield enum.name, {"type": "string", "enum": values, **({"description": text} if text else {})}
        for index, message in enumerate(self.file.message_type):
            yield message.name, self._message(message, _FILE_MESSAGES, index)

    def _message(self, message: DescriptorProto, *path: int) -> Schema:
        properties = {
            field.json_name: {**_schema(message, field), **self.comment(*path, _MESSAGE_FIELDS, index)}
            for index, field in enumerate(message.field)
        }
        schema = {"type": "object", "additionalProperties": False, "properties": properties, **self.comment(*path)}
        for number, oneof in enumerate(message.oneof_decl):
            names = [
                field.json_name
                for field in message.field
                if field.HasField("oneof_index") and field.oneof_index == number and not field.proto3_optional
            ]
            if names:
                note = f"At most one of {', '.join(names)} is set ({oneof.name})."
                schema["description"] = f"{schema.get('description', '')} {note}".strip()
        return schema

    def paths(self) -> Iterator[tuple[str, Schema]]:
        for index, service in enumerate(self.file.service):
            if service.name == SERVICE:
                for at, method in enumerate(service.method):
                    described = self.comment(_FILE_SERVICES, index, _SERVICE_METHODS, at)
                    yield f"/{self.file.package}.{service.name}/{method.name}", {"post": _operation(method) | described}


def _schema(message: DescriptorProto, field: FieldDescriptorProto) -> Schema:
    entry = next(
        (each for each in message.nested_type if field.type_name.endswith(f".{message.name}.{each.name}")), None
    )
    if entry is not None and entry.options.map_entry:
        return {"type": "object", "additionalProperties": _single(entry.field[1])}
    if field.label == _T.LABEL_REPEATED:
        return {"type": "array", "items": _single(field)}
    return _single(field)


def _single(field: FieldDescriptorProto) -> Schema:
    if field.type in _TEXTS:
        return dict(_TEXTS[field.type])
    if field.type in _NUMBERS:
        return {"type": "number"}
    if field.type in _LONG:
        return {"type": ["string", "integer"], "format": "int64"}
    if field.type_name == ".google.protobuf.Timestamp":
        return dict(_TIMESTAMP)
    if field.type_name:
        return _ref(field.type_name)
    return {"type": "integer", "format": "int32"}


def _ref(type_name: str) -> Schema:
    return {"$ref": SCHEMAS + type_name.rpartition(".")[2]}


def _content(schema: Schema, *types: str) -> Schema:
    return {"content": {each: {"schema": schema} for each in types}}


def _operation(method: MethodDescriptorProto) -> Schema:
    takes = (STREAM,) if method.client_streaming else (JSON, STREAM) if method.server_streaming else (JSON,)
    gives = (STREAM,) if method.client_streaming else (LINES_TYPE, STREAM) if method.server_streaming else (JSON,)
    return {
        "operationId": method.name,
        "tags": [SERVICE],
        "requestBody": {"required": True, **_content(_ref(method.input_type), *takes)},
        "responses": _responses(_ref(method.output_type), *gives),
    }


def _responses(schema: Schema, *types: str) -> Schema:
    return {
        "200": {"description": "OK", **_content(schema, *types)},
        "default": {"description": "The request is refused, or failed.", **_content(_ref("Error"), JSON)},
    }


ERROR = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": 'A code of Connect: "not_found", "permission_denied" …'},
        "message": {"type": "string"},
        "details": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "description": '"google.rpc.ErrorInfo" has the reason.'},
                    "value": {"type": "string", "contentEncoding": "base64"},
                    "debug": {"description": "The same as JSON."},
                },
            },
        },
    },
}


def describe(files: FileDescriptorSet) -> Schema:
    described = [Described(file) for file in files.file if file.package.startswith("executor_api.")]
    paths = {path: item for each in described for path, item in each.paths()}
    schemas = {name: schema for each in described for name, schema in each.schemas()}
    _, own = models_json_schema(
        [(RunRequest, "validation"), (RunResult, "serialization")], ref_template=SCHEMAS + "{model}"
    )
    schemas |= own["$defs"]
    run = {
        "operationId": "run",
        "summary": "Runs code in a session of its own",
        "description": "Creates a session, runs the code, and ends the session. A caller that leaves cancels it.",
        "requestBody": {"required": True, **_content(_ref("RunRequest"), JSON)},
        "responses": _responses(_ref("RunResult"), JSON),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "remote-executor",
            "version": "1",
            "description": "Runs Python for code agents, in sandboxes. docs/http.md explains streams and values.",
        },
        "security": [{"token": []}],
        "paths": {PATH: {"post": run}, **paths},
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**_reachable(schemas, {PATH: run, **paths}), "Error": ERROR},
        },
    }


def _reachable(schemas: Schema, roots: object) -> Schema:
    """Returns the schemas that `roots` refer to, also by others."""
    found: Schema = {}
    waiting = [*_refs(roots)]
    while waiting:
        name = waiting.pop()
        if name in schemas and name not in found:
            found[name] = schemas[name]
            waiting += _refs(schemas[name])
    return dict(sorted(found.items()))


def _refs(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield str(value).removeprefix(SCHEMAS)
            else:
                yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)


if __name__ == "__main__":
    description = describe(FileDescriptorSet.FromString(sys.stdin.buffer.read()))
    print(json.dumps(description, indent=1, ensure_ascii=False))
