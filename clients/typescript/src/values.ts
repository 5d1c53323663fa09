/**
 * Packs values for the sandbox, and unpacks what comes out of it (docs/values.md has the format).
 *
 * The bytes to decode may come from an attacker. For any bytes, `decode` returns a value or throws a DecodeError. The
 * depth, number and size of values are bounded, also with every reference followed. No key reaches a prototype: dicts
 * become objects without one.
 */

import { DecodeError, EncodeError } from "./errors.js";

const MAGIC = 0x52585631; // RXV1
const VALUE_BYTES_MAX = 128 << 20;
const NODES_MAX = 1_000_000;
const JSON_VALUES_MAX = 6 * NODES_MAX;
const DEPTH_MAX = 200;
const HEADER_DEPTH = 24;
/** Text and bytes with every reference followed; each value adds `VALUE_BYTES`. */
const UNFOLDED_BYTES_MAX = 256 << 20;
const VALUE_BYTES = 16;
const SHOWN_ARRAY_BYTES = 64 << 10;
const PIXELS_MAX = 64_000_000;
const INLINE_CHARS_MAX = 1024;
const DISPLAY_BYTES_MAX = 8 << 20;
const SHOWN_CHARS_MAX = 2000;
const SHOWN_PARTS_MAX = 10;
/** Hexadecimal digits of an integer. Python does not write longer ones in decimal; JavaScript is slow with them. */
const INT_DIGITS_MAX = 3_571;
const BARE_INT_MAX = (1n << 63n) - 1n;
/** Keys of Maps and Sets whose hashes a sender can make equal. This number takes a second at worst. */
const CHOSEN_KEYS_MAX = 10_000;

/** A value without a form in JavaScript: its Python type, the text that `print` shows, and sometimes more. */
export class OpaqueValue {
  constructor(
    readonly typeName: string,
    readonly text: string,
    /** Fields of a dataclass, a named tuple or an enum's member. */
    readonly fields: Readonly<Record<string, unknown>> = {},
    /** What a notebook shows for it: texts by MIME type. They are untrusted: HTML may have scripts. */
    readonly display: Readonly<Record<string, string>> = {},
  ) {}
  toString(): string {
    return this.text;
  }
}

/** A numpy array. `order` "F": the first index varies fastest. Moments and durations are numbers of their unit. */
export class NdArray {
  constructor(
    readonly dtype: string,
    readonly shape: readonly number[],
    readonly order: "C" | "F",
    readonly data: TypedArray | readonly unknown[],
  ) {}
}

/** An image as a PNG file. */
export class ImageValue {
  readonly mimeType = "image/png";
  constructor(readonly data: Uint8Array<ArrayBuffer>, readonly width: number, readonly height: number) {}
}

export type TypedArray =
  | Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array
  | BigUint64Array | BigInt64Array | Float32Array | Float64Array;
type ArrayType = { new (buffer: ArrayBuffer): TypedArray; readonly BYTES_PER_ELEMENT: number };

const ARRAYS = new Map<unknown, ArrayType>([
  ["|b1", Uint8Array], ["|u1", Uint8Array], ["|i1", Int8Array], ["<u2", Uint16Array], ["<i2", Int16Array],
  ["<u4", Uint32Array], ["<i4", Int32Array], ["<u8", BigUint64Array], ["<i8", BigInt64Array],
  ["<f4", Float32Array], ["<f8", Float64Array],
]);

