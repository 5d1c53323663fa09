"""Sandboxes for agent frameworks: each module implements one framework's own interface with sessions of a daemon.

    executor_client.integrations.pydantic_ai     a workspace backend of Pydantic AI
    executor_client.integrations.deepagents      a sandbox backend of LangChain's deepagents
    executor_client.integrations.inspect_ai      the sandbox "remote" of Inspect
    executor_client.integrations.openai_agents   a sandbox client of the OpenAI Agents SDK
    executor_client.integrations.google_adk      an environment of Google ADK
    executor_client.integrations.strands         a sandbox of Strands Agents
    executor_client.integrations.jupyter_provisioner   a kernel provisioner of Jupyter
    executor_client.integrations.jupyter_kernel        a kernel of Jupyter that forwards cells

Each module needs the extra of its framework. The rest of the client imports nothing of this package. smolagents'
integration is `executor_client.smolagents`.
"""
