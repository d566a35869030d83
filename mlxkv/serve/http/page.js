"use strict";
const $ = (id) => document.getElementById(id);
const STORE = "mlxkv.chats", KEY = "mlxkv.key";
let chats = load(), at = 0, running = null;

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    if (Array.isArray(found) && found.length) return found;
  } catch { /* not JSON */ }
  return [{ messages: [] }];
}

function save() {
  try { localStorage.setItem(STORE, JSON.stringify(chats)); } catch { /* full: kept until the page closes */ }
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (bytes >= 1024 && i < 3) { bytes /= 1024; i++; }
  return `${bytes.toFixed(i ? 1 : 0)} ${units[i]}`;
}

async function ask(path, options = {}) {
  const key = localStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    const given = prompt("API key of this server");
    if (given) { localStorage.setItem(KEY, given); return ask(path, options); }
  }
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* not an error of this server */ }
    throw new Error(message || `status ${response.status}`);
  }
  return response;
}

// Show a reply as text and code blocks, never as HTML.
function fill(element, text) {
  element.replaceChildren(...text.split(/^```.*$/m).map((part, i) => {
    const node = document.createElement(i % 2 ? "pre" : "div");
    node.className = i % 2 ? "" : "text";
    node.textContent = i % 2 ? part.replace(/^\n/, "") : part;
    return node;
  }));
}

function turn(message) {
  const node = document.createElement("article");
  node.className = `turn ${message.role}`;
  const text = document.createElement("div"), note = document.createElement("small");
  if (message.role === "user") text.textContent = message.content; else fill(text, message.content);
  note.textContent = message.note || "";
  note.className = message.failed ? "bad" : "";
  node.append(text, note);
  return { node, text, note };
}

function show() {
  $("log").replaceChildren(...chats[at].messages.map((message) => turn(message).node));
  $("chats").replaceChildren(...chats.map((chat, i) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.textContent = chat.messages[0]?.content.slice(0, 60) || "New chat";
    button.setAttribute("aria-current", i === at);
    button.onclick = () => go(i);
    item.append(button);
    return item;
  }));
  $("log").scrollTop = $("log").scrollHeight;
  $("text").focus();
}

function go(i) { stop(); at = (i + chats.length) % chats.length; show(); }

function fresh() {
  stop();
  if (chats[0].messages.length) chats.unshift({ messages: [] });
  at = 0;
  show();
}

function remove() {
  stop();
  chats.splice(at, 1);
  if (!chats.length) chats = [{ messages: [] }];
  at = Math.min(at, chats.length - 1);
  save();
  show();
}

function stop() { running?.abort(); running = null; $("send").textContent = "Send"; }

function summary(usage, kv, seconds) {
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (usage && seconds > 0) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  if (kv?.bytes) parts.push(`cache ${size(kv.bytes)}, fp16 ${size(kv.bytes_fp16)}`, `${kv.cached_tokens} tokens reused`);
  return parts.join(" · ");
}

// Yield the JSON of each server-sent event of a response.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function send(text) {
  const chat = chats[at], control = new AbortController();
  running = control;
  $("send").textContent = "Stop";
  chat.messages.push({ role: "user", content: text });
  const messages = chat.messages.filter((m) => !m.failed).map(({ role, content }) => ({ role, content }));
  const reply = { role: "assistant", content: "", note: "" };
  chat.messages.push(reply);
  show();
  const { node, text: body, note } = turn(reply);
  $("log").lastChild.replaceWith(node);
  let usage = null, kv = null, first = 0;
  try {
    const request = { messages, stream: true, stream_options: { include_usage: true } };
    const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(request), signal: control.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content || "";
      first ||= performance.now();
      usage = event.usage || usage;
      kv = event.kv || kv;
      if (!piece) continue;
      const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
      reply.content += piece;
      fill(body, reply.content);
      if (near) $("log").scrollTop = $("log").scrollHeight;
    }
    reply.note = summary(usage, kv, (performance.now() - first) / 1000);
  } catch (error) {
    reply.failed = error.name !== "AbortError" && !reply.content;
    reply.note = error.name === "AbortError" ? "stopped" : error.message;
  }
  note.textContent = reply.note;
  note.className = reply.failed ? "bad" : "";
  if (running === control) stop();
  save();
  gauge();
}

async function gauge() {
  if (document.hidden) return;
  try {
    const kv = await (await ask("/v1/kv")).json(), memory = kv.memory;
    $("model").textContent = kv.model;
    $("preset").textContent = `--kv ${kv.kv}`;
    $("preset").title = kv.report.join("\n");
    document.title = `${kv.model} · mlxkv`;
    if (memory.bytes === undefined) return;  // told to the first key alone
    const most = Math.max(memory.bytes, memory.bytes_fp16, 1);
    $("level").style.width = `${100 * memory.bytes / most}%`;
    $("level").parentNode.setAttribute("aria-valuemax", most);
    $("level").parentNode.setAttribute("aria-valuenow", memory.bytes);
    $("memory").textContent = `cache ${size(memory.bytes)} of ${size(memory.bytes_fp16)} in fp16`;
  } catch (error) { $("memory").textContent = error.message; }
}

function grow() { const t = $("text"); t.style.height = "auto"; t.style.height = `${t.scrollHeight + 2}px`; }

$("ask").onsubmit = (event) => {
  event.preventDefault();
  if (running) return stop();
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  grow();
  send(text);
};
$("text").oninput = grow;
$("new").onclick = fresh;
document.onkeydown = (event) => {
  const control = event.ctrlKey || event.metaKey;
  if (event.key === "Enter" && !event.shiftKey && event.target === $("text") && !event.isComposing) {
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  } else if (event.key === "Escape") stop();
  else if (control && event.key === "k") { event.preventDefault(); fresh(); }
  else if (event.altKey && event.key === "ArrowUp") { event.preventDefault(); go(at - 1); }
  else if (event.altKey && event.key === "ArrowDown") { event.preventDefault(); go(at + 1); }
  else if (event.altKey && event.key === "Backspace") { event.preventDefault(); remove(); }
  else if (event.key === "/" && event.target !== $("text")) { event.preventDefault(); $("text").focus(); }
};
show();
gauge();
setInterval(gauge, 2000);
