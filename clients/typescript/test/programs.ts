/** The programs that the tests need: a daemon, its gateway, a page's server and a browser. */

import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { accessSync, constants, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
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

/** Serves the page and what it loads; `results` is what the page reports. */
export async function servePage(gateway: () => Gateway): Promise<{ origin: string; results: Promise<Record<string, string>>; server: Server }> {
  let report = (_: Record<string, string>) => {};
  const results = new Promise<Record<string, string>>((resolve) => (report = resolve));
  const server = createServer(async (request, response) => {
    if (request.url === "/gateway") return void response.end(JSON.stringify(gateway()));
    if (request.url === "/results") {
      let body = "";
      for await (const piece of request) body += piece;
      report(JSON.parse(body));
      return void response.end();
    }
    const path = normalize(new URL(request.url ?? "/", "http://page").pathname);
    try {
      const content = readFileSync(join(PACKAGE, path));
      response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(content);
    } catch {
      response.writeHead(404).end();
    }
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  return { origin: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, results, server };
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

/** Shows a page in a browser without a window, until the function that it returns is called. */
export function openPage(chromium: string, url: string): () => Promise<void> {
  const profile = mkdtempSync(join(tmpdir(), "rx-chromium-"));
  const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0"];
  // A group of its own: Chromium starts many processes.
  const child = spawn(chromium, [...flags, `--user-data-dir=${profile}`, url], { stdio: "ignore", detached: true });
  return async () => {
    await stop(child);
    rmSync(profile, { recursive: true, force: true, maxRetries: 10 });
  };
}
