"""`executor mcp`: sandboxed Python for any host that speaks the Model Context Protocol, over stdin and stdout.

A thin layer between the official SDK (`mcp`, the extra of that name) and the asyncio client: the policy, the limits and
the containment are the daemon's, the same for every client.

`command` is the command line, and all that is imported before it is known that the SDK is installed; `server` has the
tools; `sessions` has the sessions that the tools run in; `content` turns results into what MCP carries; `host_input`
stands between the host and the SDK.
"""
