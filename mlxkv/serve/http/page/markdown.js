// A model's Markdown as a document: parsed by marked, cleaned by DOMPurify, never trusted.
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";
import { colour } from "./code.js";
import { button, copy, h } from "./dom.js";
import { formulas, typeset } from "./formulas.js";

const escape = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulas,
  renderer: {
    html: ({ text }) => escape(text),  // tags that a model writes are text
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,  // nothing is fetched
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const RULES = {
  ALLOWED_TAGS: "p br hr strong em del code pre blockquote ul ol li a table thead tbody tr th td h1 h2 h3 h4 h5 h6".split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align"],  // the others' values have to be such addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// Show a text in an element. Blocks that have not changed since the last call stay: what is selected
// stays selected while a reply grows, and a long reply costs no more than its last block.
export function render(element, text) {
  let blocks;
  try {
    blocks = marked.lexer(text).filter((token) => token.type !== "space");
  } catch (error) {  // a fault of the parser hides nothing
    console.warn(error);
    element.replaceChildren(h("p", { class: "plain", text }));
    element.shown = [];
    return;
  }
  const shown = element.shown || [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same].raw === shown[same].raw) same++;
  for (const { nodes } of shown.splice(same)) nodes.forEach((node) => node.remove());
  for (const token of blocks.slice(same)) {
    const fragment = DOMPurify.sanitize(marked.parser([token]), RULES);
    finish(fragment);
    shown.push({ raw: token.raw, nodes: [...fragment.childNodes] });
    element.append(fragment);
  }
  element.shown = shown;
  level(element);
}

function finish(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.getAttribute("href")) { link.replaceWith(...link.childNodes); continue; }
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
    for (const head of table.querySelectorAll("thead th:empty")) head.replaceWith(h("td"));
  }
  typeset(fragment);
  for (const block of fragment.querySelectorAll("pre")) {
    const code = block.querySelector("code") || block;
    const language = /language-([\w+#.-]{1,30})/.exec(code.className)?.[1] || "";
    code.removeAttribute("class");
    colour(code, language.toLowerCase());
    const bar = h("div", { class: "head" }, h("span", { text: language || "code" }));
    bar.append(button("Copy", (event) => copy(code.textContent.replace(/\n$/, ""), event.currentTarget), { "aria-label": "Copy code" }));
    const frame = h("div", { class: "code" }, bar);
    block.replaceWith(frame);
    block.setAttribute("tabindex", "0");
    block.setAttribute("role", "region");
    block.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    frame.append(block);
  }
}

// Headings below the page's own (h1) and the turn's (h2), none left out on the way down.
function level(element) {
  let before = 2;
  for (const node of element.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const own = Number(node.dataset.level || node.tagName[1]), wanted = Math.min(own + 2, before + 1, 6);
    before = wanted;
    if (node.tagName === `H${wanted}` && node.dataset.level) continue;
    const made = h(`h${wanted}`, { "data-level": own }, ...node.childNodes);
    const block = element.shown.find(({ nodes }) => nodes.includes(node));
    if (block) block.nodes[block.nodes.indexOf(node)] = made;
    node.replaceWith(made);
  }
}
