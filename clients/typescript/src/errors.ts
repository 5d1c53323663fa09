/**
 * The errors of the client. A program that fails is not an error: it has a `Result` with its outcome.
 *
 * `reason` is from the closed list of docs/protocol.md; `code` is the Connect code.
 */

import { Code, ConnectError } from "@connectrpc/connect";
import { ViolationsSchema, type Violation } from "./gen/executor_api/v1/types_pb.js";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

const DOMAIN = "remote-executor";

/** The base of all errors, and the error for everything that has no class of its own. */
export class ExecutorError extends Error {
  /** Empty if the answer did not come from the daemon, but from a proxy, say. */
  reason = "";
  code: Code | undefined;
  /** Seconds to wait before another attempt, if the daemon names a time. */
  retryAfterS: number | undefined;

  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}
/** The request is malformed; the message names the field. */
export class InvalidRequest extends ExecutorError {}
/** The token is missing or wrong. */
export class AuthenticationError extends ExecutorError {}
/** The caller may not do this. */
export class AuthorizationError extends ExecutorError {}
/** More than the policy grants; `violations` lists everything that it refuses. */
export class PolicyViolationError extends AuthorizationError {
  violations: Violation[] = [];
}
/** The session, execution or file does not exist, or is another caller's. */
export class NotFoundError extends ExecutorError {}
/** The session has ended, was lost or never existed. Create another one. */
export class SessionGone extends NotFoundError {}
/** A path can't be used; `reason` says why: FILE_NOT_FOUND, FILE_EXISTS … */
export class FileError extends ExecutorError {}
/** The state of the object does not allow this. */
export class PreconditionError extends ExecutorError {}
/** A limit is reached. */
export class ResourceExhaustedError extends ExecutorError {}
/** The gateway or the daemon can't be reached, or can't serve the call now. */
export class UnavailableError extends ExecutorError {}
/** The connection was lost and did not come back. The outcome of what ran is unknown. */
export class ConnectionLost extends UnavailableError {}
/** An answer violates the protocol or exceeds a limit of the client. */
export class ProtocolError extends ExecutorError {}
/** The bytes are not a packed value, or more of one than the limits allow. */
export class DecodeError extends ExecutorError {}
/** A value has no form in Python, or is too large. */
export class EncodeError extends ExecutorError {}

const CLASSES = new Map<Code, typeof ExecutorError>([
  [Code.InvalidArgument, InvalidRequest],
  [Code.Unauthenticated, AuthenticationError],
  [Code.PermissionDenied, AuthorizationError],
  [Code.NotFound, NotFoundError],
  [Code.FailedPrecondition, PreconditionError],
  [Code.ResourceExhausted, ResourceExhaustedError],
  [Code.Unavailable, UnavailableError],
]);

/** Turns anything that a call throws into an `ExecutorError`; `cause` is the original. */
export function translate(error: unknown): ExecutorError {
  if (error instanceof ExecutorError) return error;
  const from = ConnectError.from(error);
  const info = from.findDetails(ErrorInfoSchema).find((each) => each.domain === DOMAIN);
  const reason = info?.reason ?? "";
  const violations = from.findDetails(ViolationsSchema)[0];
  let kind = CLASSES.get(from.code) ?? ExecutorError;
  if (reason === "SESSION_NOT_FOUND" || reason === "SESSION_LOST") kind = SessionGone;
  else if (reason.startsWith("FILE_") || reason === "PATH_REFUSED") kind = FileError;
  else if (violations) kind = PolicyViolationError;
  // Nothing answered, so this is the network's own error, or the stream was cut.
  else if (!reason && (from.cause instanceof Error || from.rawMessage.startsWith("protocol error"))) {
    kind = UnavailableError;
  }
  const translated = new kind(from.rawMessage, { cause: error });
  translated.reason = reason;
  translated.code = from.code;
  const retry = from.findDetails(RetryInfoSchema)[0]?.retryDelay;
  if (retry) translated.retryAfterS = Math.max(0, Number(retry.seconds) + retry.nanos / 1e9);
  if (translated instanceof PolicyViolationError) translated.violations = violations?.violations ?? [];
  return translated;
}
