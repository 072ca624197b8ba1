// @anthropic-ai/sdk for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { ASKED, CITY, ENDLESS, GREEDY, HOT, isReport, MODEL, oneAborted, REPORT, shows, URL_ } from "./common.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "none", maxRetries: 0 });
const TOOLS = [{ name: "weather", input_schema: CITY }];
const FORM = { output_config: { format: { type: "json_schema", schema: REPORT } } };
const ask = (fields) => client.messages.create({ model: MODEL, messages: ASKED, ...fields });

shows("call", "an answer has a text", async () => {
  assert.ok((await ask(GREEDY)).content[0].text);
});

shows("stream", "its pieces are the whole answer", async () => {
  const pieces = [];
  const stream = client.messages.stream({ model: MODEL, messages: ASKED, ...GREEDY }).on("text", (text) => pieces.push(text));
  const [whole, final] = [await ask(GREEDY), await stream.finalMessage()];
  assert.equal(pieces.join(""), whole.content[0].text);
  assert.equal(final.content[0].text, whole.content[0].text);
});

shows("tool loop", "two calls and their results make a conversation", async () => {
  const messages = [...ASKED];
  for (const stream of [false, true]) {
    const fields = { model: MODEL, messages, tools: TOOLS, tool_choice: { type: "tool", name: "weather" }, ...HOT };
    const answer = stream ? await client.messages.stream(fields).finalMessage() : await client.messages.create(fields);
    const [call] = answer.content;
    const result = { type: "tool_result", tool_use_id: call.id, content: `Rain in ${call.input.city}.` };
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: [result] });
  }
  assert.ok((await ask({ messages, tools: TOOLS, ...GREEDY })).content.length > 0);
});

shows("structured", "an answer follows the schema", async () => {
  assert.ok(isReport(JSON.parse((await ask({ ...FORM, ...HOT })).content[0].text)));
});

shows("both", "a call or an answer by the schema, as tool_choice says", async () => {
  const fields = { tools: TOOLS, ...FORM, ...HOT };
  assert.ok(isReport(JSON.parse((await ask({ ...fields, tool_choice: { type: "none" } })).content[0].text)));
  assert.equal((await ask({ ...fields, tool_choice: { type: "any" } })).content[0].type, "tool_use");
});

shows("abort", "a stream that is left ends at the server", () =>
  oneAborted(async () => {
    for await (const _ of await ask({ ...ENDLESS, stream: true })) break;
  }),
);
