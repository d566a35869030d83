// Colours of code: tokens, which become text in spans and never markup.
import { tokenizeWith } from "./vendor/speed-highlight/tokenize.js";
import bash from "./vendor/speed-highlight/bash.js";
import c from "./vendor/speed-highlight/c.js";
import css from "./vendor/speed-highlight/css.js";
import diff from "./vendor/speed-highlight/diff.js";
import go from "./vendor/speed-highlight/go.js";
import html from "./vendor/speed-highlight/html.js";
import java from "./vendor/speed-highlight/java.js";
import js from "./vendor/speed-highlight/js.js";
import jsdoc from "./vendor/speed-highlight/jsdoc.js";
import json from "./vendor/speed-highlight/json.js";
import py from "./vendor/speed-highlight/py.js";
import regex from "./vendor/speed-highlight/regex.js";
import rs from "./vendor/speed-highlight/rs.js";
import sql from "./vendor/speed-highlight/sql.js";
import todo from "./vendor/speed-highlight/todo.js";
import toml from "./vendor/speed-highlight/toml.js";
import ts from "./vendor/speed-highlight/ts.js";
import xml from "./vendor/speed-highlight/xml.js";
import yaml from "./vendor/speed-highlight/yaml.js";
import { h } from "./dom.js";

const LONGEST = 20000;  // letters; a block grows word by word and is coloured anew each time
const languages = { bash, c, css, diff, go, html, java, js, jsdoc, json, py, regex, rs, sql, todo, toml, ts, xml, yaml };
const NAMES = {
  python: "py", javascript: "js", jsx: "js", typescript: "ts", tsx: "ts", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  cpp: "c", "c++": "c", h: "c", rust: "rs", golang: "go", yml: "yaml", svg: "xml", htm: "html", patch: "diff", jsonc: "json",
};

// Colour the text of an element, if its language is known.
export function colour(element, name) {
  const text = element.textContent, language = NAMES[name] || name, parts = [];
  if (!Object.hasOwn(languages, language) || text.length > LONGEST) return;
  tokenizeWith(text, languages[language], (part, kind) => parts.push(kind ? h("span", { class: `is-${kind}`, text: part }) : part), { languages });
  element.replaceChildren(...parts);
}
