// Asks a server through the clients of npm: node ask.cjs NODE_MODULES URL. Writes what they read as JSON.
const { createRequire } = require("module");
const [folder, url] = process.argv.slice(2);
const load = createRequire(folder + "/");
const schema = { type: "object", properties: { city: { type: "string" } } };
const question = [{ role: "user", content: "What is the weather in Oslo?" }];

async function anthropic() {
  const { Anthropic } = load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const tools = [{ name: "weather", input_schema: schema }];
  const stream = client.messages.stream({ model: "caller", max_tokens: 300, messages: question, tools });
  let text = "";
  stream.on("text", (part) => (text += part));
  const message = await stream.finalMessage();
  const { input_tokens } = await client.messages.countTokens({ model: "caller", messages: question, tools });
  return { text, content: message.content, stop: message.stop_reason, usage: message.usage, counted: input_tokens };
}

async function openai() {
  const { OpenAI } = load("openai");
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
  const tools = [{ type: "function", name: "weather", parameters: schema, strict: false }];
  const kinds = [];
  const stream = client.responses.stream({ model: "caller", input: question, tools });
  for await (const event of stream) kinds.push(event.type);
  const response = await stream.finalResponse();
  return { kinds, output: response.output, text: response.output_text, status: response.status };
}

async function main() {
  const found = { anthropic: await anthropic(), openai: await openai() };
  process.stdout.write(JSON.stringify(found));
}

main();
