// The chat page: joins the parts.
import { Chat, answered } from "./chats.js";
import { $, h, notice } from "./dom.js";
import * as files from "./files.js";
import * as gauge from "./gauge.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";
import { asked, claim, running, stop, talk, underWay } from "./talk.js";
import { editor, hello, turn, update } from "./turns.js";

const AT = "mlxkv.at";
const open = new Map();  // chats with a reply under way, and the one on the screen
let chat = Chat.fresh(settings.usual()), nodes = new Map(), wanted = new Set();

const acts = {
  busy: () => running(chat),
  fresh: () => go(Chat.fresh(settings.usual())),
  open: async (id) => go(open.get(id) || await Chat.load(id) || Chat.fresh(settings.usual())),
  removed: async (id) => {
    if (open.has(id)) stop(open.get(id));
    if (id === chat.id) await acts.fresh(); else list();
  },
  list: () => list(),
  settings: () => settings.edit(chat, show),
  // A reply that has nothing is written anew, any other gets a version beside it.
  retry: async (message) => {
    if (answered(message) || message.reasoning || message.id !== chat.leaf) return reply(message.parent, chat, undefined, true);
    await write(chat, Object.assign(chat.messages.get(message.id), { usage: undefined, kv: undefined }), false);
  },
  go: (message) => write(chat, chat.messages.get(message.id), true),
  choose: async (message, before) => {
    await chat.choose(message);
    show();
    const buttons = nodes.get(message.id)?.querySelectorAll(".versions button");
    const next = buttons?.[chat.versions(message).findIndex((one) => one.id === message.id) > before ? 1 : 0];
    (next?.disabled ? [...buttons].find((one) => !one.disabled) : next)?.focus();
  },
  edit: (message) => editor(nodes.get(message.id), message, async (content) => {
    const on = chat, control = claim(on);
    if (!control) return;
    const made = await on.add({ role: "user", content, files: message.files, parent: message.parent });
    await reply(made.id, on, control);
  }, () => { nodes.delete(message.id); show(); }),
};

// -- what is on the screen

// Show the messages of the chat; elements of those that stay are kept.
function show(end = false) {
  const before = nodes, log = $("log"), near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  nodes = new Map();
  for (const message of chat.path()) {
    const node = before.get(message.id) || turn(message, chat, acts);
    if (before.has(message.id)) update(node, message, chat, acts);
    nodes.set(message.id, node);
  }
  const shown = nodes.size ? [...nodes.values()] : [log.querySelector(".hello") || hello(begin_with)];
  for (const node of [...log.children]) if (!shown.includes(node)) node.remove();
  shown.forEach((node, i) => { if (log.children[i] !== node) log.insertBefore(node, log.children[i] || null); });
  $("send").textContent = running(chat) ? "Stop" : "Send";
  $("settings").classList.toggle("set", Object.keys(chat.settings).length > 0);
  gauge.show(chat);
  if (end || near) log.scrollTop = log.scrollHeight;
}

// Show messages that have changed, once for all changes until the next frame.
function soon(id) {
  if (!wanted.size) (document.hidden ? setTimeout : requestAnimationFrame)(() => { wanted.clear(); show(); });
  wanted.add(id);
}

const list = () => sidebar.show(chat.id, (id) => open.has(id) && running(open.get(id)), acts);

async function go(next, leave = true) {
  if (leave) await draft();
  const kept = await store.draft(next.unsaved ? "new" : next.id);
  if (!running(chat)) open.delete(chat.id);
  chat = next;
  open.set(chat.id, chat);
  nodes = new Map();
  $("log").replaceChildren();
  history.replaceState(null, "", chat.unsaved ? "#" : `#${chat.id}`);
  remember();
  $("text").value = kept.text;
  files.attach(kept.files);
  grow();
  show(true);
  await list();
  if (matchMedia("(pointer: fine)").matches) $("text").focus();
}

