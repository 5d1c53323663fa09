/** The client of a gateway: makes sessions and finds them, and keeps them alive. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Transport } from "@connectrpc/connect";
import { ExecutorError } from "./errors.js";
import type { CreateSessionRequestSchema } from "./gen/executor_api/v1/executor_service_pb.js";
import type { Policy, Session as SessionInfo } from "./gen/executor_api/v1/types_pb.js";
import { randomId, Session, wireLimits, type Limits } from "./session.js";
import { connect, repeated, type ExecutorRpc } from "./transport.js";

const RENEW_FIRST_S = 0.2;
const RENEW_RETRY_S = 2;

type Request = MessageInitShape<typeof CreateSessionRequestSchema>;

export interface SessionOptions extends Omit<Request, "$typeName" | "requestId" | "leaseId" | "limits"> {
  limits?: Limits;
  /** It outlives this client: only its idle time, its age and `end` end it. */
  detached?: boolean;
}

/**
 * A client of a gateway at `address`, such as "https://executor.example", with the daemon's token.
 *
 * Sessions that it makes belong to it unless they are detached: they end with `close`, and soon after this program or
 * page is gone. Instead of an address, it takes a Transport of @connectrpc/connect-node or -web.
 */
export class Client {
  /** Every call of the service, also those without a method here. They throw ConnectError; see `translate`. */
  readonly rpc: ExecutorRpc;
  readonly #leaseId = randomId();
  #renewal: ReturnType<typeof setTimeout> | undefined;
  #isClosed = false;

  constructor(address: string | Transport, options: { token: string }) {
    // Programs in JavaScript take both from variables that may be unset.
    if (options?.token === undefined) {
      throw new TypeError("there is no token: pass { token }, made by `executor-server token new`");
    }
    this.rpc = connect(address, options.token);
  }

  /** Makes a session. Waits while an image is fetched or packages are installed. Throws PolicyViolationError. */
  async createSession({ limits = {}, detached = false, ...options }: SessionOptions = {}): Promise<Session> {
    const leaseId = detached ? "" : this.#lease;
    const request = { ...options, requestId: randomId(), leaseId, limits: wireLimits(limits) };
    return this.#found(await repeated(() => this.rpc.createSession(request)));
  }

  /** Finds a session by its id or its name. It lives at least as long as this client, unless it is detached. */
  async getSession(by: { sessionId: string } | { name: string }): Promise<Session> {
    return this.#found(await repeated(() => this.rpc.getSession({ ...by, leaseId: this.#lease })));
  }

  async listSessions(): Promise<SessionInfo[]> {
    return (await repeated(() => this.rpc.listSessions({}))).sessions;
  }

  /** Returns what the caller may request. */
  async getPolicy(): Promise<Policy> {
    return (await repeated(() => this.rpc.getPolicy({}))).policy!;
  }

  /** Ends the sessions that only this client holds. */
  async close(): Promise<void> {
    this.#isClosed = true;
    clearTimeout(this.#renewal);
    if (this.#renewal !== undefined) await repeated(() => this.rpc.endLease({ leaseId: this.#leaseId }));
    this.#renewal = undefined;
  }

  get #lease(): string {
    if (this.#isClosed) throw new ExecutorError("the client is closed: make another one");
    return this.#leaseId;
  }

  #found({ session }: { session?: SessionInfo }): Session {
    if (session!.leased) this.#renewIn(RENEW_FIRST_S);
    return new Session(this.rpc, session!);
  }

  /** Renews the lease, again and again at the times that the daemon names. */
  #renewIn(seconds: number): void {
    if (this.#isClosed) return;
    clearTimeout(this.#renewal);
    this.#renewal = setTimeout(async () => {
      const renewed = await this.rpc.renewLease({ leaseId: this.#leaseId }).catch(() => undefined);
      this.#renewIn(renewed?.renewAfterS || RENEW_RETRY_S);
    }, 1000 * seconds);
    // The lease keeps no program of Node alive.
    (this.#renewal as { unref?: () => void }).unref?.();
  }
}
