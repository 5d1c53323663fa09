/**
 * One execution: its events, its tool calls and its result.
 *
 * Events are numbered without gaps, and a stream without a result is a broken connection: the client then attaches
 * again, after the last event that it has. The sandbox is untrusted: the client limits the bytes that it sends.
 */

import type { MessageInitShape } from "@bufbuild/protobuf";
import {
  ConnectionLost, ExecutorError, NotFoundError, PreconditionError, ProtocolError, translate, UnavailableError,
} from "./errors.js";
import type { ExecuteRequestSchema, SubmitToolResultRequestSchema } from "./gen/executor_api/v1/executor_service_pb.js";
import {
  Outcome, OutputStream, VariablesState, type BlobChunk, type ErrorDetail, type Event, type ExecutionResult,
  type LimitWarningEvent, type Payload, type Usage, type ValueSchema,
} from "./gen/executor_api/v1/types_pb.js";
import { fileInfo, type FileInfo } from "./files.js";
import { isAway, repeated, Retries, type ExecutorRpc } from "./transport.js";
import { decode, displayData, encode, OpaqueValue } from "./values.js";

const EXECUTION_BYTES_MAX = 640 << 20;
const EVENT_BYTES = 64;
const BLOBS_OPEN_MAX = 64;
const RECONNECT_S = 60;
const TOOL_ERROR_CHARS_MAX = 10_000;

/** An image that the program displayed, as a file. */
export interface Image {
  data: Uint8Array<ArrayBuffer>;
  mimeType: string;
  /** "figure" or "display". */
  source: string;
}

export type ExecutionEvent =
  | { kind: "queued"; ahead: number }
  | { kind: "log"; stream: "stdout" | "stderr"; text: string }
  | { kind: "outputCut"; omittedBytes: number }
  | ({ kind: "image" } & Image)
  /** The texts of a displayed object by MIME type. The program wrote them: HTML may have scripts. */
  | { kind: "display"; data: Record<string, string> }
  | { kind: "toolCall"; callId: string; name: string }
  | { kind: "limitWarning"; warning: LimitWarningEvent }
  | { kind: "result"; result: Result };

export interface Result {
  executionId: string;
  /** "SUCCEEDED", "EXCEPTION", "TIMEOUT" … */
  outcome: keyof typeof Outcome;
  /** The value of the trailing expression, or what a tool with `isFinalAnswer` returned. */
  output: unknown;
  isFinalAnswer: boolean;
  logs: string;
  stdout: string;
  stderr: string;
  images: Image[];
  displays: Record<string, string>[];
  error: ErrorDetail | undefined;
  usage: Usage | undefined;
  /** Whether the session's variables were kept: "KEPT", "RESET", "LOST", "ROLLED_BACK". */
  variablesState: keyof typeof VariablesState;
  generation: number;
  /** Files of the workspace that the program made or changed. */
  artifacts: FileInfo[];
}

/** A function that code in the sandbox calls by its name, and that runs here. It gets Python's positional arguments. */
export interface Tool {
  run: (...args: any[]) => unknown;
  description?: string;
  /** Names of all parameters, so that calls can use them. Without names, keyword arguments come last, as one object. */
  parameters?: string[];
  /** A call that returns ends the execution, and its answer is the output. */
  isFinalAnswer?: boolean;
}

/** Payloads that come in pieces. */
export class Blobs {
  #pieces = new Map<string, Uint8Array[]>();
  #bytes = 0;

  constructor(readonly bytesMax: number, readonly openMax: number) {}

