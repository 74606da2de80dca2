// openai-node: a stream, a tool over two turns, Responses.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "none" });
const model = "stand-in";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const stream = client.chat.completions.stream({ model, messages, tools });
const { message } = (await stream.finalChatCompletion()).choices[0];
assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Rome" });
messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" });
const answer = await client.chat.completions.create({ model, messages, tools });
assert.match(answer.choices[0].message.content, /sunny/);
const response = await client.responses.create({ model, input: "Hi" });
assert.ok(response.output_text);
