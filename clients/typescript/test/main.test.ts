import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, statSync } from "node:fs";
import { connect, createServer, type AddressInfo, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, test } from "node:test";
import { createConnectTransport } from "@connectrpc/connect-node";
import { Client } from "../src/index.js";
import { findChromium, openPage, servePage, startGateway, type Page } from "./programs.js";
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

  test("the example runs", (t) => {
    const directory = mkdtempSync(join(tmpdir(), "rx-example-"));
    t.after(() => rmSync(directory, { recursive: true }));
    const example = fileURLToPath(new URL("../../example.mjs", import.meta.url));
    const options = { cwd: directory, timeout: 60_000, encoding: "utf8" } as const;
    const printed = execFileSync(process.execPath, [example, gateway.address, gateway.token], options);
    assert.equal(printed, "[4.5, 9, 13.5]\nSUCCEEDED { tea: 4.5, coffee: 9, chocolate: 13.5 } [4.5, 9, 13.5]\n");
    assert(statSync(join(directory, "prices.png")).size > 1000);
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

describe("in Chromium", { skip, timeout: 180_000 }, () => {
  const withPage = async (url: string, use: (page: Page) => Promise<void>) => {
    assert(chromium, "there is no chromium here, and $REQUIRED_TOOLS wants one");
    const opened = await openPage(chromium, url);
    await use(opened).finally(() => opened.close());
  };

  test("in a page of another origin", (t) => withPage(`${page.origin}/test/page.html`, async ({ evaluate }) => {
    const results = Object.entries<string>(await evaluate("results()"));
    for (const [name, failure] of results) await t.test(name, () => assert.equal(failure, ""));
    assert.equal(results.length, Object.keys(suite).length);
  }));

  test("a page of any other origin is refused", () => withPage("data:text/html,stranger", async ({ evaluate }) => {
    const call = `fetch("${gateway.address}/v1/run", { method: "POST", headers: { authorization: "Bearer ${gateway.token}" }, body: '{"code": "1"}' })`;
    assert.equal(await evaluate(`${call}.then((response) => response.status, (error) => error.name)`), "TypeError");
  }));

  test("the gateway's own page runs code and calls methods", () => withPage(`${gateway.address}/try`, async ({ evaluate }) => {
    const until = (condition: string) => evaluate(`new Promise((resolve) => {
      const look = () => (${condition}) && resolve();
      new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true, attributes: true });
      look();
    })`);
    const run = async (code: string) => {
      await evaluate(`code.value = ${JSON.stringify(code)}; document.getElementById("run").click()`);
      await until('!document.getElementById("run").disabled && document.getElementById("run-state").textContent');
      return evaluate('[document.getElementById("run-state").textContent, document.getElementById("run-result").textContent]');
    };
    await until('document.querySelectorAll("#method option").length > 10');
    assert.equal((await run("1"))[0], "unauthenticated");
    await evaluate(`token.value = ${JSON.stringify(gateway.token)}`);
    assert.deepEqual(await run("print('<b onclick=x>hello</b>')\n6 * 7"), ["succeeded", "<b onclick=x>hello</b>\n42"]);
    assert.equal(await evaluate('document.querySelectorAll("#run-result b").length'), 0);
    await evaluate('method.value = "ListSessions"; method.dispatchEvent(new Event("change")); call.click()');
    await until('document.getElementById("call-state").textContent.startsWith("200")');
    await until('answer.textContent.startsWith("{")');
    assert.deepEqual(JSON.parse(await evaluate("answer.textContent")), {});
  }));
});
