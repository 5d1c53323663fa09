/** A session: a stateful interpreter in a sandbox. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import { NotFoundError, ProtocolError } from "./errors.js";
import { Blobs, decodeOrOpaque, Execution, type Packed, type Tool } from "./execution.js";
import { Files, PIECE_BYTES, pieces } from "./files.js";
import type { UploadBlobRequestSchema } from "./gen/executor_api/v1/executor_service_pb.js";
import { LimitsSchema, type Session as SessionInfo } from "./gen/executor_api/v1/types_pb.js";
import { repeated, type ExecutorRpc } from "./transport.js";
import { encode } from "./values.js";

const VARIABLES_BYTES_MAX = 512 << 20;
const VARIABLES_MAX = 2048;

/** Limits by their names in docs/api.md: `{ wallTimeS: 30, memoryBytes: 2 ** 30 }`. */
export type Limits = { [Name in Exclude<keyof WireLimits, `$${string}`>]?: number };
type WireLimits = MessageInitShape<typeof LimitsSchema>;

export interface ExecuteOptions {
  /** 1 to 64 of A-Z a-z 0-9 _ -. The same id and code again attach to the same execution. */
  executionId?: string;
  limits?: Limits;
  /** Takes a savepoint before it begins. */
  savepoint?: boolean;
  /** The output is the whole value, up to 128 MiB; without it a value over 4 MiB is opaque. */
  wholeOutput?: boolean;
}

export class Session {
  readonly files: Files;
  #tools: ReadonlyMap<string, Tool> = new Map();

  /** @internal */
  constructor(private readonly rpc: ExecutorRpc, private described: SessionInfo) {
    this.files = new Files(rpc, this.id);
  }

  get id(): string {
    return this.described.sessionId;
  }

  /** The daemon's last description of the session; `refresh` gets a new one. */
  get info(): SessionInfo {
    return this.described;
  }

  async refresh(): Promise<SessionInfo> {
    const { session } = await repeated(() => this.rpc.getSession({ sessionId: this.id }));
    return (this.described = session!);
  }

  /**
   * Runs code. Await the answer for the result, iterate over it for the events:
   *
   *     const { output } = await session.execute("1 + 1");
   *     for await (const event of session.execute("print(1)")) …
   *
   * A program that fails is a result. Throws SessionGone, PolicyViolationError, ConnectionLost and other errors.
   */
  execute(code: string, { executionId = randomId(), limits = {}, ...options }: ExecuteOptions = {}): Execution {
    const request = { ...options, sessionId: this.id, executionId, code, limits: wireLimits(limits) };
    return new Execution(this.rpc, request, this.#tools, (packed) => this.#packed(packed));
  }

  /** Replaces the tools of the session: functions that its code calls by their names, and that run here. */
  async registerTools(tools: Record<string, Tool | Tool["run"]>): Promise<void> {
    const made = new Map<string, Tool>();
    for (const [name, tool] of Object.entries(tools)) made.set(name, typeof tool === "function" ? { run: tool } : tool);
    const specs = [...made].map(([name, { run: _, ...described }]) => ({ ...described, name }));
    await repeated(() => this.rpc.registerTools({ sessionId: this.id, tools: specs }));
    this.#tools = made;
  }

  /** Sets variables of the interpreter, all or none. */
  async setVariables(variables: Record<string, unknown>): Promise<void> {
    const encoded = Object.entries(variables).map(([name, value]) => [name, encode(value)] as const);
    await repeated(async () => {
      const named = [];
      for (const [name, packed] of encoded) named.push({ name, value: await this.#packed(packed) });
      await this.rpc.setVariables({ sessionId: this.id, variables: named });
    });
  }

  /** Returns variables by name; missing ones are omitted. Without names, returns all data that is not private. */
  async getVariables(names: string[] = []): Promise<Map<string, unknown>> {
    return repeated(async () => {
      const blobs = new Blobs(VARIABLES_BYTES_MAX, VARIABLES_MAX);
      for await (const { part } of this.rpc.getVariables({ sessionId: this.id, names })) {
        if (part.case === "blobChunk") blobs.add(part.value);
        else if (part.case === "variables") {
          const { variables } = part.value;
          return new Map(variables.map(({ name, value }) => [name, decodeOrOpaque(blobs.take(value?.packed))]));
        }
      }
      throw new ProtocolError("the daemon sent no variables");
    });
  }

  /** Ends the session and its sandbox. Does nothing if it has ended. */
  async end(): Promise<void> {
    await repeated(() => this.rpc.deleteSession({ sessionId: this.id })).catch((error) => {
      if (!(error instanceof NotFoundError)) throw error;
    });
  }

  async #packed(packed: Uint8Array<ArrayBuffer>): Promise<Packed> {
    if (packed.length <= PIECE_BYTES) return { packed: { content: { case: "inline", value: packed } } };
    const sizeBytes = BigInt(packed.length), sessionId = this.id;
    async function* messages(): AsyncGenerator<MessageInitShape<typeof UploadBlobRequestSchema>> {
      yield { part: { case: "header", value: { sessionId, sizeBytes } } };
      for (const piece of pieces(packed)) yield { part: { case: "data", value: piece } };
    }
    const { blobId } = await repeated(() => this.rpc.uploadBlob(messages()));
    return { packed: { content: { case: "blob", value: { blobId, sizeBytes } } } };
  }
}

/** 32 random digits; `crypto.randomUUID` is missing in pages without TLS. */
export function randomId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Whole numbers are bigints in messages; seconds and `processes` are not. A mistyped limit must not be ignored. */
export function wireLimits(limits: Limits): WireLimits {
  for (const name of Object.keys(limits)) {
    if (!(name in LimitsSchema.field)) {
      throw new TypeError(`no such limit: ${name}. There are ${Object.keys(LimitsSchema.field).join(", ")}`);
    }
  }
  const onWire = (name: string, limit: number) => name.endsWith("S") || name === "processes" ? limit : BigInt(limit);
  return Object.fromEntries(Object.entries(limits).map(([name, limit]) => [name, onWire(name, limit)]));
}