function remember() {
  try { sessionStorage.setItem(AT, chat.unsaved ? "" : chat.id); } catch { /* begins with a new chat */ }
}

const place = () => (chat.unsaved ? "new" : chat.id);
const draft = () => store.saveDraft(place(), $("text").value, files.attached());

// -- sending

const begin_with = (text) => { $("text").value = text; send(); };

async function send() {
  const content = $("text").value.trim(), some = files.attached();
  if (running(chat) || (!content && !some.length)) return;
  const fresh = chat.unsaved, key = place();
  $("text").value = "";
  files.attach([]);
  document.querySelector('#notices [data-kind="files"]')?.remove();
  grow();
  const on = chat, control = claim(on);
  const made = await on.add({ role: "user", content, files: some.length ? some : undefined, parent: on.leaf });
  await store.saveDraft(key, "", []).catch(console.warn);
  if (fresh && on === chat) { remember(); history.replaceState(null, "", `#${on.id}`); }
  await reply(made.id, on, control);
}

async function reply(parent, on = chat, control = claim(on), varied = undefined) {
  if (control) await write(on, await on.add({ role: "assistant", parent, varied, ...asked() }), false, control);
}

async function write(on, message, more, control = claim(on)) {
  if (!control) return;
  open.set(on.id, on);
  const finished = talk(on, message, control, (over) => { if (on === chat) soon(message.id); if (over) done(); }, more);
  if (on === chat) show(!more);
  list();
  await finished;
}

function done() {
  list();
  gauge.refresh().then(() => show());
  for (const [id, one] of open) if (one !== chat && !running(one)) open.delete(id);
  if (chat.unkept) notice("kept", "This browser's storage is full: new messages are lost when you close the page.");
}

// Another tab has changed something.
async function changed({ chat: id, message }) {
  if (!message) list();
  if (id !== chat.id || chat.unsaved) return;
  const record = await store.chat(id);
  if (!record || record.deleted) { if (!running(chat)) await acts.fresh(); return; }
  chat.record = record;
  chat.take(await store.messages(id));
  soon(id);
}

// -- the keyboard: keys that no text box has a use for

function grow() { const t = $("text"); t.style.height = "auto"; t.style.height = `${t.scrollHeight + 2}px`; }

$("text").onkeydown = (event) => {
  // A phone's Enter is a new line; an input method's ends its own word (Safari tells by the code alone).
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  if (event.altKey || event.ctrlKey || event.metaKey || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  send();
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) stop(chat);
};
$("text").oninput = () => { grow(); store.saveText(place(), $("text").value); };
$("ask").onsubmit = (event) => { event.preventDefault(); if (running(chat)) stop(chat); else send(); };
$("settings").onclick = acts.settings;
document.addEventListener("click", (event) => { if (!$("gauge").contains(event.target)) $("gauge").open = false; });
addEventListener("resize", grow);
addEventListener("hashchange", () => { const id = location.hash.slice(1); if (id && id !== chat.id) acts.open(id); });
addEventListener("pagehide", () => store.saveLast(underWay()));
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

async function poll() {
  if (document.hidden) return;
  await gauge.refresh();
  gauge.show(chat);
  // A reply of another tab that has gone quiet is shown as what it is.
  if ([...chat.messages.values()].some((m) => m.state === "running" && !m.live)) await changed({ chat: chat.id });
  else if ([...nodes.keys()].some((id) => chat.messages.get(id)?.live)) show();
}

async function begin() {
  sidebar.start(acts);
  files.start(draft);
  if (!await store.open(changed)) notice("kept", "This browser stores nothing for this page: chats are lost when you close it.");
  let at = location.hash.slice(1);
  try { at ||= sessionStorage.getItem(AT); } catch { /* a new chat */ }
  const found = at && await Chat.load(at);
  await go(found || chat, false);
  const gone = await store.deletedLately();
  if (gone) sidebar.offer(gone, acts);
  document.body.dataset.ready = "true";
  poll();
  setInterval(poll, 2000);
}
begin();
