// Chats in the browser's own database. Messages are kept one by one, each with the message that it
// follows: so tabs never write over one another, and an edited message stands beside the old one.

const CHANNEL = "mlxkv", NAME = "mlxkv", LAST = "mlxkv.last", KEEP = 10 * 60e3;
export const tab = sessionTab();
let base = null, listener = () => {};
const channel = "BroadcastChannel" in self ? new BroadcastChannel(CHANNEL) : null;
const lost = { chats: new Map(), messages: new Map(), drafts: new Map() };  // where there is no database

// The same after a reload of this tab.
function sessionTab() {
  try {
    const id = sessionStorage.getItem("mlxkv.tab") || Math.random().toString(36).slice(2);
    sessionStorage.setItem("mlxkv.tab", id);
    return id;
  } catch { return Math.random().toString(36).slice(2); }
}

const answer = (request) => new Promise((good, bad) => {
  request.onsuccess = () => good(request.result);
  request.onerror = () => bad(request.error);
});

const finished = (change) => new Promise((good, bad) => {
  change.oncomplete = good;
  change.onabort = () => bad(change.error);
});

// Open the database. Returns false where the browser has none: then chats last as long as the page.
export async function open(changed) {
  listener = changed;
  if (channel) channel.onmessage = ({ data }) => listener(data);
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      const made = request.result;
      made.createObjectStore("chats", { keyPath: "id" });
      made.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
      made.createObjectStore("drafts", { keyPath: "id" });
    };
    base = await answer(request);
    base.onversionchange = () => base.close();
    await readLast();
    await purge();
    return true;
  } catch (error) {
    console.warn("no database", error);
    base = null;
    return false;
  }
}

function tell(what) { channel?.postMessage(what); }

async function put(store, record) {
  if (!base) { lost[store].set(record.id, structuredClone(record)); return; }
  const change = base.transaction(store, "readwrite"), done = finished(change);
  change.objectStore(store).put(record);
  await done;
}

async function remove(store, id) {
  if (!base) { lost[store].delete(id); return; }
  await answer(base.transaction(store, "readwrite").objectStore(store).delete(id));
}

async function get(store, id) {
  if (!base) return structuredClone(lost[store].get(id));
  return answer(base.transaction(store).objectStore(store).get(id));
}

// All chats that are not deleted, the latest first.
export async function chats() {
  const all = base ? await answer(base.transaction("chats").objectStore("chats").getAll()) : [...lost.chats.values()];
  return all.filter((chat) => !chat.deleted).sort((a, b) => b.updated - a.updated);
}

export const chat = (id) => get("chats", id);

export async function messages(id) {
  if (!base) return structuredClone([...lost.messages.values()].filter((m) => m.chat === id));
  return answer(base.transaction("messages").objectStore("messages").index("chat").getAll(id));
}

// Change some fields of a chat, whatever another tab has changed meanwhile.
export async function saveChat(id, fields) {
  const first = { id, created: Date.now(), title: "", settings: {}, deleted: 0 };
  let record;
  if (!base) {
    record = { ...first, ...lost.chats.get(id), ...fields };
    lost.chats.set(id, record);
  } else {  // read and written in one transaction: no other tab comes between
    const change = base.transaction("chats", "readwrite"), stored = change.objectStore("chats");
    const done = finished(change);
    record = { ...first, ...(await answer(stored.get(id))), ...fields };
    stored.put(record);
    await done;
  }
  tell({ chat: id });
  return structuredClone(record);
}

export async function saveMessage(message) {
  await put("messages", message);
  tell({ chat: message.chat, message: message.id });
}

// What is written and not sent: text at once and in this tab alone, as a database may take longer than a
// page that closes has; files in the database.
export async function draft(id) {
  const key = `${tab}/${id}`;
  let text = null;
  try { text = sessionStorage.getItem(`mlxkv.draft/${id}`); } catch { /* from the database */ }
  const kept = await get("drafts", key);
  return { text: text ?? kept?.text ?? "", files: kept?.files || [] };
}

export function saveText(id, text) {
  try { sessionStorage.setItem(`mlxkv.draft/${id}`, text); } catch { /* too long for it */ }
}

export async function saveDraft(id, text, files) {
  const key = `${tab}/${id}`;
  saveText(id, text);
  await (text || files.length ? put("drafts", { id: key, text, files, at: Date.now() }) : remove("drafts", key));
}

// Replies under way when the page closes: the database would miss their last words.
export function saveLast(replies) {
  try { sessionStorage.setItem(LAST, JSON.stringify(replies)); } catch { /* some words are lost */ }
}

async function readLast() {
  let last = null;
  try { last = JSON.parse(sessionStorage.getItem(LAST)); sessionStorage.removeItem(LAST); } catch { /* none */ }
  for (const reply of last || []) {
    const kept = await get("messages", reply.id);
    if (kept?.state === "running" && kept.content.length <= reply.content.length) await put("messages", reply);
  }
}

// Delete for good.
export async function forget(id) {
  if (!base) {
    for (const message of await messages(id)) lost.messages.delete(message.id);
    lost.chats.delete(id);
  } else {
    const change = base.transaction(["chats", "messages"], "readwrite"), done = finished(change);
    change.objectStore("chats").delete(id);
    const stored = change.objectStore("messages");
    for (const key of await answer(stored.index("chat").getAllKeys(id))) stored.delete(key);
    await done;
  }
  tell({ chat: id });
}

// Delete for good: chats whose deletion nobody took back for a while, what another tab wrote into one that
// was gone, and drafts of tabs that are long closed.
async function purge() {
  const all = await answer(base.transaction("chats").objectStore("chats").getAll());
  for (const one of all) if (one.deleted && one.deleted < Date.now() - KEEP) await forget(one.id);
  const change = base.transaction(["chats", "messages"], "readwrite"), stored = change.objectStore("messages");
  const there = new Set(await answer(change.objectStore("chats").getAllKeys()));
  stored.index("chat").openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    if (!there.has(cursor.key)) cursor.delete();
    cursor.continue();
  };
  await finished(change);
  const drafts = await answer(base.transaction("drafts").objectStore("drafts").getAll());
  for (const one of drafts) if (one.at < Date.now() - 30 * 864e5) await remove("drafts", one.id);
}

// The last chat that was deleted a moment ago, if any.
export async function deletedLately() {
  const all = base ? await answer(base.transaction("chats").objectStore("chats").getAll()) : [...lost.chats.values()];
  return all.filter((one) => one.deleted > Date.now() - KEEP).sort((a, b) => b.deleted - a.deleted)[0];
}
