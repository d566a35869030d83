// Formulas in TeX: $$...$$ and \[...\] on lines of their own or in a text, \(...\) and $...$ in a text. KaTeX makes MathML of them.
import { h } from "./dom.js";

const BLOCK = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[^\S\n]*(?:\n|$)/;
// As in pandoc, a dollar next to a space or before a digit or letter ends nothing: prices stay prices.
const INLINE = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\]|\\\(([^]+?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n])*?)(?<!\s)\$(?!\w))/;
const OPTIONS = { output: "mathml", strict: false, maxSize: 20, maxExpand: 200 };
const escape = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);
let katex;  // loaded with the first formula

function extension(level, start, rule) {
  const name = `${level}Formula`;
  return {
    name,
    level,
    start: (text) => start.exec(text)?.index,
    tokenizer(text) {
      const [raw, dollars, brackets, parentheses, dollar] = rule.exec(text) || [];
      const display = dollars || brackets;
      return raw && { type: name, raw, text: display || parentheses || dollar, display: Boolean(display) };
    },
    renderer({ text, display }) {
      const code = `<code class="formula${display ? " display" : ""}">${escape(text)}</code>`;
      return level === "block" ? `<p>${code}</p>` : code;
    },
  };
}

// Of marked: both leave the source in <code class="formula">, which DOMPurify lets through.
export const formulas = [extension("block", /\n(?=\$\$|\\\[)/, BLOCK), extension("inline", /\$|\\[[(]/, INLINE)];

// Replace the source of each formula by MathML. Where KaTeX is not there or cannot read it, the source stays.
export async function typeset(fragment) {
  const places = [...fragment.querySelectorAll("code.formula")];
  if (!places.length) return;
  katex ??= import("./vendor/katex.min.js").then(() => globalThis.katex);
  const library = await katex.catch(console.warn);
  if (!library) return;
  for (const place of places) {
    const displayMode = place.classList.contains("display");
    const shown = h("span", { class: place.className, tabindex: displayMode && "0", role: displayMode && "region", "aria-label": displayMode && "Formula" });
    try {
      library.render(place.textContent, shown, { ...OPTIONS, displayMode });
      place.replaceWith(shown);
    } catch (error) {
      console.warn(error);
    }
  }
}
