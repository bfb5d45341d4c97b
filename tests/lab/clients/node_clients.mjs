// What the Node clients of OpenAI, Anthropic and Ollama ask, and whether it came: node FILE URL URL.
// The first server writes text, the second calls a tool.
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [plain, caller] = process.argv.slice(2);
const messages = [{ role: "user", content: "the rain" }];
const parameters = { type: "object", properties: { town: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

function check(name, holds, found = "") {
  console.log(holds ? "ok  " : "FAIL", name, holds ? "" : JSON.stringify(found).slice(0, 400));
}

async function gathered(stream) {
  const all = [];
  for await (const one of stream) all.push(one);
  return all;
}

async function openai() {
  const client = new OpenAI({ baseURL: `${plain}/v1`, apiKey: "none" });
  const models = await gathered(await client.models.list());
  check("openai models", models.length === 1, models);
  const asked = { model: "m", messages, seed: 1, max_tokens: 24 };
  const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
  const text = whole.choices[0].message.content;
  const likely = whole.choices[0].logprobs.content;
  check("openai chat", text && likely.length === whole.usage.completion_tokens, whole);
  const more = { stream: true, stream_options: { include_usage: true } };
  const chunks = await gathered(await client.chat.completions.create({ ...asked, ...more }));
  const said = chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
  const total = chunks.at(-1).usage?.total_tokens;
  check("openai stream", said === text && total === whole.usage.total_tokens, chunks);
  const final = await client.chat.completions.stream(asked).finalContent();
  check("openai stream helper", final === text, final);
  const response = await client.responses.create({ model: "m", input: "the rain" });
  check("openai responses", response.output_text, response);
  const events = await gathered(
    await client.responses.create({ model: "m", input: "the rain", stream: true }),
  );
  const kinds = events.map((event) => event.type);
  const framed = kinds[0] === "response.created" && kinds.at(-1) === "response.completed";
  check("openai responses stream", framed, kinds);
  const done = await client.completions.create({ model: "m", prompt: "the rain", max_tokens: 5 });
  check("openai completions", done.choices[0].text, done);
  const refused = await client.chat.completions
    .create({ ...asked, temperature: -1 })
    .catch((error) => error);
  check("openai refusal", refused.status === 400 && refused.param === "temperature", refused);
  const other = new OpenAI({ baseURL: `${caller}/v1`, apiKey: "none" });
  const reply = await other.chat.completions.create({ model: "m", messages, tools });
  const [call] = reply.choices[0].message.tool_calls;
  check("openai tools", call.function.name === "weather", reply);
  const turn = await other.chat.completions.stream({ model: "m", messages, tools }).finalMessage();
  const given = JSON.parse(turn.tool_calls[0].function.arguments);
  check("openai tools stream", given.town === "Ulm", turn);
}

async function anthropic() {
  const client = new Anthropic({ baseURL: plain, apiKey: "none" });
  const asked = { model: "m", messages, max_tokens: 40 };
  const whole = await client.messages.create(asked);
  check("anthropic", whole.content[0].type === "text", whole);
  const streamed = await client.messages.stream(asked).finalMessage();
  check("anthropic stream", streamed.content[0].text && streamed.usage.output_tokens, streamed);
  const count = await client.messages.countTokens({ model: "m", messages });
  check("anthropic count", count.input_tokens > 0, count);
  const other = new Anthropic({ baseURL: caller, apiKey: "none" });
  const told = { ...asked, tools: [{ name: "weather", input_schema: parameters }] };
  const reply = await other.messages.stream(told).finalMessage();
  const used = reply.content.find((block) => block.type === "tool_use");
  check("anthropic tools", reply.stop_reason === "tool_use" && used.input.town === "Ulm", reply);
}

async function ollama() {
  const client = new Ollama({ host: plain });
  const { models } = await client.list();
  check("ollama list", models.length === 1, models);
  const asked = { model: "m", messages, options: { seed: 1, num_predict: 20 } };
  const whole = await client.chat(asked);
  check("ollama chat", whole.message.content, whole);
  const parts = await gathered(await client.chat({ ...asked, stream: true }));
  const said = parts.map((part) => part.message.content).join("");
  check("ollama stream", said === whole.message.content, parts);
  const done = await client.generate({ model: "m", prompt: "the rain", options: { num_predict: 5 } });
  check("ollama generate", done.done, done);
  const shown = await client.show({ model: models[0].name });
  check("ollama show", shown.capabilities.includes("tools"), shown);
  const reply = await new Ollama({ host: caller }).chat({ model: "m", messages, tools });
  check("ollama tools", reply.message.tool_calls[0].function.arguments.town === "Ulm", reply);
}

await openai();
await anthropic();
await ollama();
