// Small helpers around the document.

export const $ = (id) => document.getElementById(id);

// An element with properties (class, text, on... and attributes) and children.
export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const button = (text, onclick, more = {}) => h("button", { type: "button", text, onclick, ...more });

// An id that no other has; crypto.randomUUID is missing on plain http: of another machine.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Date.now().toString(36) + [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (bytes >= 1024 && i < 3) { bytes /= 1024; i++; }
  return `${bytes.toFixed(i === 3 || (i && bytes < 100) ? 1 : 0)} ${units[i]}`;
}

export const count = (n) => n.toLocaleString("en");

export function seconds(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  return s < 90 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`;
}

// Tell screen readers something that the page shows anyway.
export function say(text) { $("said").textContent = text; }

// A line above the text box, with buttons; it stays until it is answered or replaced by one of its kind.
export function notice(kind, text, actions = [], onclose = () => {}) {
  document.querySelector(`#notices [data-kind="${kind}"]`)?.remove();
  const node = h("div", { class: "notice", "data-kind": kind }, h("span", { text }));
  const close = (then) => () => { node.remove(); then(); };
  for (const [label, act] of actions) node.append(button(label, close(act)));
  node.append(button("Dismiss", close(onclose)));
  $("notices").append(node);
  return node;
}

// Copy text. On plain http: of another machine there is no clipboard API.
export async function copy(text, from) {
  const before = from.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    from.focus();
  }
  from.textContent = done ? "Copied" : "Not copied";
  say(from.textContent);
  setTimeout(() => { from.textContent = before; }, 1500);
}
