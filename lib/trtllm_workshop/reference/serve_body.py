"""From bytes of a request to a checked body, and errors in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Body = TypeVar("_Body", bound=BaseModel)
_SHOWN = 300


class ApiError(Exception):
    """An answer that is no success.

    Attributes:
        status: of HTTP. param: the field at fault. code: for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def parse_body(data: bytes, kind: type[_Body]) -> _Body:
    """The body of a request.

    Raises:
        ApiError: 400 for what is no JSON object of this kind, naming the field and the value.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: byte {problem.start} is {data[problem.start]:#04x}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {_kind(value)}, expected an object")
    if "\\ud" in data.decode("utf-8").lower() and not _is_text(value):
        raise ApiError(400, "the body has half a surrogate pair (\\ud800 to \\udfff), which is no text")
    try:
        return kind.model_validate(value)
    except ValidationError as problem:
        raise ApiError(400, *_what_is_wrong(problem, value)[:1], param=_what_is_wrong(problem, value)[1]) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), "value")


def _what_is_wrong(problem: ValidationError, body: dict[str, Any]) -> tuple[str, str | None]:
    """The message and the field: the first fault, and how many more there are."""
    faults = problem.errors(include_url=False, include_context=False)
    first = faults[0]
    # The inner steps of a union name types, not fields of the body.
    place = [str(step) for step in first["loc"] if isinstance(step, int) or str(step).isidentifier()]
    path = ".".join(place)
    name = place[0] if place else None
    if first["type"] == "missing":
        return f"{path} is missing", name
    if first["type"] == "extra_forbidden":
        return f"{path} is not a field of this request", name
    message = str(first["msg"]).removeprefix("Value error, ")
    if name is None:
        return message, None
    shown = json.dumps(body.get(name), default=str)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    more = f" ({len(faults) - 1} more faults)" if len(faults) > 1 and len({f["loc"][:1] for f in faults}) > 1 else ""
    return f"{path} is {shown}: {message}{more}"[:_SHOWN], name
