// The page to try the gateway. The output of programs is untrusted: it is shown only as text and images.

const TEXT_MAX = 200_000;
const $ = (id) => document.getElementById(id);
const description = await (await fetch("/openapi.json")).json();
const schemas = description.components.schemas;

function request(path, body, signal) {
  const token = $("token").value.trim();
  const headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
  return fetch(path, { method: "POST", headers, body, signal });
}

function shown(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

// --- /v1/run

$("run").addEventListener("click", async () => {
  const result = $("run-result");
  $("run").disabled = true;
  $("run-state").textContent = "running …";
  result.replaceChildren();
  try {
    const imports = $("imports").value.split(",").map((name) => name.trim()).filter(Boolean);
    const response = await request("/v1/run", JSON.stringify({ code: $("code").value, authorized_imports: imports }));
    const answer = await response.json();
    $("run-state").textContent = response.ok ? answer.outcome : answer.code;
    result.append(...(response.ok ? parts(answer) : [shown("pre", answer.message, "error")]));
  } catch (error) {
    $("run-state").textContent = String(error);
  } finally {
    $("run").disabled = false;
  }
});

function* parts(result) {
  if (result.logs) yield shown("pre", result.logs);
  if (result.output_text !== null) yield shown("pre", result.output_text);
  if (result.error) yield shown("pre", result.error.traceback || result.error.message, "error");
  for (const { mime_type, data } of result.images) {
    if (data === null) continue;
    const image = document.createElement("img");
    image.src = `data:${mime_type};base64,${data}`;
    image.alt = "an image that the program displayed";
    yield image;
  }
  for (const { path, size_bytes, data } of result.files) {
    const entry = shown("p", `${path} (${size_bytes} bytes) `);
    if (data !== null) {
      const link = shown("a", "save");
      link.href = `data:application/octet-stream;base64,${data}`;
      link.download = path.split("/").at(-1);
      entry.append(link);
    }
    yield entry;
  }
}

// --- any method

const operations = Object.entries(description.paths)
  .map(([path, { post }]) => ({ path, ...post, schema: post.requestBody.content["application/json"]?.schema }))
  .filter(({ schema }) => schema); // a stream of requests needs a Connect library
$("method").append(...operations.map(({ operationId }) => shown("option", operationId)));
$("method").addEventListener("change", chosen);
chosen();

function operation() {
  return operations[$("method").selectedIndex];
}

function chosen() {
  const { path, description: about, summary, schema } = operation();
  const { properties = {} } = named(schema);
  $("about").textContent = `${path} — ${about ?? summary ?? ""}`;
  $("request").value = JSON.stringify(Object.fromEntries(Object.entries(properties).map(sample)), null, 2);
  $("fields").textContent = Object.entries(properties).map(([name, of]) => `${name}: ${of.description ?? ""}`).join("\n");
}

function named(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
}

function sample([name, property]) {
  if (name === "requestId" || name === "executionId" || name === "processId") return [name, crypto.randomUUID?.() ?? "1"];
  if (name === "code") return [name, "1 + 1"];
  const schema = named(property);
  const type = Array.isArray(schema.type) ? schema.type[0] : schema.type;
  if (schema.enum) return [name, schema.enum[0]];
  return [name, schema.format === "int64" ? null : ({ string: "", array: [], object: {} }[type] ?? null)]; // null: not set
}

let leaving;
$("stop").addEventListener("click", () => leaving?.abort());
$("call").addEventListener("click", async () => {
  leaving = new AbortController();
  const answer = $("answer");
  answer.textContent = "";
  $("call").disabled = true;
  $("stop").disabled = false;
  $("call-state").textContent = "waiting …";
  try {
    const response = await request(operation().path, $("request").value, leaving.signal);
    $("call-state").textContent = `${response.status} ${response.statusText}`;
    const streams = response.headers.get("content-type") === "application/x-ndjson";
    let text = "";
    for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
      text = (text + piece).slice(-TEXT_MAX);
      answer.textContent = text;
    }
    if (!streams) answer.textContent = JSON.stringify(JSON.parse(text), null, 2);
  } catch (error) {
    $("call-state").textContent = error.name === "AbortError" ? "left" : String(error);
  } finally {
    $("call").disabled = false;
    $("stop").disabled = true;
  }
});

async function* pieces(stream) {
  // Not every browser iterates over a stream by itself.
  const reader = stream.getReader();
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) yield value;
}
