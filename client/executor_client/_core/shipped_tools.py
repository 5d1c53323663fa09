"""Ships tools with the placement "sandbox": packs them, fills the request, and explains the daemon's refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core.limits import INLINE_BYTES_PER_MESSAGE_MAX
from executor_client._core.tools import SANDBOX, Tool
from executor_client.errors import InvalidRequest, ModulesMissing

if TYPE_CHECKING:
    from executor_client._shipping import Shipped


def ship_all(tools: Mapping[str, Tool], python: str) -> dict[str, Shipped]:
    """Ships the tools that run in the sandbox, for the sandbox's version of Python.

    Raises ToolNotShippable.
    """
    placed = {name: tool for name, tool in tools.items() if tool.placement == SANDBOX}
    if not placed:
        return {}
    # Imported on first need: most programs ship nothing.
    from executor_client._shipping import ship

    others = {
        name: getattr(tool.function, "stands_for", tool.function)
        for name, tool in tools.items()
        # A class is more than its __call__; one that may go into the sandbox is shipped as a class.
        if not (tool.placement == SANDBOX and isinstance(tool.function, type))
    }
    return {
        name: ship(name, tool.function, python=python, dialect=tool.dialect, others=others)
        for name, tool in placed.items()
    }


def payloads(
    request: pb.RegisterToolsRequest, shipped: Mapping[str, Shipped]
) -> Iterator[tuple[types_pb2.Payload, bytes]]:
    """Fills the request, except for values: yields each packed value with its place in the request."""
    text_bytes = sum(len(each.text.encode("utf-8", "surrogatepass")) for each in shipped.values())
    if text_bytes > INLINE_BYTES_PER_MESSAGE_MAX:
        raise InvalidRequest(
            f"the sources of the tools have {text_bytes} bytes together, allowed are {INLINE_BYTES_PER_MESSAGE_MAX}"
        )
    for spec in request.tools:
        tool = shipped.get(spec.name)
        if tool is None:
            continue
        spec.shipped.modules.extend(tool.modules)
        if tool.value is not None:
            yield spec.shipped.value.packed, tool.value
            continue
        try:
            spec.shipped.source.text = tool.text
        except ValueError as error:
            raise InvalidRequest(f"the source of the tool {spec.name!r} is not UTF-8 text: {error}") from error
        spec.shipped.source.entry = tool.entry
        if tool.bindings is not None:
            yield spec.shipped.source.bindings.packed, tool.bindings


@contextmanager
def explaining(shipped: Mapping[str, Shipped]) -> Iterator[None]:
    """Adds to the daemon's refusal what to install if the image lacks modules."""
    try:
        yield
    except ModulesMissing as error:
        from executor_api.distributions import likeliest

        # The daemon names the missing modules; these are the distributions of all modules that the tools import.
        needed = likeliest(module for tool in shipped.values() for module in tool.modules)
        raise ModulesMissing(
            f"{error.message}. What these tools import is in the distributions {', '.join(needed)}: use an image that "
            'has them, a session with them as its packages, or the placement "host".',
            reason=error.reason,
            modules=error.modules,
        ) from error