function refuse(why: string): never {
  throw new DecodeError(why);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kinds of nodes

type Node = null | boolean | number | bigint | string | Node[];

/** Makes the values of one tag. `shell` is what `open` made, for a value that can contain itself. */
interface Kind {
  /** A letter for each entry: s text, i integer, b bytes, l list, * anything but a list, ? anything. */
  header: string;
  children: number | "any" | "pairs";
  make(reader: Reader, header: any[], children: any[], shell: any): unknown;
  open?(header: any[], children: Node[]): unknown;
}

const ENTRIES: Record<string, (entry: Node) => boolean> = {
  s: (entry) => typeof entry === "string",
  i: (entry) => typeof entry === "bigint" || Number.isSafeInteger(entry),
  b: (entry) => typeof entry === "string" || Number.isSafeInteger(entry),
  l: (entry) => Array.isArray(entry),
  "*": (entry) => !Array.isArray(entry),
  "?": () => true,
};

function leaf(header: string, make: (reader: Reader, ...header: any[]) => unknown): Kind {
  return { header, children: 0, make: (reader, entries) => make(reader, ...entries) };
}

function opaque(type: string, text: string, fields?: object, display?: Record<string, string>): OpaqueValue {
  const known = fields as Record<string, unknown> | undefined;
  return new OpaqueValue(type.slice(0, SHOWN_CHARS_MAX), text.slice(0, SHOWN_CHARS_MAX), known, display);
}

const list: Kind = {
  header: "", children: "any", open: () => [],
  make(_reader, _header, children, shell) {
    for (const child of children) shell.push(child);
    return shell;
  },
};
const set: Kind = {
  header: "", children: "any",
  make: (reader, _header, children) => new Set(children.map(reader.key)),
};
const dict: Kind = {
  header: "", children: "pairs",
  open: (_, nodes) => nodes.every((node, at) => at % 2 || typeof node === "string") ? Object.create(null) : new Map(),
  make(reader, _header, children, shell) {
    for (let at = 0; at < children.length; at += 2) {
      if (shell instanceof Map) shell.set(reader.key(children[at]), children[at + 1]);
      else shell[children[at]] = children[at + 1];
    }
    return shell;
  },
};
const record: Kind = {
  header: "sl", children: "any",
  open: ([type]) => opaque(type, type, Object.create(null)),
  make(_reader, [, names], children, shell) {
    if (names.length !== children.length || !names.every(ENTRIES.s)) refuse("a record has other names than values");
    names.forEach((name: string, at: number) => (shell.fields[name] = children[at]));
    return shell;
  },
};
const bytes = leaf("b", (reader, entry) => reader.bytes(entry).slice());

const FLOATS = new Map([["nan", NaN], ["inf", Infinity], ["-inf", -Infinity]]);

const KINDS = new Map<string, Kind>([
  ["str", leaf("b", (reader, entry) => text(reader.bytes(entry)))],
  ["int", leaf("s", (_, digits) => integer(digits))],
  ["float", leaf("s", (_, word) => FLOATS.get(word) ?? refuse("a float node holds another word"))],
  ["bytes", bytes], ["bytearray", bytes],
  ["tuple", { header: "", children: "any", make: (_reader, _header, children) => children }],
  ["list", list], ["deque", { ...list, header: "*" }], ["set", set], ["frozenset", set],
  ["dict", dict], ["ordereddict", dict], ["counter", dict], ["defaultdict", { ...dict, header: "*" }],
  ["record", record], ["namedtuple", record],
  ["numbers", leaf("si", numbers)],
  ["texts", leaf("ii", (reader, whole, lengths) => texts(reader.bytes(whole), reader.bytes(lengths)))],
  ["date", leaf("s", (_, day) => moment(`${day}T00:00:00`, 0))],
  ["datetime", leaf("si", (_, time) => moment(time, 0))],
  ["datetime-zone", {
    header: "si*", children: 1,
    make: (_, [time, , offset]) =>
      typeof offset === "number" ? moment(time, offset) : opaque("datetime.datetime", time),
  }],
  ["opaque", leaf("ss", (_, type, shown) => opaque(type, shown))],
  ["opaque-str", leaf("sss", (_, type, _repr, shown) => opaque(type, shown))],
  ["opaque-display", leaf("sssi", (reader, type, _repr, shown, data) =>
    opaque(type, shown, {}, displayData(reader.bytes(data))))],
  ["enum", {
    header: "s", children: 2,
    make: (_, [type], [name, value]) => opaque(type, ENTRIES.s!(name) ? name : type, { name, value }),
  }],
  ["np.array", leaf("?lsb", array)],
  ["np.scalar", leaf("?b", (reader, dtype, data) => {
    const made = array(reader, dtype, [], "C", data);
    if (made instanceof OpaqueValue) return made;
    return dtype === "|b1" ? made.data[0] === 1 : made.data[0];
  })],
  ["np.objects", {
    header: "l", children: 1,
    make: (_, [shape], [items]) => Array.isArray(items) && items.length === count(shape)
      ? new NdArray("object", shape, "C", items) : refuse("an array has other items than its shape"),
  }],
  ["pil.png", leaf("siib", png)],
  ["pil.raw", leaf("siib", (reader, mode, width, height, data) => {
    reader.bytes(data, 0);
    return opaque("PIL.Image.Image", `image of ${width} x ${height} pixels, mode ${mode}`);
  })],
]);

// Values that are shown by their type and their plain parts: `Decimal(1.50)`. Their headers hold no lists, so each list
// in them is a child.
const OPAQUE = `complex:complex decimal:decimal.Decimal fraction:fractions.Fraction uuid:uuid.UUID path:pathlib.Path
  range:range slice:slice ellipsis:ellipsis time:datetime.time time-zone:datetime.time timedelta:datetime.timedelta
  timezone:datetime.timezone zone:zoneinfo.ZoneInfo pd.index:pandas.Index pd.rangeindex:pandas.RangeIndex
  pd.multiindex:pandas.MultiIndex pd.series:pandas.Series pd.frame:pandas.DataFrame pd.block:pandas.DataFrame
  pd.na:pandas.NA pd.nat:pandas.NaT pd.timestamp:pandas.Timestamp pd.timedelta:pandas.Timedelta
  pd.period:pandas.Period pd.interval:pandas.Interval pd.categories:pandas.array pd.strings:pandas.array
  pd.moments:pandas.array pd.periods:pandas.array pd.intervals:pandas.array pd.masked:pandas.array`;
for (const [tag, type] of OPAQUE.split(/\s+/).map((each) => each.split(":") as [string, string])) {
  KINDS.set(tag, {
    header: "", children: "any",
    make(_reader, _header, parts) {
      const shown = parts.slice(0, SHOWN_PARTS_MAX).filter((part) => typeof part !== "object").join(", ");
      return opaque(type, `${type.slice(type.lastIndexOf(".") + 1)}(${shown})`);
    },
  });
}

const UTF8 = new TextDecoder("utf-8", { ignoreBOM: true });
const STRICT_UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Halves of surrogate pairs, which Python can send, become U+FFFD. */
const text = (data: Uint8Array) => UTF8.decode(data);

function integer(digits: string): bigint | OpaqueValue {
  if (!/^-?[0-9a-f]+$/.test(digits)) refuse("an int node does not hold a hexadecimal number");
  if (digits.length > INT_DIGITS_MAX) return opaque("int", `<an int of ${4 * digits.length} bits>`);
  return digits.startsWith("-") ? -BigInt(`0x${digits.slice(1)}`) : BigInt(`0x${digits}`);
}

function numbers(reader: Reader, code: string, at: number): unknown[] {
  const data = reader.bytes(at);
  if (code === "d") return Array.from(typed(Float64Array, data) as Float64Array);
  if (code !== "q") refuse("a numbers node holds neither integers nor floats");
  return Array.from(typed(BigInt64Array, data) as BigInt64Array, small);
}

const small = (number: bigint) => BigInt.asIntN(54, number) === number ? Number(number) : number;

/** Copies bytes to where a typed array may begin. */
function typed(type: ArrayType, data: Uint8Array): TypedArray {
  if (data.length % type.BYTES_PER_ELEMENT) refuse("a buffer ends within a number");
  return new type(data.slice().buffer);
}

/** Cuts a text into pieces, whose lengths are code points. */
function texts(data: Uint8Array, lengths: Uint8Array): string[] {
  let end = 0;
  const pieces = Array.from(typed(BigUint64Array, lengths) as BigUint64Array, (left) => {
    const start = end;
    for (; end < data.length && (left > 0n || (data[end]! & 0xc0) === 0x80); end++) {
      if ((data[end]! & 0xc0) !== 0x80) left--;
    }
    if (left) refuse("the lengths of a texts node do not add up to its text");
    return start === end ? "" : text(data.subarray(start, end));
  });
  return end === data.length ? pieces : refuse("the lengths of a texts node do not add up to its text");
}

/** A Date has milliseconds; Python's microseconds are cut. A moment without a zone is read as UTC. */
function moment(time: string, offsetS: number): Date {
  const [, seconds, millis = ".000"] = /^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{3})?(?:\d{3})?$/.exec(time) ?? [];
  const utc = Date.parse(`${seconds}${millis}Z`);
  const isGood = Math.abs(offsetS) <= 86_400 && new Date(utc).toISOString() === `${seconds}${millis}Z`;
  return isGood ? new Date(utc - 1000 * offsetS) : refuse("a moment is malformed");
}

