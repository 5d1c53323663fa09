"""An agent that fetches a page and an answer of an API, in a sandbox whose policy names one host.

The site is outside of the sandbox (outside.py). In practice you write hosts of the internet into the policy, such as
`api.github.com`, and the daemon needs no configuration for them. A host that the policy does not name is refused with
a sentence, which the model reads and acts on.
"""

from __future__ import annotations

import json

from outside import Site, served
from own_daemon import own_daemon
from scripted import Reply, ScriptedModel

from executor_client.smolagents import CodeAgent

PAGES = {
    "/": "<!doctype html><h1>Kiln &amp; Clay</h1><p>Stock and prices: <a href='/stock.json'>stock.json</a></p>\n",
    "/stock.json": json.dumps({"glaze pump": {"price": 49.5, "pieces": 3}, "kiln shelf": {"price": 12.0, "pieces": 0}}),
}

POLICY = """\
default = "shoppers"

[profiles.shoppers.network]
allowed = ["{host}"]           # a session may ask for it
max_received_bytes = "10MB"    # and receive so much in its life
"""

SCRIPT = [
    Reply(
        thought="I ask a search engine.",
        code="import requests\nprint(requests.get('https://search.example/?q=glaze+pump').text)",
    ),
    Reply(
        thought="That is refused, and <<host>> is allowed. What does it have?",
        expects=["search.example:443 is not allowed for this session; allowed: "],
        reads={"host": r"network: .*; allowed: (\S+)"},
        code="shop = 'http://<<host>>'\nprint(requests.get(shop + '/').text)",
    ),
    Reply(
        thought="Its stock is at <<path>>.",
        expects=["<h1>Kiln &amp; Clay</h1>"],
        reads={"path": r"href='([^']+)'"},
        code="""
stock = requests.get(shop + "<<path>>").json()
final_answer({article: entry["price"] for article, entry in stock.items() if entry["pieces"]})
""",
    ),
]


def main(site: Site) -> None:
    with CodeAgent(
        tools=[],
        model=ScriptedModel(SCRIPT),
        additional_authorized_imports=["requests"],
        executor_kwargs={"network": [site.host]},
    ) as agent:
        answer = agent.run("What can be bought at the potters' shop, and for how much?")
    print("The answer:", answer)


if __name__ == "__main__":
    with (
        served(PAGES) as shop,
        own_daemon("local", configuration=shop.configuration, policy=POLICY.format(host=shop.host)),
    ):
        main(shop)
