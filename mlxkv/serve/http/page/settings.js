// Settings of a chat, and those that new chats begin with.
import { $, h } from "./dom.js";
import { server } from "./gauge.js";

const KEY = "mlxkv.settings";

// What new chats begin with.
export function usual() {
  try { return JSON.parse(localStorage.getItem(KEY)) || {}; } catch { return {}; }
}

// Let the user change a chat's settings; changed() is called if something was saved.
export function edit(chat, changed) {
  const box = $("options"), { system = "", temperature, maxTokens, thinking = "", model = "" } = chat.settings;
  const models = server.models || [];
  $("models").hidden = models.length < 2;
  $("for-model").replaceChildren(...models.map((text, i) => h("option", { value: i ? text : "", text })));
  $("for-model").value = models.includes(model) ? model : "";
  $("system").value = system;
  $("temperature").value = temperature ?? "";
  $("max-tokens").value = maxTokens ?? "";
  $("thinking").value = thinking;
  $("for-all").checked = false;
  box.firstElementChild.onsubmit = async () => {
    const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const settings = { system: $("system").value.trim(), temperature: number("temperature"), maxTokens: number("max-tokens"), thinking: $("thinking").value, model: $("for-model").value };
    for (const name of Object.keys(settings)) if (settings[name] === "" || settings[name] === undefined) delete settings[name];
    if ($("for-all").checked) {
      try { localStorage.setItem(KEY, JSON.stringify(settings)); } catch { /* until the page closes */ }
    }
    await chat.configure(settings);
    changed();
  };
  $("cancel-options").onclick = () => box.close();
  box.showModal();
}