/** Reads the texts of a displayed object, by MIME type. */
export function displayData(packed: Uint8Array): Record<string, string> {
  const data: unknown = packed.length <= DISPLAY_BYTES_MAX ? JSON.parse(STRICT_UTF8.decode(packed)) : null;
  const shown = data && typeof data === "object" ? Object.entries(data) : [];
  const isGood = shown.every(([type, value]) => /^[\w.+-]+\/[\w.+-]+$/.test(type) && typeof value === "string");
  return isGood && shown.length && shown.length <= 16 ? Object.fromEntries(shown) : refuse("display data is malformed");
}

function count(shape: number[]): number {
  const isGood = shape.length <= 32 && shape.every((side) => Number.isSafeInteger(side) && side >= 0);
  return isGood ? shape.reduce((product, side) => product * side, 1) : refuse("an array has no proper shape");
}

function array(reader: Reader, dtype: unknown, shape: number[], order: string, at: Entry): NdArray | OpaqueValue {
  const data = reader.bytes(at, SHOWN_ARRAY_BYTES), items = count(shape);
  const type = ARRAYS.get(dtype) ?? (/^<[mM]8(\[\w*\])?$/.test(String(dtype)) && BigInt64Array);
  if (!type) return opaque("numpy.ndarray", `array of shape (${shape.join(", ")}) and dtype ${JSON.stringify(dtype)}`);
  if (items * type.BYTES_PER_ELEMENT !== data.length) refuse("an array has other bytes than its shape");
  return new NdArray(String(dtype), shape, order === "F" ? "F" : "C", typed(type, data));
}

