/** Runs Python in sandboxes of a remote-executor, from Node and from browsers. */

export { Client, type SessionOptions } from "./client.js";
export * from "./errors.js";
export { Execution, type ExecutionEvent, type Image, type Result, type Tool } from "./execution.js";
export { Files, type FileInfo } from "./files.js";
export { Session, type ExecuteOptions, type Limits } from "./session.js";
export { decode, encode, ImageValue, NdArray, OpaqueValue, type TypedArray } from "./values.js";
