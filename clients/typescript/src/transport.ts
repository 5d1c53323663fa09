/**
 * Calls to a gateway: the Connect protocol over `fetch`, the same in Node and in browsers.
 *
 * Browsers send no request piece by piece, so a request is collected first; answers are streams. That is enough for
 * every call but ForwardPort, and lets `files.write` work in a page, too.
 */

import { createClient, type Client as Rpc, type Transport } from "@connectrpc/connect";
import { universalClientResponseFromFetch, type UniversalClientFn } from "@connectrpc/connect/protocol";
import { createTransport } from "@connectrpc/connect/protocol-connect";
import { translate, UnavailableError, type ExecutorError } from "./errors.js";
import { ExecutorService } from "./gen/executor_api/v1/executor_service_pb.js";

export type ExecutorRpc = Rpc<typeof ExecutorService>;

const MESSAGE_BYTES_MAX = 16 << 20;
const CALL_TIMEOUT_MS = 120_000;
const AWAY_S = 10;
const BUSY_S = 30;
/** For the daemon to fetch an image or to install packages. It names a longer time to retry only if it failed. */
const IMAGE_S = 600;
const IMAGE_RETRY_MAX_S = 15;
const BACKOFF_FIRST_S = 0.05;
const BACKOFF_MAX_S = 2;

const fetched: UniversalClientFn = async ({ url, method, header, signal, body }) => {
  const pieces: Uint8Array<ArrayBuffer>[] = [];
  for await (const piece of body ?? []) pieces.push(piece as Uint8Array<ArrayBuffer>);
  const request = { method, headers: header, ...(signal && { signal }), body: new Blob(pieces) };
  try {
    return universalClientResponseFromFetch(await fetch(url, request));
  } catch (error) {
    throw error instanceof TypeError ? noAnswer(url, error) : error;
  }
};

/** Says where nothing answered, and why: `fetch` hides the reason in Node, and does not know it in browsers. */
function noAnswer(url: string, error: TypeError): TypeError {
  const { message = "" } = (error.cause ?? {}) as { message?: string };
  const hint = "document" in globalThis ? "is the gateway there, and this page's origin in its allowed_origins?" : message;
  const gateway = url.slice(0, url.lastIndexOf("/executor_api."));
  return new TypeError(`no answer from ${gateway}: ${error.message}${hint && `: ${hint}`}`, { cause: error });
}

/** Returns the calls of ExecutorService at an address ("https://…"), or over a transport of @connectrpc. */
export function connect(to: string | Transport, token: string): ExecutorRpc {
  if (typeof to === "string" && !/^(https?:\/\/|\/|$)/.test(to)) {
    throw new TypeError(`the address must begin with http:// or https:// (it is "${to}")`);
  }
  const transport = typeof to !== "string" ? to : createTransport({
    baseUrl: to,
    httpClient: fetched,
    useBinaryFormat: true,
    interceptors: [],
    acceptCompression: [],
    sendCompression: null,
    compressMinBytes: MESSAGE_BYTES_MAX,
    readMaxBytes: MESSAGE_BYTES_MAX,
    writeMaxBytes: MESSAGE_BYTES_MAX,
  });
  const authorized = (header: HeadersInit | undefined) => {
    const headers = new Headers(header);
    headers.set("authorization", `Bearer ${token}`);
    return headers;
  };
  return createClient(ExecutorService, {
    unary: (method, signal, timeout, header, ...rest) =>
      transport.unary(method, signal, timeout ?? CALL_TIMEOUT_MS, authorized(header), ...rest),
    stream: (method, signal, timeout, header, ...rest) =>
      transport.stream(method, signal, timeout, authorized(header), ...rest),
  });
}

/** Waits between attempts, longer each time, until `withinS` seconds after the first failure. */
export class Retries {
  #waitS = BACKOFF_FIRST_S;
  #deadline: number | undefined;

  constructor(readonly withinS: number) {}

  /** Waits before the next attempt, at least `afterS` seconds. Throws the error when there is no time for one. */
  async pause(error: Error, afterS = 0): Promise<void> {
    const now = Date.now() / 1000;
    this.#deadline ??= now + this.withinS;
    const waitS = Math.max(afterS, this.#waitS * (0.5 + Math.random() / 2));
    this.#waitS = Math.min(2 * this.#waitS, BACKOFF_MAX_S);
    if (now + waitS > this.#deadline) throw error;
    await new Promise((resolve) => setTimeout(resolve, 1000 * waitS));
  }

  /** Starts anew, after an answer. */
  reset(): void {
    this.#waitS = BACKOFF_FIRST_S;
    this.#deadline = undefined;
  }
}

/** Makes a call. Repeats it while the daemon names a time to retry and, if that is harmless, while nothing answers. */
export async function repeated<T>(attempt: () => Promise<T>, isHarmless = true): Promise<T> {
  const away = new Retries(AWAY_S), busy = new Retries(BUSY_S), image = new Retries(IMAGE_S);
  for (;;) {
    try {
      return await attempt();
    } catch (thrown) {
      const error = translate(thrown), afterS = error.retryAfterS ?? Infinity;
      if (error.reason === "IMAGE_NOT_READY") await image.pause(error, afterS <= IMAGE_RETRY_MAX_S ? afterS : Infinity);
      else if (afterS < Infinity) await busy.pause(error, afterS);
      else if (isHarmless && isAway(error)) await away.pause(error);
      else throw error;
    }
  }
}

/** True if nothing answered, or what answered is about to restart. */
export function isAway(error: ExecutorError): boolean {
  return error instanceof UnavailableError && ["", "DRAINING", "NODE_FENCED"].includes(error.reason);
}