function png(reader: Reader, _mode: string, width: number, height: number, at: Entry): ImageValue {
  const data = reader.bytes(at, 0).slice(), head = new DataView(data.buffer);
  const isPng = data.length > 24 && head.getBigUint64(0) === 0x89504e470d0a1a0an && head.getUint32(12) === 0x49484452;
  if (!isPng || head.getUint32(16) !== width || head.getUint32(20) !== height) refuse("an image is not what it says");
  reader.pixels += width * height;
  if (!width || !height || reader.pixels > PIXELS_MAX) refuse(`the images have no pixels, or more than ${PIXELS_MAX}`);
  return new ImageValue(data, width, height);
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

const TOKEN = /"(?:[^"\\\u0000-\u001f]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[[\],]/y;

/**
 * Parses compact JSON without objects, within the limits, and without losing digits of integers. Token by token:
 * `replace` would collect all tokens first, and 130 million of them end the process.
 */
function parse(json: string): Node {
  const lists: Node[][] = [[]];
  let values = 0, isComplete = false;
  for (let at = 0; at < json.length; at = TOKEN.lastIndex) {
    TOKEN.lastIndex = at;
    const token = TOKEN.exec(json)?.[0] ?? refuse("the tree is not JSON");
    const last = lists[lists.length - 1]!;
    if (token === ",") {
      if (!isComplete || lists.length === 1) refuse("the tree is not JSON");
      isComplete = false;
    } else if (token === "]") {
      if (lists.length === 1 || (!isComplete && last.length)) refuse("the tree is not JSON");
      lists.pop();
      isComplete = true;
    } else {
      if (isComplete || ++values > JSON_VALUES_MAX) refuse("the tree is not JSON, or has too many values");
      isComplete = token !== "[";
      const value = isComplete ? scalar(token) : [];
      last.push(value);
      if (!isComplete && lists.push(value as Node[]) > DEPTH_MAX + HEADER_DEPTH) refuse("the tree is too deep");
    }
  }
  return isComplete && lists.length === 1 ? lists[0]![0]! : refuse("the tree is not JSON");
}

function scalar(token: string): Node {
  const first = token.charCodeAt(0);
  if (first === 0x22) return JSON.parse(token);
  if (first > 0x39) return token === "null" ? null : token === "true";
  if (token.length > 40) refuse("a number has too many digits");
  const number = Number(token);
  if (!Number.isFinite(number)) refuse("a bare number is too large");
  if (Number.isSafeInteger(number) || /[.eE]/.test(token)) return number;
  const exact = BigInt(token);
  return exact <= BARE_INT_MAX && exact >= -BARE_INT_MAX ? exact : refuse("a bare integer has more than 63 bits");
}

/** Bytes in a header: base64, or the number of a buffer. */
type Entry = number | string;

class Reader {
  unfolded = 0;
  pixels = 0;
  chosenKeys = 0;
  constructor(readonly buffers: (Uint8Array | undefined)[]) {}

  /** Returns the bytes of a header's entry; a buffer can be taken once. `shown` is how many of them a text can show. */
  bytes(entry: Entry, shown = Infinity): Uint8Array {
    let data: Uint8Array | undefined;
    if (typeof entry === "string") {
      const binary = atob(entry);
      if (btoa(binary) !== entry) refuse("bytes that are not base64");
      data = Uint8Array.from(binary, (char) => char.charCodeAt(0));
    } else {
      data = this.buffers[entry] ?? refuse(`there is no buffer ${entry}, or it is used twice`);
      this.buffers[entry] = undefined;
    }
    this.unfolded += Math.min(data.length, shown);
    return data;
  }

