"""`executor mcp`: sandboxed Python for any host that speaks the Model Context Protocol, over stdin and stdout.

A thin layer between the official SDK (`mcp`, the extra of that name) and the asyncio client. Owns what a host sees:
tools, resources, texts for a model, and the sessions of its connection. It must not know policy or containment, which
are the daemon's, the same for every client.

`command` is the command line, and imports the SDK only after checking that it is installed; `server` has the tools;
`sessions` the sessions in which they run; `content` converts results to MCP's types; `live` sends output and waits
during a call; `host_input` reads the host's messages before the SDK does; `sdk` hides the differences between the SDK's
versions.
"""
