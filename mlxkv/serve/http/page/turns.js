// One message on the screen, with what can be done with it.
import { answered } from "./chats.js";
import { button, copy, count, h, seconds, size } from "./dom.js";
import { contextOf, note } from "./gauge.js";
import { render } from "./markdown.js";

const EXAMPLES = ["Explain what a KV cache is, in three sentences.", "Write a haiku about the sea.", "Give me three ideas for a quick dinner."];

// What an empty chat shows: the model, and prompts to begin with. ask(text): sends one.
export function hello(ask) {
  return h("div", { class: "hello" },
    h("h2", { text: "What would you like to know?" }),
    h("div", { class: "examples" }, ...EXAMPLES.map((text) => button(text, () => ask(text)))),
    h("p", { text: "Chats stay in this browser." }));
}

// The element of a message. acts: what the buttons do. chat: tells versions, and whether a reply runs.
export function turn(message, chat, acts) {
  const mine = message.role === "user";
  const node = h("article", { class: `turn ${message.role}`, "data-id": message.id });
  node.append(h("h2", { class: "unseen", text: mine ? "You" : "Reply" }));
  if (mine) node.append(...files(message), h("div", { class: "body", text: message.content }));
  else {
    node.append(
      h("details", { class: "reasoning", hidden: true }, h("summary"), h("div", { class: "thoughts", tabindex: "0", role: "region", "aria-label": "Reasoning" })),
      h("div", { class: "waiting", hidden: true }, h("span"), h("progress", { "aria-label": "Prompt read" })),
      h("div", { class: "body" }),
      h("div", { class: "ending", hidden: true }),
    );
  }
  node.append(h("footer"));
  update(node, message, chat, acts);
  return node;
}

// Bring an element up to its message.
export function update(node, message, chat, acts) {
  if (message.role === "assistant") {
    thoughts(node, message);
    waiting(node, message);
    render(node.querySelector(".body"), message.content);
    node.setAttribute("aria-busy", message.state === "running");
    ending(node.querySelector(".ending"), message, chat, acts);
  } else ending(null, message, chat, acts);
  foot(node.querySelector("footer"), message, chat, acts);
}

function files(message) {
  return (message.files || []).map((file) => h("details", { class: "file" },
    h("summary", { text: `${file.name} · ${size(file.size)}` }),
    h("pre", { tabindex: "0", role: "region", "aria-label": file.name, text: file.text })));
}

function thoughts(node, message) {
  const box = node.querySelector(".reasoning");
  box.hidden = !message.reasoning;
  if (!message.reasoning) return;
  const over = message.content || message.state !== "running";
  const took = message.thinkSeconds ? ` for ${seconds(message.thinkSeconds)}` : "";
  box.firstChild.textContent = over ? `Thought${took}` : "Thinking…";
  if (box.open || over) render(box.lastChild, message.reasoning);
  box.ontoggle = () => render(box.lastChild, message.reasoning);
}

function waiting(node, message) {
  const box = node.querySelector(".waiting"), [words, bar] = box.children;
  box.hidden = message.state !== "running" || Boolean(message.content || message.reasoning);
  if (box.hidden) return;
  if (!message.live) { words.textContent = "Being written in another tab…"; bar.removeAttribute("value"); return; }
  const passed = (performance.now() - message.began) / 1000, progress = message.progress;
  if (!progress) { words.textContent = `Waiting for the model… ${seconds(passed)}`; bar.removeAttribute("value"); return; }
  bar.max = progress.all;
  bar.value = progress.read;
  const left = (progress.all - progress.read) * (progress.at - message.began) / 1000 / Math.max(1, progress.read);
  words.textContent = `Reading ${count(progress.read)} of ${count(progress.all)} tokens`
    + (progress.read < progress.all && progress.read ? ` · about ${seconds(left)} left` : "");
}

const WHY = {
  failed: (m) => `No reply: ${m.error || "it failed"}`,
  lost: (m) => m.error,
  stopped: () => "Stopped.",
  interrupted: () => "The page was closed or reloaded during this reply.",
};

