/** The files of a session. Paths are absolute, or relative to the workspace. */

import { timestampDate } from "@bufbuild/protobuf/wkt";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { FileError } from "./errors.js";
import type { ManageFileRequestSchema, PutFileRequestSchema } from "./gen/executor_api/v1/executor_service_pb.js";
import type { FileInfo as WireInfo } from "./gen/executor_api/v1/types_pb.js";
import { joined } from "./execution.js";
import { repeated, type ExecutorRpc } from "./transport.js";

export const PIECE_BYTES = 256 << 10;

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
  return { path, sizeBytes: Number(sizeBytes), isDirectory, isLink, target, mode, modifyTime: modifyTime && timestampDate(modifyTime) };
}

export function* pieces(data: Uint8Array): Generator<Uint8Array> {
  for (let at = 0; at < data.length; at += PIECE_BYTES) yield data.subarray(at, at + PIECE_BYTES);
}

/** Each call throws FileError for what the kernel refuses. */
export class Files {
  /** @internal */
  constructor(private readonly rpc: ExecutorRpc, private readonly sessionId: string) {}

  async read(path: string, { offset = 0, length }: { offset?: number; length?: number } = {}): Promise<Uint8Array<ArrayBuffer>> {
    return repeated(async () => {
      const parts: Uint8Array[] = [];
      const request = { sessionId: this.sessionId, path, offset: BigInt(offset), ...(length !== undefined && { length: BigInt(length) }) };
      for await (const { part } of this.rpc.getFile(request)) if (part.case === "data") parts.push(part.value);
      return joined(parts);
    });
  }

  async readText(path: string): Promise<string> {
    return new TextDecoder().decode(await this.read(path));
  }

  /** Writes a file, or with `append` at its end; makes missing directories. */
  async write(path: string, data: string | Uint8Array, { append = false, mode }: { append?: boolean; mode?: number } = {}): Promise<FileInfo> {
    const content = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const header = { sessionId: this.sessionId, path, sizeBytes: BigInt(content.length), append, ...(mode !== undefined && { mode }) };
    async function* messages(): AsyncGenerator<MessageInitShape<typeof PutFileRequestSchema>> {
      yield { part: { case: "header", value: header } };
      for (const piece of pieces(content)) yield { part: { case: "data", value: piece } };
    }
    const { file } = await repeated(() => this.rpc.putFile(messages()), !append);
    return fileInfo(file!);
  }

  /** Lists a directory, and by default everything below it: at most 10,000 entries. */
  async list(path = "", { recursive = true }: { recursive?: boolean } = {}): Promise<FileInfo[]> {
    return (await repeated(() => this.rpc.listFiles({ sessionId: this.sessionId, path, recursive }))).files.map(fileInfo);
  }

  async stat(path: string, { follow = true }: { follow?: boolean } = {}): Promise<FileInfo> {
    return (await this.#manage(path, { case: "stat", value: { follow } }))!;
  }

  async exists(path: string): Promise<boolean> {
    return this.stat(path).then(() => true, (error) => error instanceof FileError && error.reason === "FILE_NOT_FOUND" ? false : Promise.reject(error));
  }

  /** Returns the absolute path, without links. */
  async realpath(path: string): Promise<string> {
    return (await this.#manage(path, { case: "realpath", value: {} }))!.path;
  }

  async mkdir(path: string, { parents = false, existOk = false }: { parents?: boolean; existOk?: boolean } = {}): Promise<void> {
    await this.#manage(path, { case: "mkdir", value: { parents, existOk } });
  }

  async move(path: string, target: string): Promise<void> {
    await this.#manage(path, { case: "move", value: { target } });
  }

  async remove(path: string, { recursive = false, missingOk = false }: { recursive?: boolean; missingOk?: boolean } = {}): Promise<void> {
    await this.#manage(path, { case: "remove", value: { recursive, missingOk } });
  }

  async #manage(path: string, action: MessageInitShape<typeof ManageFileRequestSchema>["action"] & {}): Promise<FileInfo | undefined> {
    const isHarmless = action.case === "stat" || action.case === "realpath";
    const { file } = await repeated(() => this.rpc.manageFile({ sessionId: this.sessionId, path, action }), isHarmless);
    return file && fileInfo(file);
  }
}
