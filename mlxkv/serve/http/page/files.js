// Text files that go with a message: dropped, pasted or picked.
import { $, button, count, h, notice, size } from "./dom.js";
import { context } from "./gauge.js";

const MOST = 4 << 20;  // bytes of one file; a request may have 8 MB unless the server was told otherwise
let files = [], listener = () => {};

export const attached = () => files;

export function attach(found) { files = found; show(); }

export function start(changed) {
  listener = changed;
  $("attach").onclick = () => $("picker").click();
  $("picker").onchange = async () => { await take([...$("picker").files]); $("picker").value = ""; $("text").focus(); };
  document.ondragover = (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;  // text that is dragged belongs to the text box
    event.preventDefault();
    $("drop").hidden = false;
  };
  document.ondragleave = (event) => { if (!event.relatedTarget) $("drop").hidden = true; };
  document.ondrop = async (event) => {
    $("drop").hidden = true;
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    await take([...event.dataTransfer.files]);
    $("text").focus();
  };
  $("text").onpaste = (event) => {
    if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    take([...event.clipboardData.files]);
  };
}

const NO_TEXT = "(not text)", WAY_ON = "pdftotext makes text of a PDF; for images run mlx-vlm by mlxkv run.";

async function take(list) {
  const refused = [];
  for (const file of list) {
    const text = file.size > MOST ? null : await read(file);
    if (text === null) refused.push(`${file.name} ${file.size > MOST ? `(${size(file.size)}; at most ${size(MOST)})` : NO_TEXT}`);
    else files.push({ name: file.name, size: file.size, text });
  }
  tell(refused);
  // Kept before it is shown: a page that is loaded again has whatever it showed.
  try { await listener(); } catch (error) { console.warn("not kept", error); }
  show();
}

// Say which files were refused, and whether those that are attached are too long.
function tell(refused = []) {
  const about = files.reduce((sum, file) => sum + file.text.length, 0) / 4, lines = [];  // tokens, roughly
  if (context && about > context) lines.push(`These files have about ${count(Math.round(about / 1000) * 1000)} tokens; this model takes ${count(context)}.`);
  if (refused.length) lines.push(`Not attached: ${refused.join(", ")}.`);
  if (refused.some((line) => line.endsWith(NO_TEXT))) lines.push(WAY_ON);
  document.querySelector('#notices [data-kind="files"]')?.remove();
  if (lines.length) notice("files", lines.join(" "));
}

// The text of a file; null if it is none.
async function read(file) {
  try {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const wide = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.subarray(0, 2).join()];
    const text = new TextDecoder(wide || "utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch { return null; }
}

function show() {
  $("attached").replaceChildren(...files.map((file, i) => {
    const drop = button("×", () => { files.splice(i, 1); show(); tell(); listener(); $("text").focus(); }, { "aria-label": `Remove ${file.name}` });
    return h("li", {}, h("span", { text: `${file.name} · ${size(file.size)}` }), drop);
  }));
}