// Why a reply is not whole, and what can be done about it.
function ending(box, message, chat, acts) {
  if (!box) return;
  const { state } = message, some = answered(message) || message.reasoning;
  const { prompt_tokens: read = 0, completion_tokens: written = 0 } = message.usage || {};
  const context = contextOf(chat, message.kv), full = state === "cut" && context && read + written >= context;
  let words = "";
  if (state === "cut") {
    words = full ? `The context is full: ${count(context)} tokens. Start a new chat.` : `Cut off at ${count(written)} tokens, the longest reply that you allowed.`;
  } else if (WHY[state]) words = WHY[state](message);
  else if (state === "done" && !some) words = "The model ended its reply at once.";
  box.hidden = !words;
  box.className = `ending ${["failed", "lost"].includes(state) ? "bad" : ""}`;
  const last = message.id === chat.leaf, mark = words + state + acts.busy() + last;
  if (!words || box.dataset.mark === mark) return;  // buttons that have the focus stay
  box.dataset.mark = mark;
  box.replaceChildren(h("span", { text: words }));
  if (acts.busy()) return;
  if (some && state !== "done" && !full && last) box.append(button("Continue", () => acts.go(message)));
  if (state === "cut" && !full) box.append(button("Longest reply…", acts.settings));
  if (!some) {
    box.append(button("Retry", () => acts.retry(message)));
    box.append(h("span", { class: "about", text: "A question without a reply is left out of what the model reads next." }));
  }
}

function summary(message) {
  const { usage, kv, rate, readSeconds } = message, parts = [];
  if (usage) parts.push(`${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`);
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (readSeconds > 1) parts.push(`${seconds(readSeconds)} to first token`);
  if (kv?.bytes) parts.push(`cache ${size(kv.bytes)}${note(kv) ? "" : ` of ${size(kv.bytes_fp16)}`}`);
  if (kv?.cached_tokens) parts.push(`${count(kv.cached_tokens)} tokens reused`);
  return parts.join(" · ");
}

function foot(node, message, chat, acts) {
  const busy = acts.busy(), versions = chat.versions(message), at = versions.findIndex((one) => one.id === message.id);
  const mark = [message.state, busy, at, versions.length, Boolean(message.usage)].join();
  if (node.dataset.mark === mark) return;
  node.dataset.mark = mark;
  node.replaceChildren();
  if (message.state === "running") return;
  const group = h("div", { class: "acts" });
  if (message.content) group.append(button("Copy", (event) => copy(message.content, event.currentTarget), { "aria-label": message.role === "user" ? "Copy message" : "Copy reply" }));
  if (!busy && message.role === "user") group.append(button("Edit", () => acts.edit(message)));
  if (!busy && message.role === "assistant" && answered(message)) group.append(button("Regenerate", () => acts.retry(message), { title: chat.settings.temperature === 0 ? "At temperature 0 you get the same reply again: see Settings" : null }));
  if (versions.length > 1) {
    const to = (i) => () => acts.choose(versions[i], at);
    group.append(h("span", { class: "versions" },
      button("‹", to(at - 1), { "aria-label": "Version before", disabled: busy || at === 0 }),
      h("span", { text: `${at + 1} / ${versions.length}` }),
      button("›", to(at + 1), { "aria-label": "Version after", disabled: busy || at === versions.length - 1 })));
  }
  node.append(group);
  if (message.role === "assistant") node.append(h("small", { text: summary(message) }));
}

// Let the user change a message in its place; send(text) is called with what it became.
export function editor(node, message, send, cancel) {
  const area = h("textarea", { "aria-label": "Edit message", rows: Math.min(12, message.content.split("\n").length + 1) });
  area.value = message.content;
  const form = h("form", { class: "edit" }, area, h("div", { class: "row" }, button("Cancel", cancel), h("button", { text: "Send" })));
  form.onsubmit = (event) => { event.preventDefault(); if (area.value.trim() || message.files?.length) send(area.value.trim()); };
  node.querySelector(".body").replaceWith(form);
  node.querySelector("footer").replaceChildren();
  area.focus();
}
