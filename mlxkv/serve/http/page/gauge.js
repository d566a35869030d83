// What caches take: of this chat, and of all chats of the server.
import { ask } from "./api.js";
import { $, count, h, size } from "./dom.js";

export let server = {};  // the document of /v1/kv
export let context;  // tokens that the model of the chat takes, where that is known
let shown = "";

// The model that a chat asks for: none, which is the first, where the server does not have it any more.
export const modelOf = ({ settings: { model } }) => (!server.models || server.models.includes(model) ? model : undefined);

// What the server says of a chat's model, unless that is not loaded yet.
const documentOf = (chat) => ([undefined, server.model].includes(modelOf(chat)) ? server : server.others?.[modelOf(chat)]);

export const contextOf = (chat, kv) => kv?.context ?? documentOf(chat)?.context;

// Ask the server again.
export async function refresh() {
  try {
    server = await (await ask("/v1/kv", {}, true)).json();
    $("model").textContent = server.model;
    $("preset").textContent = `--kv ${server.kv}`;
    $("preset").title = server.report.join("\n");
    document.title = `${server.model} · mlxkv`;
    return true;
  } catch (error) {
    $("preset").textContent = error.message;
    return false;
  }
}

// Why the figures of a cache are no saving, or "".
export function note(kv) {
  return kv.note || (kv.bytes < kv.bytes_fp16 ? "" : "nothing compressed");
}

// "64 %", or "" where nothing is saved.
const saved = (kv) => (note(kv) ? "" : `${Math.round(100 * (1 - kv.bytes / kv.bytes_fp16))} %`);

// Show the cache of a chat as its last reply told it, and those of its model.
export function show(chat) {
  const kv = chat.path().findLast((message) => message.kv)?.kv;
  context = contextOf(chat, kv);
  const all = documentOf(chat)?.memory || {}, rows = [], seen = JSON.stringify([kv, all, server.kv, context]);
  if (seen === shown) return;
  shown = seen;
  if (kv) rows.push(["This chat", count(kv.tokens), kv.bytes, kv.bytes_fp16, note(kv)]);
  if (all.bytes !== undefined) rows.push(["All chats here", "", all.bytes, all.bytes_fp16, all.bytes_fp16 && all.bytes < all.bytes_fp16 ? "" : "nothing saved yet"]);
  // The bar is how full the context is; nothing is said before there is a cache.
  const share = kv && context ? Math.min(1, kv.tokens / context) : 0;
  const used = kv ? `${count(kv.tokens)}${context ? ` of ${count(context)}` : ""}` : "", gain = kv ? saved(kv) : "";
  $("memory").replaceChildren(...(kv ? [h("b", { text: used }), h("span", { class: "wide", text: " tokens" }), gain ? ` · saves ${gain}` : ""] : ["Memory"]));
  $("level").parentNode.hidden = !kv || !context;
  $("level").style.width = `${100 * share}%`;
  $("level").parentNode.setAttribute("aria-valuenow", Math.round(100 * share));
  $("level").parentNode.setAttribute("aria-valuetext", kv ? `${used} tokens of the context` : "no reply yet");
  const head = ["", "Tokens", "In use", "In 16 bits", "Saved"].map((text) => (text ? h("th", { scope: "col", text }) : h("td")));
  const body = rows.map(([name, tokens, bytes, half, why]) => h("tr", {}, h("th", { scope: "row", text: name }), h("td", { text: tokens }),
    h("td", { text: size(bytes) }), h("td", { text: size(half) }), h("td", { text: why ? "–" : saved({ bytes, bytes_fp16: half }) })));
  const lines = [];
  if (!kv) lines.push("This chat has no cache yet: figures come with the first reply.");
  else if (note(kv)) lines.push(`This chat: ${note(kv)}.`);
  const room = [[kv, "this chat"], [all, "all"]].filter(([one]) => one?.allocated_bytes).map(([one, name]) => `${size(one.allocated_bytes)} for ${name}`);
  const once = all.bytes > all.allocated_bytes ? "; shared parts count for each chat but are stored once" : "";
  if (room.length) lines.push(`Allocated, with room to grow: ${room.join(", ")}${once}.`);
  if (all.bound_bytes) lines.push(`Limit for all caches (--kv-memory): ${size(all.bound_bytes)}${all.promised_bytes ? `, ${size(all.promised_bytes)} set aside for replies under way` : ""}.`);
  if (kv && all.bytes < kv.bytes) lines.push("A chat takes less at rest than during a reply.");
  lines.push("In use: the bytes that hold tokens. In 16 bits: what the same tokens take without compression.");
  const told = documentOf(chat)?.chosen;
  if (told) lines.push(`Chosen for ${told}.`);
  if (context) lines.push(`Context of this model: ${count(context)} tokens.`);
  $("figures").replaceChildren(...(rows.length ? [h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...body))] : []), ...lines.map((text) => h("p", { text })));
}
