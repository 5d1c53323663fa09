/** What the client promises, in Node and in a page: against a real gateway and daemon. */

import {
  AuthenticationError, Client, decode, DecodeError, encode, EncodeError, ExecutorError, FileError, ImageValue, NdArray,
  OpaqueValue, PolicyViolationError, SessionGone, type Session,
} from "../src/index.js";

export interface Gateway {
  address: string;
  token: string;
}
type Test = (client: Client, session: Session, gateway: Gateway) => Promise<void> | void;

/** Runs a test with a client and a session of its own. */
export async function run(test: Test, gateway: Gateway, client = new Client(gateway.address, gateway)): Promise<void> {
  try {
    await test(client, await client.createSession({ authorizedImports: ["*"], limits: { wallTimeS: 20 } }), gateway);
  } finally {
    await client.close();
  }
}

/** Shows a value in full, so that equal values have equal texts. */
function shown(value: unknown): string {
  if (value instanceof Map) return `Map{${[...value].map(([key, item]) => `${shown(key)}: ${shown(item)}`)}}`;
  if (value instanceof Set) return `Set{${[...value].map(shown)}}`;
  if (value instanceof Date) return `Date(${value.toISOString()})`;
  if (Array.isArray(value)) return `[${value.map(shown)}]`;
  if (ArrayBuffer.isView(value)) return `${value.constructor.name}[${value}]`;
  if (value instanceof OpaqueValue) return `Opaque(${value.typeName}, ${value.text}, ${shown(value.fields)})`;
  if (value instanceof NdArray) return `NdArray(${value.dtype}, ${value.shape}, ${shown(value.data)})`;
  if (value instanceof ImageValue) return `Image(${value.width}, ${value.height}, ${value.data.length > 50})`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, item]) => `${key}: ${shown(item)}`)}}`;
  return Object.is(value, -0) ? "-0" : typeof value === "bigint" ? `${value}n` : typeof value === "string" ? JSON.stringify(value) : String(value);
}

function equal(actual: unknown, expected: unknown): void {
  if (shown(actual) !== shown(expected)) throw new Error(`${shown(actual).slice(0, 2000)} is not ${shown(expected).slice(0, 2000)}`);
}

async function fails<E>(kind: new (...args: any[]) => E, attempt: PromiseLike<unknown>): Promise<E> {
  const error = await attempt.then((value) => new Error(`it did not fail, but gave ${shown(value)}`), (reason: unknown) => reason);
  if (!(error instanceof kind)) throw error;
  return error;
}

export const suite: Record<string, Test> = {
  "a step has its value, its output and its state": async (_, session) => {
    const first = await session.execute("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1");
    equal([first.outcome, first.output, first.stdout, first.stderr], ["SUCCEEDED", 21, "out\n", "err\n"]);
    const second = await session.execute("print(x)\n1 / 0");
    equal([second.outcome, second.logs, second.error?.type, second.error?.line], ["EXCEPTION", "20\n", "ZeroDivisionError", 2]);
    equal(second.variablesState, "KEPT");
  },

  "events come while the program runs": async (_, session) => {
    let open = () => {};
    const opened = new Promise<void>((resolve) => (open = resolve));
    await session.registerTools({ gate: () => opened });
    const execution = session.execute("print('before')\ngate()\nprint('after')");
    const kinds: string[] = [];
    for await (const event of execution) {
      kinds.push(event.kind === "log" ? event.text : event.kind);
      if (event.kind === "toolCall") open(); // the program waits for this
    }
    equal(kinds, ["before\n", "toolCall", "after\n", "result"]);
    equal((await execution).stdout, "before\nafter\n");
  },

  "code calls functions here, and gets what they return and throw": async (_, session) => {
    const data = new Uint8Array(600_000).fill(7);
    await session.registerTools({
      search: { run: async (query: string, limit: number) => ({ query, limit, data }), parameters: ["query", "limit"] },
      plain: (...given: unknown[]) => given,
      broken: () => { throw new RangeError("too far"); },
      odd: () => document_,
      answer: { run: (value: unknown) => ({ value, own: document_ }), isFinalAnswer: true },
    });
    const found = await session.execute("r = search('cats', limit=3)\n[r['query'], r['limit'], len(r['data']), r['data'][-1]]");
    equal([found.outcome, found.output], ["SUCCEEDED", ["cats", 3, 600_000, 7]]);
    equal((await session.execute("plain(1, 'a', k=2)")).output, [1, "a", { k: 2 }]);
    const raised = await session.execute("try: broken()\nexcept ValueError as error: print(error)\nodd()");
    equal([raised.logs, raised.error?.type], ["too far\n", "TypeError"]);
    const last = await session.execute("answer(bytes(400000))\nprint('never')");
    equal([last.isFinalAnswer, last.logs, (last.output as any).value.length, (last.output as any).own === document_], [true, "", 400_000, true]);
  },

  "a program is interrupted, and its session goes on": async (_, session) => {
    const execution = session.execute("y = 1\nprint('on')\nwhile True: pass");
    for await (const event of execution) if (event.kind === "log") await execution.cancel();
    equal((await execution).outcome, "CANCELLED");
    equal((await session.execute("y")).output, 1);
  },

  "an execution runs once, whoever asks for it": async (client, session) => {
    await session.execute("n = 0");
    const [one, two] = await Promise.all([1, 2].map(() => session.execute("n += 1\nn", { executionId: "same" })));
    equal([one!.output, two!.output], [1, 1]);
    const other = await client.getSession({ sessionId: session.id });
    equal((await other.execute("n")).output, 1);
  },

  "files are written, read, listed, moved and removed": async (_, { files }) => {
    const data = Uint8Array.from({ length: 600_000 }, (_, at) => at % 251);
    equal((await files.write("a/b.bin", data)).sizeBytes, 600_000);
    equal((await files.read("a/b.bin")).join() === data.join(), true);
    equal(await files.read("a/b.bin", { offset: 599_998 }), data.slice(-2));
    await files.write("a/t", "é\n");
    await files.write("a/t", "2", { append: true, mode: 0o600 });
    equal([await files.readText("a/t"), (await files.stat("a/t")).mode], ["é\n2", 0o600]);
    await files.mkdir("c/d", { parents: true });
    await files.move("a/t", "c/d/u");
    equal((await files.list()).map((file) => file.path).sort(), ["a", "a/b.bin", "c", "c/d", "c/d/u"]);
    equal([await files.exists("a/t"), await files.exists("c/d/u"), await files.realpath("c/d")], [false, true, "/workspace/c/d"]);
    equal((await fails(FileError, files.remove("c"))).reason, "FILE_IS_DIRECTORY");
    await files.remove("c", { recursive: true });
    equal((await fails(FileError, files.read("c/d/u"))).reason, "FILE_NOT_FOUND");
  },

  "a session is found by its name, and ends when it should": async (client, session, gateway) => {
    const name = `named-${session.id.slice(0, 12)}`;
    const detached = await client.createSession({ name, detached: true });
    await detached.execute("z = 5");
    const other = new Client(gateway.address, gateway);
    const found = await other.getSession({ name });
    await client.close();
    await fails(SessionGone, session.execute("1"));
    await fails(ExecutorError, client.createSession());
    equal((await found.execute("z")).output, 5);
    await found.end();
    await found.end();
    equal((await other.listSessions()).some((each) => each.name === name), false);
    await other.close();
  },

  "a session lives as long as its client": async (client) => {
    const session = await client.createSession({ authorizedImports: ["time"], limits: { ownerGraceS: 1 } });
    equal((await session.execute("import time\ntime.sleep(2)\n'alive'")).output, "alive");
  },

  "refusals have their reasons": async (client, session, gateway) => {
    const stranger = new Client(gateway.address, { token: "wrong" });
    equal((await fails(AuthenticationError, stranger.listSessions())).reason, "UNAUTHENTICATED");
    const refusal = await fails(PolicyViolationError, client.createSession({ limits: { wallTimeS: 1e9, processes: 1e6 } }));
    equal(refusal.violations.map((violation) => violation.field).sort(), ["limits.processes", "limits.wall_time_s"]);
    await session.end();
    equal((await fails(SessionGone, session.setVariables({ a: 1 }))).reason, "SESSION_NOT_FOUND");
  },

  "values cross both ways": async (_, session) => {
    const values = [
      null, true, 1, -1.5, -0, NaN, Infinity, 2 ** 80, 2n ** 62n, -(2n ** 200n), "é😀", "x".repeat(1500), new Uint8Array([0, 255]),
      new Date(1234567890123), [1, [2, ["list"]]], { a: { b: [] }, __proto__x: 1 }, new Map<unknown, unknown>([[1, 2], ["1", 3]]), new Set([1]),
      Array.from({ length: 100 }, (_, at) => at / 2),
    ];
    await session.setVariables({ values, size: values.length });
    equal((await session.getVariables(["values", "missing"])).get("values"), values);
    const { output } = await session.execute("[type(value).__name__ for value in values], values[13].isoformat(), size == len(values)");
    equal(output, [
      "NoneType bool int float float float float float int int str str bytes datetime list dict dict set list".split(" "),
      "2009-02-13T23:31:30.123000+00:00", true,
    ]);
  },

  "many large variables arrive": async (_, session) => {
    await session.execute(Array.from({ length: 70 }, (_, at) => `v${at} = bytes(263_000)`).join("\n"));
    const variables = await session.getVariables();
    equal([variables.size, (variables.get("v69") as Uint8Array).length], [70, 263_000]);
  },

  "values of Python have a form, or are opaque": async (_, session) => {
    const { output, images } = await session.execute(`
