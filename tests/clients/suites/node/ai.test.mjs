// Vercel's AI SDK, with its three providers that speak to such a server.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { CITY, isReport, MODEL, oneAborted, QUESTION, REPORT, shows, URL_ } from "./common.mjs";

const baseURL = `${URL_}/v1`;
const MODELS = {
  "openai-compatible": createOpenAICompatible({
    name: "here",
    baseURL,
    supportsStructuredOutputs: true,
  })(MODEL),
  "openai, chats": createOpenAI({ baseURL, apiKey: "none" }).chat(MODEL),
  "openai, responses": createOpenAI({ baseURL, apiKey: "none" })(MODEL),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(MODEL),
};
// Of a model that it does not know, Anthropic's provider would make a schema a tool, and force that one.
const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
const GREEDY = { temperature: 0, maxOutputTokens: 24, prompt: QUESTION, maxRetries: 0 };
const HOT = { temperature: 1, maxOutputTokens: 400, prompt: QUESTION, maxRetries: 0, providerOptions };

function weather(calls) {
  return tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema(CITY),
    execute: async ({ city }) => (calls.push(city), `Rain in ${city}.`),
  });
}

// Has to call the tool twice, and cannot any more then.
const twice = {
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({
    toolChoice: stepNumber < 2 ? { type: "tool", toolName: "weather" } : "none",
  }),
};

for (const [name, model] of Object.entries(MODELS)) {
  shows("call", `${name} answers`, async () => {
    assert.ok((await generateText({ model, ...GREEDY })).text);
  });

  shows("stream", `the pieces of ${name} are the whole answer`, async () => {
    const pieces = [];
    for await (const piece of streamText({ model, ...GREEDY }).textStream) pieces.push(piece);
    assert.equal(pieces.join(""), (await generateText({ model, ...GREEDY })).text);
    assert.ok(pieces.length > 3);
  });

  shows("tool loop", `two calls of ${name} and their results make a conversation`, async () => {
    const calls = [];
    const { steps } = await generateText({ model, ...HOT, tools: { weather: weather(calls) }, ...twice });
    assert.equal(steps.length, 3);
    assert.ok(calls.length >= 2 && steps[2].toolCalls.length === 0);
  });

  shows("tool loop", `and streamed, of ${name}`, async () => {
    const calls = [];
    const { steps } = streamText({ model, ...HOT, tools: { weather: weather(calls) }, ...twice });
    assert.equal((await steps).length, 3);
    assert.ok(calls.length >= 2);
  });

  shows("structured", `an output of ${name} follows the schema`, async () => {
    const output = Output.object({ schema: jsonSchema(REPORT) });
    assert.ok(isReport((await generateText({ model, ...HOT, output })).output));
  });

  shows("both", `after two calls an output of ${name} follows the schema`, async () => {
    const [calls, output] = [[], Output.object({ schema: jsonSchema(REPORT) })];
    const found = await generateText({ model, ...HOT, tools: { weather: weather(calls) }, output, ...twice });
    assert.ok(isReport(found.output) && calls.length >= 2);
  });

  shows("abort", `a stream of ${name} that is left ends at the server`, () =>
    oneAborted(async () => {
      const abort = new AbortController();
      const ask = { model, ...GREEDY, maxOutputTokens: 1500, abortSignal: abort.signal, onError: () => {} };
      for await (const _ of streamText(ask).textStream) {
        abort.abort();
        break;
      }
    }),
  );
}
