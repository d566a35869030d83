// The list of chats: a column, or a drawer where there is no room for one.
import { Chat, spoken } from "./chats.js";
import * as store from "./store.js";
import { $, button, h, notice, say } from "./dom.js";

let shown = "";
const narrow = matchMedia("(max-width: 42rem)");

export function start(acts) {
  $("new").onclick = () => { drawer(false); acts.fresh(); };
  $("open-side").onclick = () => drawer(true);
  $("close-side").onclick = () => drawer(false);
  $("side").onkeydown = (event) => { if (event.key === "Escape" && isOpen()) { event.stopPropagation(); drawer(false); } };
  $("shade").onclick = () => drawer(false);
  document.querySelector("main").addEventListener("focusin", () => { if (isOpen()) drawer(false, false); });
  narrow.onchange = () => drawer(false, false);
  $("search").oninput = () => { shown = ""; acts.list(); };
  drawer(false, false);
}

const isOpen = () => $("side").classList.contains("open");

function drawer(open, focus = true) {
  const side = $("side");
  side.classList.toggle("open", open && narrow.matches);
  side.inert = narrow.matches && !open;
  $("shade").hidden = !isOpen();
  $("open-side").setAttribute("aria-expanded", isOpen());
  if (focus && narrow.matches) (open ? $("close-side") : $("open-side")).focus();
}

// Show the chats; current: the id of the one that is open; busy(id): whether a reply is under way.
export async function show(current, busy, acts) {
  const all = await store.chats(), words = $("search").value.trim().toLowerCase();
  $("search").hidden = all.length < 5 && !words;
  const chats = [];
  for (const chat of all) if (!words || await holds(chat, words)) chats.push(chat);
  if ($("chats").querySelector("input")) return;  // a name is being written
  const seen = JSON.stringify([current, chats.map((chat) => [chat.id, chat.title, busy(chat.id)])]);
  if (seen === shown) return;  // a button that is being pressed stays
  shown = seen;
  $("chats").replaceChildren(...chats.map((chat) => {
    const title = chat.title || "New chat";
    const open = button(title, () => { drawer(false, false); acts.open(chat.id); }, { class: "open", "aria-current": chat.id === current ? "true" : null, title });
    const mark = busy(chat.id) ? h("span", { class: "busy", role: "img", "aria-label": "a reply is under way" }) : null;
    const more = chat.id !== current ? [] : [
      button("✎", (event) => rename(chat, event.currentTarget.parentNode, acts), { class: "more", "aria-label": `Rename ${title}`, title: "Rename" }),
      button("⤓", () => save(chat), { class: "more", "aria-label": `Save ${title} as Markdown`, title: "Save as Markdown" }),
    ];
    return h("li", { class: chat.id === current ? "current" : "" }, open, mark, ...more, button("×", () => remove(chat, acts), { class: "delete", "aria-label": `Delete ${title}`, title: "Delete" }));
  }));
}

async function holds(chat, words) {
  if ((chat.title || "").toLowerCase().includes(words)) return true;
  return (await store.messages(chat.id)).some((message) => message.content.toLowerCase().includes(words));
}

// Write another title in the place of the old one; Escape leaves it.
function rename(chat, item, acts) {
  const box = h("input", { class: "open", "aria-label": "Title", maxlength: "60" }), before = [...item.children];
  box.value = chat.title;
  let done = false;
  const end = async (keep) => {
    if (done) return;
    done = true;
    const title = box.value.trim();
    item.replaceChildren(...before);
    if (keep && title && title !== chat.title) await store.saveChat(chat.id, { title });
    shown = "";
    acts.list();
  };
  box.onkeydown = (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  };
  box.onblur = () => end(true);
  item.replaceChildren(box);
  box.focus();
  box.select();
}

// Hand the branch that is shown to the browser as a file of Markdown.
async function save(chat) {
  const opened = await Chat.load(chat.id);
  const parts = opened.path().map((one) => `## ${one.role === "user" ? "You" : "Reply"}\n\n${spoken(one)}\n`);
  const text = [`# ${chat.title}\n`, ...parts].join("\n"), url = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  h("a", { href: url, download: `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.md` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  say("Saved as Markdown");
}

async function remove(chat, acts) {
  await store.saveChat(chat.id, { deleted: Date.now() });
  await acts.removed(chat.id);
  drawer(false, false);
  offer(chat, acts).querySelector("button").focus();  // the button that was pressed is gone
  say(`Deleted ${chat.title}`);
}

// Offer to take a deletion back. Whoever dismisses that deletes for good; so does time (store.js).
export function offer(chat, acts) {
  const back = async () => { await store.saveChat(chat.id, { deleted: 0 }); await acts.open(chat.id); };
  return notice("deleted", `Deleted “${chat.title || "New chat"}”`, [["Undo", back]], () => store.forget(chat.id));
}
