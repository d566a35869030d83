// A reply under way: asked for, read as it comes, kept as it grows.
import { ask, events } from "./api.js";
import { plain, said } from "./chats.js";
import * as store from "./store.js";
import { say } from "./dom.js";
import { modelOf, refresh, server } from "./gauge.js";

const BEAT = 700;  // ms between two savings of a reply that grows
const runs = new Map();  // chat -> the AbortController of its reply, and the reply

// Keep a chat for a reply that is about to begin. Returns null where one is under way.
export function claim(chat) {
  if (runs.has(chat.id)) return null;
  const control = new AbortController();
  runs.set(chat.id, { control, reply: null });
  return control;
}

// What a message is from the moment on that its reply was asked for.
export const asked = () => ({ live: true, state: "running", began: performance.now(), tab: store.tab, beat: Date.now(), error: undefined, progress: null });

export const running = (chat) => runs.has(chat.id);
export const stop = (chat) => runs.get(chat.id)?.control.abort();
export const underWay = () => [...runs.values()].filter(({ reply }) => reply).map(({ reply }) => plain(reply));

const FIELDS = { temperature: "temperature", maxTokens: "max_tokens" };
const VARIED = 0.8;  // of a reply that is asked for again and must differ
const FEWEST = 10, SHORTEST = 0.2;  // tokens and seconds of a reply whose speed means something

function body(chat, reply, more) {
  const { settings } = chat, out = { messages: chat.request(reply.parent), stream: true };
  for (const [own, name] of Object.entries(FIELDS)) if (settings[own] !== undefined) out[name] = settings[own];
  const model = modelOf(chat);
  if (model) out.model = model;
  out.max_tokens ??= -1;  // until the context is full
  if (reply.varied) out.temperature ??= VARIED;
  if (settings.thinking) out.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (more) {  // a reply that was cut off is the start of what is asked for
    out.messages.push(said(reply));
    out.continue_final_message = true;
  }
  return JSON.stringify({ ...out, stream_options: { include_usage: true } });
}

// Write a reply into its message. control: of `claim`. more: go on with what it holds. changed(): shows
// the message.
export async function talk(chat, reply, control, changed, more = false) {
  runs.set(chat.id, { control, reply });
  const before = more ? reply.usage?.completion_tokens || 0 : 0, held = more ? reply.content + (reply.reasoning || "") : "";
  Object.assign(reply, asked());
  let saved = 0, first = 0, finish = null, thought = 0, usage = null;
  const keep = async (now) => {
    if (!now && performance.now() - saved < BEAT) return;
    saved = performance.now();
    reply.beat = Date.now();
    try { await store.saveMessage(plain(reply)); } catch { chat.unkept = true; }
  };
  // While a prompt is read nothing else would tell other tabs that this one is alive.
  const timer = setInterval(() => keep(true), 2 * BEAT);
  changed();
  try {
    await keep(true);
    if (!server.model) await refresh();  // a page that was just opened does not know yet which models there are
    const response = await ask("/v1/chat/completions", { method: "POST", body: body(chat, reply, more), signal: control.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.progress) { reply.progress = { read: event.progress[0], all: event.progress[1], at: performance.now() }; changed(); keep(false); continue; }
      const choice = event.choices?.[0], delta = choice?.delta || {};
      usage = event.usage || usage;
      reply.kv = event.kv || reply.kv;
      finish = choice?.finish_reason || finish;
      const thinking = delta.reasoning ?? delta.reasoning_content;
      if (!thinking && !delta.content) continue;
      if (!first) { first = performance.now(); reply.readSeconds = (first - reply.began) / 1000; }
      if (thinking) { reply.reasoning = (reply.reasoning || "") + thinking; thought ||= performance.now(); }
      if (delta.content) {
        if (thought && !reply.content) reply.thinkSeconds = (reply.thinkSeconds || 0) + (performance.now() - thought) / 1000;
        reply.content += delta.content;
      }
      changed();
      keep(false);
    }
    reply.state = finish === "length" ? "cut" : finish ? "done" : "lost";
    if (reply.state === "lost") reply.error = "The connection ended before the reply did.";
  } catch (error) {
    const stopped = error.name === "AbortError", grew = reply.content + (reply.reasoning || "") !== held;
    reply.state = stopped ? "stopped" : grew || more ? "lost" : "failed";
    reply.error = stopped ? undefined : error.message;
  }
  clearInterval(timer);
  if (usage) {
    const took = (performance.now() - first) / 1000;
    reply.rate = first && usage.completion_tokens >= FEWEST && took > SHORTEST ? (usage.completion_tokens - 1) / took : undefined;
    // What it held already was read as a prompt this time.
    reply.usage = { prompt_tokens: usage.prompt_tokens - before, completion_tokens: usage.completion_tokens + before };
  }
  reply.content = reply.content.replace(/\uFFFD+$/, "");  // half a character
  reply.progress = null;
  await keep(true);  // under way until it is kept: a page that closes meanwhile saves it (`underWay`)
  if (runs.get(chat.id)?.control === control) runs.delete(chat.id);
  reply.live = false;
  say({ done: "Reply finished", cut: "Reply cut off", stopped: "Stopped" }[reply.state] || `Failed: ${reply.error}`);
  changed(true);
}
