/** The programs that the tests need: a daemon, its gateway, a page's server and a browser. */

import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { accessSync, constants, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import type { Readable, Writable } from "node:stream";
import { tmpdir } from "node:os";
import { delimiter, extname, join, normalize } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import type { Gateway } from "./suite.js";

const PACKAGE = fileURLToPath(new URL("../..", import.meta.url));
const SERVER = process.env["EXECUTOR_SERVER"] ?? join(PACKAGE, "../../.venv/bin/executor-server");
const TYPES: Record<string, string> = { ".html": "text/html", ".js": "text/javascript" };
const START_MS = 60_000;

async function stop(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  child.kill("SIGTERM");
  await once(child, "exit");
}

/** Starts a program and waits for the line in which it says where it listens. */
async function started(args: string[]): Promise<[ChildProcess, string]> {
  const child = spawn(SERVER, args, { stdio: ["ignore", "pipe", "pipe"] });
  let errors = "";
  child.stderr.on("data", (data) => (errors = `${errors}${data}`.slice(-8000)));
  child.on("error", (error) => (errors += error));
  const timer = setTimeout(() => child.kill(), START_MS);
  for await (const line of createInterface(child.stdout)) {
    if (!line.includes("listens on")) continue;
    clearTimeout(timer);
    child.stdout.resume();
    return [child, line];
  }
  throw new Error(`${SERVER} ${args.join(" ")} did not start:\n${errors}`);
}

async function freePort(): Promise<number> {
  const server = createServer();
  await once(server.listen(0, "127.0.0.1"), "listening");
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, "close");
  return port;
}

/** A daemon and its gateway, which pages of one origin may use. */
export async function startGateway(origin: string): Promise<[Gateway, () => Promise<void>]> {
  const directory = mkdtempSync(join(tmpdir(), "rx-"));
  const config = join(directory, "config.toml");
  writeFileSync(config, `[gateway]\nallowed_origins = [${JSON.stringify(origin)}]\n`);
  const places = ["--config", config, "--state-dir", join(directory, "s")];
  const [daemon] = await started(["serve", "--listen", `unix:${join(directory, "s/executor.sock")}`, ...places]);
  const [gateway, line] = await started(["gateway", "--listen", `127.0.0.1:${await freePort()}`, ...places]);
  const stopAll = async () => {
    await stop(gateway);
    await stop(daemon);
    rmSync(directory, { recursive: true, force: true });
  };
  return [{ address: line.split(" ").pop()!, token: readFileSync(join(directory, "s/token"), "utf8").trim() }, stopAll];
}

/** Serves the page and what it loads. */
export async function servePage(gateway: () => Gateway): Promise<{ origin: string; server: Server }> {
  const server = createServer((request, response) => {
    if (request.url === "/gateway") return void response.end(JSON.stringify(gateway()));
    const path = normalize(new URL(request.url ?? "/", "http://page").pathname);
    try {
      const content = readFileSync(join(PACKAGE, path));
      response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(content);
    } catch {
      response.writeHead(404).end();
    }
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  return { origin: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, server };
}

/** Returns the path of a Chromium, of any version. */
export function findChromium(): string | undefined {
  const names = ["chromium", "chromium-browser", "google-chrome"];
  const found = (process.env["PATH"] ?? "").split(delimiter).flatMap((folder) => names.map((name) => join(folder, name)));
  return [process.env["CHROMIUM"] ?? "", ...found].find((path) => {
    try {
      return path !== "" && (accessSync(path, constants.X_OK), true);
    } catch {
      return false;
    }
  });
}

/** A page in a browser without a window. */
export interface Page {
  /** Returns the value of an expression in the page; promises are awaited. */
  evaluate(expression: string): Promise<any>;
  close(): Promise<void>;
}

/** Opens a page. The browser is driven over two pipes, as Chromium of every version can be. */
export async function openPage(chromium: string, url: string): Promise<Page> {
  const profile = mkdtempSync(join(tmpdir(), "rx-chromium-"));
  const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"];
  const stdio = ["ignore", "ignore", "ignore", "pipe", "pipe"] as const;
  const child = spawn(chromium, [...flags, `--user-data-dir=${profile}`], { stdio: [...stdio], detached: true });
  const waiting = new Map<number, { resolve: (result: any) => void; reject: (error: Error) => void }>();
  const input = child.stdio[3] as Writable, output = child.stdio[4] as Readable;
  let rest = "", id = 0;
  output.setEncoding("utf8").on("data", (text: string) => {
    const messages = (rest + text).split("\0");
    rest = messages.pop()!;
    for (const message of messages.map((each) => JSON.parse(each))) {
      const { resolve, reject } = waiting.get(message.id) ?? {};
      waiting.delete(message.id);
      if (message.error) reject?.(new Error(message.error.message));
      else resolve?.(message.result);
    }
  });
  child.on("exit", () => waiting.forEach(({ reject }) => reject(new Error("the browser has ended"))));
  const send = (method: string, params: object, sessionId?: string) =>
    new Promise<any>((resolve, reject) => {
      waiting.set(++id, { resolve, reject });
      input.write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    });
  const { targetId } = await send("Target.createTarget", { url: "about:blank" });
  const { sessionId } = await send("Target.attachToTarget", { targetId, flatten: true });
  const evaluate = async (expression: string) => {
    const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true }, sessionId);
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  };
  await send("Page.navigate", { url }, sessionId);
  await evaluate('new Promise((resolve) => document.readyState === "complete" ? resolve() : addEventListener("load", resolve))');
  const close = async () => {
    await stop(child);
    try {
      process.kill(-child.pid!, "SIGKILL"); // its other processes, which still write to the profile
    } catch {
      // there are none
    }
    rmSync(profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 });
  };
  return { evaluate, close };
}