  /** Counts a key. Texts and objects have secret hashes, and integers of 32 bits differ in theirs. */
  readonly key = (key: unknown): unknown => {
    const isChosen = typeof key === "bigint" || (typeof key === "number" && (key | 0) !== key);
    if (isChosen && ++this.chosenKeys > CHOSEN_KEYS_MAX) refuse(`more than ${CHOSEN_KEYS_MAX} keys are such numbers`);
    return key;
  };
}

/** Returns the value that was packed. Throws DecodeError, and nothing else, for any bytes. */
export function decode(packed: Uint8Array): unknown {
  try {
    return read(packed);
  } catch (error) {
    throw error instanceof DecodeError ? error : new DecodeError(`the value is malformed: ${error}`, { cause: error });
  }
}

function read(packed: Uint8Array): unknown {
  if (packed.length < 16 || packed.length > VALUE_BYTES_MAX) refuse("a value has too few or too many bytes");
  const head = new DataView(packed.buffer, packed.byteOffset, packed.length);
  const buffers = head.getUint32(4), treeAt = 16 + 8 * buffers;
  if (head.getUint32(0) !== MAGIC || buffers > NODES_MAX || treeAt > packed.length) refuse("not a packed value");
  let at = treeAt;
  const next = (offset: number) => {
    const start = at, length = head.getBigUint64(offset);
    if (length > packed.length - start) refuse("a length is wrong");
    return packed.subarray(start, (at += Number(length)));
  };
  const tree = next(8);
  const reader = new Reader(Array.from({ length: buffers }, (_, number) => next(16 + 8 * number)));
  if (at !== packed.length) refuse("a length is wrong");
  return build(parse(STRICT_UTF8.decode(tree)), reader);
}

/** A node whose children are being made. */
function frameOf(kind: Kind, header: Node[], nodes: Node[], shell: unknown, number: number, before: number) {
  return { kind, header, nodes, shell, number, before, next: 0, values: [] as unknown[] };
}

