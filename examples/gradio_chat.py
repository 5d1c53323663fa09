"""smolagents' `GradioUI` on an agent whose code runs in a sandbox, started here and used through its API.

A person would write `GradioUI(agent).launch()`, which shows the chat in a browser and returns when it is stopped. Here
the same app runs in the background, on the loopback interface, and Gradio's own client chats with it. Needs `gradio`;
for Gradio 6, smolagents 1.24 or later.
"""

from __future__ import annotations

import os
import random
import tempfile

# Set before the imports: no analytics for Gradio, no requests to the Hugging Face Hub.
os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1")

from gradio_client import Client  # type: ignore[import-untyped]
from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import GradioUI, tool

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(
        thought="I toss three dice.",
        expects=["Toss three dice"],
        code="""
dice = [toss() for _ in range(3)]
print("dice:", dice)
final_answer(sum(dice))
""",
    ),
    Reply(
        thought="The dice lie where they were: a chat is one conversation, and its sandbox stays.",
        expects=["And what did they show?"],
        code='print("they show", *dice)',
    ),
    Reply(
        thought="<<dice>>.",
        reads={"dice": r"they show (\d \d \d)"},
        code='final_answer("<<dice>>")',
    ),
]


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def toss() -> int:
    """Tosses one die. It runs in this process, so a recording has what it showed."""
    return random.randint(1, 6)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as files,  # uploads of the chat, and files that its page serves
        CodeAgent(tools=[toss], model=ScriptedModel(SCRIPT)) as agent,
    ):
        os.environ["GRADIO_TEMP_DIR"] = files
        app = GradioUI(agent).create_app()
        _, url, _ = app.launch(share=False, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
        try:
            chat(url, files)
        finally:
            app.close()


def chat(url: str, downloads: str) -> None:
    client = Client(url, verbose=False, download_files=downloads, analytics_enabled=False)
    try:
        # Gradio 5 names it /chat, Gradio 6 by the function that answers.
        (chat_endpoint,) = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
        for question in ("Toss three dice, please.", "And what did they show?"):
            shown = client.predict(question, api_name=chat_endpoint)
            print(question, "->", shown[-1]["content"])
    finally:
        client.close()


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
