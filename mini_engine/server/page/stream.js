// Server-sent events over fetch: unlike EventSource it can send a body and an API key.

let key = "";
export const setKey = (value) => { key = value; };

export class HttpError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function send(path, body, signal) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    const detail = said.error?.message ?? said.detail ?? answer.statusText;
    throw new HttpError(answer.status, typeof detail === "string" ? detail : JSON.stringify(detail));
  }
  return answer;
}

export async function* events(path, body, signal) {
  const reader = (await send(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2)));
      if (fields.event) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}
