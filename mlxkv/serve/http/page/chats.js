// The chat on the screen: its messages as a tree, and the branch that is shown.
import * as store from "./store.js";
import { newId } from "./dom.js";

export const STALE = 5000;  // ms without a sign of life until a reply of another tab counts as lost

export class Chat {
  constructor(record, messages = []) {
    this.id = record.id;
    this.record = record;
    this.messages = new Map();
    this.leaf = null;
    this.take(messages);
    this.leaf = this.messages.has(record.leaf) ? record.leaf : this.latest()?.id ?? null;
  }

  static fresh(settings) {
    const chat = new Chat({ id: newId(), settings: { ...settings }, title: "", updated: Date.now() });
    chat.unsaved = true;
    return chat;
  }

  static async load(id) {
    const record = await store.chat(id);
    return record && !record.deleted ? new Chat(record, await store.messages(id)) : null;
  }

  get settings() { return this.record.settings || {}; }

  // Take over what the database holds; messages that this tab writes itself stay as they are here.
  take(messages) {
    const before = this.messages;
    for (const one of messages) {
      const own = before.get(one.id);
      if (own?.live) continue;
      if (one.state === "running" && (one.tab === store.tab || (one.beat || 0) < Date.now() - STALE)) {
        one.state = "interrupted";
      }
      before.set(one.id, one);
      // Follow what was said after the last message on the screen.
      if (!own && this.leaf && one.parent === this.leaf) this.leaf = one.id;
    }
  }

  latest() { return [...this.messages.values()].sort((a, b) => b.created - a.created || (b.id > a.id ? 1 : -1))[0]; }

  // Messages from the first to the one that is shown last.
  path(leaf = this.leaf) {
    const out = [];
    for (let one = this.messages.get(leaf); one; one = this.messages.get(one.parent)) out.unshift(one);
    return out;
  }

  // The versions of a message: what else follows the same one.
  versions(message) {
    return [...this.messages.values()]
      .filter((one) => one.parent === message.parent && one.role === message.role)
      .sort((a, b) => a.created - b.created);
  }

  // Show another version, with the latest of what follows it.
  async choose(message) {
    let last = message;
    for (;;) {
      const next = [...this.messages.values()].filter((one) => one.parent === last.id).sort((a, b) => b.created - a.created)[0];
      if (!next) break;
      last = next;
    }
    await this.show(last.id);
  }

  async show(leaf) {
    this.leaf = leaf;
    if (!this.unsaved) this.record = await store.saveChat(this.id, { leaf });
  }

  async add(fields) {
    const message = { id: newId(), chat: this.id, created: Date.now(), content: "", state: "done", ...fields };
    this.messages.set(message.id, message);
    this.leaf = message.id;
    const title = this.record.title || titleOf(message);
    this.unsaved = false;
    const changes = { title, settings: this.settings, leaf: this.leaf, updated: Date.now() };
    Object.assign(this.record, changes);
    try {
      this.record = await store.saveChat(this.id, changes);
      await store.saveMessage(plain(message));
    } catch (error) {  // the storage is full: it is here as long as the page
      console.warn(error);
      this.unkept = true;
    }
    return message;
  }

  async configure(settings) {
    this.record.settings = settings;
    if (!this.unsaved) this.record = await store.saveChat(this.id, { settings });
  }

  // What the model reads before a reply: turns that got none are left out, so that roles alternate.
  request(until) {
    const path = this.path(until), out = [];
    if (this.settings.system) out.push({ role: "system", content: this.settings.system });
    for (const [i, one] of path.entries()) {
      const next = path[i + 1];
      if (one.role === "user" && (!next || answered(next))) out.push({ role: "user", content: spoken(one) });
      if (one.role === "assistant" && answered(one)) out.push(said(one));
    }
    return out;
  }
}

// A reply as part of a request; the chat template says what becomes of its thoughts.
export const said = ({ content, reasoning }) => ({ role: "assistant", content, ...(reasoning && { reasoning }) });
export const answered = (message) => message.role === "assistant" && Boolean(message.content.trim());

// The record of a message, without what belongs to this tab alone.
export function plain(message) {
  const { live, node, progress, began, ...record } = message;
  return record;
}

function titleOf(message) {
  const line = message.content.trim().split("\n")[0] || message.files?.[0]?.name || "New chat";
  return line.slice(0, 60);
}

// A message with its files, as the model reads it: files come first, so that a second question about
// them finds them in the cache.
export function spoken(message) {
  const parts = (message.files || []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}
