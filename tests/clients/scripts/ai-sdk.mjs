// AI SDK: two turns with a tool, over Responses and over chat.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "none" });
for (const model of [provider.responses("stand-in"), provider.chat("stand-in")]) {
  const tools = {
    get_weather: tool({
      description: "Weather of a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (city === "Rome" ? "sunny" : "unknown"),
    }),
  };
  const prompt = "What is the weather in Rome?";
  const { text, steps } = await generateText({ model, tools, prompt, stopWhen: stepCountIs(3) });
  assert.equal(steps.length, 2);
  assert.match(text, /sunny/);
  let streamed = "";
  for await (const piece of streamText({ model, prompt: "Hi" }).textStream) streamed += piece;
  assert.ok(streamed);
}
