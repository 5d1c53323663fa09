"""`executor mcp`: sandboxed Python for any host that speaks the Model Context Protocol, over stdin and stdout or HTTP.

A thin layer between the official SDK (extra `mcp`) and the asyncio client. Owns the tools, resources and texts that a
host sees, and the sessions of its connection. It must not know policy or containment, which belong to the daemon.

`command` is the command line, and imports the SDK only after checking that it is installed; `server` has the tools;
`sessions` the sessions in which they run; `content` converts results to MCP's types; `live` sends output and waits
during a call; `sdk` hides the differences between the SDK's versions.

For stdin and stdout, `host_input` reads the host's messages before the SDK does. For HTTP, `http` checks requests,
`callers` has a client of the daemon for each token, and `tenant_sessions` finds sessions by name.
"""
