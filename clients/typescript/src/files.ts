/** The files of a session. Paths are absolute, or relative to the workspace. */

import { timestampDate } from "@bufbuild/protobuf/wkt";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { FileError } from "./errors.js";
import type { ManageFileRequestSchema, PutFileRequestSchema } from "./gen/executor_api/v1/executor_service_pb.js";
import type { FileInfo as WireInfo } from "./gen/executor_api/v1/types_pb.js";
import { joined } from "./execution.js";
import { repeated, type ExecutorRpc } from "./transport.js";

export const PIECE_BYTES = 256 << 10;

type WriteOptions = { append?: boolean; mode?: number };
type Bytes = Uint8Array<ArrayBuffer>;
type Action = MessageInitShape<typeof ManageFileRequestSchema>["action"];

export interface FileInfo {
  path: string;
  sizeBytes: number;
  isDirectory: boolean;
  isLink: boolean;
  /** The text of a link. */
  target: string;
  /** The rights, as chmod has them. */
  mode: number;
  modifyTime: Date | undefined;
}

export function fileInfo({ path, sizeBytes, isDirectory, isLink, target, mode, modifyTime }: WireInfo): FileInfo {
  const time = modifyTime && timestampDate(modifyTime);
  return { path, sizeBytes: Number(sizeBytes), isDirectory, isLink, target, mode, modifyTime: time };
}

export function* pieces(data: Uint8Array): Generator<Uint8Array> {
  for (let at = 0; at < data.length; at += PIECE_BYTES) yield data.subarray(at, at + PIECE_BYTES);
}

/** Each call throws FileError if the kernel refuses it. */
export class Files {
  /** @internal */
  constructor(private readonly rpc: ExecutorRpc, private readonly sessionId: string) {}

  /** Reads a file from its byte `offset` on, at most `length` bytes. */
  async read(path: string, { offset = 0, length }: { offset?: number; length?: number } = {}): Promise<Bytes> {
    const part = { offset: BigInt(offset), ...(length !== undefined && { length: BigInt(length) }) };
    return repeated(async () => {
      const parts: Uint8Array[] = [];
      const request = { sessionId: this.sessionId, path, ...part };
      for await (const { part } of this.rpc.getFile(request)) if (part.case === "data") parts.push(part.value);
      return joined(parts);
    });
  }

  async readText(path: string): Promise<string> {
    return new TextDecoder().decode(await this.read(path));
  }

  /** Writes a file, or with `append` at its end; makes missing directories. */
  async write(path: string, data: string | Uint8Array, options: WriteOptions = {}): Promise<FileInfo> {
    const content = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const header = { ...options, sessionId: this.sessionId, path, sizeBytes: BigInt(content.length) };
    async function* messages(): AsyncGenerator<MessageInitShape<typeof PutFileRequestSchema>> {
      yield { part: { case: "header", value: header } };
      for (const piece of pieces(content)) yield { part: { case: "data", value: piece } };
    }
    const { file } = await repeated(() => this.rpc.putFile(messages()), !options.append);
    return fileInfo(file!);
  }

  /** Lists a directory, and by default everything below it: at most 10,000 entries. */
  async list(path = "", { recursive = true }: { recursive?: boolean } = {}): Promise<FileInfo[]> {
    const { files } = await repeated(() => this.rpc.listFiles({ sessionId: this.sessionId, path, recursive }));
    return files.map(fileInfo);
  }

  async stat(path: string, { follow = true }: { follow?: boolean } = {}): Promise<FileInfo> {
    return (await this.#manage(path, { case: "stat", value: { follow } }))!;
  }

  async exists(path: string): Promise<boolean> {
    return this.stat(path).then(() => true, (error) => {
      if (error instanceof FileError && error.reason === "FILE_NOT_FOUND") return false;
      throw error;
    });
  }

  /** Returns the absolute path, without links. */
  async realpath(path: string): Promise<string> {
    return (await this.#manage(path, { case: "realpath", value: {} }))!.path;
  }

  async mkdir(path: string, options: { parents?: boolean; existOk?: boolean } = {}): Promise<void> {
    await this.#manage(path, { case: "mkdir", value: options });
  }

  async move(path: string, target: string): Promise<void> {
    await this.#manage(path, { case: "move", value: { target } });
  }

  async remove(path: string, options: { recursive?: boolean; missingOk?: boolean } = {}): Promise<void> {
    await this.#manage(path, { case: "remove", value: options });
  }

  async #manage(path: string, action: Action & {}): Promise<FileInfo | undefined> {
    const isHarmless = action.case === "stat" || action.case === "realpath";
    const { file } = await repeated(() => this.rpc.manageFile({ sessionId: this.sessionId, path, action }), isHarmless);
    return file && fileInfo(file);
  }
}
