// openai for Node: chats and responses.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { ASKED, CITY, ENDLESS, GREEDY, HOT, isReport, MODEL, oneAborted, QUESTION, REPORT, shows, URL_ } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "none", maxRetries: 0 });
const TOOLS = [{ type: "function", function: { name: "weather", parameters: CITY, strict: true } }];
const FORM = { type: "json_schema", json_schema: { name: "report", schema: REPORT, strict: true } };
const ask = (fields) => client.chat.completions.create({ model: MODEL, messages: ASKED, ...fields });

shows("call", "each endpoint answers", async () => {
  const said = (await ask(GREEDY)).choices[0].message.content;
  const fields = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 24 };
  assert.equal((await client.responses.create(fields)).output_text, said);
  assert.ok(said);
});

shows("stream", "its pieces are the whole answer", async () => {
  const pieces = [];
  for await (const chunk of await ask({ ...GREEDY, stream: true })) pieces.push(chunk.choices[0].delta.content ?? "");
  assert.equal(pieces.join(""), (await ask(GREEDY)).choices[0].message.content);
  assert.ok(pieces.length > 3);
});

shows("tool loop", "two calls and their results make a conversation", async () => {
  const messages = [...ASKED];
  for (const stream of [false, true]) {
    const fields = { model: MODEL, messages, tools: TOOLS, tool_choice: "required", ...HOT };
    const answer = stream
      ? await client.chat.completions.stream(fields).finalChatCompletion()
      : await client.chat.completions.create(fields);
    const message = answer.choices[0].message;
    assert.ok(message.tool_calls.length > 0);
    messages.push(message);
    for (const call of message.tool_calls) {
      const { city } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: `Rain in ${city}.` });
    }
  }
  assert.ok((await ask({ messages, tools: TOOLS, ...GREEDY })).choices[0].message.content);
});

shows("structured", "what is parsed follows the schema", async () => {
  const fields = { model: MODEL, messages: ASKED, response_format: FORM, ...HOT };
  assert.ok(isReport(JSON.parse((await client.chat.completions.parse(fields)).choices[0].message.content)));
});

shows("both", "a call or an answer by the schema, as tool_choice says", async () => {
  const fields = { tools: TOOLS, response_format: FORM, ...HOT };
  assert.ok(isReport(JSON.parse((await ask({ ...fields, tool_choice: "none" })).choices[0].message.content)));
  assert.ok((await ask({ ...fields, tool_choice: "required" })).choices[0].message.tool_calls.length > 0);
});

shows("abort", "a stream that is left ends at the server", () =>
  oneAborted(async () => {
    for await (const _ of await ask({ ...ENDLESS, stream: true })) break;
  }),
);
