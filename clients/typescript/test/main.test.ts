import assert from "node:assert/strict";
import { once } from "node:events";
import { connect, createServer, type AddressInfo, type Socket } from "node:net";
import { after, before, describe, test } from "node:test";
import { createConnectTransport } from "@connectrpc/connect-node";
import { Client } from "../src/index.js";
import { findChromium, openPage, servePage, startGateway } from "./programs.js";
import { run, suite, type Gateway } from "./suite.js";

let gateway: Gateway;
let stopGateway: () => Promise<void>;
const page = await servePage(() => gateway);

before(async () => {
  [gateway, stopGateway] = await startGateway(page.origin);
});
after(async () => {
  page.server.closeAllConnections();
  page.server.close();
  await stopGateway?.();
});

describe("in Node", () => {
  for (const [name, claim] of Object.entries(suite)) test(name, () => run(claim, gateway));

  test("a transport of connect-node will do, too, with HTTP/2", () => {
    const transport = createConnectTransport({ baseUrl: gateway.address, httpVersion: "2" });
    return run(suite["files are written, read, listed, moved and removed"]!, gateway, new Client(transport, gateway));
  });

  test("a broken connection loses nothing, and nothing runs twice", async () => {
    const sockets = new Set<Socket>();
    const proxy = createServer((near) => {
      const far = connect(Number(new URL(gateway.address).port), "127.0.0.1");
      for (const [one, other] of [[near, far], [far, near]] as const) {
        sockets.add(one);
        one.pipe(other);
        one.on("error", () => undefined).on("close", () => (sockets.delete(one), other.destroy()));
      }
    });
    await once(proxy.listen(0, "127.0.0.1"), "listening");
    const cut = () => sockets.forEach((socket) => socket.destroy());
    const client = new Client(`http://127.0.0.1:${(proxy.address() as AddressInfo).port}`, gateway);
    try {
      let calls = 0;
      const session = await client.createSession();
      await session.registerTools({
        tool: () => {
          cut();
          return ++calls;
        },
      });
      const result = await session.execute("n = 0\nfor i in range(3):\n    n += 1\n    print(i, tool())\nn");
      assert.deepEqual([result.outcome, result.output, result.logs, calls], ["SUCCEEDED", 3, "0 1\n1 2\n2 3\n", 3]);
    } finally {
      await client.close();
      cut();
      proxy.close();
    }
  });
});

const chromium = findChromium();
const isRequired = (process.env["REQUIRED_TOOLS"] ?? "").includes("chromium");
const skip = !chromium && !isRequired && "there is no chromium here; install it, or name one in $CHROMIUM";

test("in a page of another origin in Chromium", { skip, timeout: 180_000 }, async (t) => {
  assert(chromium, "there is no chromium here, and $REQUIRED_TOOLS wants one");
  const close = openPage(chromium, `${page.origin}/test/page.html`);
  try {
    for (const [name, failure] of Object.entries(await page.results)) await t.test(name, () => assert.equal(failure, ""));
  } finally {
    await close();
  }
});