import collections, dataclasses, datetime, decimal, numpy
from PIL import Image
@dataclasses.dataclass
class Point: x: int; y: object
loop = [1]; loop.append(loop)
import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()
[numpy.arange(6, dtype="f4").reshape(2, 3), numpy.int64(7), numpy.array(["2024-01-01"], "M8[D]"), numpy.array([1j]),
 Image.new("RGB", (2, 3)), datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 1, 2, 3, 456789), (1, 2), {(1,): 2},
 decimal.Decimal("1.50"), Point(1, [2]), 2**53 + 1, [2**60] * 40, ["é😀"] * 40, collections.Counter("aab"), loop[1][1][0], object]`);
    equal(output, [
      new NdArray("<f4", [2, 3], "C", new Float32Array([0, 1, 2, 3, 4, 5])), 7n, new NdArray("<M8[D]", [1], "C", new BigInt64Array([19723n])),
      new OpaqueValue("numpy.ndarray", 'array of shape (1) and dtype "<c16"'), new ImageValue(new Uint8Array(60), 2, 3),
      new Date("2024-02-29"), new Date("2024-01-01T01:02:03.456Z"), [1, 2], new Map([[[1], 2]]), new OpaqueValue("decimal.Decimal", "Decimal(1.50)"),
      new OpaqueValue("__main__.Point", "__main__.Point", { x: 1, y: [2] }), 2n ** 53n + 1n, Array(40).fill(2n ** 60n), Array(40).fill("é😀"),
      { a: 2, b: 1 }, 1, new OpaqueValue("type", "<class 'object'>"),
    ]);
    equal([images.length, images[0]!.mimeType, images[0]!.data.length > 1000], [1, "image/png", true]);
  },

  "keys reach no prototype": async (_, session) => {
    const { output } = await session.execute("{'__proto__': {'polluted': 1}, 'constructor': {'prototype': {'polluted': 1}}, 'toString': 2}");
    const record = output as Record<string, unknown>;
    equal([Object.getPrototypeOf(record), Object.keys(record).length, ({} as any).polluted], [null, 3, undefined]);
    await session.registerTools({ f: (given: Record<string, unknown>) => given["polluted"] ?? "clean" });
    equal((await session.execute("f(**{'__proto__': {'polluted': 1}})")).output, "clean");
    equal(encode({ ["__proto__"]: 1 }).length > 30, true);
  },

  "hostile bytes are an error": () => {
    const deep = `${"[".repeat(300)}${"]".repeat(300)}`;
    const doubled = Array.from({ length: 60 }, (_, at) => `["list",["ref",${at}],["ref",${at}]]`);
    const trees = [
      "", "[", "]", "[]", '["nope"]', "{}", '{"a":1}', '["list",]', "[,1]", "1 2", "1,2", deep, `["list",${"1,".repeat(1_000_001)}1]`,
      "1e999", "9".repeat(50), "9223372036854775808", '"\\x"', '["ref",0]', '["list",["ref",5]]', '["tuple",["ref",0]]', '["ref",-1]', '["ref",0.5]',
      '["dict",1]', '["float","1"]', '["int","xyz"]', '["int",5]', '["bytes","!!"]', '["bytes",0]', '["bytes",-1]', '["bytes","__proto__"]', '["date","2024-02-31"]',
      '["datetime","2024-01-01",0]', '["np.array","<f8",[2],"C","AAAA"]', '["np.array","<f8",[-1],"C",""]', '["np.array","<f8",["length"],"C",""]',
      '["np.objects",[3],["list"]]', '["np.objects",[1],null]', '["pil.png","RGB",99999,99999,""]', '["foreign","AA=="]', '["record","P",["a"]]',
      '["record","P",[1],2]', '["texts",0,0]', '["numbers","q",0]', '["opaque-display","a","b","c",0]', `["list",["list","x"],${doubled.join()}]`, '["__proto__"]', '["constructor"]',
    ];
    for (const tree of trees) refuses(packed(tree));
    refuses(packed('["numbers","q",0]', new Uint8Array(7)));
    refuses(packed('["list",["bytes",0],["bytes",0]]', new Uint8Array(2000)));
    refuses(packed(`["texts",0,1]`, new Uint8Array(3), new Uint8Array(8).fill(255)));
    refuses(new Uint8Array([0x52, 0x58, 0x56, 0x31, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0]));
    refuses(packed('"\xff'));
    refuses(packed('["enum","E",["list"],["ref",1]]'), true);
    refuses(packed('["datetime-zone","2024-01-01T00:00:00",0,1e300,["timezone",0,0,null]]'));
    refuses(packed('["list",["ref","1"]]'));
    refuses(packed(`["list",["ref","${"9".repeat(1e6)}"]]`));
    const chosen = Array.from({ length: 20_000 }, (_, at) => `["int","${(at + 1).toString(16)}0000000000000000"]`); // one hash for all in V8
    refuses(packed(`["set",${chosen}]`));
    refuses(packed(`["dict",${chosen.map((key) => `${key},1`)}]`));
    equal(decode(packed(`["int","${"f".repeat(9999)}"]`)) instanceof OpaqueValue, true);
    const head = new Uint8Array(24 << 20);
    head.set([0x52, 0x58, 0x56, 0x31, 0, 45, 0, 0]); // three million buffers without bytes
    refuses(head);
    equal(decode(packed('["list",["list"],["ref",1],["ref",0]]')) instanceof Array, true);

    const whole = encode([1, "text", { a: [new Uint8Array(3), new Date(0)] }, "y".repeat(2000), 2n ** 90n, new Set([1])]);
    for (let at = 0; at < Math.min(whole.length, 400); at++) {
      for (const byte of [0, 0x22, 0x2c, 0x5b, 0x5d, 0x7f, 0xff]) {
        const changed = whole.slice();
        changed[at] = byte;
        refuses(changed, true);
      }
      refuses(whole.subarray(0, at));
    }
    for (const value of [() => 1, Symbol("a"), new (class Own {})(), new Date(NaN), 2n ** 20_000n]) {
      let error: unknown;
      try { encode(value); } catch (thrown) { error = thrown; }
      equal(error instanceof EncodeError, true);
    }
    const loop: unknown[] = [];
    loop.push(loop);
    try { encode(loop); throw new Error("a loop was packed"); } catch (error) { if (!(error instanceof EncodeError)) throw error; }
  },
};

/** A value that has no form in Python. */
const document_ = new WeakMap();

/** Packs a tree as it is. */
function packed(tree: string, ...buffers: Uint8Array[]): Uint8Array {
  const text = Uint8Array.from(tree, (char) => char.charCodeAt(0)), head = new DataView(new ArrayBuffer(16 + 8 * buffers.length));
  head.setUint32(0, 0x52585631);
  head.setUint32(4, buffers.length);
  head.setBigUint64(8, BigInt(text.length));
  buffers.forEach((buffer, at) => head.setBigUint64(16 + 8 * at, BigInt(buffer.length)));
  return Uint8Array.from([new Uint8Array(head.buffer), text, ...buffers].flatMap((part) => [...part]));
}

function refuses(bytes: Uint8Array, orReturns = false): void {
  try {
    decode(bytes);
  } catch (error) {
    if (error instanceof DecodeError) return;
    throw error;
  }
  if (!orReturns) throw new Error(`accepted: ${new TextDecoder().decode(bytes.subarray(0, 120))}`);
}