  count(bytes: number): void {
    this.#bytes += bytes;
    if (this.#bytes > this.bytesMax) throw new ProtocolError(`the answer has more than ${this.bytesMax} bytes`);
  }

  add({ blobId, data }: BlobChunk): void {
    this.count(data.length);
    const pieces = this.#pieces.get(blobId) ?? [];
    pieces.push(data);
    if (this.#pieces.set(blobId, pieces).size > this.openMax) throw new ProtocolError("too many blobs at once");
  }

  /** Returns the bytes of a payload, once. */
  take(payload: Payload | undefined): Uint8Array<ArrayBuffer> {
    const content = payload?.content;
    if (content?.case === "inline") {
      this.count(content.value.length);
      return content.value.slice();
    }
    if (!content?.case) throw new ProtocolError("a payload has no content");
    const { blobId, sizeBytes } = content.value, whole = joined(this.#pieces.get(blobId) ?? []);
    this.#pieces.delete(blobId);
    if (BigInt(whole.length) !== sizeBytes) throw new ProtocolError(`a blob has ${whole.length} bytes of ${sizeBytes}`);
    return whole;
  }
}

export function joined(pieces: Uint8Array[]): Uint8Array<ArrayBuffer> {
  const sizeBytes = pieces.reduce((sum, piece) => sum + piece.length, 0);
  const whole = new Uint8Array(sizeBytes);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

/** Returns the value, or an opaque one with the reason if it can't be decoded. */
export function decodeOrOpaque(packed: Uint8Array): unknown {
  try {
    return decode(packed);
  } catch (error) {
    return new OpaqueValue("undecodable", `<${(error as Error).message}>`);
  }
}

/**
 * An execution that has begun. Await it for its result; iterate over it for its events, from the first one, any number
 * of times. It runs on without both: it belongs to the session.
 */
export class Execution implements AsyncIterable<ExecutionEvent>, PromiseLike<Result> {
  readonly id: string;
  readonly #events: ExecutionEvent[] = [];
  readonly #blobs = new Blobs(EXECUTION_BYTES_MAX, BLOBS_OPEN_MAX);
  readonly #finalAnswers = new Map<string, unknown>();
  readonly #stop = new AbortController();
  readonly #result: Promise<Result>;
  #last = 0n;
  #isOver = false;
  #logs: { stream: LogStream; text: string }[] = [];
  #wake: () => void = () => undefined;
  #news = this.#newNews();

  /** @internal */
  constructor(
    private readonly rpc: ExecutorRpc,
    private readonly request: ExecuteRequest & { sessionId: string; executionId: string },
    private readonly tools: ReadonlyMap<string, Tool>,
    private readonly upload: (packed: Uint8Array<ArrayBuffer>) => Promise<Packed>,
  ) {
    this.id = request.executionId;
    this.#result = this.#follow().finally(() => {
      this.#isOver = true;
      this.#wake();
    });
    this.#result.catch(() => undefined); // whoever iterates gets it, too
  }

  then<A = Result, B = never>(...handlers: Parameters<Promise<Result>["then"]>): Promise<A | B> {
    return this.#result.then(...handlers) as Promise<A | B>;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<ExecutionEvent, void> {
    for (let at = 0; ; at++) {
      while (at === this.#events.length) {
        if (this.#isOver) return void (await this.#result);
        await this.#news;
      }
      yield this.#events[at]!;
    }
  }

  /** Interrupts the program, and kills it if that does not help. Does not wait: the result says how it ended. */
  async cancel(): Promise<void> {
    await repeated(() => this.rpc.cancelExecution(this.#ids)).catch((error) => {
      if (!(translate(error) instanceof NotFoundError)) throw translate(error);
    });
  }

  get #ids() {
    return { sessionId: this.request.sessionId, executionId: this.id };
  }

  #newNews(): Promise<void> {
    return new Promise((resolve) => (this.#wake = resolve));
  }

  /** Reads streams of events, one after the other, until one brings the result. */
  async #follow(): Promise<Result> {
    const away = new Retries(RECONNECT_S), busy = new Retries(RECONNECT_S);
    for (;;) {
      let result: Result | undefined, error: ExecutorError;
      try {
        const options = { signal: this.#stop.signal };
        const stream = this.#last
          ? this.rpc.attachExecution({ ...this.#ids, afterEvent: this.#last }, options)
          : this.rpc.execute(this.request, options);
        for await (const { event } of stream) {
          if (event) result = this.#take(event) ?? result;
          away.reset();
        }
        error = new UnavailableError("the events of the execution ended without a result");
      } catch (thrown) {
        error = translate(thrown);
      }
      if (result) return result;
      if (this.#stop.signal.aborted) {
        void this.cancel().catch(() => undefined); // nobody answers its tool calls any more
        throw translate(this.#stop.signal.reason);
      }
      if (error.retryAfterS !== undefined) await busy.pause(error, error.retryAfterS);
      else if (isAway(error)) await away.pause(new ConnectionLost(`execution ${this.id}: ${error.message}`));
      else throw error;
    }
  }

  /** Takes the next event; returns the result if that is it. */
  #take({ number, kind }: Event): Result | undefined {
    if (number <= this.#last && kind.case === "toolCall") return undefined; // repeated until it has an answer
    if (number !== this.#last + 1n) throw new UnavailableError(`event ${number} came after event ${this.#last}`);
    this.#blobs.count(EVENT_BYTES);
    let event: ExecutionEvent | undefined;
    switch (kind.case) {
      case "queued":
        event = { kind: "queued", ahead: kind.value.ahead };
        break;
      case "log": {
        const stream = kind.value.stream === OutputStream.STDOUT ? "stdout" : "stderr";
        this.#print(kind.value.text, stream);
        event = { kind: "log", stream, text: kind.value.text };
        break;
      }
      case "outputCut":
        this.#print(`\n[... ${kind.value.omittedBytes} bytes of output left out ...]\n`, "both");
        event = { kind: "outputCut", omittedBytes: Number(kind.value.omittedBytes) };
        break;
      case "image":
        event = { ...kind.value, kind: "image", data: this.#blobs.take(kind.value.data) };
        break;
      case "display":
        event = { kind: "display", data: shown(this.#blobs.take(kind.value.data)) };
        break;
      case "toolCall": {
        const { callId, name } = kind.value, packed = this.#blobs.take(kind.value.arguments?.packed);
        this.#blobs.count(-packed.length);
        void this.#call(callId, name, packed).catch((error) => this.#stop.abort(error));
        event = { kind: "toolCall", callId, name };
        break;
      }
      case "limitWarning":
        event = { kind: "limitWarning", warning: kind.value };
        break;
      case "blobChunk":
        this.#blobs.add(kind.value);
        break;
      case "result":
        event = { kind: "result", result: this.#ended(kind.value) };
        break;
      default:
        throw new ProtocolError("an event of an unknown kind: the client is older than the daemon");
    }
    this.#last = number;
    if (event) {
      this.#events.push(event);
      this.#wake();
      this.#news = this.#newNews();
    }
    return event?.kind === "result" ? event.result : undefined;
  }

  #print(text: string, stream: LogStream): void {
    this.#blobs.count(text.length);
    this.#logs.push({ text, stream });
  }

  #ended(wire: ExecutionResult): Result {
    const printed = (...streams: LogStream[]) =>
      this.#logs.filter((log) => streams.includes(log.stream)).map((log) => log.text).join("");
    const callId = wire.finalAnswerCallId;
    if (callId && !this.#finalAnswers.has(callId)) throw new ProtocolError("the final answer is of no call of ours");
    const output = wire.output ? decodeOrOpaque(this.#blobs.take(wire.output.packed)) : null;
    return {
      executionId: this.id,
      outcome: Outcome[wire.outcome] as keyof typeof Outcome,
      output: callId ? this.#finalAnswers.get(callId) : output,
      isFinalAnswer: callId !== "",
      logs: printed("stdout", "stderr", "both"), stdout: printed("stdout", "both"), stderr: printed("stderr", "both"),
      images: this.#events.filter((event) => event.kind === "image"),
      displays: this.#events.filter((event) => event.kind === "display").map((event) => event.data),
      error: wire.error, usage: wire.usage,
      variablesState: VariablesState[wire.variablesState] as keyof typeof VariablesState,
      generation: wire.generation,
      artifacts: wire.artifacts.map(fileInfo),
    };
  }

  /** Runs a tool and answers its call; whatever the tool throws is raised at the call in the sandbox. */
  async #call(callId: string, name: string, packed: Uint8Array): Promise<void> {
    let answer: Answer;
    try {
      const tool = this.tools.get(name);
      if (!tool) throw named("NameError", `no tool ${name} is registered with this client`);
      const value = await tool.run(...argumentsOf(tool, packed));
      if (tool.isFinalAnswer) this.#finalAnswers.set(callId, value);
      answer = { case: "value", value: await this.upload(encode(tool.isFinalAnswer ? null : value)) };
    } catch (error) {
      answer = toolError(error);
    }
    await this.#submit(callId, answer);
  }

  async #submit(callId: string, answer: Answer): Promise<void> {
    try {
      await repeated(() => this.rpc.submitToolResult({ ...this.#ids, callId, answer }));
    } catch (thrown) {
      const error = translate(thrown);
      if (error instanceof PreconditionError || error instanceof NotFoundError) return; // answered before, or over
      if (answer.case === "error" || isAway(error)) throw error;
      await this.#submit(callId, toolError(named("RuntimeError", `the tool's result was refused: ${error.message}`)));
    }
  }
}

type LogStream = "stdout" | "stderr" | "both";
type ExecuteRequest = MessageInitShape<typeof ExecuteRequestSchema>;

/** A value to send. */
export type Packed = MessageInitShape<typeof ValueSchema>;

type Answer = MessageInitShape<typeof SubmitToolResultRequestSchema>["answer"] & {};

function argumentsOf(tool: Tool, packed: Uint8Array): unknown[] {
  const [args, keywords] = decode(packed) as [unknown[], Record<string, unknown>];
  if (!tool.parameters) return Object.keys(keywords).length ? [...args, keywords] : args;
  for (const [name, value] of Object.entries(keywords)) {
    const at = tool.parameters.indexOf(name);
    if (at < args.length && at in args || at < 0) throw named("TypeError", `unexpected argument ${name}`);
    args[at] = value;
  }
  return args;
}

function named(name: string, message: string): Error {
  return Object.assign(new Error(message), { name });
}

/** Errors of JavaScript by their nearest class in Python; any other name is shown with the message. */
const PYTHON_NAMES = new Map([
  ["Error", "RuntimeError"], ["RangeError", "ValueError"], ["ReferenceError", "NameError"],
  ["EncodeError", "TypeError"], ["DecodeError", "ValueError"],
]);

function toolError(error: unknown): Answer {
  const { name, message } = error instanceof Error ? error : named("Error", String(error));
  const type = PYTHON_NAMES.get(name) ?? name;
  return { case: "error", value: { type, message: message.slice(0, TOOL_ERROR_CHARS_MAX) } };
}

function shown(packed: Uint8Array): Record<string, string> {
  try {
    return displayData(packed);
  } catch {
    return {};
  }
}
