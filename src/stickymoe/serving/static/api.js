// Requests to the server, and the stream of an answer.

const KEY = "stickymoe-key";
const CLOSED = "The answer ended early: the connection to the server is closed.";

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => sessionStorage.setItem(KEY, key);

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(extra = {}) {
  const key = storedKey();
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function request(path, init = {}) {
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not answer. Check that stickymoe serve is still running.", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const wait = response.headers.get("Retry-After");
  const message = body?.error?.message ?? `The server answered ${path} with status ${response.status}.`;
  throw new RequestError(wait ? `${message} Try again in ${wait} s.` : message, response.status);
}

export async function models() {
  return (await (await request("/v1/models", { headers: headers() })).json()).data;
}

export async function trace(path) {
  return (await request(path, { headers: headers() })).blob();
}

// The payloads of the server-sent events in a response, up to [DONE].
async function* payloads(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new RequestError(CLOSED, 0);
    });
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        const payload = data.join("\n");
        data = [];
        if (payload === "[DONE]") return;
        yield JSON.parse(payload);
      }
    }
    if (done) throw new RequestError(CLOSED, 0);
  }
}

// Yields {text, event, finish} for each chunk of an answer.
export async function* complete(model, prompt, options, signal) {
  const { chat } = model.stickymoe;
  const body = { model: model.id, stream: true, ...options };
  if (chat) body.messages = [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  const response = await request(chat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal,
  });
  for await (const chunk of payloads(response)) {
    if (chunk.error) throw new RequestError(chunk.error.message, 200);
    const choice = chunk.choices[0];
    if (!choice) continue;
    const text = (chat ? choice.delta?.content : choice.text) ?? "";
    yield { text, event: chunk.stickymoe ?? null, finish: choice.finish_reason };
  }
}
