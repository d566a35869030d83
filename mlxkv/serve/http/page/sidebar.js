// The list of chats: a column, or a drawer where there is no room for one.
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
  const chats = await store.chats();
  const seen = JSON.stringify([current, chats.map((chat) => [chat.id, chat.title, busy(chat.id)])]);
  if (seen === shown) return;  // a button that is being pressed stays
  shown = seen;
  $("chats").replaceChildren(...chats.map((chat) => {
    const title = chat.title || "New chat";
    const open = button(title, () => { drawer(false, false); acts.open(chat.id); }, { class: "open", "aria-current": chat.id === current ? "true" : null, title });
    const mark = busy(chat.id) ? h("span", { class: "busy", role: "img", "aria-label": "a reply is under way" }) : null;
    return h("li", { class: chat.id === current ? "current" : "" }, open, mark, button("×", () => remove(chat, acts), { class: "delete", "aria-label": `Delete ${title}`, title: "Delete" }));
  }));
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
