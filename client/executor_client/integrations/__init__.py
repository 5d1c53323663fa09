"""Sandboxes for agent frameworks: each module implements one framework's own interface with sessions of a daemon.

    executor_client.integrations.pydantic_ai     a workspace backend of Pydantic AI
    executor_client.integrations.deepagents      a sandbox backend of LangChain's deepagents
    executor_client.integrations.inspect_ai      the sandbox "remote" of Inspect

Each module needs the extra of its framework. The rest of the client imports nothing of this package. smolagents'
integration is `executor_client.smolagents`.
"""