/** Makes the values, with one loop and one stack. Nodes are numbered in the order in which they begin. */
function build(root: Node, reader: Reader): unknown {
  const made: { value: unknown; isReady: boolean; size: number }[] = [];
  const top = frameOf(list, [], [root], undefined, -1, 0), stack = [top];
  let nodes = 1;
  for (let frame = top; ; frame = stack[stack.length - 1]!) {
    if (frame.next === frame.nodes.length) {
      if (frame === top) return top.values[0];
      stack.pop();
      const value = frame.kind.make(reader, frame.header, frame.values, frame.shell);
      made[frame.number] = { value, isReady: true, size: reader.unfolded - frame.before };
      stack[stack.length - 1]!.values.push(value);
      continue;
    }
    const node = frame.nodes[frame.next++]!;
    if (!Array.isArray(node)) {
      if (typeof node === "string") reader.unfolded += node.length;
      frame.values.push(node);
    } else if (node[0] === "ref") {
      const known = made[node.length === 2 && typeof node[1] === "number" ? node[1] : -1];
      if (!known?.isReady) refuse("a reference leads nowhere, or to a value that is not complete");
      reader.unfolded += known.size;
      frame.values.push(known.value);
    } else {
      const kind = (typeof node[0] === "string" && KINDS.get(node[0])) || refuse("a node has an unknown tag");
      const header = node.slice(1, 1 + kind.header.length), children = node.slice(1 + kind.header.length);
      if (header.length < kind.header.length || !header.every((entry, at) => ENTRIES[kind.header[at]!]!(entry))) {
        refuse(`a ${node[0]} node has another header`);
      }
      if (kind.children === "pairs" ? children.length % 2 : ![children.length, "any"].includes(kind.children)) {
        refuse(`a ${node[0]} node has other children`);
      }
      if ((nodes += children.length) > NODES_MAX) refuse(`the value has more than ${NODES_MAX} nodes`);
      if (children.length && stack.length > DEPTH_MAX) refuse(`the value is deeper than ${DEPTH_MAX}`);
      const shell = kind.open?.(header, children), before = reader.unfolded;
      reader.unfolded += VALUE_BYTES * (1 + children.length);
      for (const entry of header) if (typeof entry === "string") reader.unfolded += entry.length;
      stack.push(frameOf(kind, header, children, shell, made.length, before));
      made.push({ value: shell, isReady: kind.open !== undefined, size: 0 });
    }
    if (reader.unfolded > UNFOLDED_BYTES_MAX) refuse("the value unfolds to too much");
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoding

/**
 * Packs a value: null, booleans, numbers, bigints, text, Uint8Array, Date, and arrays, Maps, Sets and plain objects of
 * them. Throws EncodeError for anything else, and for what is too large or refers to itself.
 */
export function encode(value: unknown): Uint8Array<ArrayBuffer> {
  const buffers: Uint8Array[] = [];
  let nodes = 0;
  const buffer = (data: Uint8Array) => buffers.push(data) - 1;

  const each = (tag: string, values: Iterable<unknown>, depth: number) => {
    if (depth >= DEPTH_MAX) throw new EncodeError(`the value is deeper than ${DEPTH_MAX}, or contains itself`);
    let written = `["${tag}"`;
    for (const child of values) written += `,${write(child, depth + 1)}`;
    return `${written}]`;
  };
  const write = (value: unknown, depth: number): string => {
    if (++nodes > NODES_MAX) throw new EncodeError(`the value has more than ${NODES_MAX} nodes`);
    if (value === null || value === undefined) return "null";
    if (typeof value === "boolean") return String(value);
    if (typeof value === "number") return numberText(value);
    if (typeof value === "bigint") return bigintText(value);
    if (typeof value === "string") {
      const isBare = value.length <= INLINE_CHARS_MAX && !/\p{Surrogate}/u.test(value);
      return isBare ? JSON.stringify(value) : `["str",${buffer(new TextEncoder().encode(value))}]`;
    }
    if (value instanceof Uint8Array) return `["bytes",${buffer(value)}]`;
    if (value instanceof Date) {
      const iso = Number.isNaN(value.getTime()) ? "" : value.toISOString();
      if (iso.length !== 24) throw new EncodeError("a Date is none that Python has");
      return `["datetime-zone","${iso.slice(0, -1)}000",0,0,["timezone",0,0,null]]`;
    }
    if (Array.isArray(value)) return each("list", value, depth);
    if (value instanceof Set) return each("set", value, depth);
    if (value instanceof Map) return each("dict", [...value].flat(1), depth);
    const prototype = Object.getPrototypeOf(value);
    if (typeof value === "object" && (prototype === null || prototype === Object.prototype)) {
      return each("dict", Object.entries(value).flat(1), depth);
    }
    const name = typeof value === "object" ? prototype?.constructor?.name ?? "object" : typeof value;
    throw new EncodeError(`a ${name} has no form in Python: send what is in it`);
  };
  const tree = new TextEncoder().encode(write(value, 0));
  return pack(tree, buffers);
}

function numberText(value: number): string {
  if (Number.isNaN(value)) return '["float","nan"]';
  if (!Number.isFinite(value)) return `["float","${value > 0 ? "" : "-"}inf"]`;
  if (Object.is(value, -0)) return "-0.0";
  // Without an exponent it would be an integer, and be refused past 63 bits.
  return Number.isInteger(value) && !Number.isSafeInteger(value) ? value.toExponential() : String(value);
}

function bigintText(value: bigint): string {
  if (value <= BARE_INT_MAX && value >= -BARE_INT_MAX) return String(value);
  const digits = value.toString(16);
  if (digits.length > INT_DIGITS_MAX) throw new EncodeError(`an integer has more than ${4 * INT_DIGITS_MAX} bits`);
  return `["int","${digits}"]`;
}

function pack(tree: Uint8Array, buffers: Uint8Array[]): Uint8Array<ArrayBuffer> {
  const treeAt = 16 + 8 * buffers.length;
  const size = buffers.reduce((sum, each) => sum + each.length, treeAt + tree.length);
  if (size > VALUE_BYTES_MAX) throw new EncodeError(`the value takes ${size} bytes; the limit is ${VALUE_BYTES_MAX}`);
  const packed = new Uint8Array(size), head = new DataView(packed.buffer);
  head.setUint32(0, MAGIC);
  head.setUint32(4, buffers.length);
  head.setBigUint64(8, BigInt(tree.length));
  let at = treeAt;
  packed.set(tree, at);
  at += tree.length;
  buffers.forEach((each, number) => {
    head.setBigUint64(16 + 8 * number, BigInt(each.length));
    packed.set(each, at);
    at += each.length;
  });
  return packed;
}
