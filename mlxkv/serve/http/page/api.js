// Requests to the server, with the key that it may ask for.
import { $ } from "./dom.js";

const KEY = "mlxkv.key";
let asking = null, declined = false;

const stored = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
let key = stored();

// Ask for the key, once for all requests that wait for it. Returns whether there is one now.
function unlock() {
  asking ||= new Promise((done) => {
    const box = $("locked");
    box.returnValue = "";
    box.onclose = () => {
      asking = null;
      if (box.returnValue !== "save" || !$("key").value.trim()) { declined = true; return done(false); }
      key = $("key").value.trim();
      try { localStorage.setItem(KEY, key); } catch { /* until the page closes */ }
      done(true);
    };
    $("key").value = "";
    $("cancel-key").onclick = () => box.close();
    box.showModal();
  });
  return asking;
}

// fetch, with errors in the server's own words. again: of a request that comes every few seconds, which
// does not ask for a key that the user has not given once.
export async function ask(path, options = {}, again = false) {
  const used = key;
  const headers = { "Content-Type": "application/json", ...(used && { Authorization: `Bearer ${used}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `mlxkv serve` still running?");
  }
  if (response.status === 401 && !(again && declined) && (used !== key || await unlock())) return ask(path, options, again);
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error.message; } catch { /* not an error of this server */ }
  throw Object.assign(new Error(message || `status ${response.status}`), { status: response.status });
}

// Yield what a stream says: {progress: [done, total]} while the prompt is read, then the documents.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const read = /^: keepalive (\d+)\/(\d+)/.exec(line);
      if (read) yield { progress: [Number(read[1]), Number(read[2])] };
      else if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
